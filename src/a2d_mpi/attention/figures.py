"""Figures of a plan: work, traffic and buffers, and the times and kernel of its calls."""

from __future__ import annotations

import numpy as np

from a2d_mpi.attention.engine import Engine
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning import cost, memory
from a2d_mpi.schedules import write
from a2d_mpi.schedules.accounts import area


class Figures:
    """Figures that a plan tells of itself; base of `a2d_mpi.attention.plan.AttentionPlan`."""

    method: str
    grid: ProcessGrid
    problem: Problem
    _engine: Engine
    overlap: bool
    compute_dtype: np.dtype

    @property
    def timings(self) -> dict[str, float]:
        """See the attributes of `a2d_mpi.attention.plan.AttentionPlan`."""
        return self._engine.timings

    @property
    def staged_bytes(self) -> int:
        """See the attributes of `a2d_mpi.attention.plan.AttentionPlan`."""
        return self._engine.staged_bytes

    def spans(self, phase: str) -> list[tuple[str, float, float]]:
        """Parts of the latest call of a phase on this rank, with their times: `Engine.spans`."""
        return self._engine.spans(phase)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers but the kernel's; predicted by `planning.memory.buffers`."""
        return self._engine.work.nbytes(apart="kernel")

    @property
    def kernel(self) -> str | None:
        """Name of the latest call's kernel; None before the first one."""
        return getattr(self._engine.kernel, "name", None)

    @property
    def deterministic(self) -> bool:
        """True if gradients of the latest call's kernel repeat bit for bit; out and lse do."""
        return getattr(self._engine.kernel, "deterministic", True)

    @property
    def product_dtype(self) -> np.dtype:
        """Dtype to which the latest call's kernel rounds probabilities before products."""
        return getattr(self._engine.kernel, "product_dtype", self.compute_dtype)

    @property
    def layout(self) -> Layout:
        """Shape of the grid and order of its ranks, as `a2d_mpi.planning` takes them."""
        return self.grid.layout

    def predicted_traffic(self, rank: int | None = None) -> dict[tuple[str, str], list[int]]:
        """Bytes [sent, received] by one forward and one backward call of `rank`.

        By `a2d_mpi.planning.cost`; the keys are those of ``traffic.bytes``.
        """
        rank = self.grid.comm.rank if rank is None else rank
        return cost.traffic(self.method, self.layout, self.problem, rank)

    def predicted_memory(self, backward: bool = True, rank: int | None = None) -> int:
        """Bytes by which the process of `rank` (default: this one) grows, with its arrays.

        From before the arrays and the plan are made to the end of a call of each phase; after the
        first call with its kernel, if that is a kernel of the host.  By
        `a2d_mpi.planning.memory`.
        """
        rank = self.grid.comm.rank if rank is None else rank
        kernel = self.kernel if self.kernel in memory.LIBRARIES else None
        sizes = self.method, self.layout, self.problem, rank
        return memory.peak_memory(*sizes, backward, kernel)

    def area(self, rank: int | None = None) -> int:
        """Visible (query, key) pairs that `rank` (default: this one) computes.

        For each of the heads of its context group: ``nheads / grid.heads``.
        """
        rank = self.grid.comm.rank if rank is None else rank
        found = write(self.method, "forward", self.layout, self.problem, rank, self.overlap)
        return sum(map(area, found))
