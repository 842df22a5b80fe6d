"""Steps of a program: all that one rank does in one phase, in order.

A step is a plain value.  It names arrays, and rows by their positions in the memory of an array.
Whatever costs time, bytes or memory is a step or a declared array.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from a2d_mpi.masks.intervals import Runs

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
    "compensation": ("lse",),  # digits that merges round off
}
OF_KEYS = ("kv", "dkv")  # kinds whose rows are keys; the rows of the other kinds are queries
# Tensors that travel in the accumulation dtype: sums and statistics.
SUMS = ("lse", "delta", "dq", "dk", "dv")


class Rows(NamedTuple):
    """Rows of an array.

    Attributes
    ----------
    array : str
    runs : tuple of range
        Positions in the memory of the array, in order.
    head : int or None
        Of an array with all heads: only the heads of this rank of the Ulysses group.
    """

    array: str
    runs: tuple[range, ...]
    head: int | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(map(len, self.runs))


@dataclass(frozen=True)
class Array:
    """Tensors of the tokens of some owners.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    pieces : tuple of (int, Runs)
        Owners, and the places in the owner's shard of the tokens that the array holds, in the
        order of memory.  An owner may have several pieces.
    role : {"given", "result", "buffer"}
        From the caller, for the caller, or a buffer of the plan.
    accumulated : tuple of str
        Tensors of the accumulation dtype; the others have the storage dtype.
    by_token : bool
        Whether the rows are in the order of tokens, not piece after piece.
    all_heads : bool
        Whether it has the heads of all context-parallel groups.
    packed : bool
        Whether its tensors lie one after the other in memory, and travel in one message.
    as_computed : bool
        Whether the kernel chooses the dtype: it writes partial results there.
    wire : bool
        Whether its tensors are as they travel, see `a2d_mpi.core.config.AttentionConfig.row`.
    room : str
        Buffer that it shares with other arrays, at other times; default: its name.
    """

    kind: str
    pieces: tuple[tuple[int, Runs], ...]
    role: str = "buffer"
    accumulated: tuple[str, ...] = SUMS
    by_token: bool = False
    all_heads: bool = False
    packed: bool = False
    as_computed: bool = False
    wire: bool = False
    room: str = ""

    @property
    def of_keys(self) -> bool:
        """True if its rows are keys, False if they are queries."""
        return self.kind in OF_KEYS

    @cached_property
    def length(self) -> int:
        """Number of its rows."""
        return sum(end - begin for _, places in self.pieces for begin, end in places)


class Send(NamedTuple):
    """Start sending rows to a peer of a channel.

    Attributes
    ----------
    channel : str
    peer : int
    rows : Rows
        One run.
    tag : int
        Tells messages apart that the two ranks may post in different orders.
    turn : int
        Messages with the same channel, peer, kind of rows, direction and tag before this one: the
        peer counts them in the same way.
    index : int
        Messages and barriers of the program before this one.
    """

    channel: str
    peer: int
    rows: Rows
    tag: int
    turn: int
    index: int


class Receive(NamedTuple):
    """Start receiving rows from a peer of a channel; attributes as of `Send`."""

    channel: str
    peer: int
    rows: Rows
    tag: int
    turn: int
    index: int


class Barrier(NamedTuple):
    """Enter a barrier of a channel: it is done when all ranks of the channel have entered it.

    Attributes
    ----------
    channel : str
    index : int
        Messages and barriers of the program before this one.
    """

    channel: str
    index: int


class Wait(NamedTuple):
    """Block until messages or barriers of one channel are done, which are given by their index."""

    channel: str
    messages: tuple[int, ...]


class Copy(NamedTuple):
    """Copy rows, also between orders, heads, dtypes and formats of the wire."""

    source: Rows
    target: Rows


class Clear(NamedTuple):
    """Set rows to zero."""

    rows: Rows


class Attend(NamedTuple):
    """Forward: write the partial result of some queries over some keys, both one run.

    A query that sees none of the keys gets out 0 and lse -inf.
    """

    queries: Rows
    keys: Rows
    target: Rows


class Differentiate(NamedTuple):
    """Backward: add the gradients of some queries over some keys, each one run.

    Attributes
    ----------
    queries, keys, dq, dkv : Rows
    fresh : bool
        Write the gradients; the targets hold nothing yet.
    """

    queries: Rows
    keys: Rows
    dq: Rows
    dkv: Rows
    fresh: bool = False


class Merge(NamedTuple):
    """Merge a partial result into rows that hold another one; the source is scratch afterwards.

    `compensation`: digits of the target's lse that merges rounded off.
    """

    source: Rows
    target: Rows
    compensation: Rows


class Add(NamedTuple):
    """Add rows to others.

    Between arrays with different heads only tensors that are `Array.accumulated` are sums; the
    others are copied.
    """

    source: Rows
    target: Rows


Message = Send | Receive
Step = Send | Receive | Barrier | Wait | Copy | Clear | Attend | Differentiate | Merge | Add
