"""Plans beside torch.distributed: DDP, FSDP2 and the package's own sums, against one process.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

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

from a2d_mpi import Attention2D, Causal, ProcessGrid
from a2d_mpi.torch import ContextParallel, attend, init_process_group, sum_gradients

ranks = pytest.mark.mpi(min_size=4)
SEQLEN, VOCAB = 37, 23


class Model(torch.nn.Module):
    """A layer of a user's own; `attention` is a function of q, k and v, (n, heads, 8) tensors."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, 16)
        self.qkv, self.head = torch.nn.Linear(16, 32), torch.nn.Linear(16, VOCAB)

    def forward(self, tokens, attention):
        x = self.tokens(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (-1, 8)).split((2, 1, 1), 1)
        return self.head(x + attention(q, k.contiguous(), v.contiguous()).flatten(1))


def new_model():
    torch.manual_seed(0)
    return Model().double()


def dense(q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def share(model, own, attention, first):
    """Return this rank's share of the mean loss over the labels from the first one."""
    drawn = torch.randint(VOCAB, (SEQLEN + 1,), generator=torch.Generator().manual_seed(1))
    labels = drawn[1:].clone()
    labels[:first] = -100
    logits = model(drawn[:-1][own], attention)
    return F.cross_entropy(logits, labels[own], reduction="sum") / (SEQLEN - first)


@pytest.fixture
def world(comm):
    init_process_group(comm)
    yield dist.group.WORLD
    dist.destroy_process_group()


@ranks
@pytest.mark.parametrize("way", ["sums", "ddp", "fsdp"])
@pytest.mark.parametrize("first", [0, SEQLEN // 2, SEQLEN - 1])
def test_training(comm, world, grid, way, first):
    """A module that calls `attend`: loss, norm and gradients are those of one process.

    If only some tokens have labels, the losses of some ranks are 0, not NaN.
    """
    one, model = new_model(), new_model()
    exact = share(one, torch.arange(SEQLEN), dense, first)
    exact.backward()
    sizes = {"nheads": 2, "nheads_kv": 1, "headdim": 8, "dtype": "float64"}
    plan, called = Attention2D(grid, Causal(), seqlen=SEQLEN, **sizes), model
    if way == "ddp":
        called = DistributedDataParallel(model)
    elif way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (comm.size,)))
    loss = share(called, torch.from_numpy(plan.tokens), partial(attend, plan), first)
    (loss if way == "sums" else loss * comm.size).backward()  # they average
    if way == "sums":
        sum_gradients(model, comm)
    norms = [torch.nn.utils.clip_grad_norm_(x.parameters(), 0.1) for x in (model, one)]
    norms[0] = norms[0].full_tensor() if way == "fsdp" else norms[0]
    assert_all(comm, torch.allclose(*norms, 1e-12) and norms[0] > 0.1, f"{norms}")
    total = sum(comm.allgather(loss.item()))
    found, wanted = ([x.grad for x in y.parameters()] for y in (model, one))
    found = [x.full_tensor() if isinstance(x, DTensor) else x for x in found]
    assert_near(comm, (total, found), (exact.item(), wanted), 1e-10)
    plan.free()


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
    with monkeypatch.context() as patched:
        if comm.rank == 2:  # it finds no store
            patched.setattr(dist, "TCPStore", lambda *_, **__: 1 // 0)
        said = message_of(comm, partial(init_process_group, comm))
        assert_all(comm, said.endswith("by zero (on rank 2)"), said)
    said = message_of(comm, partial(init_process_group, comm, "mpi"))  # not in PyTorch's wheels
    assert_all(comm, "MPI" in said and not dist.is_initialized(), said)
    init_process_group(comm)
    total = torch.tensor([comm.rank])
    dist.all_reduce(total)
    same = (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    assert_all(comm, same and int(total) == sum(range(comm.size)), f"{total}")
    dist.destroy_process_group()
