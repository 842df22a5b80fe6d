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
from refused import message_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from a2d_mpi import Attention2D, Causal, ProcessGrid
from a2d_mpi.torch import (
    ContextParallel,
    GradientHooks,
    attend,
    init_process_group,
    sum_gradients,
)

ranks = pytest.mark.mpi(min_size=4)
torch.set_num_threads(1)
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
    for step in range(STEPS):
        optimizer.zero_grad()
        numbers = range(step * sequences, (step + 1) * sequences)
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
    hooks, called, factor = None, model, 1 if way == "hooks" else comm.size
    if way == "hooks":
        hooks = GradientHooks(model, comm)
    elif way == "ddp":
        called = DistributedDataParallel(model)
    else:
        for x in (*model.blocks, model):
            fully_shard(x, mesh=init_device_mesh("cpu", (comm.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sequences = plan.replicas * passes
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0
        for turn in range(passes):
            last, quiet = turn == passes - 1, nullcontext()
            if way == "ddp" and not last:
                quiet = called.no_sync()
            if way == "fsdp":
                model.set_requires_gradient_sync(last)
            number = step * sequences + turn * plan.replicas + plan.replica
            with quiet:
                loss = share(called, number, own, attention, LABELS * sequences)
                (factor * loss).backward()
            total += loss.detach()
        if hooks:
            hooks.finish()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST))
        losses.append(sum(comm.allgather(total)))
        optimizer.step()
    if hooks:
        hooks.free()
    norms, weights = (
        [y.full_tensor() if isinstance(y, DTensor) else y for y in x]
        for x in (norms, model.parameters())
    )
    return torch.stack(losses), torch.stack(norms), weights


@ranks
@pytest.mark.parametrize("way, passes, plan", [
    ("hooks", 1, 1), ("hooks", 3, 2), ("ddp", 1, 2), ("ddp", 3, 1), ("fsdp", 1, 1), ("fsdp", 3, 2),
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
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_context_parallel(comm, world, way):
    """Averaged gradients are those of one process, if the loss says so; it must say it."""

    def llama():
        torch.manual_seed(0)
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24}
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).double()

    whole, model, tokens = llama(), llama(), sequence(0)[0]
    logits = whole(input_ids=tokens[None]).logits[0, :-1]
    F.cross_entropy(logits, tokens[1:]).backward()
    grid = ProcessGrid(comm, 2, comm.size // 2)
    cp = ContextParallel(grid, model, seqlen=SEQLEN)
    batch = cp.shard(tokens)
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (comm.size,)))
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    logits = wrapped(**batch.inputs).logits
    with pytest.raises(ValueError, match="give averaged_over="):
        cp.loss(logits, batch)
    cp.loss(logits, batch, averaged_over=comm.size).backward()
    for x, y in zip(model.parameters(), whole.parameters()):
        found = x.grad.full_tensor() if way == "fsdp" else x.grad
        far = float((found - y.grad).norm() / y.grad.norm())
        # Llama's norms and angles are float32 in every dtype of the model.
        assert_all(comm, far < 1e-6, f"off by {far}")
    cp.free(), grid.free()


@ranks
def test_dtensors_are_not_summed_again(comm, world):
    model = new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (comm.size,)))
    for summed in (sum_gradients, GradientHooks):
        said = message_of(comm, partial(summed, model, comm))
        assert_all(comm, said.startswith("parameters are DTensors, as of fully_shard"), said)


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
