"""The steps of a program: everything that one rank does in one phase, in order.

A step is a plain value.  It names arrays, and rows by their numbers in the memory of an array.
What costs time, bytes or memory is a step or a declared array.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from a2d_mpi.masks.intervals import Runs, size

# Kinds of rows, each with the tensors of a row.
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
KINDS_OF_KEYS = ("kv", "dkv")  # kinds whose rows belong to keys; other kinds belong to queries
# Tensors that travel in the accumulation dtype: sums and statistics.
SUMS = ("lse", "delta", "dq", "dk", "dv")
PARTIALS = ("out", "dq", "dkv")  # kinds of rows that hold partial results


class Rows(NamedTuple):
    """Rows of an array.

    Attributes
    ----------
    array : str
        Name of the array.
    runs : tuple of range
        Numbers of the rows in the memory of the array, in order.

    Examples
    --------
    >>> rows = Rows("row kv", (range(0, 4), range(6, 8)))
    >>> rows.count
    6
    """

    array: str
    runs: tuple[range, ...]

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(map(len, self.runs))

    def of(self, array: str) -> Rows:
        """Return the same rows of another array, which has the same pieces."""
        return Rows(array, self.runs)


@dataclass(frozen=True)
class TokenArray:
    """Tensors of tokens of one or several owners.

    For example, of 8 causal tokens in zigzag order rank 0 owns 0 1 6 7, and rank 1 owns 2 3 4 5.
    An array of all rows of rank 0, and of two runs of rank 1::

        piece    owner 0                | owner 1, two runs of places
        place    0     1     2     3    | 0           3
        token    0     1     6     7    | 2           5
        row      0     1     2     3    | 4           5         piece follows piece
        row      0     1     4     5    | 2           3         by token

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    pieces : tuple of (int, Runs)
        Owners, and the places of tokens in the owner's shard, in the order of memory.  An owner
        may have several pieces.
    role : {"given", "result", "buffer"}
        Whether the array comes from the caller, goes to the caller, or is a buffer of the plan.
    accumulated : tuple of str
        Tensors that have the accumulation dtype; the others have the storage dtype.
    by_token : bool
        Whether the rows are in the order of tokens.  Otherwise piece follows piece.
    all_heads : bool
        Whether it has the heads of all context-parallel groups.
    parcel : bool
        Whether its tensors follow each other in memory, and travel in one message.
    as_computed : bool
        Whether the kernel chooses the dtype of the partial results that it writes to the array.
    wire : bool
        Whether its tensors are encoded, see `a2d_mpi.core.config.AttentionConfig.row`.
    memory : str
        Name of the memory, which several arrays may use at different times.  Default of
        `a2d_mpi.schedules.program.Program.array`: the name of the array.

    Examples
    --------
    >>> of_0, of_1 = ((0, 4),), ((0, 1), (3, 4))  # runs of places in the shards of two ranks
    >>> array = TokenArray("kv", ((0, of_0), (1, of_1)))
    >>> array.offsets, array.length, array.of_keys
    ([0, 4, 6], 6, True)
    """

    kind: str
    pieces: tuple[tuple[int, Runs], ...]
    role: str = "buffer"
    accumulated: tuple[str, ...] = SUMS
    by_token: bool = False
    all_heads: bool = False
    parcel: bool = False
    as_computed: bool = False
    wire: bool = False
    memory: str = ""

    @property
    def of_keys(self) -> bool:
        """True if its rows belong to keys, False if they belong to queries."""
        return self.kind in KINDS_OF_KEYS

    @property
    def length(self) -> int:
        """Number of rows of the array."""
        return self.offsets[-1]

    @cached_property
    def offsets(self) -> list[int]:
        """First row of each piece, if the array is not by token, and the length of the array."""
        return list(accumulate((size(places) for _, places in self.pieces), initial=0))

    @cached_property
    def by_owner(self) -> dict[int, list[tuple[int, Runs]]]:
        """First row and places of each piece, by owner."""
        found: dict[int, list[tuple[int, Runs]]] = {}
        for offset, (owner, places) in zip(self.offsets, self.pieces):
            found.setdefault(owner, []).append((offset, places))
        return found


class Message(NamedTuple):
    """A message between this rank and a peer of a channel: a `Send` or a `Receive`.

    On MPI it is one message for each tensor of the rows; a parcel is one.

    Attributes
    ----------
    channel : str
    peer : int
        Rank of the peer in the group.
    rows : Rows
        One run.
    tag : int
        Number that distinguishes messages which the two ranks may post in different orders.
    turn : int
        Number of earlier messages with the same channel, peer, kind of rows, direction and tag.
        The peer counts in the same way.
    index : int
        Number of earlier messages of the program.
    """

    channel: str
    peer: int
    rows: Rows
    tag: int
    turn: int
    index: int


class Send(Message):
    """Start sending rows to the peer."""


class Receive(Message):
    """Start receiving rows from the peer."""


class Wait(NamedTuple):
    """Block until messages of one channel are done.

    Attributes
    ----------
    channel : str
    messages : tuple of int
        The `index` of each message.
    """

    channel: str
    messages: tuple[int, ...]


class Drain(Wait):
    """A wait at the end of a program, for messages on which nothing in it depends."""


class _Transfer(NamedTuple):
    source: Rows
    target: Rows


class Copy(_Transfer):
    """Copy rows.  The order of the rows, and the dtype of the two arrays, may differ."""


class Add(_Transfer):
    """Add rows to other rows, tensor by tensor; the order of the rows may differ."""


class Encode(_Transfer):
    """Encode rows in the narrow format of messages; tensors that have none are copied."""


class Decode(_Transfer):
    """Decode rows from the narrow format of messages; tensors that have none are copied."""


class TakeHeads(NamedTuple):
    """Copy the heads that a rank of the Ulysses group computes from an array with all heads."""

    source: Rows
    target: Rows
    head: int


class PutHeads(NamedTuple):
    """Copy the heads that a rank of the Ulysses group computed to an array with all heads.

    Attributes
    ----------
    source, target : Rows
    head : int
        Rank in the Ulysses group.
    sums : tuple of str
        Tensors that are added instead.
    """

    source: Rows
    target: Rows
    head: int
    sums: tuple[str, ...]


class Clear(NamedTuple):
    """Set rows to zero."""

    rows: Rows


class Attend(NamedTuple):
    """Forward: write the partial result of queries over keys to the target; each is one run.

    A query that sees none of the keys gets out 0 and lse -inf.
    """

    queries: Rows
    keys: Rows
    target: Rows


class AttendAndMerge(Attend):
    """Forward: merge the partial result of queries over keys into rows that hold another one.

    `a2d_mpi.schedules.passes.merged` makes an `Attend` and a `Merge` of it.
    """


class Differentiate(NamedTuple):
    """Backward: add the gradients of queries over keys; each of the four rows is one run.

    Attributes
    ----------
    queries, keys, dq, dkv : Rows
    fresh : bool
        Whether to write the gradients instead: the targets hold nothing yet.
    """

    queries: Rows
    keys: Rows
    dq: Rows
    dkv: Rows
    fresh: bool = False


class Merge(NamedTuple):
    """Merge a partial result into rows that hold another one; the source is scratch afterwards.

    Attributes
    ----------
    source, target : Rows
    compensation : Rows
        Rounding error of the target's lse in earlier merges.
    """

    source: Rows
    target: Rows
    compensation: Rows


KernelCall = Attend | Differentiate
Move = _Transfer | TakeHeads | PutHeads  # from a source to a target
Step = Message | Wait | Move | Clear | KernelCall | Merge
