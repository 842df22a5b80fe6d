"""Plans as attention implementations of Hugging Face transformers."""

from __future__ import annotations

import math
import weakref
from itertools import count
from typing import Any

import torch

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.torch.attention import attend

_numbers = count(1)
# Arguments that some models pass to their attention and no plan can use.
OTHERS = (
    "sliding_window", "s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices",
    "cu_seq_lens_q", "cu_seq_lens_k",
)  # fmt: skip
PADDING = "a plan takes no padding mask: pack sequences as documents of the plan's mask"


def _counted(plan: AttentionPlan) -> torch.Tensor | None:
    """Return the positions that a model would assume, if they are wrong for this rank's tokens."""
    first, n = plan.tokens[:1], len(plan.tokens)
    if n == 0:
        return None
    seen = [begin[0] for begin, end in plan.mask.visible(first) if begin[0] < end[0]]
    if min(seen, default=first[0]) == first[0] == plan.tokens[-1] - n + 1:
        return None  # the shard is the beginning of the sequence or of a document
    return torch.arange(n)


def use_in_transformers(plan: AttentionPlan) -> str:
    """Register a plan with Hugging Face transformers, 4.48 or newer.  Local.

    After ``model.set_attn_implementation(use_in_transformers(plan))`` the plan computes all
    attention of a model.  The model then takes one sequence without padding.  Each rank passes its
    tokens ``plan.tokens``, and their positions as `position_ids`.  The plan's mask replaces the
    model's mask.  The caller must keep a reference to the plan.

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
    * no `position_ids`, in models that pass these to their attention.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if 0 in plan.problem.queries.counts:
        rank = plan.problem.queries.counts.index(0)
        raise ValueError(
            f"rank {rank} has none of the {plan.seqlen} tokens, but models need at least one token"
        )
    try:  # without an entry here, transformers would silently drop padding masks
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError:  # before 4.53 attention always gets a mask, whose last row shows padding
        AttentionMaskInterface = None
    name, reference = f"a2d_mpi_{next(_numbers)}", weakref.ref(plan)
    forgotten = _counted(plan)

    def plan_of_name() -> AttentionPlan:
        plan = reference()
        if plan is None:
            raise ValueError(
                f"the plan of {name} was deleted: keep a reference as long as the model uses it"
            )
        return plan

    @torch._disable_dynamo  # one break of the graph, in place of one at each bool() and at attend
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        plan = plan_of_name()
        hidden = attention_mask is not None and (
            AttentionMaskInterface or bool((attention_mask[..., -1, : key.shape[2]] != 0).any())
        )
        positions, softcap = others.get("position_ids"), others.get("softcap")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        problems = {
            f"the batch must be one sequence, got {len(query)}": len(query) != 1,
            f"dropout must be 0 in attention, got {dropout}": dropout != 0,
            "output_attentions must be false: a plan does not keep the weights of attention": (
                others.get("output_attentions")
                or getattr(module.config, "output_attentions", False)
            ),
            PADDING: hidden,
            "position_ids must be given: the model counts them from 0 on every rank": (
                forgotten is not None
                and positions is not None
                and positions.shape[-1] == len(forgotten)
                and bool((positions == forgotten.to(positions.device)).all())
            ),
            f"the model scales logits by {scaling}, but the plan by {plan.softmax_scale}": (
                not math.isclose(scaling, plan.softmax_scale)
            ),
            f"the model has the soft-cap {softcap}, but the plan has {plan.logit_softcap}": (
                softcap != plan.logit_softcap
            ),
        } | {
            f"the model passes {x}, which a plan cannot use": others.get(x) is not None
            for x in OTHERS
        }
        for problem, is_there in problems.items():
            if is_there:
                plan.refuse(problem)
        # (1, heads, n, headdim) to (n, heads, headdim)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return attend(plan, q, k, v)[None], None

    def mask(attention_mask: torch.Tensor | None = None, **others: Any) -> None:
        if attention_mask is not None and not bool(attention_mask.all()):
            plan_of_name().refuse(PADDING)

    if hasattr(ALL_ATTENTION_FUNCTIONS, "register"):
        ALL_ATTENTION_FUNCTIONS.register(name, attention)
    else:  # before 4.51 it is a dict
        ALL_ATTENTION_FUNCTIONS[name] = attention
    if AttentionMaskInterface:
        AttentionMaskInterface.register(name, mask)
    return name
