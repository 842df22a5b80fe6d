"""Attention by a plan as a differentiable function of tensors, and shards of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.devices.protocol import Array
from a2d_mpi.torch.tensors import array_of, current_stream, tensor_of

IGNORED = -100  # a label that does not count, as in torch.nn.functional.cross_entropy


@torch._disable_dynamo  # torch.compiler.disable also imports the compiler, which takes seconds
def attend(
    plan: AttentionPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by a plan; the result can be differentiated once.

    The call and its backward pass are collective over the ranks of the plan.  The plan uses the
    memory of the tensors without copies.  Under autocast, q, k and v are cast to the plan's dtype
    first.  `torch.compile` leaves the call out of its graphs.

    Parameters
    ----------
    plan : AttentionPlan
    q : (n, nheads, headdim) tensor
        Shard of this rank: row i is the token ``plan.tokens[i]``.  q, k and v have the plan's
        dtype.  All tensors are on the CPU, or all are on the current GPU.
    k : (m, nheads_kv, headdim) tensor
    v : (m, nheads_kv, headdim_v) tensor
        Shards of this rank: row i is the token ``plan.tokens_kv[i]``.
    sink : (nheads,) tensor, optional
        One logit per head in the denominator, in the plan's `compute_dtype` and the same on all
        ranks.  Its gradient counts this rank's queries only, like the gradient of every parameter;
        `sum_gradients` adds the ranks.
    return_lse : bool
        Also return lse.

    Returns
    -------
    out : (n, nheads, headdim_v) tensor
    lse : (n, nheads) tensor
        Only with `return_lse`; it has the plan's `compute_dtype`.

    Raises
    ------
    ValueError
        On all ranks, if a tensor has the wrong shape, dtype or device on any rank, or only some
        ranks record gradients.
    RanksLost
        On all surviving ranks, if a rank died and MPI continues.
    """
    if any(torch.is_autocast_enabled(x) for x in ("cpu", "cuda")):
        dtype = getattr(torch, plan.dtype.name)
        q, k, v = (x.to(dtype) if isinstance(x, torch.Tensor) else x for x in (q, k, v))
    recorded = torch.is_grad_enabled() and any(
        x.requires_grad for x in (q, k, v, sink) if isinstance(x, torch.Tensor)
    )
    out, lse = _Attention.apply(plan, return_lse, recorded, q, k, v, sink)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """The node of one call in PyTorch's graph."""

    @staticmethod
    def forward(
        ctx: Any, plan: AttentionPlan, return_lse: bool, recorded: bool, *tensors: Any
    ) -> tuple:
        """Compute out and lse of q, k, v and the sink; `recorded`: for a backward pass."""
        with current_stream():
            q, k, v, sink = _arrays(plan, "forward", tensors)
            # A rank that records no gradients would not take part in the backward pass.
            out, lse = map(tensor_of, plan.forward(q, k, v, sink, _recorded=recorded))
        ctx.plan, ctx.return_lse = plan, return_lse
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        if not return_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
        """Compute the gradients of q, k, v and the sink."""
        plan = ctx.plan
        try:
            *tensors, out, lse = ctx.saved_tensors
        except RuntimeError as error:  # a tensor was changed in place, perhaps on this rank only
            plan.refuse(str(error), "backward")
        if dout is None:
            dout = torch.zeros_like(out)
        if ctx.return_lse and dlse is None:  # other ranks may have a gradient
            dlse = torch.zeros_like(lse)
        with current_stream():
            given = _arrays(plan, "backward", (dout, *tensors, out, lse, dlse))
            dout, q, k, v, sink, out, lse, dlse = given
            gradients = plan.backward(dout, q, k, v, out, lse, sink, dlse)
            dq, dk, dv, dsink = map(tensor_of, (*gradients, None)[:4])
        return None, None, None, dq, dk, dv, dsink


def _arrays(plan: AttentionPlan, phase: str, tensors: tuple) -> list[Array | None]:
    """Return the arrays of tensors; if a tensor has no array, all ranks raise an error."""
    try:
        return [array_of(x) for x in tensors]
    except Exception as error:  # of any kind: all ranks must raise it
        return plan.refuse(f"q, k, v or sink: {error}", phase)


def shard(plan: AttentionPlan, x: torch.Tensor | None, root: int = 0) -> torch.Tensor:
    """Cut a tensor of the whole sequence on one rank into shards.  Collective.

    `AttentionPlan.scatter` does the same with arrays.

    Parameters
    ----------
    plan : AttentionPlan
    x : (seqlen, ...) tensor
        The whole sequence on rank `root` of ``plan.grid.comm``; other ranks pass None.  The dtype
        may be any.  The call is not differentiable.
    root : int
        Rank of ``plan.grid.comm`` that has `x`.

    Returns
    -------
    (n, ...) tensor
        Shard of this rank, on the CPU or the current GPU like `x`.

    Raises
    ------
    ValueError
        On all ranks, if `x` has the wrong number of rows, or `root` is not a rank.
    """
    with current_stream():
        return tensor_of(plan.scatter(_rows(x), root))


def unshard(plan: AttentionPlan, x: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """Join the shards of all ranks on one rank, the opposite of `shard`.  Collective.

    `AttentionPlan.gather` does the same with arrays.

    Parameters
    ----------
    plan : AttentionPlan
    x : (n, ...) tensor
        Shard of this rank, of any dtype.  The call is not differentiable.
    root : int
        Rank of ``plan.grid.comm`` that gets the result.

    Returns
    -------
    (seqlen, ...) tensor or None
        Rows in the order of the sequence on rank `root`; None on other ranks.

    Raises
    ------
    ValueError
        On all ranks, if `x` has the wrong number of rows on any rank, or `root` is not a rank.
    """
    with current_stream():
        return tensor_of(plan.gather(_rows(x), root))


def _rows(x: Any) -> Any:
    """Return the array of a tensor; the plan refuses anything else on all ranks."""
    try:
        return array_of(x)
    except Exception:  # of any kind: the plan raises an error on all ranks
        return x


def shift_labels(plan: AttentionPlan, labels: torch.Tensor) -> torch.Tensor:
    """Shift labels for next-token prediction: each token gets the label of the next token.

    The next token may be on another rank.  The last token of the sequence gets -100, which
    cross_entropy ignores.  The last token of each packed document gets -100, too, because the next
    token does not see it.  Collective.

    Parameters
    ----------
    plan : AttentionPlan
        A plan of self-attention.
    labels : (n,) int64 tensor
        Shard of this rank.

    Returns
    -------
    (n,) int64 tensor
        Shard of this rank.

    Raises
    ------
    ValueError
        On all ranks, if `labels` has the wrong number of rows on any rank, or a dtype that cannot
        hold -100.
    """
    gathered = unshard(plan, labels)
    if not labels.dtype.is_signed:  # on all ranks, or they would have disagreed
        raise ValueError(f"labels must be able to hold {IGNORED}, got {labels.dtype}")
    if gathered is not None:
        gathered = gathered.roll(-1, 0)
        gathered[-1] = IGNORED
    shifted = shard(plan, gathered)
    following = np.minimum(plan.tokens + 1, plan.seqlen - 1)
    seen = np.zeros(len(following), bool)
    for begin, end in plan.mask.visible(following):
        seen |= (begin <= plan.tokens) & (plan.tokens < end)
    shifted[torch.from_numpy(~seen).to(shifted.device)] = IGNORED
    return shifted
