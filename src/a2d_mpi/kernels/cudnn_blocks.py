"""Blocks that cuDNN attention computes, by compute capability; needs no cuDNN.

For the sources of these facts see `a2d_mpi.kernels.graphs`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """The work of one launch: attention of `nq` queries over `nk` keys, or of several sequences.

    Attributes
    ----------
    dtype : {"float16", "bfloat16"}
        Of all tensors but the statistics.
    nheads, nheads_kv, headdim : int
    nq, nk : int
    shape : {"full", "causal", "anti-causal", "band", "general"}
        Mask shape, as of `a2d_mpi.kernels.shapes.Run`; causal, anti-causal and band need
        ``nq <= nk``.  General: each query sees an interval of keys that is given at the launch.
    scale : float
        Factor of the logits.
    window : int
    batch : int
        Sequences of a ragged launch, each of 1 to `nq` queries and 1 to `nk` keys, where the
        mask's bounds are its own; 0: a dense launch, of one sequence of that size.
    total : int
        Of gradients of a ragged launch: rows of the queries' tensors, at most.
    """

    dtype: str
    nheads: int
    nheads_kv: int
    headdim: int
    nq: int
    nk: int
    shape: str
    scale: float
    window: int = 0
    batch: int = 0
    total: int = 0


def reads_past(shape: str, nk: int, capability: tuple[int, int]) -> bool:
    """Tell whether the gradients of a dense launch may be NaN where the lse is below -88.

    On Hopper cuDNN then takes exp(0 - lse) of zeros beyond the last key for probabilities, where
    half a tile is beyond it and no mask hides it (pull request 628 of nvidia-cudnn-frontend).
    """
    return capability[0] == 9 and nk % 128 == 64 and shape in ("full", "anti-causal")


def supported(
    block: Block,
    capability: tuple[int, int],
    backward: bool = True,
    deterministic: bool = False,
) -> str | None:
    """Give the reason that cuDNN does not compute `block`; None if it does.

    Parameters
    ----------
    block : Block
    capability : (int, int)
        Compute capability of the device.
    backward : bool
        Also the gradients; False asks about the forward pass only.
    deterministic : bool
        As for `Graphs`.

    Notes
    -----
    Blocks that are not known to work are refused.  A block that passes may still raise
    `NotSupported` when its graph is built.
    """
    major, d = capability[0], block.headdim
    if major not in (8, 9, 10, 12):
        return f"cuDNN attention is not known for compute capability {capability}"
    if d % 8:
        return f"cuDNN needs a headdim that is a multiple of 8, got {d}"
    # Elsewhere the manual says 128 for gradients and for a single query, though plans for a
    # single query do build.
    most = 256 if major == 9 or not (backward or block.nq == 1) else 128
    if d > most:
        return f"cuDNN's limit of headdim is {most} for capability {capability}, got {d}"
    if not backward:
        return None
    if major in (8, 12) and block.shape == "general":
        return f"cuDNN has no gradients of a general mask for capability {capability}"
    if block.batch:
        if major in (8, 12):
            return f"cuDNN has no ragged gradients with packed statistics for {capability}"
        if deterministic:
            return "ragged deterministic gradients keep scores of the longest size for each batch"
        if d % 16:
            return f"ragged gradients need a headdim that is a multiple of 16, got {d}"
    if block.nq == 1 and not block.batch:
        # Reported on an H200 with 9.25 and 9.26 (issue 1072).
        return "cuDNN's gradients for one query may be NaN, and it has none for one key, too"
    if not block.batch and reads_past(block.shape, block.nk, capability):
        return f"cuDNN's gradients for {block.nk} keys may be NaN"
    return None
