"""Batches of sequences that are padded to one length, as arrays which ranks compare."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from a2d_mpi.torch.cache import SpreadCache


def integers(name: str, x: Any) -> np.ndarray | None:
    """Return integers, (n,) or (B, n), as an int64 array, (B, n); None stays None."""
    if x is None:
        return None
    x = x.numpy(force=True) if isinstance(x, torch.Tensor) else np.asarray(x)
    if x.dtype.kind not in "biu" or x.ndim not in (1, 2):
        raise ValueError(f"{name} must be integers, (B, N), got shape {x.shape} of {x.dtype}")
    return np.atleast_2d(np.ascontiguousarray(x, np.int64))


def digest(x: Any) -> str:
    """Return a text by which ranks compare an argument."""
    x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    if not isinstance(x, torch.Tensor):
        return repr(x)
    flat = x.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return f"{tuple(x.shape)} {x.dtype} (digest {blake2b(flat, digest_size=4).hexdigest()})"


def kind_of(x: Any) -> str:
    """Return what an argument is, for a message."""
    return f"shape {tuple(x.shape)}" if hasattr(x, "shape") else type(x).__name__


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


def check_continues(cache: SpreadCache, ids: np.ndarray, mask: np.ndarray) -> None:
    """Raise ValueError unless prompts continue the tokens of a cache, and end with a token."""
    check_padding(mask, ids.shape)
    old = cache.length
    if not mask[:, -1].all():
        raise ValueError("tokens of padding end the prompt: give attention_mask")
    if not old:
        return
    if len(ids) != len(cache.ids) or ids.shape[1] <= old:
        raise ValueError(
            f"the cache has {len(cache.ids)} rows of {old} tokens, and the prompt {len(ids)} of "
            f"{ids.shape[1]}: it must begin with those tokens, and have more"
        )
    for row, place in np.argwhere(ids[:, :old] != cache.ids):
        raise ValueError(
            f"the prompt has token {ids[row, place]} at {place} of row {row}, but the cache has "
            f"{cache.ids[row, place]}"
        )
    if (mask[:, :old].sum(1) != cache.lengths).any():
        raise ValueError("attention_mask must be that of the cache, and 1 for new tokens")


def left_padded(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Move padding behind the tokens of a row, (B, n), to the front."""
    return np.stack([np.roll(y, n) for y, n in zip(x, mask[:, ::-1].argmax(1))])


def positions_of(mask: np.ndarray) -> np.ndarray:
    """Return the position of each token of rows with padding before them, as transformers does."""
    return (mask.cumsum(1) - 1).clip(0)
