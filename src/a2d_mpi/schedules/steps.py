"""Steps of schedules: sends, receives, kernel calls and merges of a rank, in order.

A schedule is data: a list of steps, in order, without MPI, devices or times.  Others read it: the
executor (`a2d_mpi.attention.executor`) and the accounts (`a2d_mpi.schedules.accounts`).  It is of
one rank or of all at once: whatever depends on the rank is an int, or an array with an entry for
each rank; so a planner reads the schedules of thousands of ranks as fast as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from a2d_mpi.core.meetings import Others, Ranks
from a2d_mpi.schedules.sizes import Chosen, Meets, Span

# The tensors of a kind of rows.
KINDS = {
    "q": ("q",),
    "qd": ("dout", "q", "lse", "delta"),
    "kv": ("k", "v"),
    "out": ("out", "lse"),
    "dq": ("dq",),
    "dkv": ("dk", "dv"),
    "qkv": ("q", "k", "v"),
    "qkvd": ("dout", "q", "k", "v", "lse", "delta"),
    "gradients": ("dq", "dk", "dv"),
}
OF_KEYS = ("kv", "dkv")  # kinds whose rows are keys; those of the others are queries
WIDE = ("lse", "delta", "dq", "dk", "dv")  # sent as they are computed: sums, and statistics
FIRST, REST = "first", "rest"  # parts of a rank's own shard: what it computes first, and last


class Rows(NamedTuple):
    """Rows of an array.

    Attributes
    ----------
    array : str
    owner : Ranks or None
        Owner of the tokens; None: all owners of the array.
    part : (int, int), "first", "rest", Span, Chosen, Meets or None
        Of the tokens that the array has of the owner: the i-th of the chunks in which they travel
        along n ranks, each in a message; the share that their owner computes first, or last; those
        in a span of the sequence, which also selects among the tokens of all owners; those at
        some places of the shard; those that meet others; None: all.
    heads : Ranks or None
        Of an array with all heads: those of this rank of the head group.
    """

    array: str
    owner: Ranks | None = None
    part: tuple[int, int] | str | Span | Chosen | Meets | None = None
    heads: Ranks | None = None


@dataclass(frozen=True)
class Array:
    """Tensors of some owners' tokens, one owner after the other.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    owners : tuple of Ranks
        Empty: one owner at a time.
    role : {"given", "result", "buffer"}
        From the caller, for the caller, or a buffer of the plan.
    wide : tuple of str
        Tensors that have the dtype of the computation, not that of the caller.
    all_heads : bool
        Whether it has the heads of all context groups.
    packed : bool
        Whether its tensors lie one after the other, and travel in one message.
    by_token : bool
        Whether its rows are in the order of tokens, not one owner after the other.
    spans : tuple of Span, Chosen, Meets or None
        Of every owner, the tokens that the array has; empty, or None: whole shards.  An owner may
        occur with several spans.
    meets : Others, optional
        The array has those tokens of an owner that meet these others, and the whole shard of its
        own rank where `owners` are given; None: whole shards.
    room : str
        Buffer that it shares with other arrays, at other times; default: one of its own.
    """

    kind: str
    owners: tuple[Ranks, ...]
    role: str = "buffer"
    wide: tuple[str, ...] = WIDE
    all_heads: bool = False
    packed: bool = False
    by_token: bool = False
    spans: tuple[Span | Chosen | Meets | None, ...] = ()
    meets: Others | None = None
    room: str = ""

    @property
    def of_keys(self) -> bool:
        """True if its rows are keys, not queries."""
        return self.kind in OF_KEYS

    @property
    def pieces(self) -> list[tuple[Ranks, Span | Chosen | Meets | None]]:
        """Owners with their spans; None: whole shards."""
        return list(zip(self.owners, self.spans or (None,) * len(self.owners)))


@dataclass(frozen=True, eq=False)
class Message:
    """Rows on their way, each tensor by itself.

    Attributes
    ----------
    sent : bool
        Or received.
    channel : str
    peer : Ranks
        Receiver of what is sent, or sender.
    rows : Rows
    tag : int
        Tells apart messages of one kind that both sides may post in different orders: 0 to 3.
    """

    sent: bool
    channel: str
    peer: Ranks
    rows: Rows
    tag: int = 0


@dataclass(frozen=True)
class Wait:
    """Until these messages are done."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Copy:
    """Rows of one array to another."""

    rows: Rows
    to: Rows


@dataclass(frozen=True)
class Zero:
    """All of an array, for as many tokens as its rows are."""

    rows: Rows


@dataclass(frozen=True)
class Attend:
    """One call of a kernel: queries against keys, where the mask lets them.

    Forward it makes a partial result for the rows `into`, which is merged with what these hold;
    backward it adds to the gradients `into` and `keys_into`, or writes them if they are `fresh`.
    """

    queries: Rows
    keys: Rows
    into: Rows
    keys_into: Rows | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Merge:
    """A partial result that came: merged, or added, to rows of the same kind.

    Of gradients that have other heads than those of their target, only `Array.wide` ones are
    sums; the others are copied.
    """

    rows: Rows
    to: Rows


Step = Message | Wait | Copy | Zero | Attend | Merge
