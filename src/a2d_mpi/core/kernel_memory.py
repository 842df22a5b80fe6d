"""Sizes of the buffers of the kernels on the host, from the sizes of their calls."""

from __future__ import annotations

from a2d_mpi.core.config import AttentionConfig

BLOCK_Q = 512  # rows of a cache block: query tokens x query heads per KV head
BLOCK_K = 512  # keys of a cache block
PACKED = 9 << 19  # most elements of a tensor that are packed at once, if of several heads
# The kernel "onednn": products have multiples of GRAIN rows and keys, because it takes 0.5 ms to
# make one for a new shape.  Blocks with fewer queries or keys are computed as by "numba".
GRAIN = 32


def whole_grains(n: int) -> int:
    """Round a number of rows up to a multiple of `GRAIN`."""
    return -(-n // GRAIN) * GRAIN


def head_groups(nheads_kv: int, rows: int, nk: int, headdim: int) -> int:
    """Return the number of groups of KV heads whose keys and queries are packed at once.

    Parameters
    ----------
    nheads_kv : int
    rows : int
        Rows of a cache block: query tokens x query heads per KV head.
    nk, headdim : int
        Keys of the call, and elements of a head.
    """
    elements = max(1, (rows + nk) * headdim)
    return -(-nheads_kv // max(1, PACKED // elements))


def kernel_buffers(
    config: AttentionConfig,
    nq: int,
    nk: int,
    backward: bool,
    hides: bool = False,
    kernel: str = "numpy",
) -> dict[str, int]:
    """Return the bytes of each buffer of a kernel call; later calls use the buffers again.

    Parameters
    ----------
    config : AttentionConfig
        The config of a context-parallel group.
    nq, nk : int
        Queries and keys of the call.
    backward : bool
    hides : bool
        Whether some keys of the call are masked: no query of the call sees them.
    kernel : {"numpy", "numba", "onednn"}

    Returns
    -------
    dict of str to int
        Bytes by the name of the buffer.

    Notes
    -----
    The sizes hold if logits are small enough for exponentials without a shift.  Cache blocks have
    their largest size.
    """
    d, e, heads_kv = config.headdim, config.headdim_v, config.nheads_kv
    wider = max(d, e)
    group = config.nheads // heads_kv
    rows = min(max(1, BLOCK_Q // group), nq) * group
    if kernel == "onednn" and min(nq * group, nk) >= GRAIN:
        return _of_onednn(config, nq, nk, rows, backward)
    heads = -(-heads_kv // head_groups(heads_kv, rows, nk, wider))
    keys = -(-nk // max(1, -(-nk // BLOCK_K)))  # of a cache block
    elements = rows * keys + 2 * (rows + keys) * (wider + 1)  # of a cache block
    at_once = min(heads, max(1, BLOCK_Q * BLOCK_K // max(1, elements)))
    sizes = {"q": heads * rows * (d + backward), "scores": at_once * rows * keys}
    sizes["partial"] = at_once * (max(rows * d, keys * wider) if backward else rows * e)
    if backward:
        sizes |= {"dq": heads * rows * d, "dout": heads * rows * (e + 1)}
        sizes |= {"k": heads * nk * (d + 1), "v": heads * nk * (e + 1)}
        sizes |= {"dk": heads * nk * d, "dv": heads * nk * e}
        more = ("dscores",) if config.logit_softcap is None else ("dscores", "slope")
        sizes |= dict.fromkeys(more, sizes["scores"])
    else:
        sizes |= {"acc": heads * rows * e, "total": heads * rows}
        if hides or config.mixed_precision:
            sizes |= {"k": heads * nk * d, "v": heads * nk * e}
    return {name: size * config.compute_dtype.itemsize for name, size in sizes.items()}


def _of_onednn(
    config: AttentionConfig, nq: int, nk: int, rows: int, backward: bool
) -> dict[str, int]:
    d, e, heads_kv = config.headdim, config.headdim_v, config.nheads_kv
    group, up = config.nheads // heads_kv, rows + GRAIN
    block = whole_grains(rows) * whole_grains(min(nk, BLOCK_K))
    queries, keys = nq * group + GRAIN, nk + GRAIN
    sizes = {"q16": 2 * queries * d, "k16": 2 * keys * d, "v16": 2 * keys * e}
    sizes |= {"scores": 4 * block, "p": 2 * block}
    if backward:
        sizes |= {"dscores": 4 * block, "ds": 2 * block, "dout16": 2 * queries * e}
        sizes |= {"dk": 4 * keys * d, "dv": 4 * keys * e, "dq": 4 * up * d, "statistics": 8 * rows}
    else:
        sizes |= {"acc": 4 * up * e, "statistics": 12 * rows}
    return sizes
