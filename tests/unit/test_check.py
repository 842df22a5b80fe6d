"""Checks fail for results that are not finite and for bounds that prove nothing."""

import re

import h5py
import numpy as np
import pytest
from dense import TENSORS
from helpers import SAMPLE, bounds_for, drive, drive_each

from a2d_mpi.checks.check import Check
from a2d_mpi.core import reference


def test_overflow_and_logits_of_a_billion(tmp_path):
    """The exit code is 1 with the reason, even if the results are right."""
    runs = []
    for name, factors, options in (
        ("1e20", {"v": 1e20, "dout": 1e20}, ["--check", "sample"]),
        ("300", {"v": 300, "dout": 300}, ["--check", "full", "--dtype", "float16"]),
        ("1e9", {"q": 1e8}, ["--check", "sample"]),
        ("1e4", {"q": 600}, ["--check", "sample"]),
    ):
        with h5py.File(SAMPLE) as file, h5py.File(tmp_path / f"{name}.h5", "w") as copy:
            copy.attrs.update(file.attrs)
            tensors = {x: file[x][:200].astype("f4") for x in "qkv"}
            tensors["dout"] = np.roll(tensors["q"], 1, axis=0)
            for x, y in tensors.items():
                copy[x] = y * np.float32(factors.get(x, 1))
        common = [str(tmp_path / f"{name}.h5"), "--backward", "--trials", "1"]
        runs.append(("attention.py", [*common, *options], []))
    done, found = drive_each(runs, 2)
    assert [code for code, _ in found] == [1, 1, 1, 0], done.stdout + done.stderr
    verdicts = [dict(re.findall(r"^(\w+) .*\d {2,}(\w.*)$", x, re.MULTILINE)) for _, x in found]
    for report in verdicts[:2]:
        assert report["dq"] == report["dk"] == "FAILED: not finite"
        assert report["lse"] == "passed"
    assert verdicts[2]["lse"] == "FAILED: not checked, rounding alone may change a tenth of it"
    assert verdicts[2]["dv"].startswith("FAILED: not checked")
    assert set(verdicts[3].values()) == {"passed"}
    assert "Warning" not in done.stderr  # every rank would warn, again and again


def test_one_byte_too_many_in_one_of_five_trials():
    once = (
        "from a2d_mpi.comm.channel import Traffic as T; old, calls = T.count, []\n"
        "def count(self, phase, name, direction, nbytes, messages):\n"
        "    calls.append(1)\n"
        "    old(self, phase, name, direction, nbytes + (len(calls) == 30), messages)\n"
        "T.count = count"
    )
    options = ["--seqlen", "64", "--check", "none", "--trials", "5"]
    done = drive("attention.py", 2, SAMPLE, *options, sabotage=once, code=1)
    assert re.search(r"traffic +1.00e\+00 .*FAILED$", done.stdout, re.MULTILINE), done.stdout


def test_float64_gradients_that_cancel():
    """With one key, dq and dk are 0 up to the rounding of 4000 queries, and this passes."""
    rng = np.random.default_rng(0)
    q, k, v, dout = whole = [rng.standard_normal((n, 1, 64)) for n in (4000, 1, 1, 4000)]
    lse = np.einsum("qhd,khd->qh", q, k) / 8
    delta = (dout * v[0]).sum(-1)  # in another order than products of matrices
    seen = np.ones((4000, 1), bool)
    found = reference.attention_backward(dout, q, k, v, lse, delta, seen, 1 / 8, np.dtype("f8"))
    exact = {"out": np.tile(v, (4000, 1, 1)), "lse": lse, "dq": 0 * q, "dk": 0 * k}
    bounds = bounds_for(np.dtype("f8"), 1 / 8, whole, exact, dict.fromkeys(exact, 0.0))
    errors = dict(zip(("dq", "dk"), (np.abs(x).max() for x in found)))
    assert all(0 < errors[x] < bounds[x] < 1e-8 for x in errors), (errors, bounds)
    largest = {
        x: np.linalg.norm(y, axis=-1).max() for x, y in zip(("q", "v", "dout"), (q, v, dout))
    }
    assert errors["dk"] > np.finfo(float).eps * largest["q"] * largest["v"] * largest["dout"] / 8


def test_bounds_that_prove_nothing():
    """Bounds that prove nothing are NaN, which no error passes."""
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal((9, 1, 4)) for _ in range(4)]
    exact = dict(zip(TENSORS, (whole[0], whole[0][..., 0], *whole[1:])))
    same = dict.fromkeys(exact, 1e-6)
    bounds = bounds_for(np.dtype("f4"), 1.0, whole, exact, same)
    assert all(0 < x < 1e-5 for name, x in bounds.items() if name in ("out", "lse", "dv"))
    for large in (1.0, np.inf, np.nan):
        bounds = bounds_for(np.dtype("f4"), 1.0, whole, exact, {**same, "dv": large})
        assert np.isnan(bounds["dv"]) and not Check(0.0, bounds["dv"], 9).passed
    exact["lse"] = exact["lse"] + 1e7  # their rounding is one nat
    bounds = bounds_for(np.dtype("f4"), 1.0, whole, exact, same)
    assert np.isnan([bounds[x] for x in ("out", "lse", "dv")]).all()


@pytest.mark.parametrize("check, verdict", [
    ((1, 2, 1), "passed"), ((0, 0, 1), "passed"), ((3, 2, 1), "FAILED"),
    ((np.inf, np.inf, 1), "FAILED: not finite"), ((np.nan, 2, 1), "FAILED: not finite"),
    ((1, np.nan, 1), "FAILED: not checked, rounding alone may change a tenth of it"),
    ((1, np.inf, 1), "FAILED: not checked, rounding alone may change a tenth of it"),
    ((0, 1, 0), "FAILED: nothing was compared"),
])  # fmt: skip
def test_verdicts(check, verdict):
    assert Check(*check).verdict == verdict
    assert Check(*check).passed == (verdict == "passed")
