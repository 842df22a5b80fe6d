"""Training a GPT: what it learns, the text that is held out, the grid, files and pictures."""

import hashlib
import re
from collections import Counter
from math import log

import h5py
import numpy as np
import pytest
from gpts import alone, shaken, trainer_of
from helpers import ROOT, assert_all, drive, drive_each

from a2d_mpi import Documents, ProcessGrid
from a2d_mpi.experiments.checkpoint import State, latest, save
from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import TRAINING_SCHEMA
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.text import Text

pytestmark = pytest.mark.grids

TEXT, BOOK = ROOT / "LICENSE", ROOT / "data" / "new_testament.txt"
COMMITTED = ROOT / "data" / "results" / "gpt" / "tiny.h5"
SMALL = ["--layers", "1", "--width", "16", "--seqlen", "40", "--warmup-steps", "2"]
SMALL += ["--separator", r"\n\n"]


def entropy(data):
    """Return the unigram entropy of bytes in nats."""
    return -sum(n / len(data) * log(n / len(data)) for n in Counter(data).values())


def test_held_out_documents(tmp_path):
    """Held-out documents are evenly spaced; each document is in one part."""
    documents = [bytes([65 + i]) * (i + 1) for i in range(21)]
    (path := tmp_path / "text").write_bytes(b"--".join(documents))
    for share, expected in ((0.1, [9, 19]), (0.25, [3, 7, 11, 15, 19])):
        trained, held = (Text(path, b"--", share, x) for x in (False, True))
        assert bytes(held.bytes.tolist()) == b"".join(documents[i] for i in expected)
        rest = b"".join(x for i, x in enumerate(documents) if i not in expected)
        assert bytes(trained.bytes.tolist()) == rest
        assert trained.sizes() == {"documents": 21 - len(expected), "bytes": len(rest),
                                   "unigram_entropy": pytest.approx(entropy(rest))}  # fmt: skip
        assert trained.sha256 == held.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=r"has 21 documents, so a share of 0\.01 holds out none"):
        Text(path, b"--", 0.01, held_out=True)


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_evaluation(comm):
    """The loss is the mean of -log p of all bytes, as in float64 on one rank."""
    config = GPTConfig(256, 1, 12, 6, 61, nheads_kv=2)
    weights, text = shaken(config), Text(TEXT, b"\n\n")
    text.bytes, text.begins = text.bytes[:200], np.append(text.begins[text.begins < 200], 200)
    trainer = trainer_of(
        comm, ProcessGrid(comm, 1, comm.size), config, text, weights.flat.copy(), separator=b"\n\n"
    )
    found, losses = trainer.evaluate(text), []
    for begin in range(0, 183, 61)[: 200 // 61]:
        inside = text.begins[(text.begins > begin) & (text.begins < begin + 61)] - begin
        starts = np.array([0, *inside])
        tokens = text.bytes[begin : begin + 61]
        mask = Documents([*starts, 61], causal=True)
        positions = np.arange(61) - starts[np.searchsorted(starts, np.arange(61), "right") - 1]
        model = GPT(Parameters(config, weights.flat), alone(config, mask, 61), positions)
        logits = model.logits(model.hidden(tokens))
        logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        for i in range(61):
            if begin + i + 1 not in text.begins:
                losses.append(-logs[i, text.bytes[begin + i + 1]])
    assert_all(comm, abs(found / np.mean(losses) - 1) < 1e-12, f"{found}, not {np.mean(losses)}")
    trainer.free()


def test_grid_auto(tmp_path):
    """With few KV heads the planner chooses another grid, with the bits of that grid."""
    options = [TEXT, *SMALL, "--nheads", "4", "--nheads-kv", "1", "--steps", "4"]
    chosen = {
        "auto": ["--profile", ROOT / "data/results/16x1.toml"],
        "same": ["--rows", "2", "--cols", "1"],
        "default": [],
    }
    files = {x: ["--folder", tmp_path / x, "--output", tmp_path / f"{x}.h5"] for x in chosen}
    cases = [("train.py gpt", [*options, *files[x], *chosen[x]], []) for x in chosen]
    done, found = drive_each(cases, 2)
    assert [code for code, _ in found] == [0, 0, 0], done.stderr
    states, grids = [], []
    for name in chosen:
        config = read_file(tmp_path / f"{name}.h5", TRAINING_SCHEMA)["config"]
        grids.append([config[x] for x in ("method", "rows", "cols", "heads")])
        states.append(latest(tmp_path / name)[0])
    assert grids == [["attention2d", *x, 1] for x in ((2, 1), (2, 1), (1, 2))]
    assert states[0].weights.tobytes() == states[1].weights.tobytes()
    assert states[0].losses == pytest.approx(states[2].losses, rel=1e-5)


def test_checkpoints_as_documented(tmp_path, monkeypatch):
    """The code of the page runs, and its table has all names in the file."""
    config, page = GPTConfig(7, 1, 8, 2, 5), (ROOT / "docs" / "models.md").read_text()
    flat, none = initial(config, 0, "float32"), np.zeros(3)
    (folder := tmp_path / "results" / "tiny").mkdir(parents=True)
    path = save(folder, State(config, {}, flat, np.zeros((2, len(flat)), "f4"), none, none))
    with h5py.File(path) as file:
        assert all(f"`{x}`" in page for x in (*file.attrs, *(f"/{y}" for y in file)))
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1], {})
    found, wanted = np.load("results/tiny.npz"), Parameters(config, flat).state_dict()
    assert set(found) == set(wanted) and all((found[x] == wanted[x]).all() for x in wanted)


def test_picture(tmp_path):
    """The text is named, and names are not read as formulas."""
    (odd := tmp_path / "odd.h5").write_bytes(COMMITTED.read_bytes())
    with h5py.File(odd, "r+") as file:
        file["text"].attrs["name"] = "$x^$" + 90 * "w"
    done = drive("plot.py", 0, "results", odd, "--output", tmp_path, "--what", "training")
    assert done.stderr == ""
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    shown = (tmp_path / "training.svg").read_text()
    assert "<!-- $x^$www" in shown and "unigram entropy" in shown
