"""All-gather and reduce-scatter along a channel, by posted point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.group import chunked
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Receive, Rows

# Places in an owner's shard of the rows that a member of the channel requires.
Required = Callable[[int, int], Runs]
Coming = list[tuple[int, Receive]]  # owners, and the messages that bring their rows


def all_gather(
    p: Program, channel: str, own: str, peers: Sequence[int], required: Required
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

    Returns
    -------
    array : str
        All gathered rows, owner by owner in the order of the channel, and all of this rank's own.
    coming : list of (int, Receive)
    """
    if not peers:
        return own, []
    array, rank, ranks = p.arrays[own], p.rank, len(peers) + 1
    whole = p.group.whole(array.of_keys, rank)
    pieces = [(x, whole if x == rank else required(x, rank)) for x in p.channels[channel]]
    gathered, coming = p.array(channel, array.kind, pieces), []
    for peer in peers:
        for chunk in chunked(required(peer, rank), ranks):
            coming.append((peer, p.receive(channel, peer, p.rows(gathered, peer, chunk))))
    # This rank's rows are the first that the rank before it needs, and the last of the next.
    for peer in reversed(peers):
        for chunk in chunked(required(rank, peer), ranks):
            p.send(channel, peer, p.rows(own, rank, chunk))
    p.copy(p.rows(own), p.rows(gathered, rank))
    return gathered, coming


class Partials:
    """Contributions of a channel's other members to this rank's rows, received early.

    Parameters
    ----------
    p, channel, peers, required
        As of `all_gather`; the peers send what they required.
    kind : str
    """

    def __init__(
        self, p: Program, channel: str, kind: str, peers: Sequence[int], required: Required
    ) -> None:
        self._p, self._channel = p, channel
        self._coming: list[tuple[Rows, list[Receive], Runs]] = []
        for i, peer in enumerate(peers, 1):
            places = required(p.rank, peer)
            array = p.array(f"{kind} from {channel} {i}", kind, [(p.rank, places)])
            messages = [
                p.receive(channel, peer, p.rows(array, p.rank, chunk))
                for chunk in chunked(places, len(peers) + 1)
            ]
            self._coming.append((p.rows(array), messages, places))

    def combine(self, target: str) -> None:
        """Send what was held back, and merge or add the contributions, in a fixed order."""
        p = self._p
        p.release(self._channel)
        for rows, messages, places in self._coming:
            p.wait(messages)
            p.combine(rows, p.rows(target, p.rank, places))
