"""The description of a method, and all methods by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.mask import Causal, Mask
from a2d_mpi.schedules.program import Program


class Method(NamedTuple):
    """A method: functions that write the programs of a context-parallel group, and its properties.

    Attributes
    ----------
    forward, backward : callable
        Functions that write the steps of a phase into a `Program`.
    group_shape : callable
        Takes a layout.  Returns the rows and columns of the group, see `Group`.
    distribution : str or None
        The only distribution of this method.  None: the default of the mask.
    causal : bool
        Whether the method is for the causal mask only.
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
    group_shape: Callable[[Layout], tuple[int, int]] = lambda layout: (layout.rows, layout.cols)
    distribution: str | None = None
    causal: bool = False
    suits: Callable[[Layout], bool] = lambda layout: True
    most_positions: Callable[[int], int] = lambda positions: positions
    knows_nodes: bool = False
    ring: bool = False

    def even_tiles(self, layout: Layout) -> tuple[int, int]:
        """Return the rows and columns of tiles, whose areas a distribution makes even.

        A rank of a ring computes its queries against all keys.
        """
        return (layout.positions, 1) if self.ring else (layout.rows, layout.cols)

    def takes(self, mask: Mask) -> bool:
        """Return True if the method can compute a mask."""
        return type(mask) is Causal or not self.causal


class Methods(dict[str, "Method | str"]):
    """Methods by name.  The module of a method is imported when the method is first used."""

    def __getitem__(self, name: str) -> Method:
        """Return a method; raise ValueError if there is none of this name."""
        if name not in self:
            raise ValueError(f"method must be one of {tuple(self)}, got {name!r}")
        if isinstance(where := super().__getitem__(name), str):
            module, constant = where.split(":")
            self[name] = getattr(import_module(f"a2d_mpi.schedules.{module}"), constant)
        return super().__getitem__(name)


METHODS = Methods(
    {
        "attention2d": "attention2d:METHOD",
        "ring": "ring:RING",
        "striped ring": "ring:STRIPED_RING",
        "double ring": "ring:DOUBLE_RING",
        "triangle": "triangle:METHOD",
        "node aware": "attention2d:NODE_AWARE",
    }
)
