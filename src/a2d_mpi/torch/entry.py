"""What is registered with transformers: an attention and a mask function that call plans.

A call of the model (`a2d_mpi.torch.calls`) sets the number of its plans in a `Running`.  The mask
function returns this number, with that of a mask, as the layers' mask, so that a layer which is
computed again, in the backward pass, has it, too.  The attention function looks up the plan of
its layer, and calls it.  A graph of the compiler holds nothing but tensors.  There the operator
`layer` does the looking up, each time that the graph runs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.torch.attention import call_of
from a2d_mpi.torch.decoding import Step
from a2d_mpi.torch.layers import Kind
from a2d_mpi.torch.masks import causal_of, tag

if TYPE_CHECKING:
    from a2d_mpi.torch.context import ContextParallel

MASKS = 1 << 16  # most masks of a model's functions; a tag has the number of plans and of a mask
# Arguments that some models pass to their attention and no plan can use.
OTHERS = (
    "position_bias", "head_mask", "indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k",
)  # fmt: skip
owners: weakref.WeakValueDictionary[int, ContextParallel] = weakref.WeakValueDictionary()
own_attention: dict[str, str] = {}  # the attention that models had, by the one that they got

Plans = dict[Kind, AttentionPlan]


class Running:
    """The call that a model is in, in this thread.

    Attributes
    ----------
    number : () int64 tensor or None
        Of its plans.  Compiled frames see the latest one of any thread, because the compiler knows
        no attributes of threads.
    resting : bool
        Whether the model is called without plans.
    loss : tuple or None
        The arguments of the model's loss function in this call.
    """

    def __init__(self) -> None:
        self.shared: torch.Tensor | None = None
        self.resting, self.loss = False, None
        self._own = threading.local()

    def get(self) -> torch.Tensor | None:
        """Return `number`."""
        if torch.compiler.is_compiling():
            return self.shared
        return getattr(self._own, "number", None)

    def set(self, number: torch.Tensor | None) -> None:
        """Set `number`."""
        self.shared = self._own.number = number


def functions(owner: int, name: str, running: Running) -> tuple[Callable, Callable]:
    """Return the attention and the mask function of a `ContextParallel`.

    Layers have the number of their kind in the attribute `name`.  The compiler traces them.  In a
    graph all that depends on a batch is in a tensor: the number of its plans, and masks, which
    have this number and the number of a mask.  Only the kernels of operators read it.
    """

    @torch.compiler.assume_constant_result
    def mask_number(mask_function: Callable) -> int:
        return _owner_of(owner)._masks.number_of(mask_function)

    def mask(
        mask_function: Callable, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            number = torch.tensor(-1) if running.get() is None else running.get()
            return tag(number * MASKS + mask_number(mask_function))
        found = _owner_of(owner)
        shown = found._mask(mask_function, attention_mask)
        shown = tag(running.get() * MASKS + shown)
        shown.a2d_mpi_owner = found  # which a layer needs if it is computed again
        return shown

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
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        sinks = [others.get(x) for x in ("s_aux", "sinks")]
        sink = next((x for x in sinks if x is not None), None)
        asked = query.shape[0], scaling, others.get("softcap"), others.get("sliding_window")
        asked += causal_of(module, others), _problem_of(module, dropout, others)
        kind = getattr(module, name, -1)
        if torch.compiler.is_compiling():
            number = torch.ops.a2d_mpi.layer(running.get(), attention_mask, owner, kind, *asked)
        else:
            found = _owner_of(owner)
            plan = found._plan_for(module, running.get(), attention_mask, asked)
            if isinstance(plan, Step):
                return plan.attend((query, key, value), sink), None
            number = torch.tensor(plan.serial)
        # (1, heads, n, headdim) to (n, heads, headdim)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        if torch.is_autocast_enabled(device := query.device.type):
            q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
        if sink is not None:
            sink = sink.to(torch.promote_types(q.dtype, torch.float32))
        out, _ = call_of(number, q, k, v, sink)
        return out[None], None

    return attention, mask


def _problem_of(module: torch.nn.Module, dropout: float, others: dict[str, Any]) -> str:
    """Return what no plan can compute in a call of a layer, or nothing."""
    if dropout != 0:
        return f"dropout must be 0 in attention, got {dropout}"
    if others.get("output_attentions") or getattr(module.config, "output_attentions", False):
        return "output_attentions must be false: a plan does not keep the weights of attention"
    for x in OTHERS:
        if others.get(x) is not None:
            return f"the model passes {x}, which a plan cannot use"
    return ""


@torch.library.custom_op(
    "a2d_mpi::layer",
    mutates_args=(),
    schema="(Tensor? within, Tensor? mask, int owner, int kind, SymInt rows, float scaling, "
    "float? softcap, SymInt? window, bool? causal, str problem) -> Tensor",
)
def _layer(within, mask, owner, kind, *asked):
    """Return the number of the plan of a layer, () int64, in a compiled graph."""
    found = _owner_of(owner)
    module = found._firsts[kind] if kind >= 0 else None
    return torch.tensor(found._plan_for(module, within, mask, asked).serial)


@_layer.register_fake
def _(*_):
    return torch.empty((), dtype=torch.int64)


def _owner_of(number: int) -> ContextParallel:
    """Return the `ContextParallel` of a number; ValueError if it was deleted."""
    owner = owners.get(number)
    if owner is None:
        raise ValueError("ContextParallel was deleted: make another one, of the model or its copy")
    return owner


def give_back(model: torch.nn.Module) -> None:
    """Give a model its own attention back."""
    name = model.config._attn_implementation
    if name in own_attention:
        model.set_attn_implementation(own_attention[name])
