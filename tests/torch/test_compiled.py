"""Attention as an operator of PyTorch: in compiled graphs, in checkpoints, by linear plans.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import gc

import numpy as np
import pytest
import torch
from helpers import assert_all
from oracles import linear_attention
from refused import assert_raises
from test_calls import PACKED, PADDED, TWO
from test_context import EQUAL, assert_near, build, step
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from a2d_mpi import Attention2D, Causal, LinearAttention
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.torch import attend, keep_attention

pytestmark = pytest.mark.mpi(min_size=2)
BACKEND = "aot_eager"  # inductor compiles for a minute
CHECKPOINTS = {
    "none": None,
    "all": {"use_reentrant": False},
    "all but attention": {"use_reentrant": False, "context_fn": keep_attention},
}
SIZES = {"nheads": 4, "nheads_kv": 2, "headdim": 8, "headdim_v": 6, "dtype": "float64"}


@pytest.fixture(autouse=True)
def compiler():
    """Forget what earlier tests compiled."""
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of plans by phase."""
    found = {"forward": 0, "backward": 0}

    def counted(phase):
        real = getattr(AttentionPlan, phase)

        def call(*given, **options):
            found[phase] += 1
            return real(*given, **options)

        monkeypatch.setattr(AttentionPlan, phase, call)

    counted("forward"), counted("backward")
    return found


def same(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found[1], expected[1]) if y is not None)


@pytest.mark.parametrize("name, way, layers", [
    ("Llama", "none", 1), ("Qwen3", "all", 1), ("Gemma 3", "all but attention", 2),
])  # fmt: skip
def test_one_graph(comm, parallel, calls, name, way, layers):
    """A model is one graph, also for batches of other shapes, equal to one process."""
    kind, config, options = EQUAL[name]
    made = kind, config, options | {"num_hidden_layers": layers}
    model, one = build(*made), build(*made)
    one.config.use_cache = False
    if CHECKPOINTS[way]:
        model.gradient_checkpointing_enable(CHECKPOINTS[way])
    parallel(model)
    compiled = torch.compile(model, backend=BACKEND)
    for turn, given in enumerate((TWO, PACKED, TWO)):
        calls.update(forward=0, backward=0)
        assert_near(comm, step(compiled, given), step(one, given))
        expected = {"forward": layers * (1 + (way == "all")), "backward": layers}
        assert_all(comm, turn == 0 or calls == expected, f"{calls}")  # at first it is tried
    breaks, graphs = dict(counters["graph_break"]), counters["stats"]["unique_graphs"]
    inside = [x for x in breaks if "enter.<locals>.entered" not in x]
    assert_all(comm, not inside and graphs <= 2, f"{breaks}, {graphs} graphs")
    model.config.sliding_window, model.config.is_causal = 5, False
    assert_raises(comm, "in this call, but its plan has", compiled, **TWO)


def doubled(plan, shards, sink):
    """Compute with out and lse of attention, on one rank with lse alone."""
    q, k, v = shards
    out, lse = attend(plan, q * 2, k, v, sink, return_lse=True)
    return (out * 3).sum() * (plan.grid.comm.rank > 0) + lse.square().sum()


def drawn(plan):
    """Shards of q, k, v and a sink of the same whole tensors on all ranks."""
    made = torch.Generator().manual_seed(1)
    heads = (4, 8), (2, 8), (2, 6)
    whole = [torch.randn(plan.seqlen, *x, generator=made).double() for x in heads]
    sink = torch.randn(4, generator=made).double()
    return [x[plan.tokens].requires_grad_() for x in whole], sink.requires_grad_()


@pytest.mark.parametrize("n", [23, 2])
def test_the_operator(comm, grid, n):
    """In a graph with sinks and a gradient of lse, for two plans; PyTorch's own checks."""
    plans = [Attention2D(grid, Causal(), seqlen=n, softmax_scale=x, **SIZES) for x in (0.3, 0.6)]
    compiled = torch.compile(doubled, fullgraph=True, backend=BACKEND)
    for plan in plans:
        shards, sink = drawn(plan)
        found, expected = (
            torch.autograd.grad(x(plan, shards, sink), (*shards, sink))
            for x in (compiled, doubled)
        )
        equal = [torch.equal(x, y) for x, y in zip(found, expected)]
        assert_all(comm, all(equal), f"{equal}")
    given = *shards, sink, torch.tensor(plan.serial), True, True, -1
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.a2d_mpi.attend.default, given, test_utils=checks)


def test_a_plan_that_was_deleted(comm, grid):
    """PyTorch's graph keeps a plan; the graph of the compiler does not, and says so."""
    for compiled in (False, True):
        plan = Attention2D(grid, Causal(), seqlen=23, **SIZES)
        shards, sink = drawn(plan)
        call = torch.compile(attend, fullgraph=True, backend=BACKEND) if compiled else attend
        loss = call(plan, *shards, sink).sum()
        torch._dynamo.reset()
        del plan, call
        gc.collect()
        if not compiled:
            loss.backward()
            continue
        with pytest.raises(ValueError, match="the plan was deleted"):
            loss.backward()
    comm.Barrier()


def test_a_refusal_leaves_the_compiler(comm, parallel):
    """The trials run without the compiler, and give it back, also after an error."""
    model = build("FalconForCausalLM", "FalconConfig", {})
    assert_raises(comm, "does not use transformers' attention", parallel, model)
    torch.compile(lambda x: x + 1, backend=BACKEND)(torch.ones(2))
    assert_all(comm, counters["stats"]["unique_graphs"] == 1, "nothing was compiled")


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_keep_attention(comm, parallel, calls, way):
    """A checkpointed layer calls its plan forward once, not twice, with the same gradients."""
    model = parallel(build(*EQUAL["Llama"])).model
    expected = step(model, PADDED)
    if CHECKPOINTS[way]:
        model.gradient_checkpointing_enable(CHECKPOINTS[way])
        step(model, PADDED)  # the trials are repeated
    calls.update(forward=0, backward=0)
    found = step(model, PADDED)
    good = calls == {"forward": 4 if way == "all" else 2, "backward": 2}
    assert_all(comm, good and same(found, expected), f"{calls}")


def test_keep_attention_in_a_checkpoint_of_pytorch(comm, grid, calls):
    plan = Attention2D(grid, Causal(), seqlen=23, **SIZES)
    shards, sink = drawn(plan)
    found = []
    for options in CHECKPOINTS.values():
        calls.update(forward=0, backward=0)
        if options:
            loss = checkpoint(doubled, plan, shards, sink, **options)
        else:
            loss = doubled(plan, shards, sink)
        found.append((torch.autograd.grad(loss, (*shards, sink)), calls["forward"]))
    equal = [torch.equal(x, y) for z, _ in found for x, y in zip(z, found[0][0])]
    assert_all(comm, all(equal) and [x for _, x in found] == [1, 2, 1], f"{equal} {found}")


@pytest.mark.parametrize("n, norm, feature_map, compiled", [
    (29, "output", "none", True), (29, "denominator", "elu+1", False), (2, "none", "none", True),
])  # fmt: skip
def test_linear_attention(comm, grid, n, norm, feature_map, compiled):
    """A linear plan is an operator, too: out and gradients equal the definition in float64."""
    options = {"norm": norm, "feature_map": feature_map, "decay": [0.9, 0.8, 1.0, 0.5]}
    sizes = {"seqlen": n, "nheads": 4, "headdim": 8, "chunk": 4, "dtype": "float64"}
    plan = LinearAttention(grid, Causal(), **sizes, **options)
    whole = np.random.default_rng(1).standard_normal((4, n, 4, 8))
    exact = [torch.from_numpy(x) for x in linear_attention(*whole, True, **options)]
    *own, weight = (torch.from_numpy(x[plan.tokens]) for x in whole)
    own = [x.requires_grad_() for x in own]

    def weighted(*shards):
        out = attend(plan, *shards)
        return out, (out * weight).sum()

    if compiled:
        weighted = torch.compile(weighted, fullgraph=True, backend=BACKEND)
    out, loss = weighted(*own)
    loss.backward()
    pairs = zip((out.detach(), *(x.grad for x in own)), exact)
    far = [float((x - y[plan.tokens]).norm() / y.norm()) for x, y in pairs]
    assert_all(comm, max(far) <= 1e-12, f"off by {far}")


def test_linear_attention_refuses(comm, grid):
    plan = LinearAttention(grid, Causal(), seqlen=29, nheads=4, headdim=8)
    q = torch.randn(len(plan.tokens), 4, 8, requires_grad=True)
    rank0 = comm.rank == 0
    for sink, with_lse in ((torch.zeros(4), False), (None, True)):
        given = (sink, with_lse) if rank0 else ()
        assert_raises(comm, "has no sink and no lse", attend, plan, q, q, q, *given)
    with torch.set_grad_enabled(not rank0):
        assert_raises(comm, "ranks disagree on gradients", attend, plan, q, q, q)
    assert_raises(comm, "q, k, v or sink: ", attend, plan, *[q.to("meta") if rank0 else q] * 3)
    attend(plan, q, q, q).sum().backward()
