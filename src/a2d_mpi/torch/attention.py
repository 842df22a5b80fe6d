"""Attention by a plan as an operator of PyTorch, and shards of tensors.

The operator takes a plan by its number, in a tensor: a graph that `torch.compile` has made runs
with another plan when it gets another number.  Its kernels, which call the plan, are all that
happens in a call, so they check it, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.calls import PLANS, Caller
from a2d_mpi.devices.protocol import Array
from a2d_mpi.torch.tensors import array_of, current_stream, tensor_of

if TYPE_CHECKING:
    from a2d_mpi.linear.linear_attention import LinearAttention

IGNORED = -100  # a label that does not count, as in torch.nn.functional.cross_entropy


def attend(
    plan: AttentionPlan | LinearAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by a plan; the result can be differentiated once.

    The call and its backward pass are collective over the ranks of the plan.  The plan uses the
    memory of the tensors without copies.  Under autocast, q, k and v are cast to the plan's dtype
    first.  `torch.compile` keeps the call in its graph, as the operator ``a2d_mpi::attend``.  A
    compiled graph does not keep the plan: the caller must, until the backward pass has ended.

    Parameters
    ----------
    plan : AttentionPlan or LinearAttention
    q : (n, nheads, headdim) tensor
        Shard of this rank: row i is the token ``plan.tokens[i]``.  q, k and v have the plan's
        dtype.  All tensors are on the CPU, or all are on the current GPU.
    k : (m, nheads_kv, headdim) tensor
    v : (m, nheads_kv, headdim_v) tensor
        Shards of this rank: row i is the token ``plan.tokens_kv[i]``.
    sink : (nheads,) tensor, optional
        One logit per head in the denominator, in the plan's `compute_dtype` and the same on all
        ranks.  Its gradient counts this rank's queries only, like the gradient of every parameter;
        `sum_gradients` adds the ranks.  Linear attention has none.
    return_lse : bool
        Also return lse, which linear attention has not.

    Returns
    -------
    out : (n, nheads, headdim_v) tensor
    lse : (n, nheads) tensor
        Only with `return_lse`; it has the plan's `compute_dtype`.

    Raises
    ------
    ValueError
        On all ranks, if a tensor has the wrong shape, dtype or device on any rank, only some
        ranks record gradients, or the plan was deleted before the backward pass.
    RanksLost
        On all surviving ranks, if a rank died and MPI continues.
    """
    for x in (q, k, v) if sink is None else (q, k, v, sink):
        if not isinstance(x, torch.Tensor):
            plan.refuse(f"q, k, v or sink: must be a tensor, got {type(x).__name__}")
        if x.is_meta or x.layout != torch.strided:
            plan.refuse(f"q, k, v or sink: must be dense, got {x.layout} on {x.device.type}")
    if any(torch.is_autocast_enabled(x) for x in ("cpu", "cuda")):
        dtype = getattr(torch, plan.dtype.name)
        q, k, v = (x.to(dtype) for x in (q, k, v))
    kept = getattr(plan, "kept_elements", -1)
    if kept >= 0 and (sink is not None or return_lse):
        plan.refuse("linear attention has no sink and no lse")
    out, lse = call_of(torch.tensor(plan.serial), q, k, v, sink, return_lse, kept)
    return (out, lse) if return_lse else out


def call_of(
    number: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    with_lse: bool = False,
    kept: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the operator with the plan of a number, () int64; see `attend`."""
    given = (q, k, v) if sink is None else (q, k, v, sink)
    # A rank that records no gradients would not take part in the backward pass.
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return _forward(q, k, v, sink, number, recorded, with_lse, kept)


@torch.library.custom_op(
    "a2d_mpi::attend",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor plan, bool recorded, "
    "bool with_lse, SymInt kept) -> (Tensor, Tensor)",
)
def _forward(q, k, v, sink, number, recorded, with_lse, kept):  # types are in the schema
    """Compute out, and lse or what linear attention keeps, (kept,)."""
    plan = plan_of(number)
    with current_stream():
        q, k, v, sink = _arrays(plan, "forward", (q, k, v, sink))
        given = (q, k, v) if sink is None else (q, k, v, sink)
        out, lse = plan.forward(*given, _recorded=recorded)
        if kept >= 0:
            lse = plan.packed(lse)
        return tensor_of(out), tensor_of(lse)


@_forward.register_fake
def _(q, k, v, *others):
    wide = torch.promote_types(q.dtype, torch.float32)
    shape = q.shape[:2] if others[-1] < 0 else others[-1:]
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(shape, dtype=wide)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Keep what the backward pass needs."""
    *tensors, number, _, ctx.with_lse, _ = inputs
    ctx.save_for_backward(*tensors, *output, number)
    ctx.set_materialize_grads(False)
    if not ctx.with_lse:
        ctx.mark_non_differentiable(output[1])
    # Not in a graph that is being compiled, which runs with the plans of other numbers.
    ctx.plan = plan_of(number) if type(number) is torch.Tensor else None


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple:
    """Compute the gradients of the arguments of `_forward`."""
    try:
        *tensors, out, lse, number = ctx.saved_tensors
    except RuntimeError as error:  # a tensor was changed in place, perhaps on this rank only
        if ctx.plan is None:
            raise
        ctx.plan.refuse(str(error), "backward")
    if dout is None:
        dout = torch.zeros_like(out)
    if ctx.with_lse and dlse is None:  # other ranks may have a gradient
        dlse = torch.zeros_like(lse)
    gradients = _backward(dout, *tensors, out, lse, dlse if ctx.with_lse else None, number)
    dsink = None if tensors[3] is None else gradients[3]
    return *gradients[:3], dsink, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


@torch.library.custom_op(
    "a2d_mpi::attend_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor out, Tensor lse, "
    "Tensor? dlse, Tensor plan) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(dout, q, k, v, sink, out, lse, dlse, number):
    """Compute dq, dk, dv and dsink, which is empty without a sink."""
    plan = plan_of(number)
    with current_stream():
        tensors = _arrays(plan, "backward", (dout, q, k, v, out, lse, sink, dlse))
        if hasattr(plan, "unpacked"):
            tensors = *tensors[:5], plan.unpacked(tensors[5])
        gradients = plan.backward(*tensors)
        found = [tensor_of(x) for x in gradients]
    return *found[:3], q.new_empty(0) if sink is None else found[3]


@_backward.register_fake
def _(dout, q, k, v, sink, *others):
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsink


@_backward.register_autograd
def _(*_: Any) -> None:
    raise RuntimeError(
        "attention of a plan has no second derivative: it cannot differentiate twice"
    )


def keep_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Let `torch.utils.checkpoint` keep the results of attention, and compute all else again.

    ``checkpoint(function, x, use_reentrant=False, context_fn=keep_attention)``, or for a model of
    transformers ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn":
    keep_attention})``.  A layer then keeps out and lse of its attention beside its input, so that
    the backward pass calls no plan forward again (LightSeq, Li et al., arXiv:2310.03294).

    Returns
    -------
    (context manager, context manager)
        For the forward pass, and for the computation in the backward pass.
    """
    return create_selective_checkpoint_contexts([torch.ops.a2d_mpi.attend.default])


def plan_of(number: torch.Tensor) -> Caller:
    """Return the plan of a number, () int64; ValueError if it was deleted."""
    plan = PLANS.get(int(number))
    if plan is None:
        raise ValueError(
            "the plan was deleted: keep a reference until the backward pass has ended"
        )
    return plan


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
