"""Sums over ranks of the gradients of a module.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import pytest
import torch
from helpers import assert_all
from refused import assert_raises

from a2d_mpi.torch import gradients, sum_gradients
from a2d_mpi.torch.gradients import add_gradients

pytestmark = pytest.mark.mpi(min_size=3)


class Model(torch.nn.Module):
    """A tied weight, one that rank 0 does not use, one of no rank, and one that is frozen."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        made = torch.Generator().manual_seed(3)
        shapes = (5, 3), (3, 5), (7,), (4,), (2,)
        self.weights = torch.nn.ParameterList(
            torch.randn(x, generator=made).to(dtype) for x in shapes
        )
        self.weights[4].requires_grad_(False)

    def of_rank(self, rank):
        """Return the gradients of a backward pass of a rank."""
        self.zero_grad()
        first, second, third, *_ = self.weights
        y = torch.full((4, 5), 0.3 + rank).to(first.dtype) @ first @ second @ first
        (y.float().square().sum() + (third.float().square().sum() if rank else 0)).backward()
        return [x.grad for x in self.weights]


def same(model, expected):
    pairs = zip((x.grad for x in model.parameters()), expected, strict=True)
    return all(x is y if y is None else torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("bucket", [1, 60, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients(comm, monkeypatch, dtype, bucket):
    """Sums and means in the order of ranks, bit for bit; what no rank has stays None."""
    monkeypatch.setattr(gradients, "BUCKET", bucket)
    model, wide = Model(dtype), torch.promote_types(dtype, torch.float32)
    sums = []
    for grads in zip(*(model.of_rank(rank) for rank in range(comm.size))):
        there = [x.to(wide) for x in grads if x is not None]
        sums.append(sum(there[1:], there[0]) if there else None)
    model.of_rank(comm.rank)
    sum_gradients(model, comm)
    assert_all(comm, same(model, [x if x is None else x.to(dtype) for x in sums]), "other sums")
    means = [x if x is None else (x / comm.size).to(dtype) for x in sums]
    model.of_rank(comm.rank)
    add_gradients(model, comm, ranks=comm.size)
    assert_all(comm, same(model, means), "other means")


def test_messages_of_others(comm):
    """A message that is on its way on the communicator, as a late report, is no gradient."""
    model, others = Model(), [x for x in range(comm.size) if x != comm.rank]
    sent = [comm.isend("late", x, tag) for x in others for tag in (0, 32767)]
    expected = [model.of_rank(rank)[2] for rank in range(1, comm.size)]
    model.of_rank(comm.rank)
    sum_gradients(model, comm)
    late = [comm.recv(source=x, tag=tag) for x in others for tag in (0, 32767)]
    for x in sent:
        x.wait()
    good = torch.equal(model.weights[2].grad, sum(expected[1:], expected[0]))
    assert_all(comm, good and set(late) == {"late"}, f"{model.weights[2].grad} {late}")


def test_sums_that_are_refused(comm):
    """A second sum of the same gradients, sparse and complex ones, and other models."""
    model = Model()
    model.of_rank(1)
    for kept in (False, True):
        sum_gradients(model, comm)
        told = "a gradient still holds the sum over ranks of an earlier step: call zero_grad()"
        assert_raises(comm, told, sum_gradients, model, comm)
        (model.weights[0].sum() + model.weights[1].sum() + model.weights[2].sum()).backward()
        assert_raises(comm, told, sum_gradients, model, comm)
        model.zero_grad(set_to_none=not kept)
        model.weights[0].sum().backward()
    table = torch.nn.Embedding(5, 3, sparse=True)
    table.weight.grad = torch.zeros(5, 3)
    if comm.rank == 1:  # one rank alone
        table.weight.grad = None
        table(torch.tensor([2])).sum().backward()
    told = "gradients must be dense, got layout torch.sparse_coo (on rank 1)"
    assert_raises(comm, told, sum_gradients, table, comm)
    disagree = "ranks disagree on parameters to train: 2 tensors"
    first, last = torch.nn.Linear(3, 2, False), torch.nn.Linear(2, 3, False)
    for other, text in (
        (torch.nn.Linear(3 + (comm.rank == 0), 2), disagree),
        # As many elements, of another dtype or in another order.
        (torch.nn.Linear(3, 2, dtype=torch.float64 if comm.rank else torch.float32), disagree),
        (torch.nn.Sequential(*([first, last] if comm.rank else [last, first])), disagree),
        (torch.nn.Linear(3, 2, dtype=torch.complex64), "parameters are complex"),
        (torch.nn.Module(), "the model has no parameters to train"),
    ):
        assert_raises(comm, text, sum_gradients, other, comm)


@pytest.mark.parametrize("cupy", ["real"], indirect=True)
def test_gradients_on_a_gpu(comm, cupy):
    from a2d_mpi.comm.gpus import bind_gpu

    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch is built for CPUs")
    torch.cuda.set_device(bind_gpu(comm)[0].index)
    model = torch.nn.Linear(300, 7, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        model.zero_grad()
        x = torch.full((3, 300), 1.0 + comm.rank, device="cuda", dtype=torch.bfloat16)
        model(x).sum().backward()
        sum_gradients(model, comm)
    total = 3 * sum(1 + rank for rank in range(comm.size))
    good = bool((model.weight.grad == total).all() and (model.bias.grad == 3 * comm.size).all())
    assert_all(comm, good, f"{model.weight.grad} {model.bias.grad}")
