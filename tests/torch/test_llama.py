"""drivers/train.py llama, and what docs/pytorch.md shows.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import importlib
import re

import h5py
import numpy as np
from helpers import ROOT, assert_one_line_each, drive, drive_each, launch
from pages import blocks, read

from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import TRAINING_SCHEMA

SMALL = ["--seqlen", "60", "--width", "16", "--mlp", "24", "--nheads", "4", "--steps", "3"]
TEXT = ROOT / "data" / "new_testament.txt"


# One rank has wrong gradients, in float32.
WRONG = """
from a2d_mpi.torch import gradients
real = gradients.GradientHooks._start
def start(self):
    for x in self._parameters:
        if rank == 1 and x.grad is not None and x.element_size() == 4:
            x.grad.mul_(1.01)
    real(self)
gradients.GradientHooks._start = start
"""


def test_driver(tmp_path):
    """The first step equals one process, unless a gradient is wrong; grid and ring agree."""
    files = [tmp_path / "grid.h5", tmp_path / "ring.h5"]
    ways = ["--rows", "2"], ["--method", "ring"]
    options = [TEXT, *SMALL, "--separator", r"\n"]
    cases = [[*options, "--dtype", "float64", *x, "--output", y] for x, y in zip(ways, files)]
    cases = [("train.py llama", x, []) for x in (*cases, options)]
    done, found = drive_each(cases, 2, WRONG, timeout=200)
    assert [code for code, _ in found] == [0, 0, 1], done.stdout + done.stderr
    assert [text.count("(passed, bound 1e-10)") for _, text in found] == [2, 2, 0]
    assert "loss: error" in found[2][1] and "(FAILED, bound 1e-05)" in found[2][1]
    run, ring = (read_file(x, TRAINING_SCHEMA) for x in files)
    loss = run["loss"]
    assert np.allclose(loss, ring["loss"], rtol=1e-10, atol=0) and len(loss) == 3
    assert loss[2] < loss[0] < 6
    assert (run["config"]["method"], run["text"]["name"]) == ("attention2d", TEXT.name)
    with h5py.File(files[0]) as file:
        errors = {x: dict(y.attrs) for x, y in file["checks"].items()}
        assert file["seconds/total"].shape == (3,)
    assert set(errors) == {"loss", "gradients"}
    assert all(x["error"] <= x["bound"] == 1e-10 for x in errors.values())


def test_driver_refuses():
    cases = [
        ([TEXT, "--width", "20"], [], "must be an even multiple of --nheads, got 20 and 8"),
        ([TEXT, "--nheads-kv", "3"], [], "nheads_kv must divide nheads, got 3 and 8"),
        (["/none"], [], "/none"),
        ([TEXT, "--seqlen", "16000000"], [], "matrices of the check in float64"),
    ]
    done, found = drive_each([("train.py llama", *case[:2]) for case in cases], 2)
    assert [code for code, _ in found] == [2] * len(cases), done.stdout + done.stderr
    assert_one_line_each(done, [case[2] for case in cases])
    without = "sys.modules['torch'] = None"
    done = drive("train.py llama", 2, TEXT, sabotage=without, code=2)
    assert_one_line_each(done, ["pip install a2d_mpi[torch]"])


# Losses are the same on all ranks, and embeddings are those of single documents in float64.
END = """
assert len(set(comm.allgather(total))) == 1
packed.free()
ids, exact = comm.bcast(text), bert.double()
with torch.no_grad():
    alone = [exact(ids[:, a:b]).last_hidden_state[0].mean(0) for a, b in zip(ends, ends[1:])]
error = embeddings - torch.nn.functional.normalize(torch.stack(alone))
assert error.abs().max() < 1e-6, error
"""


def test_page(tmp_path):
    """The examples run as one program; names of the room exist."""
    example = tmp_path / "example.py"
    example.write_text("\n".join([*blocks("docs/pytorch.md", "python"), END]))
    done = launch(4, example, timeout=100)
    steps = re.findall(r"^(\d) ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [step for step, _ in steps] == ["0", "1", "2"], done.stdout
    first, _, last = (float(loss) for _, loss in steps)
    assert last < first < 6
    (kept,) = re.findall(r"^torch.Size\(\[1, 2340\]\) \[([\d, ]+)\]$", done.stdout, re.MULTILINE)
    kept = [int(x) for x in kept.split(",")]
    assert len(kept) == 4 and max(kept) < 1.2 * min(kept), kept
    room = importlib.import_module("a2d_mpi.torch")
    page = read("docs/pytorch.md")
    assert all(f"`{x}" in page or f" {x}" in page for x in room.__all__)
    for name in re.findall(r"^\.\. auto\w+:: a2d_mpi\.torch\.(\w+)$", read("docs/api.rst"), re.M):
        assert hasattr(room, name)
