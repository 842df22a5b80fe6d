"""The recipes for clusters name the versions of setup.cfg, and can be read."""

import re
from configparser import ConfigParser

from helpers import ROOT

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
