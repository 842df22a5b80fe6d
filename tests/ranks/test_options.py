"""Options of plans, over methods and grids: against float64, counted, and refused."""

from collections.abc import Mapping
from copy import copy
from types import MappingProxyType
from typing import NamedTuple

import h5py
import numpy as np
import pytest
from cases import GRIDS, NHEADS, OTHERS, PLANS, SIZE, accounts, differing, takes
from dense import problem, problem_for, results_of, wrong_in, wrong_with
from helpers import assert_all, deeper, drive_each, read_run
from refused import GOOD

from a2d_mpi import (
    Attention2D,
    Causal,
    Documents,
    Full,
    IntervalMask,
    RingAttention,
    SlidingWindow,
    TriangleAttention,
)
from a2d_mpi.attention.executor import Executor
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import KEPT
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.masks.mask import Mask
from a2d_mpi.results.inputs import inspect_input
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.sharding import triangle_shards

ONE = GRIDS[len(GRIDS) // 2]
N, D = 61, 16
HIDDEN = IntervalMask(  # documents; every seventh query and the last ones see nothing
    np.arange(N) // 20 * 20,
    np.where((np.arange(N) % 7 == 0) | (np.arange(N) > N - 9), 0, np.arange(N) + 1),
)
NOBODY = IntervalMask(np.zeros(40, int), np.arange(40) // 3)  # the first queries see nothing
NOTHING = IntervalMask(np.zeros(N, int), np.zeros(N, int))
ranks = pytest.mark.mpi


def on_grids(test):
    return pytest.mark.mpi(pytest.mark.grids(test))


@on_grids
@pytest.mark.one_mpi
@pytest.mark.parametrize("method", ["attention2d", "ring", "double ring", "node aware"])
def test_with_mask(comm, grid_of, method):
    """Plans of other masks equal new plans, bit for bit, and share the buffers."""
    grid = grid_of(1, SIZE)
    sizes = {"seqlen": 60, "nheads": 4, "headdim": 8}
    plan, rng = make_plan(method, grid, Causal(), **sizes), np.random.default_rng(5)
    kept, bad = [], []
    for step in range(KEPT + 2):
        cu_seqlens = [0, *np.sort(rng.integers(0, 61, 4)), 60]
        new, again = (plan.with_mask(Documents(cu_seqlens, causal=True)) for _ in range(2))
        bad += [f"{step}: not kept"] * (again is not new)
        kept.append(new)
        fresh = make_plan(method, grid, new.mask, **sizes)
        given = problem(new.mask, plan.config, seed=step)
        found, expected = (results_of(x, given) for x in (new, fresh))
        bad += wrong_in(new, found, given) + differing(expected, found)
        bad += [f"{step}: bytes"] * (new.traffic.bytes != fresh.traffic.bytes)
    again = [plan.with_mask(x.mask) is x for x in kept[: -KEPT - 2 : -1]]
    bad += ["too many or too few kept"] * (again != [True] * KEPT + [False])
    bad += ["buffers"] * (new.buffer_bytes != plan.buffer_bytes)
    plan.free()
    bad += ["not freed"] * (new.buffer_bytes != 0)
    assert_all(comm, not bad, f"{bad}")


@on_grids
@pytest.mark.one_mpi
@pytest.mark.parametrize("method", METHODS)
def test_same_plan_new_data(comm, grid_of, method):
    """Each of five calls returns results of its data, which later calls keep."""
    known = METHODS[method]
    heads = SIZE if known.causal and not triangle_shards.fits(SIZE) else 1
    rows = 1 if heads > 1 or SIZE % 2 else 2
    grid = grid_of(rows, SIZE // rows // heads, heads)
    sizes = {"seqlen": 41, "nheads": 12, "headdim": 8, "dtype": "float64"}
    plan = make_plan(method, grid, Causal(), **sizes)
    sets = [problem(Causal(), plan.config, seed=seed) for seed in (0, 1)]
    shards = [[x[plan.tokens] for x in given.inputs] for given in sets]
    refilled = [x.copy() for x in shards[0]]
    bits, calls, bad = [[x.tobytes() for x in shard] for shard in shards], [], []
    # The last two in the same arrays; forward, forward, backward, backward among them.
    for turn in ((0,), (1,), (0, 1), (1,), (0,)):
        given, results = {}, {}
        for which in turn:
            given[which] = shards[which]
            if len(calls) >= 4:
                given[which] = refilled
                for to, x in zip(refilled, shards[which]):
                    to[...] = x
            results[which] = plan.forward(*given[which][:3])
        for which in turn:
            q, k, v, dout = given[which]
            found = (*results[which], *plan.backward(dout, q, k, v, *results[which]))
            names = ("out", "lse", "dq", "dk", "dv")
            calls.append((which, dict(zip(names, found)), [x.tobytes() for x in found]))
            if [x.tobytes() for x in given[which]] != bits[which]:
                bad.append(f"call {len(calls)} changed its arguments")
    for number, (which, found, kept) in enumerate(calls, 1):
        wrong = wrong_in(plan, found, sets[which])
        wrong += [f"{x} changed later" for x, y in zip(found, kept) if found[x].tobytes() != y]
        first = next(y for w, _, y in calls if w == which)
        wrong += ["it does not repeat"] * (kept != first)
        bad += [f"call {number}: {x}" for x in wrong]
    assert_all(comm, not bad, "; ".join(bad))


class Case(NamedTuple):
    """Options of plans, and what their calls get; `aligned` is the mask by hand."""

    mask: Mask
    dtype: str = "float32"
    nheads_kv: int = NHEADS
    options: Mapping = MappingProxyType({})
    sink: bool = False
    dlse: bool = False
    size: float = 1.0
    aligned: Mask | None = None

    def plan(self, kind, grid, **others):
        sizes = {"seqlen": N, "nheads": NHEADS, "headdim": D, "nheads_kv": self.nheads_kv}
        return kind(grid, self.mask, **{**sizes, "dtype": self.dtype, **self.options, **others})

    def given(self, plan):
        return problem(self.aligned or self.mask, plan.config, self.sink, self.dlse, self.size)


def cross(mask, n, m, *distribution):
    """Two sequences: masks end together."""
    options = {"seqlen": n, "seqlen_kv": m, "distribution": distribution}
    end, i = np.arange(n) + m - n + 1, np.arange(n)
    random = np.sort(np.random.default_rng(n + m).integers(-3, m + 1, (2, n)), axis=0)
    mask, aligned = {
        "full": (Full(), Full()),
        "causal": (Causal(), IntervalMask(0 * i, end.clip(0))),
        "window": (SlidingWindow(5, 0), IntervalMask((end - 6).clip(0), end.clip(0))),
        "intervals": (IntervalMask(*random.clip(0)),) * 2,
    }[mask]
    return Case(mask, "float64", 2, options, aligned=aligned)


CAP, MLA = {"logit_softcap": 2.0}, {"headdim": 24, "headdim_v": 16}
CASES = {
    "dlse": [
        Case(Full(), dlse=True), Case(Causal(), "float64", 1, dlse=True),
        Case(HIDDEN, "float32", 2, dlse=True), Case(Causal(), "bfloat16", dlse=True),
        Case(HIDDEN, "float16", 1, sink=True, dlse=True),
    ],
    "soft-cap": [
        Case(Full(), "float32", NHEADS, CAP, True), Case(Causal(), "float64", 1, CAP),
        Case(HIDDEN, "float32", 2, CAP, True), Case(Causal(), "bfloat16", NHEADS, CAP, True),
        Case(HIDDEN, "float16", 1, CAP), Case(Full(), "float64", 1, {}, True),
    ],
    "headdim_v": [  # of MLA, as trained (192, 128) and absorbed (576, 512)
        Case(Causal(), options=MLA), Case(Causal(), "bfloat16", options=MLA),
        Case(HIDDEN, "bfloat16", 1, {"headdim": 36, "headdim_v": 32}),
        Case(Full(), "float64", 2, {"headdim": 5, "headdim_v": 12}),
        Case(Documents([0, 5, 6, 40, N]), "float32", 1, {"headdim": 36, "headdim_v": 32}),
        Case(HIDDEN, "float32", 2, MLA | CAP | {"softmax_scale": 0.4}, True, True),
    ],
    "logits": [  # to 1e4: exponentials with and without a shift
        Case(Causal(), size=2500.0), Case(HIDDEN, "float64", 1, size=2500.0), Case(NOTHING),
        Case(Causal(), "float32", 2, {"logit_softcap": 50.0}, size=300.0),
        Case(Full(), size=2500.0),
    ],
    "cross": [
        cross("full", 61, 18, "contiguous", "zigzag"),
        cross("window", 3, 40, "striped", "balanced"),
        cross("causal", 23, 57, "zigzag", "striped"),
        cross("intervals", 40, 2, "zigzag", "contiguous"),
        cross("causal", 40, 2, "contiguous", "balanced"),
    ],
}  # fmt: skip


@on_grids
@pytest.mark.parametrize("option", CASES)
@pytest.mark.parametrize("name", PLANS)
def test_plans(comm, grid_of, name, option):
    """Results, bytes, messages, buffers, masked rows; dlse of the other sign fails."""
    kind, shape, nodes = PLANS[name]
    grid, bad = grid_of(*shape, nodes=nodes), []
    for number, case in enumerate(CASES[option]):
        if not takes(kind, case.mask) or (option == "cross" and kind is TriangleAttention):
            continue
        plan = case.plan(kind, grid, overlap=number % 2 == 0)
        given = case.given(plan)
        found = results_of(plan, given, given.dlse)
        wrong = wrong_in(plan, found, given) + accounts(plan, True)
        masked = np.isneginf(found["lse"])
        wrong += [f"{x} of masked rows" for x in ("out", "dq") if found[x][masked].any()]
        if case.dlse and not comm.allreduce(len(wrong_with(plan, given, -given.dlse))):
            wrong.append("dlse of the other sign passed")
        bad += [f"case {number}: {x}" for x in wrong]
    assert_all(comm, not bad, "; ".join(bad))


SLICED = [  # of twelve heads
    Case(Causal(), nheads_kv=12),
    Case(Full(), "bfloat16", 12, {"overlap": False}),
    Case(Causal(), "float64", 12, {"wire": "mxfp8"}),
    Case(HIDDEN, "float32", 12, MLA | CAP, True, True),
    cross("causal", 23, 57, "zigzag", "striped")._replace(nheads_kv=12),
    Case(Causal(), "bfloat16", 6, {"overlap": False}),
]


@ranks
@pytest.mark.multirank
@pytest.mark.one_mpi
@pytest.mark.parametrize("name", deeper(
    [x for x in PLANS if SIZE < 6 or "Triangle" in x],
    ["Attention2D-2x2", "Attention2D-2x1x2", "RingAttention-4x1", "node aware"],
))  # fmt: skip
def test_slices(comm, grid_of, name):
    """Slices change no bit, and never the bytes of rows."""
    kind, shape, nodes = PLANS[name]
    grid, bad = grid_of(*shape, nodes=nodes), []
    for number, case in enumerate(SLICED):
        found, moved = {}, {}
        if not takes(kind, case.mask) or (kind is TriangleAttention and case.aligned):
            continue
        # Other numbers of slices, also in each phase, with one case.
        more = (2, (1, 2), 12 // grid.heads) if number == 0 else (case.nheads_kv // 2,)
        for slices in (1, *more):
            plan = case.plan(kind, grid, nheads=12, slices=slices)
            given = case.given(plan)
            found[slices] = results_of(plan, given, given.dlse)
            moved[slices], wrong = dict(plan.traffic.bytes), accounts(plan, True)
            if not case.options.get("wire"):
                wrong += wrong_in(plan, found[slices], given)
            wrong += differing(found[1], found[slices])
            wrong += ["bytes differ"] * (moved[slices] != moved[1])
            bad += [f"case {number}, {slices} slices: {x}" for x in wrong]
            plan.free()
    assert_all(comm, not bad, "; ".join(bad))


@pytest.fixture
def told(monkeypatch):
    """Note the arguments that kernels get from plans beside arrays."""
    begin, found = Executor.begin, []

    def noted(self, state, channels, given, options, *others):
        found.append(options)
        begin(self, state, channels, given, options, *others)

    monkeypatch.setattr(Executor, "begin", noted)
    return found


@on_grids
@pytest.mark.one_mpi
def test_plans_on_a_gpu(comm, grid_of, gpus, told):
    (kind, shape), bad = OTHERS[-1], []
    grid = grid_of(*shape)
    for case in (
        Case(HIDDEN, "float32", 2, CAP, True, True),
        Case(HIDDEN, "bfloat16", 1, CAP, True),
        Case(HIDDEN, "float16", 1, {}, True, True),
    ):
        plan = case.plan(kind, grid)
        given = case.given(plan)
        bad += wrong_with(plan, given, given.dlse, **gpus)
        bad += ["cuDNN would compute"] * (case.dlse and not told[-1].any_delta)
    assert_all(comm, not bad, "; ".join(bad))


@on_grids
def test_out_in_16_bits_is_rounded_once(comm, grid_of):
    """Equal keys: out is their value times a number that float32 knows to the last digit."""
    grids = [ONE] + [(1, 1, SIZE)] * (NHEADS % SIZE == 0) + [(2, 1, 2)] * (SIZE == 4)
    v = np.linspace(1, 2, N * NHEADS * D).reshape(N, NHEADS, D).astype(DTYPES["bfloat16"])
    v[:] = v[:1]
    zeros, sink = np.zeros_like(v), np.linspace(2, 3, NHEADS).astype(np.float32)
    share = (N / (N + np.exp(sink.astype(float))))[:, None]
    exact = (v[0].astype(float) * share).astype(np.float32).astype(DTYPES["bfloat16"])
    bad = []
    for shape in grids:
        plan = Case(Full(), "bfloat16").plan(Attention2D, grid_of(*shape))
        # Partial outs of other ranks are rounded on the wire; those of one value are exact.
        out, _ = plan.forward(*(x[plan.tokens] for x in (zeros, zeros, v)), sink)
        off = (out.astype(float) != exact.astype(float)).mean() if len(out) else 0
        # float32 products and sums may move a value across the middle of two neighbours.
        bad += [f"{shape}: {100 * off:.1f} % are not rounded as the exact ones"] * bool(off > 0.02)
    assert_all(comm, not bad, "; ".join(bad))


@ranks
def test_dlse_of_masked_rows(comm, grid, told):
    """It is ignored, and makes no kernel careful."""
    plan = Attention2D(grid, NOBODY, **GOOD)
    x = np.ones((len(plan.tokens), 4, 8), np.float32)
    out, lse = plan.forward(x, x, x)
    dlse = np.where(np.isneginf(lse), np.float32(np.nan), 0)
    dq, *_ = plan.backward(x, x, x, x, out, lse, dlse=dlse)
    assert_all(comm, np.isfinite(dq).all(), "NaN")
    assert_all(comm, told[-1].careful is False, "a careful kernel is slower")


# NaN and infinite elements reach the results that depend on them, and no others.

N_FINITE, GROUP = 67, 2
TOKEN, HEAD = 40, 1  # where it stands, of q and dout heads or of k and v heads
TOKENS = np.arange(N_FINITE)
DOCUMENTS = IntervalMask(np.where(TOKENS < 30, 0, 30), np.where(TOKENS < 30, 30, N_FINITE))
WINDOW = IntervalMask(TOKENS - 5, TOKENS + 3)


def reached(name, visible):
    """Return which (query, head) and (key, head) depend on an element that is not finite."""
    heads = [HEAD] if name in ("q", "dout") else range(HEAD * GROUP, (HEAD + 1) * GROUP)
    queries = np.zeros((N_FINITE, 4), bool)
    seeing = TOKENS == TOKEN if name in ("q", "dout") else visible[:, TOKEN]
    queries[:, heads] = seeing[:, None]
    keys = np.zeros((N_FINITE, 2), bool)
    keys[:, heads[0] // GROUP] = visible[seeing].any(axis=0)
    return queries, keys


@on_grids
@pytest.mark.one_mpi
@pytest.mark.parametrize("method", [Attention2D, RingAttention])
@pytest.mark.parametrize("mask", deeper([DOCUMENTS, WINDOW, Causal(), Full()], [WINDOW]), ids=repr)
@pytest.mark.parametrize("distribution", deeper(["zigzag", "striped"], ["zigzag"]))
def test_what_is_not_finite_stays(comm, grid_of, method, mask, distribution):
    sizes = {"seqlen": N_FINITE, "nheads": 4, "nheads_kv": 2, "headdim": 8}
    plan = method(grid_of(*ONE), mask, distribution=distribution, **sizes)
    visible = mask.dense(TOKENS, TOKENS)
    clean = problem_for(plan)
    expected = results_of(plan, clean)
    for name, value in (("q", np.nan), ("k", np.nan), ("v", np.inf), ("dout", np.nan)):
        given = copy(clean)
        given.inputs = [x.copy() for x in clean.inputs]
        given.inputs[("q", "k", "v", "dout").index(name)][TOKEN, HEAD, 3] = value
        found = results_of(plan, given)
        queries, keys = (x[plan.tokens] for x in reached(name, visible))
        for result, x in found.items():
            may = keys if result in ("dk", "dv") else queries
            same = np.isclose(x[~may], expected[result][~may], 1e-4, 1e-5).all()
            assert_all(comm, same, f"{value} in {name} changes {result} elsewhere")
        # dout reaches v of these queries' results, and k of their keys.
        some = found["dq" if name == "dout" else "out"][queries]
        ok = (np.isnan(some) if name == "dout" else ~np.isfinite(some)).any(-1).all()
        assert_all(comm, ok, f"{value} in {name} does not reach all that depend on it")


def test_drivers(tmp_path):
    """Drivers take an input whose v has another width."""
    rng, mla = np.random.default_rng(0), tmp_path / "mla.h5"
    with h5py.File(mla, "w") as file:
        file.attrs.update({"schema": "a2d_mpi input", "schema_version": 1})
        for name, heads, width in (("q", 4, 24), ("k", 2, 24), ("v", 2, 16)):
            file[name] = rng.standard_normal((50, heads, width), np.float32)
    assert inspect_input(mla).config.headdim_v == 16
    sizes = ["--seqlens", 48, "--nheads", 4, "--headdim", 24, "--headdim-v", 16, "--trials", 1]
    attention = [mla, "--save-outputs", "--backward", "--check", "full", "--trials", 1]
    attention += ["--output", tmp_path / "run.h5"]
    bench = ["--plans", "ring", *sizes, "--backward", "--output", tmp_path / "b.h5"]
    done, found = drive_each([("attention.py", attention, []), ("bench.py", bench, [])], 2)
    assert [code for code, _ in found] == [0, 0], done.stderr
    result = read_run(tmp_path / "run.h5")
    assert result["passed"] and "headdim 24, headdim_v 16" in found[0][1]
    assert result["config"]["headdim_v"] == 16
    shapes = {name: x.shape for name, x in result["outputs"].items()}
    assert shapes["out"] == (50, 4, 16) and shapes["dv"] == (50, 2, 16)
    assert shapes["dq"] == (50, 4, 24) and shapes["dk"] == (50, 2, 24)
    with h5py.File(tmp_path / "b.h5") as file:
        (name,) = file["runs"]
        assert "-d24x16-" in name and file["runs"][name]["config"].attrs["headdim_v"] == 16
