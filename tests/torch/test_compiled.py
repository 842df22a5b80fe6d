"""Attention as an operator of PyTorch: in compiled graphs, in checkpoints, by linear plans.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

# ruff: noqa: F401, F811  the fixtures grid and parallel

import gc

import numpy as np
import pytest
import torch
from helpers import assert_all
from refused import assert_raises, message_of
from test_context import ENDS, EQUAL, OWN, N, assert_near, build, grid, parallel, sequence, step
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from a2d_mpi import Attention2D, Causal, LinearAttention
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.torch import attend, keep_attention

pytestmark = pytest.mark.mpi(min_size=4)
torch.set_num_threads(1)
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


def spread(cp, model, ends):
    """Return the loss of all ranks and the gradients of a step."""
    cp.model.zero_grad()
    batch = cp.shard(sequence(N), cu_seqlens=ends)
    loss = cp.loss(model(**batch.inputs).logits, batch)
    loss.backward()
    cp.sum_gradients()
    found = [x.grad for x in cp.model.parameters()]
    return sum(cp.grid.comm.allgather(loss.item())), found


def same(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found[1], expected[1]))


@pytest.mark.parametrize("name, way, layers", [
    ("Llama", "none", 1), ("Qwen3", "all", 1), ("Gemma 3", "all but attention", 2),
])  # fmt: skip
def test_one_graph(comm, parallel, calls, name, way, layers):
    """A model is one graph, also for a batch with other plans, and all bits are the same."""
    kind, config, options = EQUAL[name]
    given = kind, config, options | {"num_hidden_layers": layers}
    model, plain = build(*given), parallel(build(*given))
    if CHECKPOINTS[way]:
        model.gradient_checkpointing_enable(CHECKPOINTS[way])
        model.config.use_cache = False  # or transformers logs a warning, which breaks the graph
    cp = parallel(model)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    for ends in (ENDS, np.array([0, 22, 25, 58, N])):
        calls.update(forward=0, backward=0)
        found = spread(cp, compiled, ends)
        counted = dict(calls)
        assert_all(comm, same(found, spread(plain, plain.model, ends)), "other bits")
        assert_near(comm, found, step(build(*given), *[sequence(N)] * 2, ends))
        expected = {"forward": layers * (1 + (way == "all")), "backward": layers}
        assert_all(comm, counted == expected, f"{counted}")
    assert_all(comm, not counters["graph_break"], f"{counters['graph_break']}")
    graphs = counters["stats"]["unique_graphs"]
    assert_all(comm, graphs <= 2, f"{graphs} graphs")  # another one for another number of tokens


def refused(comm, text, compiled, given):
    """Assert that a call is refused on all ranks, and that its graph has no break."""
    said = message_of(comm, lambda: compiled(**given))
    assert_all(comm, text in said, f"{text!r} is not in {said!r}")


def test_compiled_calls_that_are_refused(comm, parallel):
    """A compiled model refuses what the model itself refuses, on rank 0 or on all."""
    kind, config, options = EQUAL["Mistral"]
    model, ids = build(kind, config, options | {"num_hidden_layers": 1}), sequence(N)
    cp = parallel(model)
    batch = cp.shard(ids, cu_seqlens=ENDS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = compiled(**batch.inputs).logits
    padding = torch.ones_like(batch.labels)
    padding[:, -1] = 0
    positions = {"position_ids": batch.inputs["position_ids"].clone()}
    cases = [
        (positions, 1, OWN),
        (positions, comm.size, OWN),
        ({"attention_mask": padding}, 1, "a plan takes no padding mask"),
        ({"labels": batch.labels}, comm.size, "would shift labels on each rank alone"),
    ]
    for wrong, ranks, text in cases:
        refused(comm, text, compiled, batch.inputs | (wrong if comm.rank < ranks else {}))
    model.config.sliding_window = 5
    refused(comm, "in this call, but its plan has", compiled, batch.inputs)
    model.config.sliding_window = 9
    model.model.layers[0].self_attn.scaling = 0.5
    refused(comm, "make a new ContextParallel", compiled, batch.inputs)
    model.model.layers[0].self_attn.scaling = 8**-0.5
    assert_all(comm, torch.equal(compiled(**batch.inputs).logits, expected), "another result")
    cp.free()
    refused(comm, "has been freed", compiled, batch.inputs)
    assert_all(comm, compiled(input_ids=ids).logits.shape[1] == N, "not its own attention")


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


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_keep_attention(comm, parallel, calls, way):
    """A checkpointed layer calls its plan forward once, not twice, with the same gradients."""
    model = build(*EQUAL["Llama"])
    cp = parallel(model)
    expected = spread(cp, model, ENDS)
    calls.update(forward=0, backward=0)
    if CHECKPOINTS[way]:
        model.gradient_checkpointing_enable(CHECKPOINTS[way])
    found = spread(cp, model, ENDS)
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


DECAYS = [0.9, 0.8, 1.0, 0.5]


def linear_of(q, k, v, norm):
    """Linear attention by its definition."""
    n = len(q)
    steps = torch.arange(n)[:, None] - torch.arange(n)
    factors = torch.tensor(DECAYS, dtype=torch.float64)[:, None, None] ** steps.clip(0)
    if norm == "denominator":
        q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    weights = torch.einsum("ihd,jhd->hij", q, k) * factors * (steps >= 0)
    out = torch.einsum("hij,jhd->ihd", weights, v)
    if norm == "denominator":
        return out / (weights.sum(2).T[..., None] + 1e-6)
    if norm == "output":
        return out / (out.square().mean((1, 2), keepdim=True) + 1e-6).sqrt()
    return out


@pytest.mark.parametrize("n, norm, feature_map, compiled", [
    (29, "output", "none", True), (29, "denominator", "elu+1", False), (2, "none", "none", True),
])  # fmt: skip
def test_linear_attention(comm, grid, n, norm, feature_map, compiled):
    """A linear plan is an operator, too: out and gradients equal the definition in float64."""
    options = {"norm": norm, "feature_map": feature_map, "decay": DECAYS, "dtype": "float64"}
    plan = LinearAttention(grid, Causal(), seqlen=n, nheads=4, headdim=8, chunk=4, **options)
    made = torch.Generator().manual_seed(1)
    whole = [torch.randn(n, 4, 8, generator=made).double().requires_grad_() for _ in range(3)]
    weight = torch.randn(n, 4, 8, generator=made).double()
    expected = linear_of(*whole, norm)
    (expected * weight).sum().backward()
    own = [x.detach()[plan.tokens].requires_grad_() for x in whole]

    def weighted(*shards):
        out = attend(plan, *shards)
        return out, (out * weight[plan.tokens]).sum()

    if compiled:
        weighted = torch.compile(weighted, fullgraph=True, backend=BACKEND)
    out, loss = weighted(*own)
    loss.backward()
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(own, whole))]
    far = [float((x - y[plan.tokens]).detach().norm() / y.detach().norm()) for x, y in pairs]
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
