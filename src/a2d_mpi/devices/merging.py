"""Merge the results of several calls of plans, for users."""

from __future__ import annotations

from collections.abc import Sequence

from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.devices import device_of
from a2d_mpi.devices.protocol import Array


def merge(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Merge attention of the same queries over disjoint sets of keys.  Local.

    Parameters
    ----------
    parts : sequence of (out, lse)
        Results of `AttentionPlan.forward` on this rank for the same queries, NumPy or CuPy arrays:
        out (n, nheads, headdim) and lse (n, nheads), in nats.  At most one part may have a sink.

    Returns
    -------
    out : (n, nheads, headdim), dtype of the parts
        Attention over all keys, in a new array; 0 in rows that are masked in all parts.
    lse : (n, nheads), dtype of the parts
        Log-sum-exp in nats; -inf in rows that are masked in all parts.

    Raises
    ------
    ValueError
        If there is no part, the shapes or dtypes of the parts differ, lse does not belong to out,
        or the parts are not NumPy or CuPy arrays.

    Notes
    -----
    For gradients, pass this out and lse to `AttentionPlan.backward` of each part, in place of the
    part's own out and lse.  The dk and dv of a part are then complete, and dq is the sum over the
    parts.  Parts are merged in their order, in the accumulation dtype
    (`a2d_mpi.core.merge.merge`).
    """
    kinds = {(out.shape, out.dtype, lse.shape, lse.dtype) for out, lse in parts}
    if len(kinds) != 1:
        raise ValueError(f"all parts must have one shape and dtype, got {sorted(map(str, kinds))}")
    ((shape, dtype, rows, wide),) = kinds
    if rows != shape[:2] or wide != compute_dtype(dtype):
        raise ValueError(
            f"out has shape {shape} and dtype {dtype}, so lse must have shape {shape[:2]} and "
            f"dtype {compute_dtype(dtype)}, got {rows} and {wide}"
        )
    device = device_of(parts[0][0])
    out, lse, compensation = (device.empty(x, wide) for x in (shape, rows, rows))
    part = device.empty(shape, dtype)
    device.put(out, device.contiguous(parts[0][0]))
    device.put(lse, device.contiguous(parts[0][1]))
    device.zero(compensation)
    for others in parts[1:]:
        device.put(part, device.contiguous(others[0]))  # a copy, as merging overwrites it
        device.merge(out, lse, compensation, part, device.contiguous(others[1]))
    if dtype != wide:
        device.put(part, out)
        out = part
    return out, lse
