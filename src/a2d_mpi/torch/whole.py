"""Tensors of all tokens, of which each rank computes some rows.

The rule: every rank computes the whole loss, and gradients are averaged over ranks when `backward`
ends.  So what ranks compute alike stays right.  Where the parts of ranks are put together, the
backward pass multiplies the part of this rank by the number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from a2d_mpi.torch.context import ContextParallel

# What may be done to rows in place of the whole.
LATER = {getattr(torch.Tensor, x) for x in
         ("to", "float", "double", "half", "bfloat16", "cpu", "cuda", "detach")}  # fmt: skip


class Rows:
    """The rows of a whole tensor that each rank has.

    Parameters
    ----------
    cp : ContextParallel
    shape : (int, int)
        B, N.
    every : list of (n,) int64
        For each rank, the places of its rows among B N, or -1: they are no rows of the tensor.
    plans : object
        What a backward pass that is still to come needs, also if a layer is computed again.

    Attributes
    ----------
    places : (n,) int64 tensor
        Of this rank.
    real : (n,) bool tensor
        Which rows of this rank have a place.
    """

    def __init__(
        self, cp: ContextParallel, shape: tuple[int, int], every: list[np.ndarray], plans: object
    ) -> None:
        self.cp, self.shape, self.every, self.plans = cp, shape, every, plans
        self.places = torch.from_numpy(every[cp.grid.comm.rank]).to(cp.model.device)
        self.real = self.places >= 0

    def joined(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, (B N, ...), of this rank's, (n, ...).  Collective."""
        comm, rest = self.cp.grid.comm, own.shape[1:]
        sent = own.detach().contiguous().cpu().view(torch.uint8).numpy().reshape(len(own), -1)
        counts = [len(x) * sent.shape[1] for x in self.every]
        received = np.empty(sum(counts), np.uint8)
        with self.cp.grid.failures.translated():
            comm.Allgatherv(sent, [received, counts])
        rows = torch.from_numpy(received).view(own.dtype).view(-1, *rest).to(own.device)
        places = torch.from_numpy(np.concatenate(self.every)).to(own.device)
        whole = own.new_zeros(self.shape[0] * self.shape[1], *rest)
        whole[places[places >= 0]] = rows[places >= 0]
        return whole

    def cut(self, whole: torch.Tensor, padding: float = 0) -> torch.Tensor:
        """Return this rank's rows, (n, ...), of a tensor, (B N, ...)."""
        places = self.places.to(whole.device)
        own = whole[places.clamp(min=0)]
        return own.masked_fill((places < 0).view(-1, *[1] * (own.dim() - 1)), padding)


class Whole(torch.Tensor):
    """A tensor of all tokens, (B, N, ...) or (B N, ...), gathered when somebody computes with it.

    Gathering is collective over the grid, once for each tensor: all ranks compute with it, or none
    does.

    Attributes
    ----------
    own : (n, ...) tensor
        This rank's rows, those of ``cp.rows``, which need no gathering.  `ContextParallel.total`
        sums what ranks make of them.
    """

    @staticmethod
    def __new__(cls, rows: Rows, own: torch.Tensor, lead: tuple[int, ...]) -> Whole:
        shape = *lead, *own.shape[1:]
        x = cls._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)
        x._rows, x._own, x._lead, x._found = rows, own, lead, None
        return x

    @property
    def own(self) -> torch.Tensor:
        return _Own.apply(self._own, self._rows.cp)[self._rows.real.to(self.device)]

    def gathered(self) -> torch.Tensor:
        """Return the values without a graph.  Collective at the first call."""
        if self._found is None:
            self._found = self._rows.joined(self._own).view(self.shape)
        return self._found

    def numpy(self, *, force: bool = False) -> np.ndarray:
        if self.requires_grad and not force:
            raise RuntimeError("call detach() before numpy(), or pass force=True")
        return self.gathered().numpy(force=True)

    def tolist(self) -> list:
        return self.gathered().tolist()

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.gathered().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.gathered().clone()

    def __repr__(self) -> str:
        return f"Whole({tuple(self.shape)}, {self.dtype})"  # which gathers nothing

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        x, kwargs = args[0] if args else None, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in LATER and isinstance(x, cls) and x._found is None:
                own = func(x._own, *args[1:], **kwargs)
                return x if own is x._own else join(own, x._rows, x._lead)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        given = tree_map(lambda x: x.gathered() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*given[0], **given[1])


class _Join(torch.autograd.Function):
    """Put the rows of ranks together, lazily."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, rows: Rows, lead: tuple[int, ...]) -> Whole:
        ctx.rows, ctx.lead = rows, lead
        return Whole(rows, own.detach(), lead)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        factor = ctx.rows.cp._average_at_end()
        return ctx.rows.cut(gradient.flatten(0, len(ctx.lead) - 1)) * factor, None, None


class _Own(torch.autograd.Function):
    """Let a backward pass that begins with own rows average gradients."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
        ctx.cp = cp
        return own.view_as(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        ctx.cp._average_at_end()
        return gradient, None


class _Cut(torch.autograd.Function):
    """Cut a tensor that all ranks have into their rows; all ranks get its whole gradient."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows, ctx.shape = rows, whole.shape
        return rows.cut(whole.flatten(0, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        whole = ctx.rows.joined(gradient).view(ctx.shape)
        return whole / ctx.rows.cp._average_at_end(), None


class _Total(torch.autograd.Function):
    """Sum a tensor over the ranks of a grid, in their order."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, cp: ContextParallel, kept: object) -> torch.Tensor:
        ctx.cp, ctx.kept = cp, kept
        with cp.grid.failures.translated():
            parts = cp.grid.comm.allgather(part.detach().cpu())
        return sum(parts[1:], parts[0]).to(part.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient * ctx.cp._average_at_end(), None, None


def join(own: torch.Tensor, rows: Rows, lead: tuple[int, ...] | None = None) -> Whole:
    """Return the tensor of all tokens, (*lead, ...), of this rank's rows, (n, ...)."""
    whole = _Join.apply(own, rows, lead or rows.shape)
    whole._own = own  # with its graph
    return whole


def cut(whole: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return this rank's rows of a tensor of all tokens, which all ranks have."""
    return _Cut.apply(whole, rows) if whole.requires_grad else rows.cut(whole.flatten(0, 1))


def total(part: torch.Tensor, cp: ContextParallel, kept: object = None) -> torch.Tensor:
    """Return the sum of a tensor of each rank, on all ranks.  Collective."""
    return _Total.apply(part, cp, kept)
