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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import PLANS, Caller
from a2d_mpi.comm.channel import Channel
from a2d_mpi.comm.transport import Transport
from a2d_mpi.core.sizes import next_ranks

Shape = tuple[int, ...]
_now = threading.local()  # .alone: this thread tries a model; .pieces: of the latest convolution


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

    @property
    def n(self) -> int:
        """Number of its tokens."""
        return self.tokens.stop - self.tokens.start


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
                    raise ValueError(
                        f"linear and recurrent layers need runs of consecutive tokens, and shards "
                        f'are {shards.name}: pass distribution="zigzag"'
                    )
                cuts = [run[0], *(x for x in bounds if run[0] < x <= run[-1]), run[-1] + 1]
                for x, y in ((x, y) for x, y in zip(cuts, cuts[1:]) if x < y):
                    i = int(np.searchsorted(bounds, x, side="right")) - 1
                    tokens = slice(begin, begin + y - x)
                    found.append((x, Piece(rank, tokens, i, x == bounds[i], y == bounds[i + 1])))
                    begin = tokens.stop
        self.listed = [x for _, x in sorted(found)]
        # Of all ranks, in the order in which they are sent; then of this rank.
        self._order = sorted(range(len(found)), key=lambda i: self.listed[i][:2])
        self.own = [i for i in self._order if self.listed[i].rank == self.grid.comm.rank]
        everyone = tuple(range(self.grid.comm.size))
        with self.grid.call("making", self) as call:
            call.agree({"tokens": whole, "documents": bounds})
        self._channel = Channel(self.grid.comm_of("all", everyone), "states", plan.traffic)

    def gather(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], *through: torch.Tensor
    ) -> tuple[list[torch.Tensor], ...]:
        """Return tensors of all pieces, given this rank's, in float32 or wider.  Collective.

        Its backward pass is collective, too: all ranks reach it through the tensors `through`.

        Parameters
        ----------
        parts : sequence of tensor
            Of each piece of this rank.
        shapes : sequence of shape
            Of all pieces.
        *through : tensor

        Returns
        -------
        whole : list of tensor
            Of all pieces.
        through : list of tensor
        """
        sizes = [int(np.prod(x)) for x in shapes]
        if not sum(sizes):
            return [through[0].new_empty(x) for x in shapes], [*through]
        counts = [0] * self.grid.comm.size
        for piece, size in zip(self.listed, sizes):
            counts[piece.rank] += size
        wide = torch.promote_types(through[0].dtype, torch.float32)
        mine = torch.cat([through[0].new_empty(0, dtype=wide), *(x.flatten() for x in parts)])
        whole, *through = _Gather.apply(self, counts, mine.to(wide), *through)
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

    def last_columns(
        self, x: torch.Tensor, k: int, every: bool, *through: torch.Tensor
    ) -> tuple[list[torch.Tensor], ...]:
        """Gather the last k columns, or fewer, of all pieces, of x, (1, C, n); see `gather`.

        `every`: also of pieces that end their document.
        """
        counts = [min(k, x.n) if every or not x.ends else 0 for x in self.listed]
        parts = [x[..., self.listed[i].tokens] for i in self.own]
        parts = [_last(part, counts[i]) for i, part in zip(self.own, parts)]
        return self.gather(parts, [(1, x.shape[1], y) for y in counts], *through)

    def before(
        self, i: int, k: int, tails: list[torch.Tensor], past: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the k columns before piece i, (1, C, k), with zeros before its document.

        `tails` are the last columns of all pieces; `past`, (documents, C, m), those of a cache.
        """
        found, n = [tails[i][..., :0]], 0
        while n < k and not self.listed[i].begins:
            i -= 1
            found.insert(0, tails[i])
            n += tails[i].shape[-1]
        if n < k and past is not None:
            found.insert(0, past[self.listed[i].document, None].to(found[0].dtype))
        found = _last(torch.cat(found, -1), k)
        return F.pad(found, (k - found.shape[-1], 0))

    def compose(
        self,
        states: list[tuple[torch.Tensor, torch.Tensor]],
        initial: torch.Tensor | None,
        apply: Callable,
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Return the state that enters each piece, and the last one of each document.

        None is 0.

        Parameters
        ----------
        states : list of (T, b)
            Of all pieces; empty tensors where none is needed.
        initial : (documents, ...) tensor, optional
            States before the documents.
        apply : callable
            It applies T to a state.
        """
        entering, state = [], None
        last = [None] * self.documents if initial is None else [*initial]
        for piece, (transition, added) in zip(self.listed, states):
            state = last[piece.document] if piece.begins else state
            entering.append(state)
            if added.numel():
                begun = state is not None
                state = apply(transition, state.to(added.dtype)) + added if begun else added
            if piece.ends:
                last[piece.document] = state
        return entering, last


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
        pieces.exchange("forward", [mine.detach().numpy(force=True)] * len(counts), received)
        return whole.to(mine.device), *(x.view_as(x) for x in through)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *through):
        sent = [x.numpy(force=True) for x in grad.split(ctx.counts)]
        own = sent[ctx.pieces.grid.comm.rank]
        received = [np.empty_like(own) for _ in sent]
        ctx.pieces.exchange("backward", sent, received)
        total = received[0]
        for x in received[1:]:
            total += x
        return None, None, torch.from_numpy(total).to(grad.device), *through


def _recurrence(
    pieces: Pieces,
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    shapes: tuple[Shape, Shape],
    initial: torch.Tensor | None,
    final: bool,
    apply: Callable = torch.mul,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], torch.Tensor | None]:
    """Return outputs and entering states of this rank's pieces, and the last states if `final`.

    Parameters
    ----------
    found : list of (out, T, b)
        Of each piece of this rank.
    shapes : (shape, shape)
        Of T and b.
    initial, final, apply
        States before documents; whether states after them are needed; see `Pieces.compose`.
    """
    sizes = [int(np.prod(x)) for x in shapes]
    kept = [final or not x.ends for x in pieces.listed]
    parts = [torch.cat([x.flatten() for x in y]) for _, *y in found]
    parts = [x[: len(x) * kept[i]] for i, x in zip(pieces.own, parts)]
    whole, outs = pieces.gather(
        parts, [(sum(sizes) * x,) for x in kept], *(out for out, *_ in found)
    )
    states = [x.split(sizes) if len(x) else (x, x) for x in whole]
    states = [[y.view(s) if len(y) else y for y, s in zip(x, shapes)] for x in states]
    entering, last = pieces.compose(states, initial, apply)
    if not final:
        return outs, [entering[i] for i in pieces.own], None
    zero = whole[0].new_zeros(shapes[1])
    last = torch.stack([zero if x is None else x.to(zero.dtype) for x in last])
    return outs, [entering[i] for i in pieces.own], last


def convolution(
    original: Callable,
    pieces: Pieces,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *args: Any,
    **others: Any,
) -> torch.Tensor:
    """A causal convolution of each channel of x, (1, C, n).

    Before the columns of this rank's tokens there may be those that a cache has of each document.
    """
    k, n = weight.shape[-1] - 1, sum(pieces.listed[i].n for i in pieces.own)
    past, x = hidden_states.split([hidden_states.shape[-1] - n, n], -1)
    past = past[0].unflatten(-1, (pieces.documents, -1)).transpose(0, 1) if past.numel() else None
    tails, (x,) = pieces.last_columns(x, k, False, x)
    parts, sizes = [], []
    for i in pieces.own:  # one call for all pieces, with k columns before each
        own = x[..., pieces.listed[i].tokens]
        parts += [pieces.before(i, k, tails, past).to(x.dtype), own]
        sizes += [k, own.shape[-1]]
    out = original(torch.cat(parts, -1), weight, *args, **others)
    return torch.cat(out.split(sizes, -1)[1::2], -1)


def delta_rule(
    original: Callable,
    pieces: Pieces,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule and Kimi's, of (1, n, H, D); a state is (H, dk, dv)."""
    heads, dk, dv, found = value.shape[2], key.shape[-1], value.shape[-1], []
    wide = torch.promote_types(value.dtype, torch.float32)
    eye = torch.eye(dk, dtype=wide, device=value.device)
    for i in pieces.own:
        q, k, v, *gates = (x[:, pieces.listed[i].tokens] for x in (query, key, value, g, beta))
        begins = None
        if initial_state is not None or not pieces.listed[i].begins:
            v = F.pad(v, (0, dk))  # [v | 0]
            begins = F.pad(eye, (dv, 0)).expand(1, heads, dk, dv + dk).contiguous()  # [0 | I]
        given = {"initial_state": begins, "output_final_state": True, **others}
        out, state = original(q, k, v, g=gates[0], beta=gates[1], **given)
        state = F.pad(state[0], (0, dv + dk - state.shape[-1]))
        found.append((out, state[..., dv:], state[..., :dv]))
    shapes = (heads, dk, dk), (heads, dk, dv)
    with torch.autocast(value.device.type, enabled=False):
        given = found, shapes, initial_state, output_final_state, torch.matmul
        outs, entering, last = _recurrence(pieces, *given)
        for i, (out, state) in enumerate(zip(outs, entering)):
            if state is not None:
                more = torch.einsum("bnhk,hkv->bnhv", out[..., dv:].to(state.dtype), state)
                outs[i] = (out[..., :dv] + more).to(out.dtype)
    return torch.cat(outs, 1), last


def scan(
    original: Callable,
    pieces: Pieces,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Mamba 2, of (1, n, H, P); a state is (H, P, N), and T is a number for each head."""
    heads, x, found, decays = hidden_states.shape[2], hidden_states, [], []
    wide = torch.promote_types(x.dtype, torch.float32)
    given = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, **others}
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    for i in pieces.own:
        own = pieces.listed[i].tokens
        asked = x[:, own], dt[:, own], A, B[:, own], C[:, own], chunk_size
        out, state = original(*asked, return_final_states=True, **given)
        decays.append((A.to(wide) * step[:, own].to(wide)).cumsum(1).exp())  # (1, n, H)
        found.append((out, decays[-1][0, -1], state[0]))
    shapes = (heads, 1, 1), (heads, x.shape[3], B.shape[3])
    with torch.autocast(x.device.type, enabled=False):
        asked = found, shapes, initial_states, return_final_states
        outs, entering, last = _recurrence(pieces, *asked)
        for j, (i, state) in enumerate(zip(pieces.own, entering)):
            if state is not None:
                c = C[:, pieces.listed[i].tokens].to(wide)
                c = c.repeat_interleave(heads // C.shape[2], 2) * decays[j][..., None]
                more = torch.einsum("bnhs,hps->bnhp", c, state.to(wide))
                outs[j] = outs[j] + more.to(outs[j].dtype)
    out = torch.cat(outs, 1)
    return (out, last) if return_final_states else out


# Functions of each token alone, of the same shapes, for trials of a model.


def _mean(*tensors: torch.Tensor) -> torch.Tensor:
    return sum(x.flatten(2).mean(-1) for x in tensors)[..., None, None]


def _delta_alone(query, key, value, g, beta, output_final_state=False, **_):
    state = value.new_zeros(1, value.shape[2], key.shape[-1], value.shape[-1])
    out = (value + _mean(query, key, g, beta)).to(value.dtype)
    return out, state if output_final_state else None


def _scan_alone(x, dt, A, B, C, *_, return_final_states=False, **__):
    out = (x + _mean(dt, B, C)).to(x.dtype)
    return (out, x.new_zeros(1, *x.shape[2:], B.shape[3])) if return_final_states else out


# By names in files of models: functions over pieces and of each token alone.
FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "causal_conv1d_fn": (convolution, lambda x, *_, **__: x),
    "torch_chunk_gated_delta_rule": (delta_rule, _delta_alone),
    "chunk_kimi_delta_attention": (delta_rule, _delta_alone),
    "mamba2_chunk_scan": (scan, _scan_alone),
    # Fused functions may decline a call by returning None.
    "mamba2_split_conv1d_scan_combined": (lambda *_, **__: None, lambda *_, **__: None),
}


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
        for name, (spread, alone) in FUNCTIONS.items():
            original = vars(module).get(name)
            if original is None:
                continue
            if not hasattr(original, "a2d_mpi"):
                takes = inspect.signature(original).parameters
                if not _takes(takes, spread):
                    problems.append(f"{module.__name__}.{name} takes {', '.join(takes)}")
                    continue
                setattr(module, name, _dispatched(original, spread, alone))
            known.append(name)
    return known, problems


def _takes(parameters: Sequence[str], spread: Callable) -> bool:
    """Return whether a function has the parameters of the one that replaces it."""
    ours = [x for x in inspect.signature(spread).parameters.values() if x.kind != x.VAR_KEYWORD]
    ours = [x for x in ours if x.kind != x.VAR_POSITIONAL][2:]  # of the tensors and options
    first = [x.name for x in ours if x.default is x.empty]
    return [*parameters][: len(first)] == first and {x.name for x in ours} <= {*parameters}


def _dispatched(original: Callable, spread: Callable, alone: Callable) -> Callable:
    """Return a function that replaces another one; see the top of this file."""

    @torch.compiler.disable
    def over_pieces(serial: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pieces = PLANS.get(int(serial))
        if pieces is None:
            raise ValueError("the ContextParallel of this call was freed")
        return spread(original, pieces, *args, **kwargs)

    @wraps(original)
    def function(*args: Any, seq_idx: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and getattr(_now, "alone", False):
            return alone(*args, **kwargs)
        if isinstance(seq_idx, torch.Tensor) and seq_idx.dtype == torch.float64:
            return over_pieces(seq_idx, *args, **kwargs)
        return original(*args, **kwargs, **({} if seq_idx is None else {"seq_idx": seq_idx}))

    function.a2d_mpi = True
    return function


@contextmanager
def trial() -> Iterator[None]:
    """Let the functions compute each token alone in this context and thread."""
    _now.alone = True
    try:
        yield
    finally:
        _now.alone = False
