"""The way of the plans of a batch to the layers of a model.

`ContextParallel` puts three functions into its model, and each of them runs in this order:

1. `forward` of the model, and of each model in it (`enter`), takes the number of the plans from
   the positions, and keeps it in a `Running` as long as the call runs.
2. The mask function (`functions`) returns this number, with that of a mask, as the layers' mask.
3. The attention function looks up the plan of its layer, and calls it.

A graph of the compiler holds nothing but tensors.  There the operators `begin` and `layer` do the
looking up, each time that the graph runs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.torch.attention import call_of
from a2d_mpi.torch.balance import hide
from a2d_mpi.torch.layers import Kind, causal_of, tag

if TYPE_CHECKING:  # they load all of transformers
    from a2d_mpi.torch.cache import SpreadCache
    from a2d_mpi.torch.context import ContextParallel

MASKS = 1 << 16  # most masks of a model's functions; a tag has the number of plans and of a mask
COPY = "a copy of a model needs a ContextParallel of its own, and batches of that one"
LABELS = "the model would shift labels on each rank alone: give them to cp.shard"
OTHER = f"the ContextParallel of this batch has been freed, or belongs to another model: {COPY}"
IMPLEMENTATION = "the model has got another attention implementation: call cp.free() first"
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
    dtypes : list of torch.dtype
        Of the plans of each kind of layers.
    """

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        self.shared: torch.Tensor | None = None
        self.is_compiled, self.resting, self.dtypes = False, False, dtypes
        self._own = threading.local()

    def get(self) -> torch.Tensor | None:
        """Return `number`."""
        if torch.compiler.is_compiling():
            return self.shared
        own = getattr(self._own, "number", None)
        # Below a compiled frame whose graph breaks there are frames that are not compiled.
        return self.shared if own is None and self.is_compiled else own

    def set(self, number: torch.Tensor | None) -> None:
        """Set `number`."""
        self.shared = number
        if torch.compiler.is_compiling():
            self.is_compiled = number is not None
        else:
            self.is_compiled, self._own.number = False, number


def enter(
    module: torch.nn.Module, owner: int, name: str, running: Running, names: Sequence[str]
) -> None:
    """Let `forward` of a model, also of a copy, take the plans of its batch."""
    own, original = vars(module).get("forward"), id(module)
    inner = getattr(own or module.forward, "__func__", None)
    if inner is None:  # of accelerate
        inner = lambda module, *args, **kwargs: own(*args, **kwargs)  # noqa: E731

    def begin(module: torch.nn.Module, given: dict[str, Any]) -> int | None:
        found = owners.get(owner)
        if found is not None and not found._freed and module in found._entries:
            return found._begin(module, given)
        for x in given.values():
            if ticket := getattr(x, "a2d_mpi", None):
                ticket.owner._refuse({OTHER: True}, ticket.plans)
        if module.config._attn_implementation == name:  # a copy is a model as any other
            module.set_attn_implementation(own_attention[name])
        return None

    def begin_compiled(module: torch.nn.Module, given: dict[str, Any]) -> torch.Tensor | None:
        ours, problem = module.config._attn_implementation == name, wrong_arguments(given)
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if ours and id(module) != original:
            problem = COPY
        elif ours and cache_of(given) is not None:
            problem = "a compiled model takes no cache over ranks: call the model itself"
        if positions is None and not ours:
            return None
        positions = torch.empty(0, dtype=torch.int64) if positions is None else positions
        mask = mask if isinstance(mask, torch.Tensor) else None
        asked = positions, mask, owner, ours, module.training, problem
        given["position_ids"], number = torch.ops.a2d_mpi.begin(*asked)
        return number if ours else None

    @wraps(inner)
    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if running.get() is not None or running.resting:  # within a call
            return inner(module, *args, **kwargs)
        given = dict(zip(names, args)) | kwargs
        if torch.compiler.is_compiling():
            number = begin_compiled(module, given)
        else:
            number = begin(module, given)
        if number is None:
            return inner(module, **given)
        number = number if isinstance(number, torch.Tensor) else torch.tensor(number)
        # Without a mask of padding, transformers takes jumps of positions for documents.
        no_mask = "attention_mask" in names and given.get("attention_mask") is None
        if no_mask and cache_of(given) is None:
            given["attention_mask"] = torch.ones_like(given["position_ids"])
        running.set(number)
        try:
            output = inner(module, **given)
        finally:
            running.set(None)
        return hide(output)

    forward.a2d_mpi = name, own
    module.forward = MethodType(forward, module)


@torch.library.custom_op(
    "a2d_mpi::begin",
    mutates_args=(),
    schema="(Tensor positions, Tensor? mask, int owner, bool ours, bool training, str problem)"
    " -> (Tensor, Tensor)",
)
def _begin(positions, mask, owner, ours, training, problem):
    """Return positions and the number of their plans, () int64, in a compiled graph."""
    number = -1
    if ours:
        found = _owner_of(owner)
        unknown = [x for x in found.model.modules() if f"_{found._name}" in vars(x)]
        if {*unknown} - {*found.layers}:
            problem = f"ContextParallel does not know a layer: {COPY}"
        number = found._number(positions, mask, training, problem)
    elif ticket := getattr(positions, "a2d_mpi", None):
        problem = OTHER if ticket.owner._freed else IMPLEMENTATION
        ticket.owner._refuse({problem: True}, ticket.plans)
    return positions.clone(), torch.tensor(number)


@_begin.register_fake
def _(positions, *_):
    return torch.empty_like(positions), torch.empty((), dtype=torch.int64)


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
        causal = causal_of(module, others)
        problem = _problem_of(module, dropout, others)
        sinks = [others.get(x) for x in ("s_aux", "sinks")]
        sink = next((x for x in sinks if x is not None), None)
        asked = query.shape[0], scaling, others.get("softcap"), others.get("sliding_window")
        kind = getattr(module, name, -1)
        if torch.compiler.is_compiling():
            given = running.get(), attention_mask, owner, kind, *asked, causal, problem
            number = torch.ops.a2d_mpi.layer(*given)
        else:
            found = _owner_of(owner)
            asked = running.get(), attention_mask, *asked, causal, problem
            plan = found._plan_for(module, *asked)
            if hasattr(plan, "attend"):  # a step of generation
                return plan.attend((query, key, value), sink), None
            number = torch.tensor(plan.serial)
        # (1, heads, n, headdim) to (n, heads, headdim)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        if any(torch.is_autocast_enabled(x) for x in ("cpu", "cuda")):
            q, k, v = (x.to(running.dtypes[kind]) for x in (q, k, v))
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
    return torch.tensor(found._plan_for(module, within, mask, *asked).serial)


@_layer.register_fake
def _(*_):
    return torch.empty((), dtype=torch.int64)


def _owner_of(number: int) -> ContextParallel:
    """Return the `ContextParallel` of a number; ValueError if it was deleted."""
    owner = owners.get(number)
    if owner is None:
        raise ValueError("ContextParallel was deleted: make another one, of the model or its copy")
    return owner


def cache_of(given: dict[str, Any]) -> SpreadCache | None:
    """Return the cache over ranks among the arguments of a call."""
    caches = (given.get(x) for x in ("cache", "past_key_values"))
    return next((x for x in caches if hasattr(x, "kept")), None)


def wrong_arguments(given: dict[str, Any]) -> str:
    """Return what is wrong with the arguments of a call for a batch, or nothing."""
    if given.get("labels") is not None:
        return LABELS
    last = given.get("logits_to_keep", 0)
    counts = isinstance(last, int) and last != 0 and cache_of(given) is None
    return "logits_to_keep would count this rank's tokens" if counts else ""


def undo(model: torch.nn.Module, names: Collection[str], sets: dict[int, Plans]) -> None:
    """Undo what `ContextParallel` did to a model, or to the one that it is a copy of."""
    give_back(model, names, sets)
    for x in model.modules():
        for name in names:
            vars(x).pop(f"_{name}", None)
        function = getattr(vars(x).get("forward"), "__func__", None)
        name, own = getattr(function, "a2d_mpi", (None, None))
        if name in names:
            vars(x).pop("forward")
            vars(x).update({"forward": own} if own else {})


def give_back(model: torch.nn.Module, names: Collection[str], sets: dict[int, Plans]) -> None:
    """Give a model its own attention back, in place of some others, and release buffers."""
    if model.config._attn_implementation in names:
        model.set_attn_implementation(own_attention[model.config._attn_implementation])
    for plan in (x for plans in sets.values() for x in plans.values()):
        plan.free()
