"""The recipes for clusters: they can be read, and name the versions of setup.cfg."""

import re
import subprocess
import sys
from configparser import ConfigParser
from types import ModuleType

import pytest
from helpers import ROOT

SPACK, CONDA, APPTAINER = (
    (ROOT / "jobs" / x).read_text()
    for x in ("spack/package.py", "conda/meta.yaml", "apptainer.def")
)
CONFIG = ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
VERSION, EXTRAS = CONFIG["metadata"]["version"], CONFIG["options.extras_require"]


def needed(text):
    """Return the least versions of requirements, by name."""
    return dict(re.findall(r"^([\w-]+)>=([\d.]+)", text, re.MULTILINE))


REQUIRED = needed(CONFIG["options"]["install_requires"])
PYTHON = CONFIG["options"]["python_requires"].removeprefix(">=")
BUILD = needed(re.search(r'requires = \["(.*)"\]', (ROOT / "pyproject.toml").read_text())[1])


def spack(text, monkeypatch):
    """Return name, versions and dependencies of the class in a recipe of Spack."""
    found = {"version": [], "depends_on": [], "variant": [], "license": []}

    def directive(name):
        return lambda what, **options: found[name].append((what, options))

    class PythonPackage:
        pass

    package, python = ModuleType("spack.package"), ModuleType("python")
    vars(package).update({name: directive(name) for name in found})
    python.PythonPackage = PythonPackage
    modules = {"spack": ModuleType("spack"), "spack.package": package}
    for name in ("spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"):
        modules[name] = ModuleType(name)
    modules["spack_repo.builtin.build_systems.python"] = python
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    names = {}
    exec(compile(text, "package.py", "exec"), names)
    classes = [x for x in names.values() if isinstance(x, type) and x is not PythonPackage]
    (made,) = classes
    assert issubclass(made, PythonPackage) and made.__doc__
    asked = {(x.split("@")[0], options.get("when")): x.split("@")[1].rstrip(":")
             for x, options in found["depends_on"]}  # fmt: skip
    variants = [x for x, _ in found["variant"]]
    licences = [x for x, _ in found["license"]]
    return made.__name__, [x for x, _ in found["version"]], asked, variants, licences


def expected_of_spack():
    asked = {("python", None): PYTHON, ("py-setuptools", None): BUILD["setuptools"]}
    for name, least in REQUIRED.items():
        when = "^python@:3.10" if name == "tomli" else None
        asked[f"py-{name.replace('_', '-')}", when] = least
    for extra in ("numba", "plot"):
        ((name, least),) = needed(EXTRAS[extra]).items()
        asked[f"py-{name}", f"+{extra}"] = least
    return "PyA2dMpi", [VERSION], asked, ["numba", "plot"], [CONFIG["metadata"]["license"]]


def test_citation():
    text, log = ((ROOT / x).read_text() for x in ("CITATION.cff", "CHANGELOG.md"))
    assert f"\nversion: {VERSION}\n" in text and f"version {VERSION} " in log
    assert f"\nlicense: {CONFIG['metadata']['license']}\n" in text


def test_spack(monkeypatch):
    assert spack(SPACK, monkeypatch) == expected_of_spack()


@pytest.mark.parametrize(
    "old, new",
    [
        ("numpy@1.26:", "numpy@1.25:"),
        ("0.1.0", "0.2.0"),
        ('    depends_on("py-tqdm@4.60:", type=("build", "run"))\n', ""),
        (', when="^python@:3.10"', ""),
    ],
)
def test_another_recipe_is_seen(monkeypatch, old, new):
    assert SPACK.count(old) == 1
    assert spack(SPACK.replace(old, new), monkeypatch) != expected_of_spack()


def conda(text):
    """Return version, licence and requirements of a recipe of conda."""
    lists = {}
    for name in ("host", "run"):
        block = re.search(rf"^  {name}:\n((?:    .*\n)+)", text, re.MULTILINE)[1]
        lines = re.findall(r"^    - ([\w-]+)(?: >=([\d.]+))?$", block, re.MULTILINE)
        assert len(lines) == len(re.findall(r"^    -", block, re.MULTILINE))
        lists[name] = dict(lines)
    version = re.search(r'^  version: "(.*)"$', text, re.MULTILINE)[1]
    return version, re.search(r"^  license: (.*)$", text, re.MULTILINE)[1], lists


def test_conda():
    host = {"python": PYTHON, "pip": "", **BUILD}
    lists = {"host": host, "run": {"python": PYTHON, **REQUIRED}}
    expected = VERSION, CONFIG["metadata"]["license"], lists
    assert conda(CONDA) == expected
    assert conda(CONDA.replace("mpi4py >=4.1", "mpi4py >=4.0")) != expected
    assert "\t" not in CONDA
    path = re.search(r"^  path: (.*)$", CONDA, re.MULTILINE)[1]
    assert (ROOT / "jobs" / "conda" / path).resolve() == ROOT
    assert (ROOT / re.search(r"license_file: (.*)$", CONDA, re.MULTILINE)[1]).exists()


def sections(text):
    """Return the sections of an Apptainer definition file; "" is the header."""
    parts = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[::2]))


def test_apptainer():
    found = sections(APPTAINER)
    assert set(found) == {
        "",
        "labels",
        "files",
        "post",
        "environment",
        "runscript",
        "test",
        "help",
    }
    header = dict(re.findall(r"^(\w+): (\S+)$", found[""], re.MULTILINE))
    assert header["Bootstrap"] == "docker"
    base = re.fullmatch(r"python:3\.(\d+)-slim", header["From"])[1]
    assert int(base) >= int(PYTHON.split(".")[1])
    labels = dict(x.split() for x in found["labels"].strip().splitlines())
    assert labels == {"Version": VERSION, "License": CONFIG["metadata"]["license"]}
    copied = dict(x.split() for x in found["files"].strip().splitlines())
    for source, target in copied.items():
        assert (ROOT / source).exists() and target == f"/opt/a2d_mpi/{source}"
    # What setup.cfg reads, and what the image is tested with.
    config = "".join(map(str, (x for y in CONFIG.values() for x in y.values())))
    assert "file: README.md" in config and {"README.md", "LICENSE", "src"} <= set(copied)
    for section in ("post", "environment", "runscript", "test"):
        subprocess.run(["bash", "-n"], input=found[section], text=True, check=True)
    for path in re.findall(r"/opt/a2d_mpi/(\S+)", found["test"] + found["help"]):
        assert path in copied or path.split("/")[0] in copied
    extras = re.search(r"/opt/a2d_mpi\[(.*)\]", found["post"])[1].split(",")
    assert extras and set(extras) <= set(EXTRAS)
