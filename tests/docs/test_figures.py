"""Committed figures have the data of this code, and styles and digests tell them apart."""

import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, drive, module_of
from matplotlib.figure import Figure
from PIL import Image

from a2d_mpi.experiments.hdf5 import write_file
from a2d_mpi.experiments.results import TRAINING_SCHEMA
from a2d_mpi.figures.pictures import METHOD_STYLES, digest, finish, pyplot
from a2d_mpi.schedules.method import METHODS

FIGURES = ROOT / "data" / "figures"


def commands():
    """Return the programs and arguments of `jobs/run.py figures` as lists of words."""
    lines = map(shlex.split, module_of("jobs/run.py").JOBS["figures"]("$output"))
    return [words[1:] for words in lines if words[0] == "python"]


def pictures(words):
    """Return the files that a command draws in the folder of figures."""
    if "--what" in words:
        folder, what = (words[words.index(x) + 1] for x in ("--output", "--what"))
        words = [f"{folder}/{name}.png" for name in what.split(",")]
    return [x.removeprefix("$output/") for x in words if x.endswith(".png")]


@pytest.mark.thorough
@pytest.mark.parametrize("words", commands(), ids=lambda x: pictures(x)[0])
def test_committed_figures_are_of_this_code(words, tmp_path, monkeypatch):
    """Committed figures equal new ones; `python jobs/run.py figures data/figures` updates them."""

    def only_data(_, path, *, metadata, **__):
        Path(path).write_text(metadata["Data"])

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Figure, "savefig", only_data)
    monkeypatch.setattr(sys, "argv", [x.replace("$output", f"{tmp_path}") for x in words])
    for name in pictures(words):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    with pytest.raises(SystemExit) as done:
        runpy.run_path(words[0], run_name="__main__")
    assert not done.value.code
    for name in pictures(words):
        with Image.open(FIGURES / name) as image:
            assert (tmp_path / name).read_text() == image.text["Data"], name


def test_every_figure_has_a_command_and_a_page():
    drawn = [name for words in commands() for name in pictures(words)]
    committed = [str(x.relative_to(FIGURES)) for x in FIGURES.rglob("*.*")]
    assert sorted(drawn) == sorted(committed)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(x.read_text() for x in pages)
    assert [x for x in committed if f"data/figures/{x})" not in text] == []


def test_losses(tmp_path):
    """The text is named, and names are not read as formulas."""
    write_file(run := tmp_path / "run.h5", TRAINING_SCHEMA, {
        "loss": np.linspace(5, 2, 60), "config": {"seqlen": 64, "accumulate": 2},
        "text": {"name": "$x^$" + 90 * "w", "unigram_entropy": 3.0}, "held_out": {"loss": 2.1},
    })  # fmt: skip
    done = drive("plot.py", 0, "results", run, "--output", tmp_path, "--what", "training")
    assert done.stderr == ""
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    shown = (tmp_path / "training.svg").read_text()
    for text in ("<!-- $x^$www", "60 steps of 128 tokens", "unigram entropy, 3.00", "text, 2.10"):
        assert text in shown, text


def test_a_method_has_one_colour_and_one_marker():
    assert METHOD_STYLES.keys() >= METHODS.keys()
    for i in (0, 1):
        assert len({x[i] for x in METHOD_STYLES.values()}) == len(METHOD_STYLES)


def test_digest():
    """The digest depends on data and words, but not on size or rounding."""
    plt = pyplot()

    def of(values, title="a", above="", **options):
        figure, axes = plt.subplots(**options)
        axes.plot(values)
        axes.imshow(np.ma.masked_less([values], 2))
        axes.set_title(title)
        finish(figure, above)
        plt.close(figure)
        return digest(figure)

    first = of([1.0, 2.0, 3.0])
    assert first == of([1.0 + 1e-12, 2.0, 3.0], figsize=(3, 2))
    others = of([1.0, 2.01, 3.0]), of([1.0, 2.0, 3.0], "b"), of([1.0, 2.5, 3.0])
    assert len({first, *others, of([1.0, 2.0, 3.0], above="c")}) == 5
