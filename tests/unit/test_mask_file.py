"""Masks by name or from a file, in drivers: run, recorded, or refused."""

from hashlib import sha256

import h5py
import numpy as np
import pytest
from helpers import SAMPLE, drive_each, read_run

from a2d_mpi import Documents, IntervalMask
from a2d_mpi.experiments.user_files import read_mask

N = 40
TOKENS = np.arange(N)
# Two intervals a query: the first two keys, and a window of four.
BEGIN = np.stack([0 * TOKENS, np.maximum(TOKENS - 3, 2)])
END = np.stack([np.minimum(TOKENS + 1, 2), TOKENS + 1])
CU = np.array([0, 7, 7, 30])


def write(path, attributes=(), **datasets):
    with h5py.File(path, "w") as file:
        file.attrs.update(dict(attributes))
        for name, x in datasets.items():
            if callable(x):
                x(file, name)
            else:
                file[name] = x
    return path


GOOD = {
    "one": ({}, {"begin": 0 * TOKENS, "end": TOKENS + 1}, IntervalMask(0 * TOKENS, TOKENS + 1)),
    "several": ({}, {"begin": BEGIN.astype("u2"), "end": END}, IntervalMask(BEGIN, END)),
    "chunks": ({}, {"begin": lambda f, x: f.create_dataset(x, data=BEGIN, compression="gzip"),
                    "end": END}, IntervalMask(BEGIN, END)),
    "empty rows": ({}, {"begin": TOKENS, "end": 0 * TOKENS}, IntervalMask(TOKENS, 0 * TOKENS)),
    "causal": ({"causal": True}, {"cu_seqlens": CU}, Documents(CU, causal=True)),
    "full": ({"causal": 0}, {"cu_seqlens": CU.astype("i4")}, Documents(CU)),
    "schema": ({"schema": "a2d_mpi mask", "schema_version": 1, "causal": np.True_},
               {"cu_seqlens": CU}, Documents(CU, causal=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_files(tmp_path, name):
    attributes, datasets, expected = GOOD[name]
    found = read_mask(write(tmp_path / "mask.h5", attributes, **datasets), N)
    assert found == expected
    assert np.array_equal(found.dense(TOKENS, TOKENS), expected.dense(TOKENS, TOKENS))


def unwritten(file, name):
    file.create_dataset(name, (N,), "i8")


def changed(array, place, value):
    (found := array.copy())[place] = value
    return found


BAD = {
    "nothing": ({}, {}, "must have datasets begin and end, or cu_seqlens, got none of them"),
    "half": ({}, {"begin": BEGIN}, "or cu_seqlens, got begin"),
    "both": ({}, {"begin": BEGIN, "end": END, "cu_seqlens": CU}, "got begin and end and cu_"),
    "schema": ({"schema": "a2d_mpi input"}, {"begin": BEGIN, "end": END}, "must be 'a2d_mpi m"),
    "group": ({}, {"begin": lambda f, x: f.create_group(x), "end": END}, "got end"),
    "floats": ({}, {"begin": BEGIN, "end": END * 1.0}, "end must be a (seqlen,) or (m, "),
    "short": (
        {}, {"begin": BEGIN[:, 1:], "end": END[:, 1:]},
        f"IntervalMask has intervals of {N - 1} queries, but the sequence has {N}",
    ),
    "scalar": ({}, {"begin": 1, "end": 2}, "begin must be a (seqlen,) or "),
    "null": ({}, {"begin": h5py.Empty("i8"), "end": END}, "begin must be a (seqlen,) or "),
    "other shapes": ({}, {"begin": BEGIN[0], "end": END}, f"got ({N},) and (2, {N})"),
    "negative": ({}, {"begin": changed(BEGIN, (0, 0), -1), "end": END},
                 f"begin[0, 0] must be 0 to {N}, got -1"),
    "beyond": ({}, {"begin": BEGIN[1], "end": changed(END[1], 9, N + 1)},
               f"end[9] must be 0 to {N}, got {N + 1}"),
    "overlap": ({}, {"begin": changed(BEGIN, (1, 1), 1), "end": changed(END, (1, 1), 4)},
                "intervals [0, 2] and [1, 4] of query 1 overlap"),
    "unsorted": ({"causal": True}, {"cu_seqlens": CU[::-1][:-1]}, "must begin with 0, got 30"),
    "backwards": ({"causal": True}, {"cu_seqlens": [0, 9, 8, 12]}, "begins at 9 and ends at 8"),
    "too long": ({"causal": True}, {"cu_seqlens": [0, 9, 41]}, "ends at 41, the sequence at 40"),
    "two rows": ({"causal": True}, {"cu_seqlens": [CU, CU]}, "must be a (documents + 1,) integer"),
    "no causal": ({}, {"cu_seqlens": CU}, "the attribute causal, true or false, got none"),
    "causal?": ({"causal": "no"}, {"cu_seqlens": CU}, "true or false, got 'no'"),
    "unwritten": ({}, {"begin": unwritten, "end": END}, "begin has 0 of the 320 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path, name):
    attributes, datasets, text = BAD[name]
    path = write(tmp_path / "mask.h5", attributes, **datasets)
    with pytest.raises((ValueError, OSError)) as error:
        read_mask(path, N)
    assert text in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


SMALL = [SAMPLE, "--seqlen", N, "--trials", "1", "--check", "full"]


def test_masks_of_a_run(tmp_path):
    """Masks by name and from files are checked and recorded in the result."""
    for name in ("several", "causal"):
        write(tmp_path / f"{name}.h5", GOOD[name][0], **GOOD[name][1])
    runs = {
        "sliding_window:3,2": ["--mask", "sliding_window:3,2", "--backward"],
        "causal_document:0,7,7,30": ["--mask", " causal_document:0,7,7,30 "],
        f"file:{tmp_path}/several.h5": ["--mask-file", tmp_path / "several.h5", "--backward"],
        f"file:{tmp_path}/causal.h5": ["--mask-file", tmp_path / "causal.h5"],
    }
    output = tmp_path / "run.h5"
    done, found = drive_each(
        [("attention.py", [*SMALL, *x, "--save-outputs", "--output", f"{output}{i}"], [])
         for i, x in enumerate(runs.values())], 2
    )  # fmt: skip
    assert [code for code, _ in found] == [0] * len(runs), done.stderr + done.stdout
    results = [read_run(f"{output}{i}") for i in range(len(runs))]
    assert [x["config"]["mask"] for x in results] == list(runs)
    hashes = [x["origin"].get("mask_file_sha256") for x in results]
    files = [(tmp_path / f"{x}.h5").read_bytes() for x in ("several", "causal")]
    assert hashes == [None, None, *(sha256(x).hexdigest() for x in files)]
    areas = [int(x["area"].sum()) for x in results]
    window = sum(min(i + 2, N - 1) - max(i - 3, 0) + 1 for i in range(N))
    documents = sum(n * (n + 1) // 2 for n in (7, 23))
    assert areas == [window, documents, int((END - BEGIN).clip(0).sum()), documents]
    assert np.array_equal(results[1]["outputs"]["out"], results[3]["outputs"]["out"])
    assert (results[1]["outputs"]["out"][30:] == 0).all()  # tokens after the last document
