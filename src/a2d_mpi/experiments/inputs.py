"""Input data of measurements: random numbers, and a second data set with the same norms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import agree

TENSORS = ("q", "k", "v", "dout", "sink")


def other_data(name: str, x: np.ndarray, back: bool = False) -> np.ndarray:
    """Make other numbers with the same norms, for which kernels take the same time.

    The rows of a shard are reversed and negated, and their elements are rotated by a number that
    differs between tensors.  The elements of a sink, which is the same on all ranks, are only
    rotated.

    Parameters
    ----------
    name : str
        Name of the tensor.
    x : (..., elements) float
    back : bool
        Invert the operation: return the first numbers, bit for bit.
    """
    by = 1 + TENSORS.index(name)
    if name == "sink":
        return np.roll(x, -by if back else by)
    return -(np.roll(x, -by, axis=-1)[::-1] if back else np.roll(x[::-1], by, axis=-1))


def random_rows(
    tokens: Iterable[int], shape: tuple[int, ...], dtype: np.dtype, seed: int, stream: int = 0
) -> np.ndarray:
    """Draw standard normal rows of tokens; a row does not depend on ranks or distribution.

    Parameters
    ----------
    tokens : iterable of int
        Global indices.
    shape : tuple of int
        Shape of one row.
    dtype : dtype
    seed, stream : int
        Each seed, and each stream (one for each tensor), has its own numbers.

    Returns
    -------
    (tokens, *shape) dtype
    """
    generators = (
        np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, stream, token]))
        for token in tokens
    )
    rows = [generator.standard_normal(shape).astype(dtype) for generator in generators]
    return np.array(rows, dtype).reshape(len(rows), *shape)


def random_inputs(plan: AttentionPlan, backward: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw this rank's shards of q, k, v and, with `backward`, dout; see `random_rows`."""
    return {
        name: random_rows(plan.tokens.tolist(), plan.config.shape(name), plan.dtype, seed, stream)
        for stream, name in enumerate(("dout", "q", "k", "v"))
        if name != "dout" or backward
    }


def refuse_nan(comm: MPI.Intracomm, tensors: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError on all ranks if a number on any rank is NaN or infinite."""
    bad = {name: int(x.size - np.isfinite(x).sum()) for name, x in tensors.items()}
    wrong = [f"{name} has {n} elements that are NaN or infinite" for name, n in bad.items() if n]
    agree(comm, "; ".join(wrong) + ": nothing can be checked" if wrong else None)
