"""Choose the distribution with the least predicted time, for masks that no closed form balances.

Even work is not the only aim.  For packed documents a balanced distribution sends more than a
contiguous one.  The contiguous one keeps a document on few ranks, but its tiles are uneven.  A
rank computes and receives at the same time, so the longer of the two decides.  The machine
determines which one is longer.  A plan does not know the machine and assumes a typical one.  The
planner knows the machine and simulates all three distributions.
"""

from __future__ import annotations

from a2d_mpi.masks.compiled import CompiledMask
from a2d_mpi.sharding.balance import (
    EVEN_AREA,
    MOST_RUNS,
    Deal,
    deal,
    measured,
    pairs_of_cuts,
    starts,
)

# Distributions to choose from.
CHOICES = ("contiguous", "zigzag", "balanced")
# Floating-point operations that a rank does while it receives a byte, by the bytes of an element.
# Tensors with 2 bytes are taken to be on GPUs.  The profiles in data/machines have 1,900 to 2,600
# within a node and 9,800 to 39,000 between nodes.  Of the values from 1500 to 8000, 3000 chose the
# fastest distributions (docs/masks.md).  Other tensors are taken to be on CPUs, with about
# 50 GFLOP/s per core and 25 GB/s for 64 cores.
_FLOPS_PER_BYTE = {2: 3000.0, 4: 100.0, 8: 50.0}
# Computing and transfers overlap.  This share of the shorter one of them is not hidden.
_EXPOSED = 0.25
# Each position gets the first of these numbers of runs that makes at most _FINE runs in all.
# Bytes are counted in whole runs.
_RUNS, _FINE = (64, 32, 16, 8, 4, 2), 1024


def choose(
    seen: CompiledMask, rows: int, cols: int, itemsize: int, speed: float | None = None
) -> tuple[str, str]:
    """Choose the distribution with the least predicted time.

    Parameters
    ----------
    seen, rows, cols, itemsize, speed
        As of `predict_times`.

    Returns
    -------
    name : {"contiguous", "zigzag", "balanced"}
    why : str
        A clause for users, with the numbers that decided.
    """
    times, numbers = predict_times(seen, rows, cols, itemsize, speed)
    if not times:
        return "balanced", "nothing to compare: one rank, very few tokens or over a thousand ranks"
    why = "least predicted time (of the busiest rank: work over the mean, tokens sent or received)"
    return min(times, key=times.get), f"{why}: {numbers}"


def predict_times(
    seen: CompiledMask, rows: int, cols: int, itemsize: int, speed: float | None = None
) -> tuple[dict[str, float], str]:
    """Predict the time of each distribution.

    Parameters
    ----------
    seen : CompiledMask
        Of N queries and N keys.
    rows, cols : int
        R and C of the grid; ``P x 1`` is a ring.
    itemsize : {2, 4, 8}
        Bytes of an element of the tensors.
    speed : float, optional
        Floating-point operations that a rank does while it receives a byte.  Default: the value
        of a typical machine.

    Returns
    -------
    times : dict of str to float
        In units of the time in which a byte arrives, for one element of a head.  Empty if there is
        nothing to compare: one rank, very few tokens or over a thousand ranks.
    numbers : str
        The numbers that decided.
    """
    deals = seen.once(_deals, rows, cols)
    # Each visible pair takes four operations per element of a head.
    even = 4 * float(seen.area) / (rows * cols) / (speed or _FLOPS_PER_BYTE[itemsize])
    times = {}
    for name, dealt in deals.items():
        shorter, longer = sorted((dealt.work * even, dealt.traffic * seen.seqlen * itemsize))
        times[name] = longer + _EXPOSED * shorter
    return times, "; ".join(f"{name} {x.work:.2f}, {x.traffic:.2f} N" for name, x in deals.items())


def _deals(seen: CompiledMask, rows: int, cols: int) -> dict[str, Deal]:
    """Return the distributions to compare, as deals of runs."""
    positions = rows * cols
    if positions == 1 or 2 * positions > min(MOST_RUNS, seen.seqlen):
        return {}
    each = next((x for x in _RUNS if x * positions <= min(_FINE, seen.seqlen)), 2)
    bounds, pairs = pairs_of_cuts(seen, each * positions)
    zigzag, contiguous = (
        measured(bounds, pairs, owner, rows, cols) for owner in starts(each, positions)[:2]
    )
    deals = {"contiguous": contiguous, "zigzag": zigzag}
    if min(contiguous.work, zigzag.work) > EVEN_AREA:  # otherwise a search cannot gain much
        deals["balanced"] = seen.once(deal, rows, cols)
    return deals
