"""The memory of a program: the caller's tensors, new results, and buffers of the plan."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from a2d_mpi.attention.engine import Engine
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS, Rows, TokenArray


class Arrays:
    """The tensors of the arrays of one program.

    Parameters
    ----------
    program : Program
    slices : int
        Number of slices of the heads.
    """

    def __init__(self, program: Program, slices: int) -> None:
        self._declared, self._results = program.arrays, program.results
        self._slice, self._slices = program.slice, slices
        # Sizes with all heads of the problem, and with the heads that this rank computes.
        self._config, self._group = program.group.problem.config, program.group.config
        self._work: Workspace | None = None

    def begin(
        self,
        engine: Engine,
        given: Mapping[str, Array],
        new: dict[str, dict[str, Array]],
        rounds: bool,
    ) -> None:
        """Begin a call with the caller's arrays and with arrays for results.

        Results are made in `new`, unless it has them.  If `rounds` is false, they have the
        accumulation dtype, whatever the program says.
        """
        self._engine, self._given, self._new = engine, given, new
        if self._work is not engine.work:
            self._work = engine.work
            self._views: dict[Rows, list[Array]] = engine.work.cache()
            self._parcels: dict[str, tuple[Array, list[Array]]] = engine.work.cache()
        for name, array in self._declared.items():
            if array.role == "result" and name not in new:
                new[name] = self._result(array, rounds)

    def end(self) -> dict[str, Array]:
        """End the call, drop the caller's arrays, and return the results by name."""
        results = {
            name: x
            for rows in self._results.values()
            for name, x in zip(KINDS[self.kind(rows)], self.tensors(rows))
        }
        self._given, self._new = {}, {}
        return results

    def kind(self, rows: Rows) -> str:
        """Return the kind of rows, one of `KINDS`."""
        return self._declared[rows.array].kind

    def tensors(self, rows: Rows) -> list[Array]:
        """Return the given rows of each tensor of an array; the rows must be one run."""
        if rows in self._views:
            return self._views[rows]
        views, length = self.all_rows(rows.array), self._declared[rows.array].length
        (run,) = rows.runs or (range(0),)
        if len(run) < length:
            views = [x[run.start : run.stop] for x in views]
        if self._declared[rows.array].role == "buffer":
            self._views[rows] = views
        return views

    def all_rows(self, name: str) -> list[Array]:
        """Return all rows of each tensor of an array: (tokens, heads, ...)."""
        array = self._declared[name]
        names = KINDS[array.kind]
        if array.role != "buffer":
            by_name = self._given if array.role == "given" else self._new[name]
            return [by_name[x] for x in names]
        if array.parcel:
            return self._parcel(name)[1]
        tensors = self._tensors(array)
        return [self._engine.work.get((array.memory, i), *x) for i, x in enumerate(tensors)]

    def travelling(self, rows: Rows) -> list[Array]:
        """Return the arrays that MPI sends for rows: one for all tensors of a parcel."""
        if not self._declared[rows.array].parcel:
            return self.tensors(rows)
        return [self._parcel(rows.array)[0]]

    def first_heads(self, rows: Rows, head: int) -> list[int]:
        """Return, for each tensor, the first head of this slice on rank `head` of its group."""
        first = (head * self._slices + self._slice) * self._group.nheads
        names = KINDS[self.kind(rows)]
        return [first * self._config.shape(x)[0] // self._config.nheads for x in names]

    def _tensors(self, array: TokenArray) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Return the shape and dtype of each tensor of a buffer."""
        accumulated, config = array.accumulated, self._group
        if array.as_computed and getattr(self._engine.kernel, "rounds_partials", False):
            accumulated = ()
        tensors = []
        for name in KINDS[array.kind]:
            shape, dtype = config.row(name, name in accumulated, array.wire)
            tensors.append(((array.length, *shape), dtype))
        return tensors

    def _parcel(self, name: str) -> tuple[Array, list[Array]]:
        """Return a parcel as bytes, and its tensors, (tokens, heads, headdim) each."""
        if name not in self._parcels:
            array = self._declared[name]
            tensors = self._tensors(array)
            self._parcels[name] = self._engine.work.parcel((array.memory, 0), tensors)
        return self._parcels[name]

    def _result(self, array: TokenArray, rounds: bool) -> dict[str, Array]:
        """Make new arrays for results: (tokens, heads, headdim), of lse (tokens, heads)."""
        config, empty = self._config if array.all_heads else self._group, self._engine.device.empty
        return {
            x: empty(
                (array.length, *config.shape(x)),
                config.dtype_of(x, not rounds or x in array.accumulated),
            )
            for x in KINDS[array.kind]
        }
