"""The attention that a model of transformers computes, found by watching the model.

Nothing here knows a model by its name.  The model runs on a few tokens, on each rank alone.  An
attention function notes what it gets, and returns a function of each token alone.  The rest of the
model must then be a function of each token and its position, too.  Four trials check this:

* A NaN in one token must not reach another token.  It does in convolutions, in linear and
  recurrent layers, and in attention that does not use the functions of transformers.
* The first tokens must be the same without the others.  They are not if RoPE depends on the
  largest position.
* All must be the same after a cache that says that it holds tokens.  It is not if a layer counts
  positions by itself.
* Without positions all must be the same as with the positions 0, 1, ...  Some models begin with
  another number.

So the model is right with plans if each plan has the mask of its layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
import torch

from a2d_mpi.masks.mask import Mask
from a2d_mpi.torch.masks import causal_of, known_mask, mask_of, number_of, tag
from a2d_mpi.torch.recurrent import install, trial

FEW = 16  # tokens of a trial
FIRST = 8  # those that are tried without the others
POISONED = 9  # the one with the NaN
NUMBERS = count()  # of all kinds, of this process
SWITCHES = "training", "gradient_checkpointing"  # attributes of modules that may change

Outputs = list[tuple[str, torch.Tensor]]  # names and rows, (n, width)
Note = Callable[[str, torch.Tensor], "torch.Tensor | None"]


class NoRows(ValueError):
    """The output of a model has no row for each token."""


class Kind(NamedTuple):
    """The arguments of a layer's plans.

    Attributes
    ----------
    mask : Mask
        The mask of a sequence that is one document.
    nheads, nheads_kv, headdim, headdim_v, softmax_scale, logit_softcap, dtype
        As of plans.
    """

    mask: Mask | None
    nheads: int
    nheads_kv: int
    headdim: int
    headdim_v: int
    softmax_scale: float
    logit_softcap: float | None
    dtype: str


Call = tuple[str, torch.nn.Module, Kind, "torch.Tensor | None", dict[str, Any]]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object have another attribute in this context."""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


def register(name: str, attention: Callable, mask: Callable) -> None:
    """Register an attention and a mask function with transformers."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)  # or no mask function is called


def layers_of(model: torch.nn.Module, seqlen: int) -> dict[torch.nn.Module, Kind]:
    """Return the kind of each attention layer of a model, in the order of their calls.  Local.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    seqlen : int
        N, tokens of the sequence.

    Raises
    ------
    ValueError
        If plans cannot compute what the model computes.  The message names the layer.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            "it is no PreTrainedModel of transformers: make ContextParallel of the model first, "
            "and then what wraps it (DDP, adapters of PEFT)"
        )
    if model.config.is_encoder_decoder:
        raise ValueError("an encoder with a decoder has two sequences")
    for name, value in model.config.to_dict().items():
        if value and "layerdrop" in name:
            raise ValueError(f"{name} must be 0, got {value}: each rank would draw other numbers")
    for name, x in model.named_modules():
        if isinstance(x, torch.nn.modules.batchnorm._BatchNorm):
            raise ValueError(f"{name} is a BatchNorm: in training it mixes tokens")
    watch, name = _Watch(model), f"a2d_mpi_watch_{next(NUMBERS)}"
    register(name, watch.attention, watch.mask)
    with attention_of(model, name), trial():
        try:
            watch.check_tokens(seqlen)
            masks = [mask_of(x, seqlen) for x in watch.masks]
            layers: dict[torch.nn.Module, Kind] = {}
            for where, module, kind, given, others in watch.calls:
                number = number_of(given)
                if number is None and given is not None:
                    raise ValueError(f"{where} gets a mask of its own")
                asked = others.get("sliding_window"), causal_of(module, others)
                mask = known_mask(where, number, *asked, masks, seqlen)
                kind = kind._replace(mask=mask)
                if layers.setdefault(module, kind) != kind:
                    raise ValueError(f"{where} attends in two ways")
        finally:
            watch.clear()  # transformers keeps the functions
    return layers


def is_random(model: torch.nn.Module, seqlen: int) -> bool:
    """Return whether a model has dropout in training; ValueError if it is random without, too.

    Ranks may draw the numbers of dropout, because each one is for one element.
    """
    watch, name, found = _Watch(model), f"a2d_mpi_watch_{next(NUMBERS)}", []

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any) -> torch.Tensor:
        found.append(training and p > 0)
        return x

    register(name, watch.attention, watch.mask)
    with attention_of(model, name), replaced(torch.nn.functional, "dropout", dropout):
        try:
            model.train()
            few = _inputs(model, seqlen)
            before = random_state(model)
            expected = watch.run(few)
            watch.compare(few, expected, "is random in training, apart from dropout")
            if not torch.equal(before, random_state(model)):  # which routes may hide
                raise ValueError("it draws random numbers in training, apart from dropout")
        finally:
            watch.clear()
    return any(found)


def random_state(model: torch.nn.Module) -> torch.Tensor:
    """Return the state of the random numbers that a model draws."""
    on_gpu = model.device.type == "cuda"
    return torch.cuda.get_rng_state(model.device) if on_gpu else torch.get_rng_state()


def has_loss_function(model: torch.nn.Module, seqlen: int) -> bool:
    """Return whether the loss that a model makes of labels is its `loss_function` of logits."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return False
    calls, few = [], _inputs(model, seqlen)

    def noted(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        calls.append(logits)
        return logits.new_zeros(())

    if hasattr(model.config, "output_router_logits"):  # a balance loss is added to it
        few["output_router_logits"] = False
    try:
        with attention_of(model, "eager"), replaced(model, "_loss_function", noted):
            output = model(**few, labels=few["input_ids"])
    except (ValueError, RuntimeError, IndexError):  # labels may have another shape
        return False
    return len(calls) == 1 and calls[0].shape[:2] == few["input_ids"].shape and not output.loss


class Fingerprint:
    """What the trials of a model depend on: its modules, their hooks, numbers, texts and switches.

    Parameters
    ----------
    model : torch.nn.Module

    Notes
    -----
    Comparing it takes 0.2 ms for 631 modules, because nothing is looked up by name but attributes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = [*model.modules()]
        self._state = [vars(x) for x in modules]
        self._parts = [
            x for y in modules for x in (y._modules, y._forward_hooks, y._forward_pre_hooks)
        ]
        self._read = [
            (state, name)
            for state in self._state
            for name, x in state.items()
            if isinstance(x, (bool, int, float, str)) and name[0] != "_" and name not in SWITCHES
        ]
        self._before = self._now()

    def _now(self) -> tuple[list, ...]:
        read = [state.get(name) for state, name in self._read]
        return (
            read,
            [*map(len, self._state)],
            [*chain.from_iterable(map(dict.values, self._parts))],
        )

    def changed(self) -> bool:
        """Return whether the model has changed."""
        return self._now() != self._before


class _Watch:
    """An attention function that notes its calls, and trials of a model that uses it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.clear()

    def clear(self) -> None:
        self.calls: list[Call] = []
        self.masks: list[Callable] = []
        self._note: Note = lambda name, x: None

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Note the arguments; return the values of each token."""
        where = next((name for name, x in self.model.named_modules() if x is module), "attention")
        (_, nheads, n, headdim), (_, nheads_kv, m, _) = query.shape, key.shape
        if n != m or nheads % nheads_kv or key.shape[:3] != value.shape[:3]:
            raise ValueError(f"{where} attends from {n} tokens to {m}, with {nheads_kv} KV heads")
        scale = headdim**-0.5 if scaling is None else float(scaling)
        dtype = str(query.dtype).removeprefix("torch.")
        heads = nheads, nheads_kv, headdim, value.shape[3]
        kind = Kind(None, *heads, scale, others.get("softcap"), dtype)
        self.calls.append((where, module, kind, attention_mask, others))
        for name, x in {"q": query, "k": key, "v": value}.items():
            self._note(f"{where} ({name})", x[0].transpose(0, 1).flatten(1))
        return value.repeat_interleave(nheads // nheads_kv, 1).transpose(1, 2).contiguous(), None

    def mask(self, mask_function: Callable, **others: Any) -> torch.Tensor:
        """Note the function; return its number as a mask."""
        self.masks.append(mask_function)
        return tag(len(self.masks) - 1)

    def run(self, inputs: dict[str, Any], note: Note | None = None) -> Outputs:
        """Run the model; return what modules and attention got and gave, without `note`."""
        self.clear()
        seen: Outputs = []
        self._note = note or (lambda name, x: seen.append((name, x)))
        run(self.model, inputs, self._note)
        return seen

    def check_tokens(self, seqlen: int) -> None:
        """Raise ValueError if the model mixes tokens outside of attention; note its calls."""
        whole, bad = _inputs(self.model, seqlen), torch.tensor([POISONED])
        bad = bad.to(self.model.device)
        embeddings = self.model.get_input_embeddings()
        handle = embeddings.register_forward_hook(
            lambda module, given, out: out.index_fill(1, bad, float("nan"))
        )
        try:
            poisoned = self.run(whole)
        finally:
            handle.remove()
        for name, x in poisoned:
            if x[:POISONED].isnan().any() or x[POISONED + 1 :].isnan().any():
                known, problems = install(self.model)
                known = ["transformers' attention", *known]
                text = f"{name} mixes tokens outside of {', '.join(known)}"
                raise ValueError("; ".join([text, *problems]))
        if name != type(self.model).__name__:
            raise NoRows("its output has no row for each token")
        if not x[POISONED].isnan().any():
            raise ValueError("its output does not depend on its input embeddings")
        if not self.calls:
            raise ValueError("no layer calls transformers' attention functions")
        del poisoned, x  # each holds what all modules give
        expected = self.run(whole)
        calls, masks = self.calls, self.masks
        first = {x: y[:, :FIRST] for x, y in whole.items()}
        self.compare(first, expected, "depends on the largest position, or on other tokens")
        takes = inspect.signature(self.model.forward).parameters
        for name in [x for x in ("cache", "past_key_values") if x in takes][:1]:
            cached = whole | {name: _cache(seqlen)}
            self.compare(cached, expected, "counts positions by itself")
        whole["position_ids"] = torch.arange(FEW, device=self.model.device)[None]
        del expected
        expected = self.run(whole)
        del whole["position_ids"]
        self.compare(whole, expected, "does not count positions 0, 1, 2, ...")
        self.calls, self.masks = calls, masks

    def compare(self, inputs: dict[str, Any], expected: Outputs, what: str) -> None:
        """Raise ValueError at the first thing that differs."""
        rest = iter(expected)

        def note(name: str, x: torch.Tensor) -> torch.Tensor:
            other, y = next(rest, (None, x))
            if name != other or not same(x, y[: len(x)]):
                raise ValueError(f"{name} {what}")
            return y[: len(x)]

        self.run(inputs, note)


def _inputs(model: torch.nn.Module, seqlen: int) -> dict[str, torch.Tensor]:
    """Return a few tokens with positions that reach from the first to the last of a sequence."""
    first = np.linspace(1, 16, FIRST).round()  # RoPE does not change the position 0
    spread = np.linspace(0, seqlen - 1, FEW - FIRST).round()
    positions = torch.from_numpy(np.append(first, spread).clip(0, seqlen - 1)).long()
    return inputs_of(model, positions[None])


def inputs_of(model: torch.nn.Module, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return random tokens, the same on all ranks, with positions, (1, n)."""
    made = torch.Generator().manual_seed(0)
    number = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(number, positions.shape, generator=made)
    # Without a mask of padding, transformers takes jumps of positions for the ends of documents.
    given = {"input_ids": tokens, "position_ids": positions}
    given["attention_mask"] = torch.ones_like(positions)
    return {name: x.to(model.device) for name, x in given.items()}


def _cache(seqlen: int) -> object:
    """Return a cache that says that it holds tokens, but holds none."""
    from transformers.cache_utils import DynamicCache

    class Cache(DynamicCache):
        def get_seq_length(self, *_: Any, **__: Any) -> int:
            return seqlen

        def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple:
            return keys, values

        def get_conv_state(self, *_: Any, **__: Any) -> None:
            return None

        def update_conv_state(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return x

        def is_recording_past(self, *_: Any) -> bool:
            return False

        get_recurrent_state, update_recurrent_state = get_conv_state, update_conv_state

    return Cache()


@contextmanager
def attention_of(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Let a model use an attention, without dropout, gradients, autocast and cache."""
    before, trained = model.config._attn_implementation, [x for x in model.modules() if x.training]
    exact = torch.autocast(model.device.type, enabled=False)
    with ExitStack() as stack:
        # accelerate puts autocast around the model's own `forward`.
        if "_original_forward" in vars(model):
            stack.enter_context(replaced(model, "forward", model._original_forward))
        if getattr(model.config, "use_cache", None):
            stack.enter_context(replaced(model.config, "use_cache", False))
        try:
            model.set_attn_implementation(name)
            if model.config._attn_implementation != name:
                kind = type(model).__name__
                raise ValueError(f"{kind} does not use transformers' attention functions")
            # A stance holds from the moment that it is made.
            eager = getattr(torch.compiler, "set_stance", lambda _: nullcontext())("force_eager")
            with eager, torch.no_grad(), torch.random.fork_rng(), exact:
                yield model.eval()
        finally:
            model.set_attn_implementation(before)
            model.eval()
            for x in trained:
                x.training = True


def run(model: torch.nn.Module, inputs: dict[str, Any], note: Note, every: bool = True) -> None:
    """Run a model, and pass on the names and rows, (n, width), of what its modules give.

    `note` also gets the inputs of blocks, which are the items of lists of modules.  It may return
    other inputs, so that errors do not add up from block to block.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : dict of str to tensor
    note : callable
    every : bool
        Whether to note all modules, or only blocks and the model.
    """
    n = inputs["input_ids"].shape[1]
    lists = [x for x in model.modules() if isinstance(x, torch.nn.ModuleList)]
    blocks = {x for y in lists for x in y}

    def rows(output: Any) -> torch.Tensor | None:
        if isinstance(output, dict):
            output = tuple(x for name, x in output.items() if name != "aux_loss")  # comes first
        x = output[0] if isinstance(output, tuple) and output else output
        has_rows = isinstance(x, torch.Tensor) and x.dim() == 3 and x.shape[:2] == (1, n)
        # A copy, because the model may change it in place later.
        return x[0].clone() if has_rows and x.is_floating_point() else None

    def begun(name: str, module: torch.nn.Module, args: tuple) -> tuple | None:
        x = rows(args)
        other = None if x is None else note(f"{name} (input)", x)
        return None if other is None else (other[None], *args[1:])

    def ended(name: str, module: torch.nn.Module, args: tuple, output: Any) -> None:
        x = rows(output)
        if x is not None:
            note(name or type(model).__name__, x)

    handles = []
    for name, x in model.named_modules():
        if x in blocks:
            handles.append(x.register_forward_pre_hook(partial(begun, name)))
        if every or x in blocks or x is model:
            handles.append(x.register_forward_hook(partial(ended, name)))
    try:
        model(**inputs)
    except ValueError:
        raise
    except Exception as error:  # whatever a model raises
        given = ", ".join(inputs)
        raise ValueError(f"a call with {given} fails: {type(error).__name__}: {error}") from error
    finally:
        for x in handles:
            x.remove()


def same(found: torch.Tensor, expected: torch.Tensor, every: bool = False) -> bool:
    """Return True if most rows are the same in the first half of their digits.

    A row may differ, because rounding may choose another expert for it.  `every`: all rows of a
    recurrence are the same, up to its rounding: only those behind a border may show an error.
    """
    half = torch.finfo(torch.float32).eps ** 0.5  # of softmax
    eps = torch.finfo(found.dtype).eps
    x, y = found.float(), expected.float()
    bound = max(half, 4 * eps if every else eps**0.5)
    good = (x - y).norm(dim=1) <= bound * y.norm(dim=1)
    return bool(good.all()) if every else 2 * int(good.sum()) > len(good)
