"""A plan's attention as a differentiable function of tensors, and shards of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.devices.protocol import Array
from a2d_mpi.torch.tensors import array_of, current_stream, tensor_of

IGNORED = -100  # a label that counts nothing, as in torch.nn.functional.cross_entropy


@torch._disable_dynamo  # as torch.compiler.disable, which takes seconds to import the compiler
def attend(
    plan: AttentionPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by a plan; differentiable once in all tensors.

    Collective over the ranks of the plan, and so is its backward pass: all ranks must make both.
    The plan reads the memory of the tensors and writes that of the results.  Under autocast the
    tensors are cast to the plan's dtype first.  `torch.compile` leaves the call out of its graphs.

    Parameters
    ----------
    plan : AttentionPlan
    q : (n, nheads, headdim) tensor
        Shard of this rank: row i is the token ``plan.tokens[i]``.  All tensors are on the CPU, or
        on the current GPU, and have the plan's dtype.
    k : (m, nheads_kv, headdim) tensor
    v : (m, nheads_kv, headdim_v) tensor
        Shards of this rank.
    sink : (nheads,) tensor, optional
        A logit per head in the denominator, the same on all ranks, of the plan's `compute_dtype`.
        Its gradient is the share of this rank, as for every weight: see `sum_gradients`.
    return_lse : bool
        Also return lse.

    Returns
    -------
    out : (n, nheads, headdim_v) tensor
    lse : (n, nheads) tensor
        Of `compute_dtype`; only with `return_lse`.

    Raises
    ------
    ValueError
        On all ranks, if a tensor has the wrong shape, dtype or device on any of them.
    """
    if any(torch.is_autocast_enabled(x) for x in ("cpu", "cuda")):
        dtype = getattr(torch, plan.dtype.name)
        q, k, v = (x.to(dtype) if isinstance(x, torch.Tensor) else x for x in (q, k, v))
    out, lse = _Attention.apply(plan, return_lse, q, k, v, sink)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """The graph's node of one call."""

    @staticmethod
    def forward(ctx: Any, plan: AttentionPlan, return_lse: bool, *tensors: Any) -> tuple:
        """Out and lse of q, k, v and the sink."""
        with current_stream():
            q, k, v, sink = _arrays(plan, "forward", tensors)
            out, lse = map(tensor_of, plan.forward(q, k, v, sink))
        ctx.plan, ctx.return_lse = plan, return_lse
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        if not return_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
        """Gradients of q, k, v and the sink."""
        plan = ctx.plan
        try:
            *tensors, out, lse = ctx.saved_tensors
        except RuntimeError as error:  # changed in place, perhaps on this rank alone
            plan.refuse(str(error), "backward")
        if dout is None:
            dout = torch.zeros_like(out)
        if ctx.return_lse and dlse is None:  # another rank may have one
            dlse = torch.zeros_like(lse)
        with current_stream():
            given = _arrays(plan, "backward", (dout, *tensors, out, lse, dlse))
            dout, q, k, v, sink, out, lse, dlse = given
            gradients = plan.backward(dout, q, k, v, out, lse, sink, dlse)
            dq, dk, dv, dsink = map(tensor_of, (*gradients, None)[:4])
        return None, None, dq, dk, dv, dsink


def _arrays(plan: AttentionPlan, phase: str, tensors: tuple) -> list[Array | None]:
    """The arrays of tensors; if one has none, all ranks raise an error in place of the call."""
    try:
        return [array_of(x) for x in tensors]
    except Exception as error:  # of any kind: the other ranks must hear of it
        return plan.refuse(f"q, k, v or sink: {error}", phase)


def shard(plan: AttentionPlan, x: torch.Tensor | None, root: int = 0) -> torch.Tensor:
    """Cut a tensor of the whole sequence on one rank into shards: `AttentionPlan.scatter`.

    Parameters
    ----------
    plan : AttentionPlan
    x : (seqlen, ...) tensor
        On rank `root` of ``plan.grid.comm``, of any dtype; no gradient passes through.  Other
        ranks pass None.
    root : int

    Returns
    -------
    (n, ...) tensor
        Shard of this rank, on the CPU or the current GPU, as `x` is.
    """
    with current_stream():
        return tensor_of(plan.scatter(_rows(x), root))


def unshard(plan: AttentionPlan, x: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """Join the shards of all ranks on one rank: `AttentionPlan.gather`, the opposite of `shard`.

    Parameters
    ----------
    plan : AttentionPlan
    x : (n, ...) tensor
        Shard of this rank, of any dtype; no gradient passes through.
    root : int

    Returns
    -------
    (seqlen, ...) tensor or None
        In the order of the sequence on rank `root` of ``plan.grid.comm``; None on other ranks.
    """
    with current_stream():
        return tensor_of(plan.gather(_rows(x), root))


def _rows(x: Any) -> Any:
    """The array of a tensor; anything else is left to the plan, which refuses it on all ranks."""
    try:
        return array_of(x)
    except Exception:  # of any kind: the other ranks must hear of it
        return x


def shift_labels(plan: AttentionPlan, labels: torch.Tensor) -> torch.Tensor:
    """Labels of next-token prediction: each token gets the label of the token that follows it.

    That token may be on another rank.  The last token gets -100, and so does a token which the
    token that follows does not see: the last one of a packed document.  Collective.

    Parameters
    ----------
    plan : AttentionPlan
        Of one sequence.
    labels : (n,) int64 tensor
        Shard of this rank.

    Returns
    -------
    (n,) int64 tensor
        Shard of this rank.
    """
    whole = unshard(plan, labels)
    if whole is not None:
        whole = whole.roll(-1, 0)
        whole[-1] = IGNORED
    shifted = shard(plan, whole)
    following = np.minimum(plan.tokens + 1, plan.seqlen - 1)
    seen = np.zeros(len(following), bool)
    for begin, end in plan.mask.visible(following):
        seen |= (begin <= plan.tokens) & (plan.tokens < end)
    shifted[torch.from_numpy(~seen).to(shifted.device)] = IGNORED
    return shifted
