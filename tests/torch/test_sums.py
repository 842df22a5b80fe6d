"""What is summed over ranks: gradients, the mean over labels, the balance loss of MoE layers.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import pytest
import torch
from helpers import assert_all
from refused import assert_raises

from a2d_mpi.torch import GradientHooks, sum_gradients

pytestmark = pytest.mark.mpi(min_size=3)
torch.set_num_threads(1)


@pytest.fixture(params=[3, 4])
def part(request, comm):
    """All ranks in groups of three or of four; the last group may be smaller."""
    part = comm.Split(comm.rank // request.param, comm.rank)
    yield part
    part.Free()


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
    text = f"{name} has a gradient, but was frozen or no parameter of the model when"
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
