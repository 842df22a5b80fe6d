"""Check the active Python for jobs/env.sh (A2D_MPI_ENV=active), and print the name of its MPI.

    python jobs/active.py any|mpich|openmpi [EXTRA|MODULE...]

Run from the repository's root.  Required are the packages of setup.cfg, those of the extras named,
and each other name as a module.  Exit code 2, and one line, if anything is missing.
"""

import re
import sys
from configparser import ConfigParser
from importlib.util import find_spec


def refuse(problem):
    """Print one line, and end with exit code 2."""
    print(f"A2D_MPI_ENV=active: {sys.executable}: {problem}", file=sys.stderr)
    sys.exit(2)


def missing(requirement):
    """Return a requirement such as "h5py>=3.10" if it is not met, and the version found."""
    from importlib.metadata import PackageNotFoundError, version

    name, least, before = re.match(
        r'([\w-]+)(?:>=([\d.]+))?(?:.*python_version < "3\.(\d+)")?', requirement
    ).groups()
    if before and sys.version_info >= (3, int(before)):
        return None
    try:
        found = version(name)
    except PackageNotFoundError:
        # A site may have a package without metadata.
        return None if find_spec(name.replace("-", "_")) else requirement
    numbers = [[int(x) for x in re.findall(r"\d+", text)[:3]] for text in (found, least or "0")]
    return f"{requirement} (has {found})" if numbers[0] < numbers[1] else None


def mpi():
    """Return vendor and version of the MPI that mpi4py loads, without starting it."""
    import mpi4py

    mpi4py.rc.initialize = False  # some MPIs end a process that no launcher started
    try:
        from mpi4py import MPI
    except Exception as error:
        lines = [x.strip() for x in str(error).splitlines() if x.strip()]
        refuse(f"mpi4py cannot load MPI: {lines[-1] if lines else error!r}")
    return MPI.get_vendor()


def main(wanted, *needs):
    """Print "mpich", "openmpi", or the name of another MPI."""
    if sys.version_info < (3, 10):  # noqa: UP036 (nothing else checks it here)
        refuse("is older than Python 3.10")
    config = ConfigParser()
    config.read("setup.cfg")
    extras = config["options.extras_require"]
    lists = [config["options"]["install_requires"], *(extras.get(x, x) for x in needs)]
    requirements = [line for text in lists for line in text.split("\n") if line]
    lacking = [x for x in map(missing, requirements) if x]
    if lacking:
        refuse("lacks " + ", ".join(lacking))
    vendor, version = mpi()
    name = {"MPICH": "mpich", "Open MPI": "openmpi"}.get(vendor, vendor)
    if wanted not in ("any", name):
        refuse(f"this job needs {wanted}, but mpi4py has {vendor} {'.'.join(map(str, version))}")
    print(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
