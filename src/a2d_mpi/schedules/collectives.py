"""All-gather and reduce-scatter along a channel, by posted point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.chunks import chunked
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Receive, Rows

# Takes an owner and a member of the channel.  Returns the places in the owner's shard of the rows
# that the member requires.
Required = Callable[[int, int], Runs]
Incoming = Iterable[tuple[int, Receive]]  # owners, and the messages with their rows


def all_gather(
    p: Program,
    channel: str,
    own: str,
    peers: Sequence[int],
    required: Required,
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

    Returns
    -------
    array : str
        Name of the array with all gathered rows, and with all rows of this rank.  The owners are
        in the order of the channel.
    coming : iterable of (int, Receive)
        Owners and messages.
    """
    if not peers:
        return own, []
    array, rank, ranks = p.arrays[own], p.rank, len(peers) + 1
    own_places = p.group.all_places(array.of_keys, rank)
    pieces = [(x, own_places if x == rank else required(x, rank)) for x in p.channels[channel]]
    gathered, coming = p.array(channel, array.kind, pieces), []
    for peer in peers:
        for chunk in chunked(required(peer, rank), ranks):
            coming.append((peer, p.receive(channel, peer, p.rows(gathered, peer, chunk))))
    # The previous rank needs these rows first, and the next rank needs them last.
    for peer in reversed(peers):
        for chunk in chunked(required(rank, peer), ranks):
            p.send(channel, peer, p.rows(own, rank, chunk))
    p.copy(p.rows(own), p.rows(gathered, rank))
    return gathered, coming


class Partials:
    """Partial results along a channel: peers' results for this rank's rows, and the other way.

    Receives are posted early.

    Parameters
    ----------
    p, channel, peers, required
        As in `all_gather`; the peers send results for the rows that they required.
    kind : {"out", "dq", "dkv"}
    """

    def __init__(
        self, p: Program, channel: str, kind: str, peers: Sequence[int], required: Required
    ) -> None:
        self._p, self._channel, self._kind, self._required = p, channel, kind, required
        self._coming: list[tuple[Rows, list[Receive], Runs]] = []
        for i, peer in enumerate(peers, 1):
            places = required(p.rank, peer)
            array = p.array(f"{kind} from {channel} {i}", kind, [(p.rank, places)])
            messages = [
                p.receive(channel, peer, p.rows(array, p.rank, chunk))
                for chunk in chunked(places, len(peers) + 1)
            ]
            self._coming.append((p.rows(array), messages, places))

    def of(self, owner: int, rows: Rows) -> Rows:
        """Declare rows for this rank's partial result for rows of an owner."""
        pieces = [(owner, self._required(owner, self._p.rank))]
        array = self._p.array(f"{self._kind} to {owner}", self._kind, pieces)
        return self._p.matching(array, rows)

    def give(self, owner: int, rows: Rows) -> None:
        """Send a finished partial result to its owner."""
        self._p.give(self._channel, owner, rows)

    def combine(self, target: str) -> None:
        """Send results that were held back; merge or add contributions, in a fixed order."""
        p = self._p
        p.release(self._channel)
        for rows, messages, places in self._coming:
            p.wait(messages)
            p.combine(rows, p.rows(target, p.rank, places))
