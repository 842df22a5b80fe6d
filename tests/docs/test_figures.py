"""Committed figures are drawn by drivers from committed results, and are on a page."""

import shlex
import sys

import pytest
from helpers import ROOT, execute, module_of

from a2d_mpi.figures.pictures import METHOD_STYLES
from a2d_mpi.schedules.method import METHODS

FIGURES = ROOT / "data" / "figures"


def commands():
    """Return the programs and arguments of `jobs/run.py figures` as lists of words."""
    lines = map(shlex.split, module_of("jobs/run.py").JOBS["figures"]("$output"))
    return [words[1:] for words in lines if words[0] == "python"]


def picture(words):
    """Return the file that a command draws in the folder of figures."""
    if "--what" in words:
        return words[words.index("--what") + 1] + ".png"
    return next(x.removeprefix("$output/") for x in words if x.endswith(".png"))


@pytest.mark.thorough
@pytest.mark.parametrize("words", commands(), ids=picture)
def test_drawn_from_committed_results(words, tmp_path):
    (drawn := tmp_path / picture(words)).parent.mkdir(exist_ok=True)
    words = [x.replace("$output", f"{tmp_path}") for x in words]
    execute(sys.executable, *words, timeout=300, cwd=ROOT)
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_every_figure_has_a_command_and_a_page():
    drawn = [picture(words) for words in commands()]
    committed = [str(x.relative_to(FIGURES)) for x in FIGURES.rglob("*.*")]
    assert sorted(drawn) == sorted(committed)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(x.read_text() for x in pages)
    assert [x for x in committed if f"data/figures/{x})" not in text] == []


def test_a_method_has_one_colour_and_one_marker():
    assert METHOD_STYLES.keys() >= METHODS.keys()
    for i in (0, 1):
        assert len({x[i] for x in METHOD_STYLES.values()}) == len(METHOD_STYLES)
