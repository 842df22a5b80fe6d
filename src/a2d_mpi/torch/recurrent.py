"""Linear and recurrent layers whose tokens are spread over ranks, with the model's own functions.

A rank's tokens are cut into pieces: runs of consecutive tokens inside one document.  A recurrence
is affine in the state S that enters a piece.  It leaves T S + b, and its outputs are out + A S:

1. One call of the model's function for each piece gives `out` and b.  It also gives A and T if it
   gets values [v | 0] and the state [0 | I], or they are known in closed form.
2. All ranks gather T and b of all pieces, and compose the states that enter their pieces.
3. Each rank adds A S to the outputs of its pieces.

A convolution gets the last columns before each piece.  No token moves, and attention keeps its
distribution.  Gradients flow back through the gathering.

The functions are found by their names in the file of the model, where they have the arguments of
flash-linear-attention, causal-conv1d and mamba-ssm.  They are replaced by functions that do the
same, unless the argument `seq_idx`, which models pass on to them, is that of `seq_idx_of`.  Then
it tells which pieces a call has, also when a layer is computed again.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.comm.calls import PLANS, Caller
from a2d_mpi.comm.channel import Channel
from a2d_mpi.comm.transport import Transport
from a2d_mpi.core.sizes import next_ranks

Given = dict[str, Any]  # the arguments of a call, by name
_now = threading.local()  # .note: what gets results in this thread


class Piece(NamedTuple):
    """A run of a rank's tokens inside one document.

    Attributes
    ----------
    rank : int
    tokens : slice
        Its tokens among those of the rank.
    document : int
    begins, ends : bool
        Whether the document begins with it, and ends with it.
    """

    rank: int
    tokens: slice
    document: int
    begins: bool
    ends: bool


class Pieces(Caller):
    """The pieces of all ranks, and what ranks send each other about them.

    Parameters
    ----------
    plan : AttentionPlan
        With the distribution of the tokens; it counts what is sent, on the channel "states".
    ends : (documents + 1,) integers, optional
        First token of each document, and the end of the last one; tokens after it are a document.
        Default: all tokens are one document.

    Attributes
    ----------
    listed : list of Piece
        In the order of tokens.
    own : list of int
        Those of this rank, in the order of its tokens.
    documents : int

    Raises
    ------
    ValueError
        On all ranks, if shards have no runs of consecutive tokens.
    """

    def __init__(self, plan: AttentionPlan, ends: Sequence[int] | None = None) -> None:
        self.grid = plan.grid
        shards, whole = plan.distribution, plan.distribution.seqlen
        bounds = [0, whole] if ends is None else [*map(int, ends)]
        bounds += [whole] if bounds[-1] < whole else []
        self.documents, found = len(bounds) - 1, []
        for rank in range(shards.nshards):
            begin = 0
            for run in (x for x in shards.runs(rank) if len(x)):
                if run.step != 1 and len(run) > 1:
                    raise CollectiveError(
                        "linear and recurrent layers need runs of consecutive tokens, and shards "
                        f'are {shards.name}: pass distribution="zigzag"'
                    )
                cuts = sorted({run[0], *(x for x in bounds if run[0] < x <= run[-1]), run[-1] + 1})
                for x, y in zip(cuts, cuts[1:]):
                    i = int(np.searchsorted(bounds, x, side="right")) - 1
                    tokens = slice(begin, begin := begin + y - x)
                    found.append((x, Piece(rank, tokens, i, x == bounds[i], y == bounds[i + 1])))
        self.listed = [x for _, x in sorted(found)]
        # Of all ranks, in the order in which they are sent; then of this rank.
        self._order = sorted(range(len(found)), key=lambda i: self.listed[i][:2])
        self.own = [i for i in self._order if self.listed[i].rank == self.grid.comm.rank]
        with self.grid.call("making", self) as call:
            call.agree({"tokens": whole, "documents": bounds})
        comm = self.grid.comm_of("all", tuple(range(self.grid.comm.size)))
        self._channel = Channel(comm, "states", plan.traffic)

    def cut(self, x: torch.Tensor, i: int, dim: int = 1) -> torch.Tensor:
        """Return the part of a tensor of this rank's tokens, along `dim`, that has piece i."""
        tokens = self.listed[i].tokens
        return x.narrow(dim, tokens.start, tokens.stop - tokens.start)

    def gather(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[tuple], *through: torch.Tensor
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
        """Return tensors of all pieces, given this rank's, in float32 or wider.  Collective.

        Its backward pass is collective, too: all ranks reach it through the tensors `through`.

        Parameters
        ----------
        parts : sequence of tensor
            Of the pieces of this rank.
        shapes : sequence of shape
            Of all pieces.
        *through : tensor

        Returns
        -------
        whole : list of tensor
            Of all pieces.
        through : sequence of tensor
        """
        sizes, counts = [int(np.prod(x)) for x in shapes], [0] * self.grid.comm.size
        if not any(sizes):
            return [through[0].new_empty(x) for x in shapes], through
        for piece, size in zip(self.listed, sizes):
            counts[piece.rank] += size
        none = through[0].new_empty(0, dtype=torch.promote_types(through[0].dtype, torch.float32))
        mine = torch.cat([none, *(x.flatten() for x in parts)])
        whole, *through = _Gather.apply(self, counts, mine, *through)
        split = dict(zip(self._order, whole.split([sizes[i] for i in self._order])))
        return [split[i].view(x) for i, x in enumerate(shapes)], through

    def exchange(self, action: str, sent: list[np.ndarray], received: list[np.ndarray]) -> None:
        """Send an array to each rank, and receive one from each, through the host's memory."""
        rank, transport, messages = self.grid.comm.rank, Transport(), []
        peers = next_ranks(rank, len(sent))
        with self.grid.call(action, self, transport.settle) as call:
            call.agree()
            self._channel.begin_phase(action, transport, call.watch)
            for peer in peers:
                messages += self._channel.irecv([received[peer]], peer, 0)
            for peer in peers:
                messages += self._channel.isend([sent[peer]], peer, 0)
            received[rank][...] = sent[rank]
            self._channel.wait(messages)

    def compose(
        self, whole: Iterable[torch.Tensor], initial: Iterable, step: Callable
    ) -> tuple[list, list]:
        """Return the state that enters each piece, and the last one of each document.

        Parameters
        ----------
        whole : iterable of tensor
            What all pieces add.
        initial : iterable
            The state before each document.
        step : callable
            It returns the state behind a piece, given that before it and what it adds.
        """
        entering, last, state = [], [*initial], None
        for piece, x in zip(self.listed, whole):
            state = last[piece.document] if piece.begins else state
            entering.append(state)
            state = step(state, x)
            if piece.ends:
                last[piece.document] = state
        return entering, last

    def columns(
        self, x: torch.Tensor, k: int, past: torch.Tensor | None, every: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Return the k columns before each piece, at the end of each document, (1, C, k), and x.

        Parameters
        ----------
        x : (1, C, n) tensor
        k : int
        past : (documents, C, m) tensor, optional
            Columns before the documents.  Default: zeros.
        every : bool
            Whether those at the ends of documents are needed.
        """
        counts = [x.tokens.stop - x.tokens.start for x in self.listed]
        counts = [min(k, n) * (every or not x.ends) for n, x in zip(counts, self.listed)]
        parts = [_last(self.cut(x, i, 2), counts[i]) for i in self.own]
        tails, (x,) = self.gather(parts, [(1, x.shape[1], n) for n in counts], x)
        none = x.new_zeros(self.documents, x.shape[1], k)
        past = none if past is None else torch.cat([none, past.to(x.dtype)], -1)
        join = lambda state, tail: _last(torch.cat([state, tail.to(x.dtype)], -1), k)  # noqa: E731
        return *self.compose(tails, _last(past, k).split(1), join), x


def cut_pieces(plans: dict[Any, AttentionPlan], ends: Sequence[int] | None) -> None:
    """Cut the tokens of the plans of a batch into pieces, which the first plan keeps.  Collective.

    Raises
    ------
    ValueError
        As of `Pieces`.
    """
    first = next(iter(plans.values()))
    first.pieces = Pieces(first, ends)


def pieces_of(plans: dict[Any, AttentionPlan]) -> Pieces | None:
    """Return the pieces of the plans of a batch, if the model has recurrent layers."""
    return getattr(next(iter(plans.values())), "pieces", None)


def seq_idx_of(plans: dict[Any, AttentionPlan]) -> dict[str, torch.Tensor]:
    """Return the argument `seq_idx` of a call of the model, if it has recurrent layers."""
    pieces = pieces_of(plans)
    if pieces is None:
        return {}
    tag = torch.tensor(pieces.serial, dtype=torch.float64)  # that of others has integers
    tag.a2d_mpi_pieces = pieces  # which a layer needs if it is computed again
    return {"seq_idx": tag}


def _last(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the last k columns of x, or all."""
    return x[..., max(0, x.shape[-1] - k) :]


class _Gather(torch.autograd.Function):
    """Vectors of all ranks; their gradient is the sum over ranks, in the order of ranks."""

    @staticmethod
    def forward(ctx, pieces, counts, mine, *through):
        ctx.pieces, ctx.counts = pieces, counts
        whole = mine.new_empty(sum(counts), device="cpu")
        received = [x.numpy() for x in whole.split(counts)]
        pieces.exchange("forward", [mine.numpy(force=True)] * len(counts), received)
        return whole.to(mine.device), *(x.view_as(x) for x in through)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *through):
        sent = [x.numpy(force=True) for x in grad.contiguous().split(ctx.counts)]
        received = [np.empty_like(sent[ctx.pieces.grid.comm.rank]) for _ in sent]
        ctx.pieces.exchange("backward", sent, received)
        total = sum(received[1:], received[0])
        return None, None, torch.from_numpy(total).to(grad.device), *through


def _recurrence(
    pieces: Pieces,
    found: list[tuple[torch.Tensor, torch.Tensor]],
    split: Callable,
    add: Callable,
    initial: torch.Tensor | None,
    final: bool,
    apply: Callable = torch.mul,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return outputs of this rank's tokens, and the last states of all documents if `final`.

    Parameters
    ----------
    found : list of (out, tensor)
        Of each piece of this rank: outputs, and a tensor of T and b.
    split : callable
        It returns T and b.
    add : callable
        It returns `out` with A S, given j, of the j-th piece of this rank, `out` and S.
    initial : (documents, ...) tensor, optional
        The states before documents.  Default: zeros.
    final : bool
    apply : callable
        It applies T to a state.
    """

    def step(state: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
        if not len(x):  # nobody needs it
            return None
        transition, added = split(x)
        return added if state is None else apply(transition, state.to(added.dtype)) + added

    kept = [final or not x.ends for x in pieces.listed]
    parts = [x for i, (_, x) in zip(pieces.own, found) if kept[i]]
    shapes = [found[0][1].shape if x else (0,) for x in kept]
    with torch.autocast(found[0][0].device.type, enabled=False):
        whole, outs = pieces.gather(parts, shapes, *(out for out, _ in found))
        begun = [None] * pieces.documents if initial is None else initial
        entering, last = pieces.compose(whole, begun, step)
        own = enumerate(zip(outs, (entering[i] for i in pieces.own)))
        out = torch.cat([x if state is None else add(j, x, state) for j, (x, state) in own], 1)
        if not final:
            return out, None
        zero = torch.zeros_like(split(whole[0])[1])
        return out, torch.stack([zero if x is None else x.to(zero.dtype) for x in last])


# What follows computes a function over pieces.  `call` calls the model's function as the model
# does, but for some arguments.


def _convolution(call: Callable, pieces: Pieces, given: Given) -> torch.Tensor:
    """Convolve x, (1, C, n); a cache's columns of all documents may stand before it."""
    x, k = given["hidden_states"], given["weight"].shape[-1] - 1
    n = sum(pieces.listed[i].tokens.stop - pieces.listed[i].tokens.start for i in pieces.own)
    past, x = x.split([x.shape[-1] - n, n], -1)
    past = past[0].unflatten(-1, (pieces.documents, -1)).transpose(0, 1) if past.numel() else None
    before, _, x = pieces.columns(x, k, past, False)
    parts = [y for i in pieces.own for y in (before[i], pieces.cut(x, i, 2))]
    out = call(hidden_states=torch.cat(parts, -1))  # one call for all pieces
    return torch.cat(out.split([y.shape[-1] for y in parts], -1)[1::2], -1)


def _delta_rule(call: Callable, pieces: Pieces, given: Given) -> tuple:
    """The gated delta rule and Kimi's, of (1, n, H, D); a state is (H, dk, dv)."""
    value, initial = given["value"], given.get("initial_state")
    heads, dk, dv, found = value.shape[2], given["key"].shape[-1], value.shape[-1], []
    wide = torch.promote_types(value.dtype, torch.float32)
    eye = torch.eye(dk, dtype=wide, device=value.device)
    for i in pieces.own:
        own = {x: pieces.cut(given[x], i) for x in ("query", "key", "value", "g", "beta")}
        begun = None
        if initial is not None or not pieces.listed[i].begins:
            own["value"] = F.pad(own["value"], (0, dk))  # [v | 0]
            begun = F.pad(eye, (dv, 0)).expand(1, heads, dk, dv + dk).contiguous()  # [0 | I]
        out, state = call(**own, initial_state=begun, output_final_state=True)
        found.append((out, F.pad(state[0], (0, dv + dk - state.shape[-1]))))  # [b | T]

    def add(j: int, out: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        more = torch.einsum("bnhk,hkv->bnhv", out[..., dv:].to(state.dtype), state)
        return (out[..., :dv] + more).to(out.dtype)

    split, final = lambda x: (x[..., dv:], x[..., :dv]), given.get("output_final_state", False)
    return _recurrence(pieces, found, split, add, initial, final, torch.matmul)


def _scan(call: Callable, pieces: Pieces, given: Given) -> torch.Tensor | tuple:
    """Mamba 2, of (1, n, H, P); a state is (H, P, N), and T is a number for each head."""
    (*_, heads, width), C, found, decays = given["hidden_states"].shape, given["C"], [], []
    dt, bias = given["dt"], given.get("dt_bias")  # as the function computes them
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if given.get("dt_softplus") else dt
    dt = dt.clamp(*given.get("dt_limit", (0.0, float("inf"))))
    logs = given["A"] * dt.to(torch.promote_types(dt.dtype, torch.float32))
    for i in pieces.own:
        own = {x: pieces.cut(given[x], i) for x in ("hidden_states", "dt", "B", "C")}
        out, state = call(**own, initial_states=None, return_final_states=True)
        decays.append(pieces.cut(logs, i).cumsum(1).exp())  # (1, n, H)
        found.append((out, torch.cat([state[0].flatten(1), decays[-1][0, -1, :, None]], 1)))

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, -1, None, None], x[:, :-1].unflatten(1, (width, -1))

    def add(j: int, out: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        c = pieces.cut(C, pieces.own[j]).repeat_interleave(heads // C.shape[2], 2)
        more = torch.einsum("bnhs,hps->bnhp", c * decays[j][..., None], state.to(decays[j].dtype))
        return out + more.to(out.dtype)

    final = given.get("return_final_states", False)
    out, last = _recurrence(pieces, found, split, add, given.get("initial_states"), final)
    return (out, last) if final else out


# Functions of each token alone, of the same shapes, for trials of a model.


def _mean(*tensors: torch.Tensor) -> torch.Tensor:
    return sum(x.flatten(2).mean(-1) for x in tensors)[..., None, None]


def _delta_alone(query, key, value, g, beta, output_final_state=False, **_):
    state = value.new_zeros(1, value.shape[2], key.shape[-1], value.shape[-1])
    out = (value + _mean(query, key, g, beta)).to(value.dtype)
    return out, state if output_final_state else None


def _scan_alone(hidden_states, dt, B, C, return_final_states=False, **_):
    out = (hidden_states + _mean(dt, B, C)).to(hidden_states.dtype)
    state = out.new_zeros(1, *out.shape[2:], B.shape[3])
    return (out, state) if return_final_states else out


# By names in files of models: functions over pieces and of each token alone, and what they take.
DELTA = _delta_rule, _delta_alone, "query key value g beta initial_state output_final_state"
FUNCTIONS: dict[str, tuple[Callable, Callable, str]] = {
    "causal_conv1d_fn": (_convolution, lambda hidden_states, **_: hidden_states,
                         "hidden_states weight"),
    "torch_chunk_gated_delta_rule": DELTA,
    "chunk_kimi_delta_attention": DELTA,
    "mamba2_chunk_scan": (_scan, _scan_alone, "hidden_states dt A B C dt_bias dt_softplus "
                          "dt_limit initial_states return_final_states"),
    # Fused functions may decline a call by returning None.
    "mamba2_split_conv1d_scan_combined": (lambda *_: None, lambda **_: None, ""),
}  # fmt: skip


def install(model: torch.nn.Module) -> tuple[list[str], list[str]]:
    """Replace the functions in the files of a model.

    Returns
    -------
    known : list of str
        Names of functions that the files have.
    problems : list of str
        What other functions of these names take.
    """
    known, problems = [], []
    for module in dict.fromkeys(sys.modules[type(x).__module__] for x in model.modules()):
        for name in (x for x in FUNCTIONS if x in vars(module)):
            takes = inspect.signature(vars(module)[name]).parameters
            if {*FUNCTIONS[name][2].split()} <= {*takes}:
                known.append(name)
                if not hasattr(vars(module)[name], "a2d_mpi"):
                    setattr(module, name, _replaced(vars(module), name, [*takes]))
            else:
                problems.append(f"{module.__name__}.{name} takes {', '.join(takes)}")
    return known, problems


def _replaced(module: dict[str, Any], name: str, takes: list[str]) -> Callable:
    """Return a function that replaces that of a name; see the top of this file."""
    original, (spread, alone, _) = module[name], FUNCTIONS[name]

    @torch.compiler.disable
    def over_pieces(seq_idx: torch.Tensor, args: tuple, kwargs: Given) -> Any:
        if (pieces := PLANS.get(int(seq_idx))) is None:
            raise ValueError("the ContextParallel of this call was freed")

        def call(**changed: Any) -> Any:
            given = [changed.pop(x, y) for x, y in zip(takes, args)]
            return original(*given, **kwargs | changed)

        return spread(call, pieces, dict(zip(takes, args)) | kwargs)

    @wraps(original)
    def function(*args: Any, seq_idx: torch.Tensor | None = None, **kwargs: Any) -> Any:
        note = None if torch.compiler.is_compiling() else getattr(_now, "note", None)
        if note is _alone:
            return alone(**dict(zip(takes, args)) | kwargs)
        if isinstance(seq_idx, torch.Tensor) and seq_idx.dtype == torch.float64:
            found = over_pieces(seq_idx, args, kwargs)
        else:
            found = original(*args, **kwargs, **({} if seq_idx is None else {"seq_idx": seq_idx}))
        if note is not None and found is not None:
            out = (found[0] if isinstance(found, tuple) else found)[0]
            note(name, out.T if spread is _convolution else out.flatten(1))
        return found

    function.a2d_mpi = original
    return function


def _alone(name: str, x: torch.Tensor) -> None:
    """Stand for a trial, whose results nobody notes."""


@contextmanager
def trial(note: Callable[[str, torch.Tensor], Any] = _alone) -> Iterator[None]:
    """Let the functions compute each token alone in this context and thread.

    With `note` they compute as ever, and `note` gets the name and the rows, (n, width), of each
    result.
    """
    _now.note = note
    try:
        yield
    finally:
        _now.note = None
