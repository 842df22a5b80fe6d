"""The numbers that a plan is measured on: random ones, and others as large as the given ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import agree

TENSORS = ("q", "k", "v", "dout", "sink")


def other_data(name: str, x: np.ndarray, back: bool = False) -> np.ndarray:
    """Other numbers with the same norms, so that kernels take the same time for them.

    The rows of a shard in reverse, negated, their elements moved by another number for each
    tensor.  The elements of a sink, which all ranks have, move only.

    Parameters
    ----------
    name : str
        Of the tensor.
    x : (..., elements) float
    back : bool
        The other way round: the given numbers from the other ones, to the bit.
    """
    by = 1 + TENSORS.index(name)
    if name == "sink":
        return np.roll(x, -by if back else by)
    return -(np.roll(x, -by, axis=-1)[::-1] if back else np.roll(x[::-1], by, axis=-1))


def random_rows(
    tokens: Iterable[int], shape: tuple[int, ...], dtype: np.dtype, seed: int, stream: int = 0
) -> np.ndarray:
    """Standard normal numbers for tokens, the same whatever the ranks and the distribution.

    Parameters
    ----------
    tokens : iterable of int
    shape : tuple of int
        Of one token.
    dtype : dtype
    seed, stream : int
        Other numbers for another seed, and for another stream (tensor).

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
    """This rank's shards of q, k, v and perhaps dout, `random_rows` each."""
    return {
        name: random_rows(plan.tokens.tolist(), plan.config.shape(name), plan.dtype, seed, stream)
        for stream, name in enumerate(("dout", "q", "k", "v"))
        if name != "dout" or backward
    }


def refuse_nan(comm: MPI.Intracomm, tensors: Mapping[str, np.ndarray]) -> None:
    """ValueError on all ranks if any number on any rank is NaN or infinite."""
    bad = {name: int(x.size - np.isfinite(x).sum()) for name, x in tensors.items()}
    wrong = [f"{name} has {n} elements that are NaN or infinite" for name, n in bad.items() if n]
    agree(comm, "; ".join(wrong) + ": nothing can be checked" if wrong else None)
