"""Programs: the steps of one rank in one phase, and the functions that write them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from a2d_mpi.masks.intervals import Runs, common, cut, size
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.progressions import concatenated, progressions, ranks_among
from a2d_mpi.schedules.steps import (
    KINDS,
    SUMS,
    Add,
    Array,
    Attend,
    Barrier,
    Clear,
    Copy,
    Differentiate,
    Merge,
    Message,
    Receive,
    Rows,
    Send,
    Step,
    Wait,
)

PARTIALS = ("out", "dq", "dkv")  # kinds of rows that hold partial results


class StepLimit(Exception):
    """The program has reached its largest number of steps."""


class _StepList(list):
    """Steps, at most `most`; None: any number."""

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self.most = most

    def append(self, step: Step) -> None:
        """Add a step; raise `StepLimit` if it is the last one that is allowed."""
        super().append(step)
        if self.most is not None and len(self) >= self.most:
            raise StepLimit


class Program:
    """Everything that one rank does in one phase.

    Parameters
    ----------
    rank : int
        Rank in the group.
    group : Group
    stride, offset : int
        The rank p of the group is the rank ``p stride + offset`` of the layout.
    most : int, optional
        Most steps to write.  Default: all.

    Attributes
    ----------
    channels : dict of str to tuple of int
        The ranks of the group in each channel, in the order of their ranks in the channel.
    arrays : dict of str to Array
    steps : list of Step
    body : int
        Number of steps before the waits that end the program.
    messages : int
        Number of messages, sent and received, and of barriers.
    results : dict of str to Rows
        Rows that hold the results of this rank's shard at the end, by kind.
    mask : Mask
        Mask of the pairs that this rank computes.
    """

    def __init__(
        self, rank: int, group: Group, stride: int = 1, offset: int = 0, most: int | None = None
    ) -> None:
        self.rank, self.group, self.mask = rank, group, group.problem.mask
        self._stride, self._offset = stride, offset
        self.channels: dict[str, tuple[int, ...]] = {}
        self.arrays: dict[str, Array] = {}
        self.steps = _StepList(most)
        self.results: dict[str, Rows] = {}
        self._piece_offsets: dict[str, list[int]] = {}
        self._index: dict[str, dict[int, list[int]]] = {}
        self._twins: dict[str, str] = {}
        self.messages = self.body = 0
        self._turns: dict[tuple, int] = {}
        self._token_runs: dict[Rows, list[range]] = {}
        self._packed: dict[Rows, Rows] = {}
        self._wires: dict[str, str] = {}
        self._on_wire: dict[str, list[range]] = {}
        self._encoded: dict[int, tuple[Rows, Rows]] = {}
        self._ends: dict[Rows, tuple[int, int]] = {}
        self._partial: dict[tuple, Rows] = {}
        self._written: dict[str, list[range]] = {}
        self._unsorted_sums: set[str] = set()
        self._sorted: set[str] = set()
        self._held: list[tuple[str, int, Rows]] = []
        self._barriers: list[Barrier] = []
        self._positions: dict[str, list[tuple[int, list[range]]]] = {}

    def grid_rank(self, rank: int) -> int:
        """Return the rank in the layout of a rank of the group."""
        return rank * self._stride + self._offset

    # Arrays and rows.

    def array(
        self,
        name: str,
        kind: str,
        pieces: Iterable[tuple[int, Runs]],
        role: str = "buffer",
        accumulated: tuple[str, ...] | None = None,
        **options: bool | str,
    ) -> str:
        """Declare an array, see `a2d_mpi.schedules.steps.Array`; return its name.

        By default all tensors of results have the accumulation dtype.
        """
        if name not in self.arrays:
            if accumulated is None:
                accumulated = KINDS[kind] if role == "result" else SUMS
            self.arrays[name] = Array(kind, tuple(pieces), role, accumulated, **options)
        return name

    def _offsets(self, name: str) -> list[int]:
        """Return the offsets of the pieces of an array, in rows; the last one is its length."""
        if name not in self._piece_offsets:
            sizes = (size(places) for _, places in self.arrays[name].pieces)
            self._piece_offsets[name] = list(accumulate(sizes, initial=0))
        return self._piece_offsets[name]

    def _of_owner(self, name: str, owner: int) -> Sequence[int]:
        """Return the numbers of the pieces of an array that belong to an owner."""
        if name not in self._index:
            index = self._index[name] = {}
            for i, (owned_by, _) in enumerate(self.arrays[name].pieces):
                index.setdefault(owned_by, []).append(i)
        return self._index[name].get(owner, ())

    def _held_at(self, name: str, owner: int) -> list[tuple[int, Runs]]:
        """Return the offsets of an owner's pieces in an array, and their places in the shard."""
        offsets, pieces = self._offsets(name), self.arrays[name].pieces
        return [(offsets[i], pieces[i][1]) for i in self._of_owner(name, owner)]

    def own(self, name: str, kind: str, role: str = "buffer", **options: bool | str) -> Rows:
        """Declare an array of this rank's shard; return all its rows."""
        places = self.group.all_places(kind in ("kv", "dkv"), self.rank)
        return self.rows(self.array(name, kind, [(self.rank, places)], role, **options))

    def rows(
        self,
        name: str,
        owner: int | None = None,
        places: Runs | None = None,
        head: int | None = None,
    ) -> Rows:
        """Return rows of an array.

        Parameters
        ----------
        name : str
            Name of the array.
        owner : int, optional
            Only rows of this owner's tokens.  Default: all rows.
        places : Runs, optional
            Only rows of the tokens at these places of the owner's shard.  For an array by token
            they must be the places of one of its pieces.  Default: all places.
        head : int, optional
            As in `Rows`.
        """
        array = self.arrays[name]
        if owner is None:
            return Rows(name, (range(array.length),) if array.length else (), head)
        if array.by_token:
            where = self._by_token(name)
            numbers = self._of_owner(name, owner)
            matching = (i for i in numbers if places in (None, array.pieces[i][1]))
            by_token = (r for i in matching for r in where[i][1])
            return Rows(name, tuple(by_token), head)
        runs: list[range] = []
        for offset, held in self._held_at(name, owner):
            _place(runs, offset, held, places)
        return Rows(name, tuple(runs), head)

    def rows_within(self, name: str, begin: int, end: int) -> Rows:
        """Return the rows of the tokens in ``[begin, end)``, of all owners."""
        array = self.arrays[name]
        shards, runs = self.group.shards(array.of_keys), []
        if not array.by_token:
            for offset, (owner, held) in zip(self._offsets(name), array.pieces):
                _place(runs, offset, held, shards.places(owner, ((begin, end),)))
            return Rows(name, tuple(runs))
        tokens = self.tokens(self.rows(name))
        first, last = np.searchsorted(tokens, (begin, end)).tolist()
        return Rows(name, (range(first, last),) if first < last else ())

    def matching(self, name: str, rows: Rows) -> Rows:
        """Return the rows of the array `name` for the tokens of `rows`."""
        runs: list[range] = []
        for owner, wanted in self.pieces(rows):
            for offset, held in self._held_at(name, owner):
                _place(runs, offset, held, wanted)
        return Rows(name, tuple(runs))

    def pieces(self, rows: Rows) -> list[tuple[int, Runs]]:
        """Return the owners of rows and the places in their shards.

        The array of the rows must not be by token.
        """
        pieces, offsets = self.arrays[rows.array].pieces, self._offsets(rows.array)
        own = []
        for run in rows.runs:
            i = bisect_right(offsets, run.start) - 1
            while i < len(pieces) and offsets[i] < run.stop:
                first, last = run.start - offsets[i], run.stop - offsets[i]
                owner, places = pieces[i]
                if first > 0 or last < offsets[i + 1] - offsets[i]:
                    places = cut(places, max(first, 0), last)
                if places:
                    own.append((owner, places))
                i += 1
        return own

    def token_runs(self, rows: Rows) -> list[range]:
        """Return the tokens of rows as progressions.

        For all rows of an array by token, the progressions are not in the order of the rows.
        """
        if rows not in self._token_runs:
            array = self.arrays[rows.array]
            if array.by_token and rows.count < array.length:
                return progressions(self.tokens(rows))
            shards = self.group.shards(array.of_keys)
            pieces = array.pieces if rows.count == array.length else self.pieces(rows)
            runs = [r for owner, places in pieces for r in shards.at(owner, places)]
            self._token_runs[rows] = runs
        return self._token_runs[rows]

    def tokens(self, rows: Rows) -> np.ndarray:
        """Return the token of every row, (rows,) int64, in the order of the rows."""
        array = self.arrays[rows.array]
        if array.by_token:
            of_array = self.token_runs(Rows(rows.array, (range(array.length),)))
            return np.sort(concatenated(of_array))[positions(rows)]
        return concatenated(self.token_runs(rows))

    def sorted_twin(self, name: str) -> str:
        """Declare an array with the same rows by token; return its name.

        If the rows of the array are in the order of tokens, return the array itself.
        """
        if name not in self._twins:
            array = self.arrays[name]
            self._twins[name] = name
            if not (array.by_token or self.in_order(array.of_keys, array.pieces)):
                options = {"accumulated": array.accumulated, "by_token": True}
                twin = self.array(f"{name} by token", array.kind, array.pieces, **options)
                self._twins[name] = twin
        return self._twins[name]

    def in_order(self, of_keys: bool, pieces: Iterable[tuple[int, Runs]]) -> bool:
        """Return True if the tokens of pieces, one piece after the other, are in order."""
        shards = self.group.shards(of_keys)
        runs = (r for owner, places in pieces for r in shards.at(owner, places))
        return all(a[-1] < b[0] for a, b in pairwise(runs))

    def sorted(self, name: str) -> str:
        """Copy the rows of an array to its sorted twin, only once; return the twin."""
        twin = self.sorted_twin(name)
        if twin != name and name not in self._sorted:
            self._sorted.add(name)
            self.copy(self.rows(name), self._piecewise(twin))
        return twin

    def piece_by_piece(self, name: str) -> Rows:
        """Return all rows of an array, one run per piece; the tokens of a run are in order."""
        runs = (range(a, b) for a, b in pairwise(self._offsets(name)) if a < b)
        return Rows(name, tuple(runs))

    def sums(
        self, name: str, kind: str, like: str, by_token: bool = False
    ) -> Callable[[Rows], Rows]:
        """Declare and clear an array of sums for the rows of another array.

        Parameters
        ----------
        name, kind : str
        like : str
            The array with the same tokens.
        by_token : bool
            Whether kernel calls add to all rows in the order of tokens, as with `sorted`.  Their
            sums have an array of their own, which is added to `name` before rows of `name` are
            first sent or combined.

        Returns
        -------
        callable
            Takes rows of the array `like` or of its sorted twin.  Returns the rows of their sums.
        """
        self.array(name, kind, self.arrays[like].pieces)
        self.clear(self.rows(name))
        names = {like: name}
        if by_token and (twin := self.sorted_twin(name)) != name:
            names[self.sorted_twin(like)] = twin
            self.clear(self.rows(twin))
            self._unsorted_sums.add(name)
        return lambda rows: rows._replace(array=names[rows.array])

    def _piecewise(self, name: str) -> Rows:
        """Return all rows of an array by token, in the order of its pieces."""
        return Rows(name, tuple(r for _, runs in self._by_token(name) for r in runs))

    def _by_token(self, name: str) -> list[tuple[int, list[range]]]:
        """Return the owner, and the positions in an array by token, of every piece."""
        if name not in self._positions:
            array = self.arrays[name]
            shards = self.group.shards(array.of_keys)
            tokens = [shards.at(owner, places) for owner, places in array.pieces]
            owners = (owner for owner, _ in array.pieces)
            self._positions[name] = list(zip(owners, ranks_among(tokens)))
        return self._positions[name]

    # Messages.

    def receive(self, channel: str, peer: int, rows: Rows, tag: int = 0) -> Receive | None:
        """Start receiving rows; return the message, or None without rows."""
        if not rows.runs:
            return None
        message = Receive(channel, peer, rows, tag, *self._count(False, channel, peer, rows, tag))
        if (wire := self._wire(rows.array)) == rows.array:
            self.steps.append(message)
        else:  # `wait` decodes the rows
            arriving = rows._replace(array=wire)
            self._encoded[message.index] = arriving, rows
            self._hold(arriving)
            self.steps.append(message._replace(rows=arriving))
        return message

    def send(self, channel: str, peer: int, rows: Rows, tag: int = 0) -> Send | None:
        """Start sending rows; return the message, or None without rows.

        The rows are encoded for the wire.  Scattered rows are packed into a copy.
        """
        if not rows.runs:
            return None
        if self.arrays[rows.array].kind in PARTIALS:
            self._pass_barriers()
        self._add_sorted_sums(rows.array)
        rows = self._for_wire(rows)
        if len(rows.runs) > 1:
            rows = self._side_by_side(rows)
        message = Send(channel, peer, rows, tag, *self._count(True, channel, peer, rows, tag))
        self.steps.append(message)
        return message

    def wait(self, messages: Iterable[Message | Barrier | None]) -> None:
        """Block until messages or barriers of one channel are done."""
        if posted := [x for x in messages if x]:
            self.steps.append(Wait(posted[0].channel, tuple(x.index for x in posted)))
            for x in posted:
                if x.index in self._encoded:
                    wire, rows = self._encoded.pop(x.index)
                    self.copy(wire, rows)

    def exchange(self, *messages: Message | None) -> list[Message]:
        """Return messages that travel at the same time.

        Without overlap, wait for them at once and return an empty list.
        """
        posted = [x for x in messages if x]
        if not self.group.overlap:
            self.wait(posted)
            return []
        return posted

    def gathered(self, *channels: str) -> None:
        """Enter a barrier of each channel, after this rank has gathered all rows from it.

        Call it after the waits for these rows, on every rank of the channels.  The rank sends its
        first partial result after all ranks of the channels have entered.  Earlier results would
        share links with rows that other ranks wait for.
        """
        for channel in channels:
            if len(self.channels[channel]) > 1:
                self._barriers.append(Barrier(channel, self.messages))
                self.steps.append(self._barriers[-1])
                self.messages += 1

    def _pass_barriers(self) -> None:
        """Wait for the barriers that this rank has entered."""
        for barrier in self._barriers:
            self.wait([barrier])
        self._barriers = []

    def give(self, channel: str, owner: int, rows: Rows) -> None:
        """Send a finished partial result to its owner; without overlap, `release` sends it."""
        if self.group.overlap:
            self.send(channel, owner, rows)
        else:
            self._held.append((channel, owner, rows))

    def release(self, channel: str) -> None:
        """Send all partial results of a channel that `give` held back."""
        for x in [x for x in self._held if x[0] == channel]:
            self.send(*x)
        self._held = [x for x in self._held if x[0] != channel]

    def finish(self) -> None:
        """Wait for all messages for which there is no wait yet."""
        self.steps.most, self.body = None, len(self.steps)
        waited = {x for step in self.steps if isinstance(step, Wait) for x in step.messages}
        left = [
            x
            for x in self.steps
            if isinstance(x, Send | Receive | Barrier) and x.index not in waited
        ]
        for channel in self.channels:
            self.wait(x for x in left if x.channel == channel)

    def _count(self, sent: bool, channel: str, peer: int, rows: Rows, tag: int) -> tuple[int, int]:
        """Count a message; return its turn and index."""
        key = sent, channel, peer, self.arrays[rows.array].kind, tag
        turn = self._turns[key] = self._turns.get(key, -1) + 1
        self.messages += 1
        return turn, self.messages - 1

    def _wire(self, name: str) -> str:
        """Return the array of the same rows encoded for the wire; itself if not encoded."""
        if name not in self._wires:
            array, self._wires[name] = self.arrays[name], name
            if self.group.encodes(array):
                room = f"{array.room or name} on the wire"
                self._wires[name] = f"{name} on the wire"
                self.arrays[f"{name} on the wire"] = replace(
                    array, role="buffer", wire=True, room=room
                )
        return self._wires[name]

    def _for_wire(self, rows: Rows) -> Rows:
        """Return rows encoded for the wire.

        Rows that are encoded already, for example because they arrived so, are not encoded again.
        Sums and partial results change, so they are encoded whenever they are sent.  If one of the
        given rows is sent, all rows of the array are encoded at once.
        """
        name, array = self._wire(rows.array), self.arrays[rows.array]
        if name == rows.array:
            return rows
        held = self._on_wire.get(name, ())
        if array.kind in PARTIALS or not all(
            any(x.start <= run.start and run.stop <= x.stop for x in held) for run in rows.runs
        ):
            source = self.rows(rows.array) if array.role == "given" else rows
            encoded = source._replace(array=name)
            self.copy(source, encoded)
            self._hold(encoded)
        return rows._replace(array=name)

    def _hold(self, encoded: Rows) -> None:
        """Record that an array for the wire holds rows; adjacent runs are joined."""
        held = self._on_wire.setdefault(encoded.array, [])
        for run in encoded.runs:
            if held and held[-1].stop == run.start:
                held[-1] = range(held[-1].start, run.stop)
            else:
                held.append(run)

    def _side_by_side(self, rows: Rows) -> Rows:
        """Return a packed copy of scattered rows, which is made when it is first needed."""
        if rows not in self._packed:
            array = self.arrays[rows.array]
            name = self.array(
                f"packed {len(self._packed)}",
                array.kind,
                self.pieces(rows),
                accumulated=array.accumulated,
                wire=array.wire,
            )
            self._packed[rows] = self.rows(name)
            self.copy(rows, self._packed[rows])
        return self._packed[rows]

    # Work.

    def copy(self, source: Rows, target: Rows) -> None:
        """Copy rows."""
        if source.runs:
            self.steps.append(Copy(source, target))

    def clear(self, rows: Rows) -> None:
        """Set rows to zero."""
        if rows.runs:
            self.steps.append(Clear(rows))

    def attend(self, queries: Rows, keys: Rows, target: Rows) -> None:
        """Compute a partial result; write it to rows without a result yet, or merge it."""
        if not queries.runs:
            return
        written = self._written.setdefault(target.array, [])
        if not any(a.start < b.stop and b.start < a.stop for a in target.runs for b in written):
            written += target.runs
            self.steps.append(Attend(queries, keys, target))
        elif self.sees(queries, keys):
            partial = self._partial_of(target)
            self.steps.append(Attend(queries, keys, partial))
            self.combine(partial, target)

    def differentiate(
        self, queries: Rows, keys: Rows, dq: Rows, dkv: Rows, fresh: bool = False
    ) -> None:
        """Add gradients, in one kernel call for each run of keys; write them if `fresh`."""
        if not fresh and not self.sees(queries, keys):
            return
        for k, dk in _common_runs(keys.runs, dkv.runs) or [((), ())]:
            k_rows, dkv_rows = keys._replace(runs=k), dkv._replace(runs=dk)
            self.steps.append(Differentiate(queries, k_rows, dq, dkv_rows, fresh))

    def combine(self, source: Rows, target: Rows) -> None:
        """Merge a partial result into rows of the same kind, or add a sum to them."""
        if not source.runs:
            return
        self._add_sorted_sums(source.array)
        array = self.arrays[target.array]
        if array.kind != "out":
            self.steps.append(Add(source, target))
            return
        name = f"compensation of {target.array}"
        if name not in self.arrays:
            self.array(name, "compensation", array.pieces)
            self.clear(self.rows(name))
        self.steps.append(Merge(source, target, target._replace(array=name)))

    def sees(self, queries: Rows, keys: Rows) -> bool:
        """Return True if any of the queries sees any of the keys."""
        if not (queries.runs and keys.runs):
            return False
        if type(self.mask) is Full:
            return True
        if type(self.mask) is Causal:
            return self.extremes(queries)[1] >= self.extremes(keys)[0]
        intervals = self.mask.intervals(self.tokens(queries), np.sort(self.tokens(keys)))
        return any((end > begin).any() for begin, end in intervals)

    def extremes(self, rows: Rows) -> tuple[int, int]:
        """Return the first and the last token of rows."""
        if rows not in self._ends:
            runs = self.token_runs(rows)
            self._ends[rows] = min(r[0] for r in runs), max(r[-1] for r in runs)
        return self._ends[rows]

    def _partial_of(self, target: Rows) -> Rows:
        """Declare rows for a partial result that is merged into `target` at once."""
        if target not in self._partial:
            self._partial[target] = self.rows(
                self.array(
                    f"partial {len(self._partial)}",
                    "out",
                    self.pieces(target),
                    accumulated=KINDS["out"],
                    as_computed=True,
                    room="partial",
                )
            )
        return self._partial[target]

    def _add_sorted_sums(self, name: str) -> None:
        """Add the sums in an array's sorted twin to the array, before its rows are used."""
        if name in self._unsorted_sums:
            self._unsorted_sums.remove(name)
            twin = self.sorted_twin(name)
            self.steps.append(Add(self._piecewise(twin), self.rows(name)))


def positions(rows: Rows) -> np.ndarray:
    """Return the positions of rows in the memory of their array, (rows,) int64."""
    return concatenated(rows.runs)


def common_rows(source: Rows, target: Rows) -> list[tuple[Rows, Rows]]:
    """Cut the rows of two arrays into pieces that are one run in both."""
    return [
        (source._replace(runs=a), target._replace(runs=b))
        for a, b in _common_runs(source.runs, target.runs)
    ]


def _common_runs(
    one: Sequence[range], other: Sequence[range]
) -> list[tuple[tuple[range], tuple[range]]]:
    pairs, i, j, a, b = [], 0, 0, 0, 0  # a, b: number of rows of the runs i, j that are done
    while i < len(one) and j < len(other):
        n = min(len(one[i]) - a, len(other[j]) - b)
        pairs.append(((one[i][a : a + n],), (other[j][b : b + n],)))
        a, b = a + n, b + n
        if a == len(one[i]):
            i, a = i + 1, 0
        if b == len(other[j]):
            j, b = j + 1, 0
    return pairs


def _place(runs: list[range], offset: int, held: Runs, places: Runs | None) -> None:
    """Append the positions of `places` to `runs`; the places `held` begin at `offset`."""
    for begin, end in held:
        wanted = ((begin, end),) if places is None else common(places, begin, end)
        for a, b in wanted:
            first, last = offset + a - begin, offset + b - begin
            if runs and runs[-1].stop == first:
                runs[-1] = range(runs[-1].start, last)
            else:
                runs.append(range(first, last))
        offset += end - begin
