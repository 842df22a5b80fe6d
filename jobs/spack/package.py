"""Spack's recipe of a2d_mpi, for Spack 1.0 and newer; docs/clusters.md says how to use it.

The project has no public address yet, so the recipe names no source: `spack develop` gives it a
checkout.  With an address, fill in `homepage` and `git`, and the commit of the version.
"""

from spack.package import depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyA2dMpi(PythonPackage):
    """Exact two-dimensional parallel attention over MPI."""

    license("Apache-2.0")

    version("0.1.0")

    variant("numba", default=True, description="compiled passes of the NumPy kernel")
    variant("plot", default=False, description="figures, by matplotlib")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-h5py@3.10:", type=("build", "run"))
    depends_on("py-ml-dtypes@0.5:", type=("build", "run"))
    depends_on("py-threadpoolctl@3:", type=("build", "run"))
    depends_on("py-tqdm@4.60:", type=("build", "run"))
    depends_on("py-tomli@2:", type=("build", "run"), when="^python@:3.10")
    depends_on("py-numba@0.60:", type=("build", "run"), when="+numba")
    depends_on("py-matplotlib@3.8:", type=("build", "run"), when="+plot")
