"""A method, as the registry of `a2d_mpi.schedules` has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.mask import Causal, Mask
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program
from a2d_mpi.sharding.distribution import Shards


class Method(NamedTuple):
    """A method: how the programs of its phases are written, inside one context-parallel group.

    Attributes
    ----------
    forward, backward : callable
        Write the steps of a phase into a `Program`.
    shape : callable
        Rows, columns and the inner channel of rings, of a layout.
    distribution : str or None
        The only one that makes it this method; None: the one that balances the mask.
    suits : callable
        Whether a layout of more than one rank is worth a try: no two give the same schedule.
    tiles : callable
        Rows and columns of the tiles that the ranks of a layout compute: those that the balanced
        distribution makes even.
    place : callable or None
        Gives the runs of tokens of every rank of a context-parallel group, for a mask, the number
        of tokens, the number of ranks, and the share of KV heads.  None: `distribution` is a
        formula, or the mask's.
    digest : callable or None
        Text that tells placements of a problem apart, on which ranks agree.
    whole : callable
        The most positions, of so many at most, that a context-parallel group can have.
    causal : bool
        Whether it is for the causal mask only.
    known_as : callable
        Name under which the literature knows it on a layout, or "".
    knows_nodes : bool
        Whether its schedules depend on `Layout.nodes`.
    streams : bool
        Whether its schedules depend on `Layout.stream`.
    roundings : callable
        How often a partial result is encoded for the wire on its way, at most, of a layout and a
        kind of rows: "out", "dq" or "dkv".
    cuts : callable
        Tokens at which partial results divide shards, of the problem of a context-parallel group:
        every partial result is of whole pieces of shards between them.
    """

    forward: Callable[[Program], None]
    backward: Callable[[Program], None]
    shape: Callable[[Layout], tuple[int, int, str]]
    distribution: str | None = None
    suits: Callable[[Layout], bool] = lambda layout: True
    tiles: Callable[[Layout], tuple[int, int]] = lambda layout: (layout.rows, layout.cols)
    place: Callable[[Mask, int, int, float], Shards] | None = None
    digest: Callable[[Problem], str] | None = None
    whole: Callable[[int], int] = lambda positions: positions
    causal: bool = False
    known_as: Callable[[Layout], str] = lambda layout: ""
    knows_nodes: bool = False
    streams: bool = False
    roundings: Callable[[Layout, str], int] = lambda layout, kind: 1
    cuts: Callable[[Problem], Sequence[int]] = lambda problem: ()

    def takes(self, mask: Mask) -> bool:
        """Tell whether the method is for a mask."""
        return type(mask) is Causal or not self.causal
