"""Plans as attention implementations of Hugging Face transformers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import torch

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.masks.intervals import EVERYTHING
from a2d_mpi.torch.attention import attend

_numbers = count(1)
# Arguments that some models pass to their attention and no plan can use.
OTHERS = (
    "sliding_window", "s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices",
    "cu_seq_lens_q", "cu_seq_lens_k",
)  # fmt: skip
PAIRS = 1024  # random queries for which the masks of a plan and of a model are compared
PADDING = "a plan takes no padding mask: pack sequences as documents"
BALANCE = "the balance loss of MoE layers would be of this rank's tokens: use ContextParallel"


def register(attention: Callable, mask: Callable) -> str:
    """Register an attention and a mask function with transformers under a new name; return it."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = f"a2d_mpi_{next(_numbers)}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)  # or transformers would drop masks of padding
    return name


def weakly(owner: Any, function: Callable, lost: str) -> Callable:
    """Return `function` of an object that the result does not keep alive.

    Copies of a model share the result.  It raises ValueError(`lost`) once the object is deleted.
    """
    reference = weakref.ref(owner)

    @torch._disable_dynamo  # one break of the graph, in place of one at each bool() and at attend
    def call(*given: Any, **others: Any) -> Any:
        owner = reference()
        if owner is None:
            raise ValueError(lost)
        return function(owner, *given, **others)

    return call


def check_shards(plan: AttentionPlan) -> None:
    """Raise ValueError if a rank has no tokens, because models need at least one token."""
    if 0 in plan.problem.queries.counts:
        rank = plan.problem.queries.counts.index(0)
        raise ValueError(
            f"rank {rank} has none of the {plan.seqlen} tokens, but models need at least one token"
        )


def attend_layer(
    plan: AttentionPlan,
    module: torch.nn.Module,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    problems: dict[str, bool],
    scaling: float | None = None,
    dropout: float = 0.0,
    sink: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer by a plan, or raise ValueError on all ranks.

    Parameters
    ----------
    plan : AttentionPlan
    module : torch.nn.Module
        The layer.
    tensors : (1, nheads, n, headdim), (1, nheads_kv, n, headdim), (1, nheads_kv, n, headdim_v)
        q, k and v.
    problems : dict of str to bool
        What the caller refuses, and whether it is there.
    scaling, dropout, others
        What transformers passes to attention functions.
    sink : (nheads,) tensor, optional

    Returns
    -------
    (1, n, nheads, headdim_v) tensor
    None
        In place of the weights of attention.
    """
    q = tensors[0]
    scaling, softcap = q.shape[-1] ** -0.5 if scaling is None else scaling, others.get("softcap")
    problems = problems | {
        f"the batch must be one sequence, got {len(q)}": len(q) != 1,
        f"dropout must be 0 in attention, got {dropout}": dropout != 0,
        "output_attentions must be false: a plan does not keep the weights of attention": (
            others.get("output_attentions") or getattr(module.config, "output_attentions", False)
        ),
        f"the model scales logits by {scaling}, but the plan by {plan.softmax_scale}": (
            not math.isclose(scaling, plan.softmax_scale)
        ),
        f"the model has the soft-cap {softcap}, but the plan has {plan.logit_softcap}": (
            softcap != plan.logit_softcap
        ),
    }
    problems |= {
        f"the model passes {x}, which a plan cannot use": others.get(x) is not None for x in OTHERS
    }
    for problem, is_there in problems.items():
        if is_there:
            plan.refuse(problem)
    # (1, heads, n, headdim) to (n, heads, headdim)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors)
    if sink is not None:
        sink = sink.to(getattr(torch, plan.compute_dtype.name))
    return attend(plan, q, k, v, sink)[None], None


def _counted(plan: AttentionPlan) -> torch.Tensor | None:
    """Return the positions that a model would assume, if they are wrong for this rank's tokens."""
    first, n = plan.tokens[:1], len(plan.tokens)
    if n == 0:
        return None
    seen = [begin[0] for begin, end in plan.mask.visible(first) if begin[0] < end[0]]
    if min(seen, default=first[0]) == first[0] == plan.tokens[-1] - n + 1:
        return None  # the shard is the beginning of the sequence or of a document
    return torch.arange(n)


def _contradiction(plan: AttentionPlan, mask_function: Callable) -> str | None:
    """Compare the mask of a model with a plan's, and say what is wrong.

    A plan may hide what the model shows, such as other documents.
    """
    zero, tokens = torch.tensor(0), np.arange(plan.seqlen)
    try:
        mask_function(zero, zero, zero + EVERYTHING, zero + EVERYTHING)
        numbers = tokens
    except IndexError:  # it looks up positions of this rank's tokens: compare the first of them
        breaks = np.flatnonzero(np.diff(plan.tokens) != 1)
        tokens = plan.tokens[: breaks[0] + 1] if len(breaks) else plan.tokens
        numbers = np.arange(len(tokens))
    n, random = len(tokens), np.random.default_rng(0)
    # Steps of all sizes meet the bounds of windows and of chunks.
    steps = [0, *(1 << x for x in range(n.bit_length()))]
    q = np.repeat(random.integers(n, size=PAIRS), 2 * len(steps))
    k = q + np.tile(steps + [-x for x in steps], PAIRS)
    inside = (k >= 0) & (k < n)
    q, k = q[inside], k[inside]
    shown = mask_function(zero, zero, *(torch.from_numpy(numbers[x]) for x in (q, k)))
    shown = torch.as_tensor(shown).expand(len(q)).numpy(force=True)
    q, k, wanted = tokens[q], tokens[k], np.zeros(len(q), bool)
    for begin, end in plan.mask.visible(q):
        wanted |= (begin <= k) & (k < end)
    for i in np.flatnonzero(wanted & ~shown)[:1]:
        return f"the plan's mask shows key {k[i]} to query {q[i]}, but the model's hides it"
    if shown[k > q].any() and not wanted[k > q].any():
        return "the model attends in both directions, but the plan's mask is causal"
    return None


def use_in_transformers(plan: AttentionPlan) -> str:
    """Register a plan with Hugging Face transformers, 4.53 or newer.  Local.

    After ``model.set_attn_implementation(use_in_transformers(plan))`` the plan computes all
    attention of a model.  The model then takes one sequence without padding.  Each rank passes its
    tokens ``plan.tokens``, and their positions as `position_ids`.  The plan's mask replaces the
    model's mask.  The caller must keep a reference to the plan.

    `ContextParallel` does all this, and finds out whether a plan can compute the model at all.
    This function sees only what the model passes to its attention.

    Parameters
    ----------
    plan : AttentionPlan

    Returns
    -------
    str
        Name of the implementation.  Each call returns a new name.

    Raises
    ------
    ValueError
        If a rank has no tokens, because models of transformers need at least one token.

    Notes
    -----
    A call of the model raises ValueError on all ranks if any rank has

    * dropout, a padding mask or `output_attentions`;
    * a batch of more than one sequence;
    * another scale or soft-cap than the plan, or a window, sinks or a bias;
    * a mask that hides what the plan shows, or that is not causal, as the plan's is;
    * no `position_ids`, or `position_ids` that a plan with another distribution has had.
    """
    check_shards(plan)
    lost = "the plan was deleted: keep a reference as long as a model uses it"
    return register(weakly(plan, _attend, lost), weakly(plan, _check_mask, lost))


def _attend(
    plan: AttentionPlan,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer; refuse masks and positions of a wrong plan."""
    asked = getattr(module.config, "output_router_logits", False)
    problems = {
        PADDING: attention_mask is not None,
        BALANCE: others.get("output_router_logits", asked),
    }
    if (positions := others.get("position_ids")) is not None:
        forgotten = _counted(plan)
        problems |= {
            "position_ids must be given: the model counts them from 0 on every rank": (
                forgotten is not None
                and positions.shape[-1] == len(forgotten)
                and bool((positions == forgotten.to(positions.device)).all())
            ),
            "two plans with different distributions got the same position_ids: give both one": (
                positions.__dict__.setdefault("a2d_mpi_plan", plan.distribution)
                != plan.distribution
            ),
        }
    return attend_layer(plan, module, (query, key, value), problems, **others)


def _check_mask(
    plan: AttentionPlan,
    attention_mask: torch.Tensor | None = None,
    mask_function: Callable | None = None,
    **others: Any,
) -> None:
    """Refuse padding, and a mask of a model that contradicts the plan's."""
    if attention_mask is not None and not bool(attention_mask.all()):
        plan.refuse(PADDING)
    if mask_function is not None and (problem := _contradiction(plan, mask_function)):
        plan.refuse(problem)
