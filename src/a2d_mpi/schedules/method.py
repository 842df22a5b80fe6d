"""The description of a method, an entry of `a2d_mpi.schedules.METHODS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.mask import Causal, Mask
from a2d_mpi.schedules.program import Program


class Method(NamedTuple):
    """A method: functions that write the programs of a context-parallel group, and its properties.

    Attributes
    ----------
    forward, backward : callable
        Functions that write the steps of a phase into a `Program`.
    shape : callable
        Takes a layout.  Returns the rows and columns of the group, see `Group`.
    distribution : str or None
        The only distribution of this method.  None: the default of the mask.
    suits : callable
        Takes a layout of more than one rank.  Returns True if the planner should try it.  Layouts
        with equal programs are tried once.
    most_positions : callable
        Takes a number of ranks.  Returns the largest number of positions, up to this one, that a
        context-parallel group can have.
    knows_nodes : bool
        Whether programs depend on `Layout.nodes`.
    ring : bool
        Whether ranks wait for each other between kernel calls, and use memory again, as in rings.
        The steps of a program then keep their order.  Transfers take place all the time, so that
        slices of the heads gain nothing, except where ranks share the heads.
    """

    forward: Callable[[Program], None]
    backward: Callable[[Program], None]
    shape: Callable[[Layout], tuple[int, int]] = lambda layout: (layout.rows, layout.cols)
    distribution: str | None = None
    suits: Callable[[Layout], bool] = lambda layout: True
    most_positions: Callable[[int], int] = lambda positions: positions
    knows_nodes: bool = False
    ring: bool = False

    @property
    def causal(self) -> bool:
        """True if the method is for the causal mask only, as the triangle distribution is."""
        return self.distribution == "triangle"

    def tiles(self, layout: Layout) -> tuple[int, int]:
        """Return the rows and columns of tiles that ranks compute, which are to be even.

        A rank of a ring computes its queries against all keys.
        """
        return (layout.positions, 1) if self.ring else (layout.rows, layout.cols)

    def is_ring(self, layout: Layout) -> bool:
        """Return True if context-parallel groups of a layout are rings of several ranks."""
        return self.ring and layout.positions > 1

    def takes(self, mask: Mask) -> bool:
        """Return True if the method can compute a mask."""
        return type(mask) is Causal or not self.causal
