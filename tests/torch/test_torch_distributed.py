"""Plans beside torch.distributed: DDP, FSDP2 and the package's own sums, against one process.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_all
from refused import assert_raises, message_of
from test_calls import KINDS, PADDED, TWO
from test_context import assert_near, build, loss_of, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from a2d_mpi import Attention2D, Causal, ProcessGrid
from a2d_mpi.torch import (
    ContextParallel,
    attend,
    init_process_group,
    sum_gradients,
)

ranks = pytest.mark.mpi(min_size=4)
SEQLEN, VOCAB, STEPS, LARGEST = 37, 23, 3, 0.5  # the largest norm of gradients


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(16) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(16, 24), torch.nn.GELU(), torch.nn.Linear(24, 16)
        )

    def forward(self, x, attention):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, 8)).split((2, 1, 1), 1)
        x = x + self.out(attention(q, k.contiguous(), v.contiguous()).flatten(1))
        return x + self.mlp(self.norms[1](x))


class Model(torch.nn.Module):
    """A small model; `attention` is a function of q, k and v, (n, heads, 8) tensors."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, 16)
        self.positions = torch.nn.Embedding(SEQLEN, 16)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(16, VOCAB)
        self.recomputes = False

    def forward(self, tokens, positions, attention):
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            if self.recomputes:
                x = checkpoint(block, x, attention, use_reentrant=False)
            else:
                x = block(x, attention)
        return self.head(x)


def new_model():
    torch.manual_seed(0)
    return Model().double()


def sequence(number):
    """Tokens and labels of a sequence; the first half has no labels, so some ranks have none."""
    drawn = torch.randint(VOCAB, (SEQLEN + 1,), generator=torch.Generator().manual_seed(number))
    tokens, labels = drawn[:-1], drawn[1:].clone()
    labels[: SEQLEN // 2] = -100
    return tokens, labels


LABELS = SEQLEN - SEQLEN // 2  # of a sequence


def dense(q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def share(model, number, own, attention, labels):
    """This rank's share of the mean loss over so many labels."""
    tokens, targets = (x[own] for x in sequence(number))
    logits = model(tokens, own, attention)
    return F.cross_entropy(logits, targets, reduction="sum") / labels


def one_process(sequences):
    """Losses, norms of gradients, and weights of a training by one process in float64."""
    model, own = new_model(), torch.arange(SEQLEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for turn in range(STEPS):
        optimizer.zero_grad()
        numbers = range(turn * sequences, (turn + 1) * sequences)
        labels = LABELS * sequences
        losses.append(sum(share(model, x, own, dense, labels) for x in numbers))
        losses[-1].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST))
        optimizer.step()
    return torch.stack(losses).detach(), torch.stack(norms), [*model.parameters()]


def distance(found, exact):
    """The largest relative distance of losses, of norms, and of a parameter's elements."""
    pairs = [*zip(found[:2], exact[:2]), *zip(found[2], exact[2])]
    return max(float((x - y).detach().abs().max() / y.detach().abs().max()) for x, y in pairs)


@pytest.fixture
def world(comm):
    init_process_group(comm)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(params=[1, 2], ids=["1 replica", "2 replicas"])
def plan(request, comm):
    """A plan of all ranks, or of one of two replicas; `plan.replica` is its number."""
    replica = comm.rank * request.param // comm.size
    part = comm.Split(replica, comm.rank)
    rows = 2 if part.size % 2 == 0 else 1
    grid = ProcessGrid(part, rows, part.size // rows)
    sizes = {"nheads": 2, "nheads_kv": 1, "headdim": 8, "dtype": "float64"}
    plan = Attention2D(grid, Causal(), seqlen=SEQLEN, **sizes)
    plan.replica, plan.replicas = replica, request.param
    yield plan
    plan.free(), grid.free(), part.Free()


def train(plan, comm, way, passes):
    """The same training over the ranks; each replica has its own sequences, one a pass.

    With several passes layers are computed again, and a part of them is compiled.
    """
    model, losses, norms = new_model(), [], []
    model.recomputes = passes > 1
    for block in model.blocks if passes > 1 else ():
        block.mlp.compile(backend="aot_eager")
    own, attention = torch.from_numpy(plan.tokens), partial(attend, plan)
    called, factor = model, 1 if way == "sums" else comm.size
    if way == "ddp":
        called = DistributedDataParallel(model)
    elif way == "fsdp":
        for x in (*model.blocks, model):
            fully_shard(x, mesh=init_device_mesh("cpu", (comm.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sequences = plan.replicas * passes
    for turn in range(STEPS):
        optimizer.zero_grad()
        total = 0
        for number in range(passes):
            last, quiet = number == passes - 1, nullcontext()
            if way == "ddp" and not last:
                quiet = called.no_sync()
            if way == "fsdp":
                model.set_requires_gradient_sync(last)
            order = turn * sequences + number * plan.replicas + plan.replica
            with quiet:
                loss = share(called, order, own, attention, LABELS * sequences)
                (factor * loss).backward()
            total += loss.detach()
        if way == "sums":
            sum_gradients(model, comm)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST))
        losses.append(sum(comm.allgather(total)))
        optimizer.step()
    norms, weights = (
        [y.full_tensor() if isinstance(y, DTensor) else y for y in x]
        for x in (norms, model.parameters())
    )
    return torch.stack(losses), torch.stack(norms), weights


@ranks
@pytest.mark.parametrize("way, passes, plan", [
    ("sums", 3, 2), ("ddp", 1, 2), ("ddp", 3, 1), ("fsdp", 3, 2),
], indirect=["plan"])  # fmt: skip
def test_training(comm, world, plan, way, passes):
    """Three steps of AdamW with clipping, of one and several backward passes each."""
    exact = one_process(plan.replicas * passes)
    far = distance(train(plan, comm, way, passes), exact)
    assert_all(comm, far < 1e-9 and exact[1].min() > LARGEST, f"{far} {exact[1]}")


@ranks
def test_ranks_without_labels(comm, plan):
    """Ranks without a label have a loss of 0, not NaN, and the gradients of one process."""
    model, (tokens, labels) = new_model(), sequence(0)
    labels[:-1] = -100
    assert_all(comm, plan.grid.comm.allreduce(SEQLEN - 1 in plan.tokens) == 1, "no other ranks")

    def loss(own, attention):
        logits = model(tokens[own], own, attention)
        return F.cross_entropy(logits, labels[own], reduction="sum")

    loss(torch.arange(SEQLEN), dense).backward()
    exact = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    own = loss(torch.from_numpy(plan.tokens), partial(attend, plan))
    own.backward()
    sum_gradients(model, plan.grid.comm)
    far = max(float((x.grad - y).abs().max()) for x, y in zip(model.parameters(), exact))
    good = own.item() > 0 if SEQLEN - 1 in plan.tokens else own.item() == 0
    assert_all(comm, good and far < 1e-12, f"{own.item()} {far}")


@ranks
@pytest.mark.parametrize("way, name, replicas", [
    ("own", "Llama", 2), ("own", "Mixtral", 2), ("ddp", "Llama", 2), ("ddp", "Mixtral", 2),
    ("ddp", "Gemma 3", 1), ("fsdp", "Llama", 2), ("fsdp", "Mixtral", 1),
])  # fmt: skip
def test_models(comm, world, way, name, replicas):
    """Grids with other batches: the gradient of the mean of their losses, of several passes."""
    part = comm.Split(comm.rank * replicas // comm.size, comm.rank)
    grid, model, one = ProcessGrid(part, 1, part.size), build(*KINDS[name]), build(*KINDS[name])
    short = {x: y[:2, :27] for x, y in PADDED.items()}
    passes = [(TWO, short), (short, PADDED)][:replicas]
    exact = step(one, *(x for y in passes for x in y))
    own = {"replicas": comm} if way == "own" else {"average": False}
    cp = ContextParallel(grid, model, **own)
    called, mine = model, passes[comm.rank * replicas // comm.size]
    if way == "ddp":
        called = DistributedDataParallel(model, find_unused_parameters=name == "Mixtral")
    elif way == "fsdp":
        fully_shard(model.model.layers[0], mesh=init_device_mesh("cpu", (comm.size,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (comm.size,)))
    losses = []
    for given in mine:
        losses.append(loss_of(called, given))
        losses[-1].backward()
    grads = [x.grad for x in model.parameters()]
    grads = [x.full_tensor() if isinstance(x, DTensor) else x for x in grads]
    total = sum(comm.allgather(sum(x.item() for x in losses))) / comm.size
    found = total, [None if x is None else x.double() for x in grads]
    assert_near(comm, found, (exact[0] / replicas, [x / replicas for x in exact[1]]))
    cp.free(), grid.free(), part.Free()


@ranks
def test_replicas_that_are_refused(comm, grid):
    """The ranks that share a step must have those of the grid."""
    across = comm.Split(comm.rank % 2, comm.rank)
    text = "replicas must have all ranks that share a step"
    assert_raises(comm, text, ContextParallel, grid, build(*KINDS["Llama"]), replicas=across)
    across.Free()


@ranks
def test_dtensors_are_not_summed_again(comm, world):
    model = new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (comm.size,)))
    assert_raises(comm, "parameters are DTensors, whose gradients", sum_gradients, model, comm)


@ranks
def test_process_group_for_a_communicator(comm, world):
    """The error says which communicator to pass, and how to get the process group from it."""
    grid = partial(ProcessGrid, rows=1, cols=comm.size)
    for call in (grid, init_process_group, partial(sum_gradients, new_model())):
        for wrong in (world, None):
            said = message_of(comm, partial(call, wrong), ValueError)
            assert "got ProcessGroup" in said or "got NoneType" in said
            assert "for example MPI.COMM_WORLD" in said and "init_process_group(comm)" in said


@ranks
@pytest.mark.filterwarnings("ignore:For MPI backend")
def test_process_groups_that_are_refused(comm, monkeypatch):
    """The same error on all ranks, whatever fails on one of them; afterwards it can be set up."""
    if comm.rank == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    said = message_of(comm, partial(init_process_group, comm))
    assert_all(comm, said == "torch.distributed is initialized already (on rank 1)", said)
    if comm.rank == 1:
        dist.destroy_process_group()
    backend = "gloo" if comm.rank else "cpu:gloo"
    said = message_of(comm, partial(init_process_group, comm, backend))
    assert_all(comm, said.startswith("ranks disagree on backend: cpu:gloo on rank 0"), said)
    real = dist.TCPStore

    def store(host, port, size, is_master, *more, **options):
        if is_master == (failing == 0) and comm.rank == failing:
            raise RuntimeError("no port")
        return real(host, port, size, is_master, *more, **options)

    for failing in (0, 2):
        monkeypatch.setattr(dist, "TCPStore", store)
        said = message_of(comm, partial(init_process_group, comm))
        assert_all(comm, said == "no port" + " (on rank 2)" * (failing == 2), said)
    monkeypatch.undo()
    said = message_of(comm, partial(init_process_group, comm, "mpi"))  # not in PyTorch's wheels
    assert_all(comm, "MPI" in said and not dist.is_initialized(), said)
    init_process_group(comm)
    total = torch.tensor([comm.rank])
    dist.all_reduce(total)
    same = (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    assert_all(comm, same and int(total) == sum(range(comm.size)), f"{total}")
    dist.destroy_process_group()
