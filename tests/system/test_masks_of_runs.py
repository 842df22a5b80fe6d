"""Masks of a run, by name and of files that users import: checked, and recorded in the result."""

from hashlib import sha256

import h5py
import numpy as np
from helpers import SAMPLE, drive_each, read_run

N = 40
TOKENS = np.arange(N)
# Two intervals a query: the first two keys, and a window of four.
BEGIN = np.stack([0 * TOKENS, np.maximum(TOKENS - 3, 2)])
END = np.stack([np.minimum(TOKENS + 1, 2), TOKENS + 1])
OWN = """
import h5py
from a2d_mpi import IntervalMask, register_mask

def intervals(seqlen):
    with h5py.File({path!r}) as file:
        return IntervalMask(file["begin"][()], file["end"][()])

register_mask("intervals", intervals)
"""
SMALL = [SAMPLE, "--seqlen", N, "--trials", "1", "--check", "full"]


def test_masks_of_a_run(tmp_path):
    with h5py.File(tmp_path / "masks.h5", "w") as file:
        file["begin"], file["end"] = BEGIN, END
    (own := tmp_path / "own.py").write_text(OWN.format(path=str(tmp_path / "masks.h5")))
    runs = {
        "sliding_window:3,2": ["--mask", "sliding_window:3,2", "--backward"],
        "causal_document:0,7,7,30": ["--mask", " causal_document:0,7,7,30 "],
        "intervals": ["--import", own, "--mask", "intervals", "--backward"],
    }
    output = tmp_path / "run.h5"
    done, found = drive_each(
        [("attention.py", [*SMALL, *x, "--save-outputs", "--output", f"{output}{i}"], [])
         for i, x in enumerate(runs.values())], 2
    )  # fmt: skip
    assert [code for code, _ in found] == [0] * len(runs), done.stderr + done.stdout
    results = [read_run(f"{output}{i}") for i in range(len(runs))]
    assert [x["config"]["mask"] for x in results] == list(runs)
    hashes = [x["origin"].get("import_sha256") for x in results]
    assert hashes == [None, None, [sha256(own.read_bytes()).hexdigest()]]
    areas = [int(x["area"].sum()) for x in results]
    window = sum(min(i + 2, N - 1) - max(i - 3, 0) + 1 for i in range(N))
    documents = sum(n * (n + 1) // 2 for n in (7, 23))
    assert areas == [window, documents, int((END - BEGIN).clip(0).sum())]
    assert (results[1]["outputs"]["out"][30:] == 0).all()  # tokens after the last document
