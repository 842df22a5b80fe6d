"""All-gather and reduce-scatter along a channel, by posted point-to-point messages.

Streamed, the shards of the other members, or the partial results, pass through two buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.group import chunked
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Receive, Rows

# Places in an owner's shard of the rows that a member of the channel requires.
Required = Callable[[int, int], Runs]
Coming = Iterable[tuple[int, Receive]]  # owners, and the messages that bring their rows
SLOTS = 2  # buffers that rows pass through


def all_gather(
    p: Program,
    channel: str,
    own: str,
    peers: Sequence[int],
    required: Required,
    by_token: bool = False,
) -> tuple[str, Coming]:
    """Gather the rows that this rank requires of all members of a channel.

    Parameters
    ----------
    p : Program
    channel : str
    own : str
        Array of this rank's shard.
    peers : sequence of int
        The other members, nearest following first: no rank is everybody's first target.
    required : callable
    by_token : bool
        The rows shall be in the order of tokens.  Rows that are not, shard after shard, arrive in
        two buffers and are copied.

    Returns
    -------
    array : str
        All gathered rows, owner by owner in the order of the channel, and all of this rank's own.
    coming : iterable of (int, Receive)
        To be iterated over once; with `by_token` no row is copied before.
    """
    if not peers:
        return own, []
    array, rank, ranks = p.arrays[own], p.rank, len(peers) + 1
    whole = p.group.whole(array.of_keys, rank)
    pieces = [(x, whole if x == rank else required(x, rank)) for x in p.channels[channel]]
    room = "held" if p.group.stream else channel
    if by_token and not p.in_order(array.of_keys, pieces):
        cut = [(x, y) for x, z in pieces for y in ([z] if x == rank else chunked(z, ranks))]
        gathered = p.array(channel, array.kind, cut, by_token=True, room=room)
        coming = Stream(p, channel, own, peers, required, gathered)
    else:
        gathered, coming = p.array(channel, array.kind, pieces, room=room), []
        for peer in peers:
            for chunk in chunked(required(peer, rank), ranks):
                coming.append((peer, p.receive(channel, peer, p.rows(gathered, peer, chunk))))
        _send_own(p, channel, own, peers, required)
    p.copy(p.rows(own), p.rows(gathered, rank))
    return gathered, coming


def _send_own(
    p: Program, channel: str, own: str, peers: Sequence[int], required: Required
) -> None:
    """Send this rank's rows to all that require them."""
    # They are the first that the rank before it needs, and the last of the next.
    for peer in reversed(peers):
        for chunk in chunked(required(p.rank, peer), len(peers) + 1):
            p.send(channel, peer, p.rows(own, p.rank, chunk))


class Stream:
    """Rows of a channel's other members, shard by shard, received in two buffers in turn.

    Iterating over it, once, yields owners and messages, as `all_gather`.  Once the loop goes on,
    the rows of a message have been used, and the next but one are received in their place.

    Parameters
    ----------
    p, channel, own, peers, required
        As of `all_gather`.
    backwards : bool
        The rows of the last peer come first.
    copies : str, optional
        Array by token with the same rows, to which they are copied.
    """

    def __init__(
        self,
        p: Program,
        channel: str,
        own: str,
        peers: Sequence[int],
        required: Required,
        copies: str | None = None,
        backwards: bool = False,
    ) -> None:
        peers = peers[::-1] if backwards else peers
        self._p, self._channel, self._copies = p, channel, copies
        self._kind, self._messages = p.arrays[own].kind, []
        found = ((x, y) for x in peers for y in chunked(required(x, p.rank), len(peers) + 1))
        self._shards = list(found)
        self._post(SLOTS if p.group.overlap else 0)
        _send_own(p, channel, own, peers, required)

    def __iter__(self) -> Iterator[tuple[int, Receive]]:
        """Yield owners and messages."""
        p = self._p
        for i, (owner, places) in enumerate(self._shards):
            self._post(i + 1)
            message = self._messages[i]
            yield owner, message
            if self._copies:
                p.copy(message.rows, p.rows(self._copies, owner, places))
            if p.group.overlap:
                self._post(i + 1 + SLOTS)

    def _post(self, number: int) -> None:
        """Post receives until they are so many."""
        p = self._p
        for turn in range(len(self._messages), min(number, len(self._shards))):
            name, room = f"{self._channel} {turn}", f"{self._channel} {turn % SLOTS}"
            array = p.array(name, self._kind, [self._shards[turn]], room=room)
            owner, _ = self._shards[turn]
            self._messages.append(p.receive(self._channel, owner, p.rows(array)))
            p.exchange(self._messages[-1])


class Partials:
    """Partial results along a channel: for this rank's rows, and of this rank for its peers' rows.

    The former are received early; streamed, in two buffers in turn.

    Parameters
    ----------
    p, channel, peers, required
        As of `all_gather`; the peers send what they required.
    kind : str
    """

    def __init__(
        self, p: Program, channel: str, kind: str, peers: Sequence[int], required: Required
    ) -> None:
        self._p, self._channel, self._kind = p, channel, kind
        self._peers, self._required = peers, required
        self._coming: list[tuple[Rows, list[Receive], Runs]] = []
        self._done, self._sent = 0, []
        self._post(SLOTS if p.group.stream else len(peers))

    def _post(self, number: int) -> None:
        """Post the receives of the contributions of so many peers."""
        p, ranks = self._p, len(self._peers) + 1
        for i in range(len(self._coming), min(number, len(self._peers))):
            places = self._required(p.rank, self._peers[i])
            room = f"from {self._channel} {i % SLOTS}" if p.group.stream else ""
            name = f"{self._kind} from {self._channel} {i + 1}"
            array = p.array(name, self._kind, [(p.rank, places)], room=room)
            messages = [
                p.receive(self._channel, self._peers[i], p.rows(array, p.rank, chunk))
                for chunk in chunked(places, ranks)
            ]
            self._coming.append((p.rows(array), messages, places))

    def of(self, owner: int, rows: Rows, target: str) -> Rows:
        """Rows for this rank's partial result for some rows of an owner.

        Streamed, they come from the last peer to the first, in two buffers in turn.  In its step i
        the i-th peer computes what this rank adds to the rows of `target` before its own step
        i + 2, and then receives the next but one: ranks that wait for each other would have to be
        at different steps, each behind the other.
        """
        p, turn = self._p, len(self._sent)
        if not p.group.stream:
            pieces = [(owner, self._required(owner, p.rank))]
            return p.matching(p.array(f"{self._kind} to {owner}", self._kind, pieces), rows)
        step = len(self._peers) - 1 - self._peers.index(owner)
        self._add(step + 1 - SLOTS, target)
        if turn >= SLOTS:
            p.wait([self._sent[turn - SLOTS]])
        name, room = f"{self._kind} to {owner} {turn}", f"to {turn % SLOTS}"
        return p.rows(p.array(name, self._kind, p.pieces(rows), room=room))

    def give(self, owner: int, rows: Rows) -> None:
        """Send a finished partial result to its owner."""
        if self._p.group.stream:
            self._sent.append(self._p.send(self._channel, owner, rows))
            self._p.exchange(self._sent[-1])
        else:
            self._p.give(self._channel, owner, rows)

    def combine(self, target: str) -> None:
        """Send what was held back, and merge or add the contributions, in a fixed order."""
        self._p.release(self._channel)
        self._add(len(self._peers), target)

    def _add(self, number: int, target: str) -> None:
        """Merge or add contributions until so many are, and receive others in their place."""
        p = self._p
        while self._done < number:
            rows, messages, places = self._coming[self._done]
            p.wait(messages)
            p.combine(rows, p.rows(target, p.rank, places))
            self._done += 1
            self._post(self._done + SLOTS)
