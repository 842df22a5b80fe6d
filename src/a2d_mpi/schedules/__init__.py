"""Methods of distributed attention, each written down once, as data.

`attention2d` is the file to read first, after the words in `steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from a2d_mpi.core.sizes import Layout, Problem
from a2d_mpi.schedules import attention2d, ring
from a2d_mpi.schedules.steps import Ranks, Schedule, Sizes


class Method(NamedTuple):
    """How a method computes, inside one context group.

    Attributes
    ----------
    forward, backward : callable
        Write the steps of a phase down into a `Schedule`.
    shape : callable
        What of `Sizes` follows from a layout: rows, columns, and the inner channel of rings.
    distribution : str or None
        The only one that makes it this method; None: the one that balances the mask.
    suits : callable
        Whether a layout of more than one rank is worth a try: no two give the same schedule.
    """

    forward: Callable[[Schedule], None]
    backward: Callable[[Schedule], None]
    shape: Callable[[Layout], tuple[int, int, str]]
    distribution: str | None = None
    suits: Callable[[Layout], bool] = lambda layout: True


def _double_ring(layout: Layout) -> tuple[int, int, str]:
    # Groups of one rank are themselves one ring, whose hops are outer ones.
    return (layout.rows, layout.cols, "inner") if layout.cols > 1 else (1, layout.cells, "outer")


def _suits_double(layout: Layout) -> bool:
    """Two rings of two ranks at least, and the inner ones never spread wider than the outer."""
    wider = layout.order.index("c") < layout.order.index("r")
    return min(layout.rows, layout.cols) > 1 and not wider


_RING = Method(
    ring.forward,
    ring.backward,
    lambda layout: (1, layout.cells, "ring"),
    suits=lambda layout: layout.cols == 1 < layout.rows,
)
METHODS = {
    "attention2d": Method(
        attention2d.forward, attention2d.backward, lambda layout: (layout.rows, layout.cols, "")
    ),
    "ring": _RING,
    "striped ring": _RING._replace(distribution="striped"),
    "double ring": _RING._replace(shape=_double_ring, suits=_suits_double),
}


def write(
    method: str,
    phase: str,
    layout: Layout,
    group: Problem,
    me: Ranks,
    overlap: bool = True,
    **others: Any,
) -> Schedule:
    """The schedule of a rank, or of several, in a context group of more than one.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    phase : {"forward", "backward"}
    layout : Layout
    group : Problem
        Of the context group: ``problem.layer(layout.heads)``.
    me : Ranks
        In the context group.
    overlap : bool
    **others
        Further fields of the `Schedule`.
    """
    known = METHODS[method]
    rows, cols, inner = known.shape(layout)
    sizes = Sizes(rows, cols, group.counts, group.nheads, group.nheads_kv, overlap, inner)
    schedule = Schedule(me, sizes, **others)
    (known.backward if phase == "backward" else known.forward)(schedule)
    return schedule
