"""Blocks that cuDNN attention can compute, by compute capability; this module needs no cuDNN.

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
        Dtype of all tensors but the statistics.
    nheads, nheads_kv, headdim : int
    nq, nk : int
        Queries and keys.
    shape : {"full", "causal", "anti-causal", "band", "general"}
        Mask shape, as in `a2d_mpi.kernels.shapes.Run`.  The shapes causal, anti-causal and band
        need ``nq <= nk``.  With "general", the launch takes an interval of keys for each query.
    scale : float
        Factor of the logits.
    window : int
        Keys that each query of a band sees.
    batch : int
        Number of sequences of a ragged launch.  Each has 1 to `nq` queries and 1 to `nk` keys, and
        its own mask.  0: a dense launch of one sequence with nq queries and nk keys.
    total : int
        Most rows of the queries' tensors, for gradients of a ragged launch.
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
    """Return True if gradients of a dense launch may be NaN when an lse is below -88.

    Half of cuDNN's last tile may be beyond the last key.  On Hopper, cuDNN then takes exp(0 - lse)
    of the zeros there for probabilities, unless a mask hides them (pull request 628 of
    nvidia-cudnn-frontend).
    """
    return capability[0] == 9 and nk % 128 == 64 and shape in ("full", "anti-causal")


def supported(
    block: Block, capability: tuple[int, int], backward: bool = True, deterministic: bool = False
) -> str | None:
    """Return the reason why cuDNN does not compute `block`; return None if it does.

    Parameters
    ----------
    block : Block
    capability : (int, int)
        Compute capability of the device.
    backward : bool
        Whether to ask about gradients, too; otherwise only about the forward pass.
    deterministic : bool
        As in `a2d_mpi.kernels.graphs.Graphs`.

    Notes
    -----
    Blocks that are not known to work are refused.  A block that is accepted here may still raise
    `NotSupported` when its graph is built.
    """
    major, d = capability[0], block.headdim
    if major not in (8, 9, 10, 12):
        return f"cuDNN attention is not known for compute capability {capability}"
    if d % 8:
        return f"cuDNN needs a headdim that is a multiple of 8, got {d}"
    # The manual says 128 on other GPUs, for gradients and for a single query.  But graphs for a
    # single query can be built.
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
