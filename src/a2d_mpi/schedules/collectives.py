"""All-gather and reduce-scatter along a channel, by posted point-to-point messages.

If memory is short, shards and partial results pass through two buffers (`Stream`, `Partials`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.chunks import chunked
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Receive, Rows

# Takes an owner and a member of the channel.  Returns the places in the owner's shard of the rows
# that the member requires.
Required = Callable[[int, int], Runs]
Incoming = Iterable[tuple[int, Receive]]  # owners, and the messages with their rows
SLOTS = 2  # number of buffers that streamed rows pass through


def all_gather(
    p: Program,
    channel: str,
    own: str,
    peers: Sequence[int],
    required: Required,
    by_token: bool = False,
) -> tuple[str, Incoming]:
    """Gather the rows that this rank requires of all members of a channel.

    Parameters
    ----------
    p : Program
    channel : str
    own : str
        Array of this rank's shard.
    peers : sequence of int
        The other members, beginning with the next rank: no rank is the first target of all.
    required : callable
        Returns the required rows, see `Required`.
    by_token : bool
        Whether the rows must be in the order of tokens.  If shard after shard is another order,
        shards arrive in two buffers and are copied.

    Returns
    -------
    array : str
        Name of the array with all gathered rows, and with all rows of this rank.  The owners are
        in the order of the channel.
    coming : iterable of (int, Receive)
        Owners and messages.  Iterate over it once: with `by_token` the iteration copies the rows.
    """
    if not peers:
        return own, []
    array, rank, ranks = p.arrays[own], p.rank, len(peers) + 1
    own_places = p.group.all_places(array.of_keys, rank)
    pieces = [(x, own_places if x == rank else required(x, rank)) for x in p.channels[channel]]
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
    """Send this rank's rows to all peers that require them."""
    # The previous rank needs these rows first, and the next rank needs them last.
    for peer in reversed(peers):
        for chunk in chunked(required(p.rank, peer), len(peers) + 1):
            p.send(channel, peer, p.rows(own, p.rank, chunk))


class Stream:
    """Rows of a channel's other members, shard by shard, received in two buffers in turn.

    Iterate over it once; it yields owners and messages, as `all_gather` does.  The rows of a
    message may be used until the next iteration.  Then the rows of the message after the next one
    are received in the same buffer.

    Parameters
    ----------
    p, channel, own, peers, required
        As in `all_gather`.
    copies : str, optional
        Array by token with the same rows, to which the rows are copied.
    backwards : bool
        Whether the rows of the last peer come first.
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
        shards = ((x, y) for x in peers for y in chunked(required(x, p.rank), len(peers) + 1))
        self._shards = list(shards)
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
        """Post receives until `number` have been posted."""
        p = self._p
        for turn in range(len(self._messages), min(number, len(self._shards))):
            name, room = f"{self._channel} {turn}", f"{self._channel} {turn % SLOTS}"
            array = p.array(name, self._kind, [self._shards[turn]], room=room)
            owner, _ = self._shards[turn]
            self._messages.append(p.receive(self._channel, owner, p.rows(array)))
            p.exchange(self._messages[-1])


class Partials:
    """Partial results along a channel: peers' results for this rank's rows, and the other way.

    Receives are posted early.  In a streamed tile, results arrive in two buffers in turn.

    Parameters
    ----------
    p, channel, peers, required
        As in `all_gather`; the peers send results for the rows that they required.
    kind : {"out", "dq", "dkv"}
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
        """Post the receives of the contributions of the first `number` peers."""
        p, ranks = self._p, len(self._peers) + 1
        for i in range(len(self._coming), min(number, len(self._peers))):
            places = self._required(p.rank, self._peers[i])
            name = f"{self._kind} from {self._channel} {i + 1}"
            room = f"from {self._channel} {i % SLOTS}" if p.group.stream else name
            array = p.array(name, self._kind, [(p.rank, places)], room=room)
            messages = [
                p.receive(self._channel, self._peers[i], p.rows(array, p.rank, chunk))
                for chunk in chunked(places, ranks)
            ]
            self._coming.append((p.rows(array), messages, places))

    def of(self, owner: int, rows: Rows, target: str) -> Rows:
        """Declare rows for this rank's partial result for rows of an owner.

        In a streamed tile, call it from the last peer to the first; two buffers are used in turn.
        In its step i, peer i computes a contribution to `target`.  This rank adds the contribution
        before its own step i + 2, and then posts another receive in its buffer.  There can be no
        deadlock: of ranks that wait for each other, each would have to be behind the others.
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
        """Send results that were held back; merge or add contributions, in a fixed order."""
        self._p.release(self._channel)
        self._add(len(self._peers), target)

    def _add(self, number: int, target: str) -> None:
        """Merge or add the first `number` contributions, and post receives in their buffers."""
        p = self._p
        while self._done < number:
            rows, messages, places = self._coming[self._done]
            p.wait(messages)
            p.combine(rows, p.rows(target, p.rank, places))
            self._done += 1
            self._post(self._done + SLOTS)
