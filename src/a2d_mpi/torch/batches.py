"""Batches of sequences of different lengths, padded to one length."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import torch
from mpi4py import MPI

from a2d_mpi.comm.agreement import Call, agree

T = TypeVar("T")


def agreed(
    comm: MPI.Intracomm,
    given: dict[str, Any],
    root: int | None,
    arrange: Callable[..., T],
) -> T:
    """Arrange integer tensors that are the same on all ranks.  Collective.

    Parameters
    ----------
    comm : Intracomm
    given : dict of str to (n,) or (B, n) integers or None
        Tensors or arrays by name.
    root : int, optional
        The rank that passes them.  Default: all ranks pass the same.
    arrange : callable
        It takes int64 arrays, (B, n), or None.  It raises ValueError if they are wrong.

    Returns
    -------
    object
        The result of `arrange`.

    Raises
    ------
    ValueError
        On all ranks, if a tensor has no integers, `arrange` raises it, or ranks pass others.
    """
    problem = None if root in (None, *range(comm.size)) else f"root must be a rank, got {root}"
    agree(comm, problem, {"root": root})
    call, whole, arranged = Call(comm), [None] * len(given), None
    with call.checks():
        whole = [None if x is None else integers(x) for x in given.values()]
    if root is not None:
        call.problem, whole = comm.bcast((call.problem, whole), root)
    with call.checks():
        arranged = arrange(*whole)
    call.agree({name: digest(x) for name, x in zip(given, whole)})
    return arranged


def check_tokens(ids: np.ndarray | None, vocabulary: int) -> None:
    """Raise ValueError unless `ids` are tokens, (B, n)."""
    if ids is None or not ids.size:
        got = "none" if ids is None else f"shape {ids.shape}"
        raise ValueError(f"input_ids must be (B, N) tokens, at least one in each row, got {got}")
    if len(wrong := ids[(ids < 0) | (ids >= vocabulary)]):
        raise ValueError(f"tokens must be from 0 to {vocabulary - 1}, got {wrong[0]}")


def check_padding(mask: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `mask` is 1 for consecutive tokens of each row, and otherwise 0."""
    if mask.shape != shape:
        raise ValueError(f"attention_mask must have shape {shape}, got {mask.shape}")
    edges = np.abs(np.diff(mask, axis=1, prepend=0, append=0)).sum(1)
    if not np.isin(mask, (0, 1)).all() or (edges > 2).any():
        raise ValueError(
            "attention_mask must be 1 for consecutive tokens of a row, and 0 elsewhere"
        )
    if len(empty := np.flatnonzero(edges == 0)):
        raise ValueError(f"row {empty[0]} of attention_mask has no token")


def left_padded(ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move padding behind the tokens of a row, (B, n), to the front."""
    behind = mask[:, ::-1].argmax(1)
    return tuple(np.stack([np.roll(x, n) for x, n in zip(y, behind)]) for y in (ids, mask))


def integers(x: Any) -> np.ndarray:
    """Return an integer tensor or array, (n,) or (B, n), as an int64 array, (B, n)."""
    x = x.numpy(force=True) if isinstance(x, torch.Tensor) else np.asarray(x)
    if x.dtype.kind not in "biu" or x.ndim not in (1, 2):
        raise ValueError(f"need integers, (n,) or (B, n), got shape {x.shape} of {x.dtype}")
    return np.atleast_2d(np.ascontiguousarray(x, np.int64))


def digest(x: np.ndarray | None) -> str:
    """Return a text by which ranks compare arrays."""
    return "none" if x is None else f"{x.size} numbers ({blake2b(x, digest_size=4).hexdigest()})"
