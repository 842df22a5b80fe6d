"""Blocks that cuDNN attention computes, by compute capability; needs no cuDNN.

For the sources of these facts see `a2d_mpi.kernels.graphs`.
"""

from __future__ import annotations

from dataclasses import dataclass

SHAPES = ("full", "causal", "anti-causal", "band", "general")


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
        Mask shape, as of `a2d_mpi.core.shapes.Run`; causal, anti-causal and band need
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

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise ValueError(f"cuDNN computes in float16 or bfloat16, got {self.dtype!r}")
        if min(self.nheads, self.nheads_kv, self.headdim, self.nq, self.nk) < 1:
            raise ValueError(f"all sizes must be positive, got {self}")
        if self.nheads % self.nheads_kv:
            raise ValueError(f"nheads must be a multiple of nheads_kv, got {self}")
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {SHAPES}, got {self.shape!r}")
        if self.shape not in ("full", "general") and self.nq > self.nk:
            raise ValueError(f"a {self.shape} block needs nq <= nk, got {self.nq} and {self.nk}")
        if (self.shape == "band") != (self.window > 0):
            raise ValueError(f"a band, and only a band, has a window > 0, got {self}")
        if self.batch < 0 or (self.batch and self.shape == "general"):
            raise ValueError(f"only simple shapes have batches, of 1 sequence or more, got {self}")


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
    gradients: str = "native",
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
    gradients : {"native", "float32"}
        Dtype of the gradients.
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
    # Each query head's gradient of a shared KV head is kept in the 16-bit dtype before the sum:
    # no kernel writes that sum in float32.
    if gradients == "float32" and block.nheads != block.nheads_kv:
        return "cuDNN has no float32 gradients where query heads share a KV head"
    # The plan that is built has no workspace of scores: dq is accumulated in place.
    if gradients == "float32" and deterministic:
        return "cuDNN's float32 gradients are not known to be deterministic"
    return None
