"""Buffers of the NumPy kernel, by the sizes of its calls."""

from __future__ import annotations

from a2d_mpi.core.config import AttentionConfig

BLOCK_Q = 512  # rows of a cache block: query tokens x query heads per KV head
BLOCK_K = 512  # keys of a cache block
PACKED = 9 << 19  # elements of a tensor that are packed at once, if they are of several heads


def head_groups(nheads_kv: int, rows: int, nk: int, headdim: int) -> int:
    """Groups of KV heads whose keys and queries are packed at once; `rows`: of a query block."""
    elements = max(1, (rows + nk) * headdim)
    return -(-nheads_kv // max(1, PACKED // elements))


def kernel_buffers(
    config: AttentionConfig, nq: int, nk: int, backward: bool, hides: bool = False
) -> dict[str, int]:
    """Bytes of each buffer that the kernel needs for a call; a later call uses the same buffers.

    Parameters
    ----------
    config : AttentionConfig
        Of a context-parallel group.
    nq, nk : int
        Queries and keys of the call.
    backward : bool
    hides : bool
        The mask leaves out some of the keys: no query of the call sees them.

    Notes
    -----
    Logits are taken to be small enough for exponentials without a shift, and cache blocks to be
    as large as they can be.
    """
    d, e, heads_kv = config.headdim, config.headdim_v, config.nheads_kv
    wider = max(d, e)
    group = config.nheads // heads_kv
    rows = min(max(1, BLOCK_Q // group), nq) * group
    heads = -(-heads_kv // head_groups(heads_kv, rows, nk, wider))
    keys = -(-nk // max(1, -(-nk // BLOCK_K)))  # of a cache block
    block = rows * keys + 2 * (rows + keys) * (wider + 1)
    at_once = min(heads, max(1, BLOCK_Q * BLOCK_K // max(1, block)))
    found = {"q": heads * rows * (d + backward), "scores": at_once * rows * keys}
    found["partial"] = at_once * (max(rows * d, keys * wider) if backward else rows * e)
    if backward:
        found |= {"dq": heads * rows * d, "dout": heads * rows * (e + 1)}
        found |= {"k": heads * nk * (d + 1), "v": heads * nk * (e + 1)}
        found |= {"dk": heads * nk * d, "dv": heads * nk * e}
        more = ("dscores",) if config.logit_softcap is None else ("dscores", "slope")
        found |= dict.fromkeys(more, found["scores"])
    else:
        found |= {"acc": heads * rows * e, "total": heads * rows}
        if hides or config.mixed_precision:
            found |= {"k": heads * nk * d, "v": heads * nk * e}
    return {name: elements * config.compute_dtype.itemsize for name, elements in found.items()}
