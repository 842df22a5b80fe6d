"""What is summed over ranks: gradients, the mean over labels, the balance loss of MoE layers.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from helpers import assert_all
from refused import assert_raises, message_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import (
    ContextParallel,
    GradientHooks,
    init_process_group,
    sum_gradients,
)
from a2d_mpi.torch.sums import GradientSum, total

pytestmark = pytest.mark.mpi(min_size=3)
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
N, VOCAB = 61, 53
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.3}
MODELS = {
    "Llama": {},
    "Mixtral": EXPERTS | {"num_local_experts": 5},
    "Qwen3Moe": EXPERTS | {"num_experts": 5, "moe_intermediate_size": 24},
    "GptOss": EXPERTS | {"num_local_experts": 5, "sliding_window": 9},
}
ALONE = "from the tokens of this rank alone: take cp.loss, and for the balance loss of MoE layers"


def build(name, dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name] | options)
    config._experts_implementation = "eager"  # the others have no float64
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).train()


def sequence(number=0):
    return torch.randint(VOCAB, (1, N), generator=torch.Generator().manual_seed(number))


BOTH = pytest.mark.parametrize("part", [3, 4], indirect=True)


@pytest.fixture
def part(request, comm):
    """All ranks in groups of three, or of `param`; the last group may be smaller."""
    part = comm.Split(comm.rank // getattr(request, "param", 3), comm.rank)
    yield part
    part.Free()


def grid_of(comm):
    rows = 2 if comm.size % 2 == 0 else 1
    return ProcessGrid(comm, rows, comm.size // rows)


@pytest.fixture
def parallel(part):
    """Make a `ContextParallel` on a group; it is freed after the test."""
    made = []

    def make(model, **options):
        made.append(ContextParallel(grid_of(part), model, seqlen=N, **options))
        return made[-1]

    yield make
    for x in made:
        x.free()
        x.grid.free()


def summed_in_order(part, dtype, upload=np.array, download=np.array):
    """Sum uneven parts of an array, and compare with the sum in the order of ranks."""
    drawn = (np.random.default_rng(p).standard_normal(103) for p in range(part.size))
    of_ranks = [x.astype(dtype) for x in drawn]
    flat = upload(of_ranks[part.rank])
    sums = GradientSum(part, flat)
    for bucket in (slice(100, 103), slice(1, 100), slice(0, 1)):
        sums.start(bucket)
    sums.finish()
    same = download(flat).tobytes() == sum(of_ranks).tobytes()
    assert_all(part, same, "another sum")
    shares = sum(-(-n // part.size) for n in (3, 99, 1))
    sent = 2 * (part.size - 1) * shares * np.dtype(dtype).itemsize * (part.size > 1)
    assert_all(part, sums.nbytes == sent, f"{sums.nbytes} bytes, not {sent}")
    sums.free()


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_order_of_ranks(part, dtype):
    """All ranks get the sum in the order of ranks, bit for bit."""
    summed_in_order(part, dtype)
    found, wanted = total(part, 0.1 * part.rank), sum(0.1 * p for p in range(part.size))
    assert_all(part, found == wanted, f"{found}, not {wanted}")


@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
@pytest.mark.parametrize("transfers", ["device", "host"])
def test_order_of_ranks_on_a_gpu(part, gpus, transfers, monkeypatch):
    monkeypatch.setenv("A2D_MPI_TRANSFERS", transfers)
    summed_in_order(part, "float32", **gpus)


class Model(torch.nn.Module):
    """Two weights that need a gradient, and two that do not."""

    def __init__(self):
        super().__init__()
        made = torch.Generator().manual_seed(3)
        weights = (torch.randn(5, generator=made, dtype=torch.float64) for _ in range(4))
        self.weights = torch.nn.ParameterList(weights)
        for x in self.weights[2:]:
            x.requires_grad_(False)

    def forward(self, x):
        return sum(x * (i + 1) * y.square().sum() for i, y in enumerate(self.weights))


def copy_of_gradients(model):
    return {x: y.grad if y.grad is None else y.grad.clone() for x, y in model.named_parameters()}


def assert_summed(comm, model, own):
    """The gradients are the sums of those that ranks had; None if no rank had one."""
    for x, grads in {x: [y[x] for y in comm.allgather(own)] for x in own}.items():
        there, found = [y for y in grads if y is not None], model.get_parameter(x).grad
        near = torch.allclose(found, sum(there), 1e-14) if there else found is None
        assert_all(comm, near, f"{x}: {found} {grads}")


CHANGES = {
    "weights.2": lambda model: model.weights[2].requires_grad_(True),
    "extra": lambda model: setattr(model, "extra", torch.nn.Parameter(torch.ones(2).double())),
    "weights.1": lambda model: model.weights.__setitem__(1, torch.nn.Parameter(torch.ones(7))),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("where", ["on one rank", "on all ranks"])
def test_parameters_after_the_hooks(part, name, where):
    """A parameter that was unfrozen, added or replaced is refused; new hooks then sum it."""
    model = Model()
    hooks = GradientHooks(model, part)
    if where == "on all ranks" or part.rank == 0:
        CHANGES[name](model)
    model.weights[0].sum().mul(part.rank + 1).backward()
    if where == "on all ranks" or part.rank == 0:
        model.get_parameter(name).sum().mul(part.rank + 1).backward()
    text = f"{name} has a gradient, but was frozen or absent when GradientHooks was made"
    assert_raises(part, text, hooks.finish)
    hooks.free()
    if where == "on one rank" and part.size > 1:
        assert_raises(part, "ranks disagree on parameters", GradientHooks, model, part)
        return
    own = copy_of_gradients(model)
    hooks = GradientHooks(model, part)
    hooks.finish()
    hooks.free()
    assert_summed(part, model, own)


def test_parameters_that_are_frozen_later(part):
    """Before or after the backward pass, for a while, or tied: all gradients are summed."""
    model = Model()

    def check(summed):
        model(1.0 + part.rank).backward()
        model.weights[1].requires_grad_(False)  # an optimizer still steps on its gradient
        own = copy_of_gradients(model)
        summed()
        assert_summed(part, model, own)
        model.zero_grad()
        model.weights[1].requires_grad_(True)

    check(lambda: sum_gradients(model, part))
    hooks = GradientHooks(model, part)
    for frozen in (False, True, False):
        model.weights[0].requires_grad_(not frozen)
        check(hooks.finish)
    model.weights[2] = torch.nn.Parameter(torch.ones(5).double(), requires_grad=False)
    check(hooks.finish)
    model.weights[3] = model.weights[0]
    check(hooks.finish)
    hooks.free()


def balance(logits):
    """The balance loss of one process in float64: arXiv:2101.03961, equations 4 to 6."""
    total, rows = 0.0, torch.cat([x.double() for x in logits])
    for expert in range(rows.shape[1]):
        chosen = (rows.topk(2).indices == expert).any(1).double().mean()
        total = total + chosen * rows.softmax(1)[:, expert].mean()
    return rows.shape[1] * total


def far(found, exact):
    """The largest relative distance of gradients."""
    pairs = [(x.grad.double(), y.grad) for x, y in zip(found.parameters(), exact.parameters())]
    return max(float((x - y).norm() / y.norm().clamp(1e-9)) for x, y in pairs)


@pytest.mark.parametrize("name, asked, end", [
    ("Mixtral", "in the call", N), ("Mixtral", "in the config", 40),
    ("Qwen3Moe", "in the call", 40), ("GptOss", "in the config", N),
])  # fmt: skip
@BOTH
def test_balance_loss(part, parallel, name, asked, end):
    """Loss, balance loss and all gradients are those of one process, without padding."""
    ids, one, in_call = sequence(), build(name), asked == "in the call"
    out = one(input_ids=ids[:, :end], labels=ids[:, :end], output_router_logits=True)
    out.loss.backward()
    exact = balance(out.router_logits).item()
    assert_all(part, abs(exact / out.aux_loss.item() - 1) < 1e-6, "not the usual formula")
    model = build(name, output_router_logits=not in_call)
    cp = parallel(model)
    batch = cp.shard(ids, cu_seqlens=None if end == N else [0, end])
    out = model(**batch.inputs, **{"output_router_logits": True} if in_call else {})
    found = cp.balance_loss(out, batch)
    loss = cp.loss(out.logits, batch) + model.router_aux_loss_coef * found
    loss.backward()
    cp.sum_gradients()
    total = part.allreduce(found.item())
    assert_all(part, abs(total / exact - 1) < 1e-12, f"{total} for {exact}")
    assert_all(part, far(model, one) < 1e-6, f"gradients off by {far(model, one)}")


@pytest.mark.parametrize("asked", ["in the call", "in the config"])
def test_numbers_of_one_rank_are_refused(part, parallel, asked):
    """The model's own balance loss is of this rank's tokens, so computing with it is refused."""
    ids, asks = sequence(), {"output_router_logits": True}
    model = build("Mixtral", output_router_logits=asked == "in the config")
    cp = parallel(model)
    batch = cp.shard(ids)
    out = model(**batch.inputs, **asks if asked == "in the call" else {})
    own, loss = out.aux_loss, cp.loss(out.logits, batch)
    uses = [
        lambda: loss + 0.1 * own, lambda: loss + own, lambda: own + loss, lambda: own * 2,
        lambda: own.item(), lambda: float(own), lambda: torch.stack([own]), lambda: own.backward(),
        lambda: own.detach(), lambda: own / 2, lambda: loss.add_(own), lambda: loss - own,
        lambda: model(**batch.inputs, **asks, return_dict=False),
        lambda: model.forward(**batch.inputs, **asks).aux_loss + loss,
    ]  # fmt: skip
    for use in uses:
        said = message_of(part, use, ValueError)
        assert_all(part, ALONE in said, said)
    if asked == "in the call":
        without, only = {}, asks if part.rank == 0 else {}
        for more in (without, only) if part.size > 1 else (without,):
            out = model(**batch.inputs, **more)
            text = "only output_router_logits=True gives the balance loss of MoE layers"
            assert_raises(part, text, cp.balance_loss, out, batch)
    out = model(**batch.inputs, **asks)
    out.router_logits = tuple(2 * x for x in out.router_logits)  # as if by another formula
    assert_raises(part, "has another formula", cp.balance_loss, out, batch)
    cp.free()
    number = model(input_ids=ids, **asks).aux_loss.item()
    assert_all(part, number > 0, "still refused")


def test_balance_loss_compiled(part, parallel):
    model, ids = build("Mixtral"), sequence()
    cp = parallel(model)
    batch, asks = cp.shard(ids), {"output_router_logits": True}
    expected = cp.balance_loss(model(**batch.inputs, **asks), batch)
    out = torch.compile(model, backend="eager")(**batch.inputs, **asks)
    assert_all(part, torch.equal(cp.balance_loss(out, batch), expected), "another result")


def test_balance_loss_in_bfloat16(part, parallel):
    """At most twice the error of one process in bfloat16."""
    name, ids, kind = "Mixtral", sequence(), torch.bfloat16
    exact = build(name)
    for model in (one := build(name, kind), exact):
        model(input_ids=ids, output_router_logits=True).aux_loss.backward()
    model = build(name, kind)
    cp = parallel(model)
    batch = cp.shard(ids)
    cp.balance_loss(model(**batch.inputs, output_router_logits=True), batch).backward()
    cp.sum_gradients()
    gates = [
        [x.grad.double() for y, x in z.named_parameters() if "gate.weight" in y]
        for z in (model, one, exact)
    ]
    found, alone = (
        max(float((x - y).norm() / y.norm()) for x, y in zip(z, gates[2])) for z in gates[:2]
    )
    assert_all(part, found <= 2 * alone, f"{found} and {alone}")


@pytest.mark.parametrize("way, name, ranks", [
    ("sum_gradients", "Llama", 3), ("hooks", "Mixtral", 4), ("ddp", "Llama", 4),
    ("ddp", "Mixtral", 3), ("fsdp", "Mixtral", 4),
])  # fmt: skip
def test_replicas(comm, way, name, ranks):
    """Two sequences with 36 and 9 labels: the mean over all 45, whatever averages gradients."""
    some = comm.Split(comm.rank >= ranks, comm.rank)
    if comm.rank < ranks:
        replica = some.rank * 2 // ranks  # of 2 + 1 or 2 + 2 ranks
        part = some.Split(replica, some.rank)
        check_replicas(some, part, replica, way, name)
        part.Free()
    some.Free()


def check_replicas(some, part, replica, way, name):
    one, exact, averaged, routes = build(name), 0.0, None, name == "Mixtral"
    asks = {"output_router_logits": True} if routes else {}
    sequences = [(sequence(x), sequence(x)) for x in range(2)]
    outs = [one(input_ids=ids, **asks) for ids, _ in sequences]
    for number, out, (_, labels) in zip((36, 9), outs, sequences):
        labels[0, number + 1 :] = -100
        exact = exact + F.cross_entropy(out.logits[0, :-1], labels[0, 1:], reduction="sum") / 45
    if routes:
        exact = exact + 0.3 * balance(torch.cat(x) for x in zip(*(x.router_logits for x in outs)))
    exact.backward()
    if way in ("ddp", "fsdp"):
        init_process_group(some)
        averaged = some.size
    grid, model = grid_of(part), build(name)
    cp = ContextParallel(grid, model, seqlen=N, replicas=some)
    batch = cp.shard(*sequences[replica])
    called, hooks = model, GradientHooks(model, some) if way == "hooks" else None
    if way == "ddp":
        called = DistributedDataParallel(model, find_unused_parameters=routes)
    elif way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (some.size,)))
    out = called(**batch.inputs, **asks)
    loss = cp.loss(out.logits, batch, averaged)
    if routes:
        loss = loss + 0.3 * cp.balance_loss(out, batch, averaged)
    loss.backward()
    if way == "sum_gradients":
        cp.sum_gradients()
    elif hooks:
        hooks.finish()
        hooks.free()
    found = some.allreduce(loss.item()) / (averaged or 1)
    assert_all(some, abs(found / exact.item() - 1) < 1e-6, f"{found} for {exact.item()}")
    for x, y in zip(model.parameters(), one.parameters()):
        gradient = x.grad.full_tensor() if way == "fsdp" else x.grad
        off = float((gradient - y.grad).norm() / y.grad.norm().clamp(1e-9))
        assert_all(some, off < 1e-6, f"off by {off}")
    if averaged:
        cp.replicas = part  # as if they had not been given
        for more in (averaged, None, 0):
            with pytest.raises(
                ValueError, match=f"^{part.size} ranks share a step .*averaged_over"
            ):
                cp.loss(out.logits, batch, more)
        dist.destroy_process_group()
    cp.free(), grid.free()


def test_replicas_that_are_refused(part):
    """The ranks that share a step must have those of the grid."""
    across = part.Split(part.rank % 2, part.rank)
    grid = grid_of(part)
    text = "replicas must have all ranks that share a step"
    if part.size > 1:
        assert_raises(part, text, ContextParallel, grid, build("Llama"), seqlen=N, replicas=across)
    grid.free(), across.Free()


@pytest.mark.parametrize("wrong", ["of one rank", "of one replica"])
def test_an_error_of_one_replica(comm, wrong):
    """The other replicas raise it, too; they would wait for the labels."""
    part = comm.Split(comm.rank % 2, comm.rank)
    cp = ContextParallel(grid_of(part), build("Llama"), seqlen=N, replicas=comm)
    ids, told = sequence(), "input_ids[3] must be 0 to"
    if comm.rank in ((comm.size - 1,) if wrong == "of one rank" else range(1, comm.size, 2)):
        ids[0, 3] = -7
    assert_raises(comm, told, cp.shard, ids)
    assert_all(comm, cp.shard(sequence()).nlabels == 2 * (N - 1), "another number of labels")
    cp.free(), cp.grid.free(), part.Free()


def test_vocabulary(part, parallel):
    """Ids and labels outside of the vocabulary are refused on all ranks, with numbers."""
    cp = parallel(build("Llama"))
    ids, labels = sequence(), sequence()
    labels[0, 7] = -100
    cp.shard(ids, labels)
    for name, x, wrong in (
        ("input_ids", 3, VOCAB), ("input_ids", 60, -1), ("input_ids", 0, -100),
        ("labels", 3, VOCAB), ("labels", 60, -1), ("labels", 5, -99),
    ):  # fmt: skip
        given = {"input_ids": ids.clone(), "labels": labels.clone()}
        given[name][0, x] = wrong
        told = f"{name}[{x}] must be 0 to {VOCAB - 1}, got {wrong}"
        assert_raises(part, told, lambda given=given: cp.shard(**given))
        mine = given if part.rank == part.size - 1 else {"input_ids": None}
        assert_raises(part, told, lambda mine=mine: cp.shard(**mine, root=part.size - 1))
    assert_all(part, cp.shard(ids, labels).nlabels == N - 2, "other labels")
