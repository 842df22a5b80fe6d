"""Plans that send narrow formats: errors, bytes, and what the check finds."""

from copy import copy

import numpy as np
import pytest
from cases import PLANS, SIZE, accounts, differing
from dense import problem_for, results_of
from helpers import SAMPLE, assert_all, drive, read_run

from a2d_mpi import Attention2D, Causal, Full, IntervalMask
from a2d_mpi.checks.check import check_attention
from a2d_mpi.core import wire
from a2d_mpi.core.wire import FORMATS


def ranks(test):
    return pytest.mark.mpi(pytest.mark.grids(test))


def rounded(given, name):
    """Return a problem whose inputs are rounded to a format."""
    given = copy(given)
    given.inputs = [wire.rounded(x.astype(np.float32), name) for x in given.inputs]
    return given


def bad_checks(plan, checks, name):
    """Return verdicts that are wrong."""
    told = f"{plan.method} {name}"
    return [f"{told} {x}: {y} {y.verdict}" for x, y in checks.items() if not y.passed]


@ranks
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("seqlen", "formats"), [(2, ["mxfp4"]), (61, FORMATS)])
def test_all_methods(comm, grid_of, seqlen, formats, name):
    """Errors, bytes and buffers are right, results repeat, and lse is of rounded tensors."""
    kind, shape, nodes = PLANS[name]
    grid, bad = grid_of(*shape, nodes=nodes), []
    sizes = {"seqlen": seqlen, "nheads": 6, "nheads_kv": 2, "headdim": 40}
    exact = kind(grid, Causal(), **sizes)
    given = problem_for(exact)
    for form in formats:
        plan, again = (kind(grid, Causal(), **sizes, wire=form, overlap=x) for x in (True, False))
        found = results_of(plan, given)
        bad += accounts(plan, True)
        bad += bad_checks(plan, check_attention(plan, given.shards(plan) | found), form)
        bad += differing(found, results_of(again, given))
        same = ["lse", *["out"] * ("Ring" in kind.__name__)]
        if seqlen > 2 and len(shape) == 2:
            of_rounded = results_of(exact, rounded(given, form))
            told = f"{plan.method} {form} is not that of the rounded tensors: "
            bad += [told + x for x in differing({y: of_rounded[y] for y in same}, found)]
    assert_all(comm, not bad, "; ".join(bad))


@ranks
@pytest.mark.parametrize("transfers", ["device", "host"])
def test_on_gpus(comm, grid_of, gpus, transfers):
    """CuPy arrays get the same check and bytes, and lse to the last digits."""
    grid, bad = grid_of(1, SIZE), []
    for name in FORMATS:
        sizes = {"seqlen": 23, "nheads": 2, "nheads_kv": 1, "headdim": 9, "wire": name}
        plan = Attention2D(grid, Causal(), **sizes, transfers=transfers)
        given = problem_for(plan)
        local = given.shards(plan) | results_of(plan, given, **gpus)
        bad += bad_checks(plan, check_attention(plan, local), name) + accounts(plan, True)
    assert_all(comm, not bad, "; ".join(bad))


@ranks
def test_what_travels(comm, grid_of):
    """Bytes are of the format; 16-bit tensors travel unchanged, except gradients."""
    grid, bad = grid_of(SIZE, 1), []
    sizes = {"seqlen": 16 * SIZE, "nheads": 2, "headdim": 64}
    received = 16 * (SIZE - 1) * 2  # rows of heads of k, and as many of v
    for dtype, name, forward, backward in (
        ("float32", None, 256, 256),
        ("float32", "bfloat16", 128, 128),
        ("float32", "mxfp8", 66, 66),
        ("float32", "mxfp4", 34, 34),
        ("bfloat16", "bfloat16", 128, 128),
        ("bfloat16", "mxfp8", 66, 66),
        ("bfloat16", None, 128, 256),
    ):
        plan = Attention2D(grid, Full(), **sizes, dtype=dtype, wire=name)
        results_of(plan, problem_for(plan))
        bytes_ = plan.traffic.bytes
        for phase, each in (("forward", forward), ("backward", forward + backward)):
            right = 2 * received * each
            if bytes_.get((phase, "col"), [0, 0]) != [right, right] and SIZE > 1:
                bad.append(f"{dtype} {name} {phase}: {bytes_}, not {right}")
    assert_all(comm, not bad, "; ".join(bad))


@ranks
def test_a_wrong_scale(comm, grid_of, monkeypatch):
    """A check fails in lse if scales are twice too large."""
    right, grid, bad = wire.encode, grid_of(1, SIZE), []

    def wrong(to, x, name):
        right(to, x, name)
        blocks = -(-x.shape[2] // 32)
        to[..., -blocks:] += to[..., -blocks:] < 254

    monkeypatch.setattr(wire, "encode", wrong)
    for name in ("mxfp8", "mxfp4") if SIZE > 1 else ():  # one rank sends nothing
        plan = Attention2D(grid, Full(), seqlen=61, nheads=2, headdim=64, wire=name)
        given = problem_for(plan)
        checks = check_attention(plan, given.shards(plan) | results_of(plan, given))
        bad += [f"{name}: {checks}"] * checks["lse"].passed
    assert_all(comm, not bad, "; ".join(bad))


@ranks
def test_padding(comm, grid_of):
    """Masked rows and keys may hold NaN, and other results do not change."""
    begin, end = np.zeros(33, int), np.minimum(np.arange(33) + 1, 20)
    begin[20:], end[20:] = 0, 0  # the last queries see nothing, and their keys are seen by nobody
    mask, grid, found = IntervalMask(begin, end), grid_of(1, SIZE), []
    bad = []
    for padding in (0.0, np.nan, np.inf):
        plan = Attention2D(grid, mask, seqlen=33, nheads=2, headdim=33, wire="mxfp8")
        given = copy(problem_for(plan))
        given.inputs = [
            np.where(np.arange(33)[:, None, None] < 20, x, padding) for x in given.inputs
        ]
        results = results_of(plan, given)
        seen = plan.tokens < 20
        found.append({x: y[seen].tobytes() for x, y in results.items()})
        masked = [x for x in ("out", "dq", "dk", "dv") if results[x][~seen].any()]
        bad += [f"{x} of masked rows under {padding}" for x in masked]
    bad += ["results depend on padding"] * (found[0] != found[1] or found[0] != found[2])
    assert_all(comm, not bad, "; ".join(bad))


@ranks
def test_small_elements_beside_large_ones(comm, grid_of):
    """Partial results of all ranks are off in one element; large ones each have in another."""
    grid, bad = grid_of(1, SIZE), []
    for name in FORMATS:
        plan = Attention2D(grid, Full(), seqlen=25 * SIZE, nheads=1, headdim=32, wire=name)
        local = {x: np.zeros((25, 1, 32), np.float32) for x in "qkv"}
        local["v"][:, 0, comm.rank] = 4
        local["v"][:12, 0, 31] = 0.5  # 0.24 of their partial results, in mxfp4: 0
        out, lse = plan.forward(*local.values())
        checks = check_attention(plan, {**local, "out": out, "lse": lse})
        bad += [f"{name} {x}: {check}" for x, check in checks.items() if not check.passed]
        if name == "mxfp4" and abs(checks["out"].error - 0.24 * (SIZE - 1) / SIZE) > 1e-6:
            bad.append(f"no error of {name}: {checks['out']}")
    assert_all(comm, not bad, "; ".join(bad))


def test_result_files(tmp_path):
    """Result files have formats, and errors against tensors before rounding."""
    options = ["--seqlen", "48", "--backward", "--trials", "1", "--check", "full"]
    done = drive(
        "attention.py", 2, SAMPLE, *options, "--wire", "mxfp8", "--output", tmp_path / "run.h5"
    )
    result = read_run(tmp_path / "run.h5")
    assert result["config"]["wire"] == "mxfp8"
    for name in ("out", "lse", "dq", "dk", "dv"):
        check = result["checks"][name]
        assert check["passed"] and check["as_given"] > check["error"], (name, check)
        assert f"{check['as_given']:.2e}" in done.stdout
