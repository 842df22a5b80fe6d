"""The recipes for clusters name the versions of setup.cfg, and can be read."""

import re
import subprocess
from configparser import ConfigParser
from importlib.util import find_spec

from helpers import ROOT

GIT = ROOT / ".gitignore"
CONFIG = ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
VERSION, LICENSE = CONFIG["metadata"]["version"], CONFIG["metadata"]["license"]
EXTRAS = CONFIG["options.extras_require"]
PYTHON = CONFIG["options"]["python_requires"].removeprefix(">=")


def read(path):
    return (ROOT / path).read_text()


def needed(text, pattern=r"^ *([\w-]+)>=([\d.]+)"):
    """Return the least versions of requirements, by name."""
    found = re.findall(pattern, text, re.MULTILINE)
    return {name.replace("_", "-"): least for name, least in found}


BUILD = needed(re.search(r'requires = \["(.*)"\]', read("pyproject.toml"))[1])
EXPECTED = {"python": PYTHON, **BUILD, **needed(CONFIG["options"]["install_requires"])}
SPACK, CONDA = read("jobs/spack/package.py"), read("jobs/conda/recipe.yaml")
OF_SPACK = EXPECTED | needed(EXTRAS["numba"]) | needed(EXTRAS["plot"])


def of_spack(text):
    return needed(text, r'^    depends_on\("(?:py-)?([\w-]+)@([\d.]+):", type=')


def of_conda(text):
    return needed(text, r"^    - ([\w-]+) >=([\d.]+)$")


def test_recipes():
    assert of_spack(SPACK) == OF_SPACK and of_conda(CONDA) == EXPECTED | needed(EXTRAS["numba"])
    assert f'version("{VERSION}")' in SPACK and f'license("{LICENSE}")' in SPACK
    for extra in ("numba", "plot"):
        assert f'variant("{extra}"' in SPACK and f'when="+{extra}")' in SPACK
    assert '"py-tomli@2:", type=("build", "run"), when="^python@:3.10")' in SPACK
    assert f'  version: "{VERSION}"\n' in CONDA and f"  license: {LICENSE}\n" in CONDA
    path = re.search(r"^  path: (.*)$", CONDA, re.MULTILINE)[1]
    assert (ROOT / "jobs" / "conda" / path).resolve() == ROOT
    compile(SPACK, "package.py", "exec")


def test_conda_recipe():
    """rattler-build, which the extra lint has, reads the recipe as it is meant."""
    if find_spec("rattler_build") is None:
        return
    from rattler_build import Stage0Recipe, VariantConfig

    recipe = Stage0Recipe.from_file(str(ROOT / "jobs/conda/recipe.yaml"))
    (rendered,) = recipe.render(VariantConfig())
    found = rendered.recipe.to_dict()
    assert found["package"] == {"name": "a2d_mpi", "version": VERSION}
    run = {x.replace(" >=", ">=") for x in found["requirements"]["run"]}
    lists = (*CONFIG["options"]["install_requires"].split("\n"), EXTRAS["numba"])
    assert run == {x.partition(";")[0] for x in lists if x} | {f"python>={PYTHON}"}
    assert found["build"]["noarch"] == "python"
    (script,) = CONFIG["options.entry_points"]["console_scripts"].split("\n")[1:]
    assert script in CONDA


def test_sdist_is_the_repository():
    """What setuptools does not take by itself is in MANIFEST.in; .ci/run builds it and runs it."""
    lines = [x.split() for x in read("MANIFEST.in").splitlines()]
    named = {x for command, *names in lines if command in ("graft", "include") for x in names}
    ignored = {x.strip("/") for x in read(".gitignore").splitlines()} if GIT.exists() else set()
    here = {x.name for x in ROOT.iterdir() if x.name[0] != "."} - ignored
    itself = {
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        "setup.cfg",
        "src",
    }
    assert here - itself == {x.partition("/")[0] for x in named} - {".ci"}


def test_citation():
    assert f"\nversion: {VERSION}\n" in read("CITATION.cff")
    assert f"\nlicense: {LICENSE}\n" in read("CITATION.cff")
    assert f"version {VERSION} " in read("CHANGELOG.md")


def test_apptainer():
    parts = re.split(r"^%(\w+)\n", read("jobs/apptainer.def"), flags=re.MULTILINE)
    found = dict(zip(["", *parts[1::2]], parts[::2]))
    base = re.search(r"^Bootstrap: docker\nFrom: python:3\.(\d+)-slim$", found[""], re.MULTILINE)
    assert int(base[1]) >= int(PYTHON.split(".")[1])
    assert found["labels"].split() == ["Version", VERSION, "License", LICENSE]
    copied = dict(x.split() for x in found["files"].strip().splitlines())
    for source, target in copied.items():
        assert (ROOT / source).exists() and target == f"/opt/a2d_mpi/{source}"
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "src"} <= set(copied)
    for section in ("post", "environment", "runscript", "test"):
        subprocess.run(["bash", "-n"], input=found[section], text=True, check=True)
    for path in re.findall(r"/opt/a2d_mpi/(\S+)", found["test"] + found["help"]):
        assert path in copied or path.split("/")[0] in copied
    assert set(re.search(r"a2d_mpi\[(.*)\]", found["post"])[1].split(",")) <= set(EXTRAS)
