"""The description of a method, an entry of `a2d_mpi.schedules.METHODS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.mask import Causal, Mask
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program


class Method(NamedTuple):
    """A method: functions that write the programs of a context-parallel group, and its properties.

    Attributes
    ----------
    forward, backward : callable
        Functions that write the steps of a phase into a `Program`.
    shape : callable
        Takes a layout.  Returns rows, columns and the name of the inner channel of rings.
    distribution : str or None
        The only distribution of this method.  None: the default of the mask.
    suits : callable
        Takes a layout of more than one rank.  Returns True if the planner should try it.  Layouts
        with equal programs are tried once.
    tiles : callable
        Takes a layout.  Returns the rows and columns of tiles that its ranks compute.  The
        balanced distribution evens out these tiles.
    most_positions : callable
        Takes a number of ranks.  Returns the largest number of positions, up to this one, that a
        context-parallel group can have.
    causal : bool
        Whether the method is for the causal mask only.
    known_as : callable
        Takes a layout.  Returns the name of the method on this layout in the literature, or "".
    knows_nodes : bool
        Whether programs depend on `Layout.nodes`.
    roundings : callable
        Takes a layout and a kind of rows ("out", "dq" or "dkv").  Returns how often a partial
        result is encoded for the wire on its way, at most.
    cuts : callable
        Takes the problem of a context-parallel group.  Returns the tokens at which partial results
        divide shards: a partial result holds all tokens of a shard between two cuts, or none.
    """

    forward: Callable[[Program], None]
    backward: Callable[[Program], None]
    shape: Callable[[Layout], tuple[int, int, str]]
    distribution: str | None = None
    suits: Callable[[Layout], bool] = lambda layout: True
    tiles: Callable[[Layout], tuple[int, int]] = lambda layout: (layout.rows, layout.cols)
    most_positions: Callable[[int], int] = lambda positions: positions
    causal: bool = False
    known_as: Callable[[Layout], str] = lambda layout: ""
    knows_nodes: bool = False
    roundings: Callable[[Layout, str], int] = lambda layout, kind: 1
    cuts: Callable[[Problem], Sequence[int]] = lambda problem: ()

    def takes(self, mask: Mask) -> bool:
        """Return True if the method can compute a mask."""
        return type(mask) is Causal or not self.causal
