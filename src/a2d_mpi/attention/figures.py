"""Figures of a plan's calls: times, bytes of its buffers, properties of its kernel."""

from __future__ import annotations

import numpy as np

from a2d_mpi.attention.engine import Engine


class Figures:
    """The figures that a plan's engine knows; base of `a2d_mpi.attention.plan.AttentionPlan`."""

    _engine: Engine
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
    def deterministic(self) -> bool:
        """True if gradients of the latest call's kernel repeat bit for bit; out and lse do."""
        return getattr(self._engine.kernel, "deterministic", True)

    @property
    def product_dtype(self) -> np.dtype:
        """Dtype to which the latest call's kernel rounds probabilities before products."""
        return getattr(self._engine.kernel, "product_dtype", self.compute_dtype)
