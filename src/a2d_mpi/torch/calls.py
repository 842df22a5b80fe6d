"""A call of a model over ranks: whole arguments in, whole results out.

1. `arranged` packs the tokens of a batch, without padding, as documents of one sequence.
2. Each rank computes its tokens of this sequence, with its share of each argument (`_own_part`).
3. `_joined` puts the results of ranks together, lazily, and sums the parts of the loss.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils._pytree import tree_map

from a2d_mpi.comm.agreement import Call
from a2d_mpi.torch.attention import IGNORED
from a2d_mpi.torch.batches import check_padding, digest, integers, kind_of
from a2d_mpi.torch.entry import Running, give_back
from a2d_mpi.torch.layers import replaced
from a2d_mpi.torch.recurrent import seq_idx_of
from a2d_mpi.torch.tensors import check_range
from a2d_mpi.torch.whole import Rows, cut, join, total

if TYPE_CHECKING:
    from a2d_mpi.torch.context import ContextParallel

TOKENS = "input_ids", "inputs_embeds"
INTEGERS = "attention_mask", "position_ids", "labels", "shift_labels", "cu_seq_lens_q"
ITEMS = "num_items_in_batch"
CHANGES = "changes of modules"  # on which ranks agree before they try a model again
DOCUMENTS = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
CACHES = "cache", "past_key_values"
PLAIN = bool, int, float, str, type(None)
AUX = "load_balancing_loss_func"  # the function of transformers' MoE models
MIXTRAL = "transformers.models.mixtral.modeling_mixtral"  # whose function TRL takes for all


ENTERED: WeakKeyDictionary[Callable, Any] = WeakKeyDictionary()  # and the `forward` before


class Arranged(NamedTuple):
    """A batch as one sequence of T tokens, which may end with some that fill it.

    Attributes
    ----------
    shape : (int, int)
        B, N.
    places : (T,) int64
        Place of each token among B N; -1: none.
    positions : (T,) int64
    ends : tuple of int or None
        First token of each document, and T; None: there is one document.
    targets : (T,) int64 or None
        The label that each token predicts, or -100.
    most : int
        Largest position, or tokens of a document, that layers compute.
    """

    shape: tuple[int, int]
    places: np.ndarray
    positions: np.ndarray
    ends: tuple[int, ...] | None
    targets: np.ndarray | None
    most: int


def arranged(
    given: dict[str, np.ndarray | None],
    shape: tuple[int, int],
    follows: bool,
    least: int,
    causal: bool = True,
) -> Arranged:
    """Pack a batch without padding; ValueError if arguments are wrong.

    Parameters
    ----------
    given : dict of str to int64 array or None
        `attention_mask`, `position_ids`, `labels` and `shift_labels`, (B, N) or (1, N), and
        `cu_seq_lens_q`, (1, documents + 1).
    shape : (int, int)
        B, N.
    follows : bool
        Whether a token predicts the label of the next one.
    least : int
        Least T.
    causal : bool
        Whether the model is causal.  Others take no jumps of positions for documents.
    """
    mask, positions, ends = (
        given.get(x) for x in ("attention_mask", "position_ids", "cu_seq_lens_q")
    )
    if mask is not None:
        check_padding(mask, shape)
    for name in ("position_ids", "labels", "shift_labels"):
        x, other = given.get(name), (1, shape[1]) if name == "position_ids" else shape
        if x is not None and x.shape not in (shape, other):
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    kept = np.ones(shape, bool) if mask is None else mask != 0
    firsts = np.diff(kept, axis=1, prepend=False) & kept  # of documents
    if positions is not None:
        positions = np.broadcast_to(positions, shape)
        jumps = (np.diff(positions, axis=1) != 1) & kept[:, 1:] & kept[:, :-1]
        if mask is None:  # only then transformers takes jumps of positions for documents
            firsts[:, 1:] |= jumps
        elif jumps.any():
            raise ValueError("packed documents, jumps of position_ids, take no attention_mask")
        if jumps.any() and ends is None and not causal:
            raise ValueError(
                "a model that is not causal takes no jumps of position_ids for documents: give "
                "cu_seq_lens_q, too"
            )
    else:
        positions = np.broadcast_to(np.arange(shape[1]), shape)
    places = np.flatnonzero(kept)
    if ends is not None:
        shown = np.zeros(len(places) + 1, bool)
        check_range(len(places), cu_seq_lens_q=ends)
        shown[ends.reshape(-1)] = True
        if given.get("position_ids") is None:
            firsts.reshape(-1)[places[shown[:-1]]] = True
        elif not np.array_equal(shown[:-1], firsts.reshape(-1)[places]):
            raise ValueError("cu_seq_lens_q has other documents than position_ids")
    targets = _targets(given, kept, follows)
    fill = max(0, least - len(places))
    bounds = [*np.flatnonzero(firsts.reshape(-1)[places]), len(places), len(places) + fill]
    bounds = tuple(int(x) for x in np.unique(bounds))

    def packed(x: np.ndarray, value: int) -> np.ndarray:
        return np.append(x.reshape(-1)[places], [value] * fill).astype(np.int64)

    return Arranged(
        shape,
        np.append(places, [-1] * fill).astype(np.int64),
        packed(positions, 0),
        bounds if len(bounds) > 2 else None,
        None if targets is None else packed(targets, IGNORED),
        max(int(positions.max(initial=0, where=kept)) + 1, *np.diff(bounds).tolist()),
    )


def _targets(given: dict, kept: np.ndarray, follows: bool) -> np.ndarray | None:
    """Return the label that each token predicts, (B, N); ValueError if padding would."""
    labels, shifted = given.get("labels"), given.get("shift_labels")
    targets, name = (labels, "labels") if shifted is None else (shifted, "shift_labels")
    if shifted is None and labels is not None and follows:
        targets = np.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
    if targets is None:
        return None
    for row, place in np.argwhere((targets != IGNORED) & ~kept):
        place += follows and shifted is None
        raise ValueError(
            f"padding would predict {name}[{row}, {place}]: it must be {IGNORED}, as must be the "
            "first token of a row that is padded on the left"
        )
    return targets


def enter(
    module: torch.nn.Module, owner: Callable[[], ContextParallel | None], running: Running
) -> None:
    """Let `forward` of a model, also of a copy, compute over ranks."""
    own = vars(module).get("forward")
    inner = getattr(own or module.forward, "__func__", None)
    if inner is None:  # of accelerate
        inner = lambda module, *args, **kwargs: own(*args, **kwargs)  # noqa: E731
    names = [*inspect.signature(module.forward).parameters]

    @torch.compiler.disable
    def begun(module: torch.nn.Module, given: dict[str, Any]) -> _Call | None:
        cp = owner()
        if cp is None or module not in cp._entries or cp._freed:
            give_back(module)  # a copy is a model as any other
            return None
        inside = cp._running.resting or cp._running.get() is not None
        if inside or not _enters(cp, module, given):
            return None
        return _Call(cp, module, names, given)

    @torch.compiler.disable(recursive=False)  # the model itself is compiled
    def entered(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        call = begun(module, given)
        if call is None:
            return inner(module, *args, **kwargs)
        try:
            output = inner(module, **call.own)
        finally:
            call.end()
        return output if call.rows is None else call.whole(output)

    @wraps(inner)
    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and running.shared is not None:
            return inner(module, *args, **kwargs)  # of a model in the model: no break
        return entered(module, *args, **kwargs)

    ENTERED[forward] = own
    module.forward = MethodType(forward, module)


def leave(module: torch.nn.Module) -> None:
    """Undo `enter`."""
    function = getattr(vars(module).get("forward"), "__func__", None)
    if function in ENTERED:
        own = ENTERED[function]
        vars(module).pop("forward")
        vars(module).update({} if own is None else {"forward": own})


def _enters(cp: ContextParallel, module: torch.nn.Module, given: dict[str, Any]) -> bool:
    """Return whether the ranks share a call of a model, or all call it for a model in it.

    The latter if it makes the loss by itself: the model in it gives whole results.
    """
    labels, mask = given.get("labels"), given.get("attention_mask")
    if labels is None or given.get("fused_lm_head") or module in cp._losses:
        return True
    if mask is not None and labels.shape == mask.shape and (labels[mask == 0] != IGNORED).any():
        raise ValueError(f"labels of padding must be {IGNORED}")
    return False


class _Call:
    """A call of a model over ranks.  The compiler sees nothing of it but the model itself."""

    @torch.compiler.disable
    def __init__(
        self, cp: ContextParallel, module: torch.nn.Module, names: list[str], given: dict[str, Any]
    ) -> None:
        """Begin the call: `own` has this rank's share of its arguments.  Collective."""
        self.cp, self.module, self._stack, self.own = cp, module, ExitStack(), given
        cp._running.loss = None
        cache = next((x for x in map(given.get, CACHES) if hasattr(x, "kept")), None)
        if cache is not None:  # all ranks compute a step of generation
            self.rows = None
            self._stack.enter_context(cp._within(cp._generator.begin(cache, given)))
            return
        self.given = given = dict(given)
        self._is_dict, self._kept = given.pop("return_dict", True), given.pop("logits_to_keep", 0)
        batch, self.rows = _begin(cp, module, given, self._kept)
        self.own, self._count = _own_part(given, names, batch, self.rows), given.get(ITEMS)
        if batch.targets is not None and self._count is None:
            self._count = int((batch.targets != IGNORED).sum())
        if given.get("fused_lm_head"):
            self.own |= {"shift_labels": self.own.get("labels"), ITEMS: self._count}
        self._stack.enter_context(cp._within(self.rows.plans.number))
        self._stack.enter_context(replaced(module, "_loss_function", cp._loss_later))
        self._stack.enter_context(_own_numbers(cp, module))
        self._stack.enter_context(_whole_aux(cp, self.rows, given.get("attention_mask")))

    @torch.compiler.disable
    def end(self) -> None:
        """End the call, also after an error."""
        self._stack.close()

    @torch.compiler.disable
    def whole(self, output: Any) -> Any:
        """Return the whole output, of this rank's."""
        cp, rows, given = self.cp, self.rows, self.given
        loss = cp._running.loss
        if isinstance(output, tuple):
            kind = type(self.module).__name__
            raise ValueError(f"{kind} must have return_dict=True in its config")
        output = _joined(output, cp, self.module, rows, given.get("attention_mask"))
        if given.get("fused_lm_head"):
            _join_fused(output, cp, rows, given)
        elif loss is not None:
            whole = _loss(cp, self.module, rows, loss, self.own["labels"], self._count, given)
            output["loss"] = output["loss"] + whole  # which may have a balance loss already
        if not isinstance(self._kept, int) or self._kept:
            columns = self._kept
            columns = columns if isinstance(columns, torch.Tensor) else slice(-columns, None)
            output["logits"] = output["logits"][:, columns]
        return output if self._is_dict in (True, None) else output.to_tuple()


def _begin(
    cp: ContextParallel, module: torch.nn.Module, given: dict[str, Any], kept: Any
) -> tuple[Arranged, Rows]:
    """Check the arguments of a call, and make its plans.  Collective."""
    comm, batch, said, call = cp.grid.comm, None, {}, Call(cp.grid.comm)
    with call.checks():
        _check(cp, module, given, kept)
        shape = next(given[x] for x in TOKENS if given.get(x) is not None).shape[:2]
        said = {name: digest(x) for name, x in given.items() if x is not None}
        known = {name: integers(name, given.get(name)) for name in INTEGERS}
        follows = _follows(module, given)
        batch = arranged(known, tuple(shape), follows, 2 * comm.size, cp._causal)
        cp._check_tokens(given.get("input_ids"), batch)
    said |= {"the model": type(module).__name__, "training": module.training}
    said |= {CHANGES: (changed := cp._print.changed())}
    said |= {"torch.is_grad_enabled()": torch.is_grad_enabled()}
    with cp.grid.failures.translated():
        call.agree(said)
        cp._prepare(batch.most, changed, module.training)
        plans = cp._plans_of(len(batch.places), batch.ends)
    rows = Rows(cp, batch.shape, [batch.places[x] for x in plans.tokens], plans)
    cp.rows = rows.places[rows.real]
    return batch, rows


def _check(cp: ContextParallel, module: torch.nn.Module, given: dict[str, Any], kept: Any) -> None:
    """Raise ValueError if a model's arguments are none that ranks can share."""
    if others := {x.config._attn_implementation for x in cp.layers} - {cp._name}:
        raise ValueError(f"the model has got the attention {others.pop()}: call cp.free() first")
    tokens = [x for x in TOKENS if given.get(x) is not None]
    if len(tokens) != 1:
        raise ValueError(f"give one of {' and '.join(TOKENS)}, got {len(tokens)}")
    x, dims = given[tokens[0]], 2 + (tokens[0] == "inputs_embeds")
    if not isinstance(x, torch.Tensor) or x.dim() != dims or not x.numel():
        raise ValueError(f"{tokens[0]} must be tokens of a batch, (B, N, ...), got {kind_of(x)}")
    for name in CACHES:
        if given.get(name) is not None:
            raise ValueError(f"{name} is a cache of one process: call model.generate")
    if given.get("use_cache"):
        raise ValueError("use_cache=True: a call over ranks gives no cache; call model.generate")
    if given.get("labels") is not None and (not isinstance(kept, int) or kept):
        raise ValueError("give labels or logits_to_keep, not both")
    for name, y in given.items():
        has_rows = isinstance(y, torch.Tensor) and y.shape[:2] == x.shape[:2]
        if not (has_rows or isinstance(y, PLAIN) or name in (*DOCUMENTS, *INTEGERS, ITEMS)):
            raise ValueError(
                f"ranks cannot share the argument {name}: it must have a row for each of "
                f"{x.shape[0]} x {x.shape[1]} tokens, got {kind_of(y)}"
            )
    if (types := given.get("token_type_ids")) is not None:
        most = getattr(module.config, "type_vocab_size", sys.maxsize) - 1
        check_range(most, token_type_ids=types.numpy(force=True))


def _follows(module: torch.nn.Module, given: dict[str, Any]) -> bool:
    """Return whether a token predicts the label of the next one, in the loss of a model."""
    has_labels = given.get("labels") is not None
    return has_labels and "shift_labels" in inspect.signature(module.loss_function).parameters


def _own_part(
    given: dict[str, Any], names: list[str], batch: Arranged, rows: Rows
) -> dict[str, Any]:
    """Return this rank's share of the arguments of a call."""
    mine, device, own = rows.plans.tokens[rows.cp.grid.comm.rank], rows.places.device, {}
    for name, x in given.items():
        if name not in (*DOCUMENTS, *INTEGERS, ITEMS):
            own[name] = cut(x, rows)[None] if isinstance(x, torch.Tensor) else x
    own["position_ids"] = torch.from_numpy(batch.positions[mine])[None].to(device)
    if batch.targets is not None:
        own["labels"] = torch.from_numpy(batch.targets[mine])[None].to(device)
    if "attention_mask" in names:  # or transformers takes jumps of positions for documents
        own["attention_mask"] = torch.ones_like(own["position_ids"])
    if {"use_cache", "kwargs"} & {*names}:  # it may pass it on
        own["use_cache"] = False
    return own | seq_idx_of(rows.plans)


def later(running: Any) -> Callable:
    """Return a loss function that keeps its arguments in a `Running`."""

    def loss(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        running.loss = logits, args, kwargs
        return logits.new_zeros(())

    return loss


def _loss(
    cp: ContextParallel,
    module: torch.nn.Module,
    rows: Rows,
    given: tuple,
    labels: torch.Tensor,
    count: Any,
    whole: dict[str, Any],
) -> torch.Tensor:
    """Return the whole loss, by the model's own function."""
    (logits, args, kwargs), function = given, module.loss_function
    names = inspect.signature(function).parameters
    kwargs = dict(zip([*names][1:], args)) | kwargs
    if "num_items_in_batch" not in names:  # it may be no sum over tokens
        kwargs |= {x: whole[x] for x in ("labels", "shift_labels") if x in kwargs and x in whole}
        return function(join(logits[0], rows), **kwargs)
    kwargs |= {"labels": labels, "num_items_in_batch": count}
    kwargs |= {"shift_labels": labels} if "shift_labels" in names else {}
    part, call = logits.new_zeros(()), Call(cp.grid.comm)
    with call.checks():
        part = function(logits, **kwargs)
    with cp.grid.failures.translated():
        call.agree()
    return total(part, cp, rows)


@contextmanager
def _own_numbers(cp: ContextParallel, module: torch.nn.Module) -> Iterator[None]:
    """Let ranks draw different numbers for dropout, from the seed and their rank."""
    if not (module.training and cp._draws):
        yield
        return
    seed = int(torch.randint(1 << 62, ()))  # the same on all ranks that have the same seed
    with torch.random.fork_rng():
        torch.manual_seed(seed + cp.grid.comm.rank)
        yield


@contextmanager
def _whole_aux(cp: ContextParallel, rows: Rows, mask: torch.Tensor | None) -> Iterator[None]:
    """Let the function of the balance loss of MoE layers see the routes of all tokens."""
    cp._counted = False

    def replacing(original: Callable) -> Callable:
        @torch.compiler.disable
        @wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            name = next(iter(given))
            if not isinstance(given[name], tuple):
                return original(**given)
            cp._counted, lead = True, (rows.shape[0] * rows.shape[1],)
            given[name] = tuple(join(x.flatten(0, -2), rows, lead) for x in given[name])
            return original(**given | {"attention_mask": mask})

        return function

    files = {sys.modules.get(x) for x in (MIXTRAL, *cp._files)}
    with ExitStack() as stack:
        for x in files:
            if x is not None and AUX in vars(x):
                stack.enter_context(replaced(x, AUX, replacing(vars(x)[AUX])))
        yield


def _joined(
    output: Any, cp: ContextParallel, module: torch.nn.Module, rows: Rows, mask: Any
) -> Any:
    """Replace what ranks have computed in an output by tensors of all tokens."""
    n, lead = len(rows.places), (rows.shape[0] * rows.shape[1],)

    def whole(name: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or name in ("loss", "aux_loss"):
            if name == "aux_loss" and isinstance(x, torch.Tensor) and not cp._counted:
                raise ValueError(
                    f"{type(module).__name__} makes aux_loss of the tokens of one rank"
                )
            return x
        if x.shape[:2] == (1, n):
            return join(x[0], rows)
        if name == "router_logits" and x.shape[:1] == (n,):
            return join(x, rows, lead)
        raise ValueError(
            f"{type(module).__name__} returns {name} of shape {tuple(x.shape)}, which has no row "
            "for each token: ranks cannot put it together"
        )

    for name in output:  # in the order of all ranks
        if name == "pooler_output" and hasattr(module, "pooler"):
            continue
        output[name] = tree_map(lambda x, name=name: whole(name, x), output[name])
    if output.get("pooler_output") is not None:
        if mask is not None and not mask[:, 0].all():
            raise ValueError("the pooler would take padding, with which a row begins")
        output["pooler_output"] = module.pooler(output["last_hidden_state"])
    return output


def _join_fused(output: Any, cp: ContextParallel, rows: Rows, given: dict[str, Any]) -> None:
    """Finish the output of TRL's fused head, whose results of tokens are one column shorter."""
    weight = getattr(cp.model.config.get_text_config(), "router_aux_loss_coef", 0.0)
    aux = 0.0 if output.get("aux_loss") is None else weight * output["aux_loss"]
    output["loss"] = total(output["loss"] - aux, cp, rows) + aux
    if given.get("shift_labels") is None:
        for name, x in output.items():
            if isinstance(x, torch.Tensor) and x.dim() == 2:
                output[name] = x[:, :-1]
