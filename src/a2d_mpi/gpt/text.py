"""Text as bytes, packed documents, and the batch of each step."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCAB = 256


class Batch(NamedTuple):
    """One sequence of packed documents.

    Attributes
    ----------
    tokens, targets : (seqlen,) int64
        `targets`: the next byte of the same document; -1 where there is none.
    positions : (seqlen,) int64
        In the document.
    cu_seqlens : (documents + 1,) int64
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray


class Text:
    """A text, cut into documents.

    Parameters
    ----------
    path : Path
    separator : bytes
        Between documents; empty: the text is one.

    Raises
    ------
    ValueError
        If the text is empty.
    OSError
        If it cannot be read.
    """

    def __init__(self, path: Path, separator: bytes = b"\n\n\n") -> None:
        whole = Path(path).read_bytes()
        parts = [x for x in whole.split(separator) if x] if separator else [whole]
        if not any(parts):
            raise ValueError(f"{path} has no text")
        self.bytes = np.frombuffer(b"".join(parts), np.uint8).astype(np.int64)
        self.begins = np.cumsum([0, *map(len, parts)])  # of documents, and the end

    def batch(self, seqlen: int, seed: int, step: int, one_document: bool = False) -> Batch:
        """The sequence of a step: `seqlen` bytes from a random place on, round the end.

        `one_document`: as if it were one.
        """
        rng = np.random.default_rng([seed, step])
        n = len(self.bytes)
        where = (int(rng.integers(n)) + np.arange(seqlen + 1)) % n
        tokens = self.bytes[where]
        if one_document:
            starts = np.zeros(1, np.int64)
        else:
            first = np.zeros(n, bool)
            first[self.begins[:-1]] = True
            starts = np.flatnonzero(first[where[:-1]])
            starts = np.union1d(starts, [0])
        ends = np.append(starts[1:], seqlen)
        targets = tokens[1:].copy()
        if not one_document:
            targets[ends[:-1] - 1] = -1
            if first[where[-1]]:
                targets[-1] = -1
        positions = np.arange(seqlen) - np.repeat(starts, ends - starts)
        return Batch(tokens[:-1], targets, positions, np.append(starts, seqlen))

    def entropy(self) -> float:
        """Nats a byte of the bytes' frequencies: the loss of the best model without context."""
        share = np.bincount(self.bytes, minlength=VOCAB) / len(self.bytes)
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())
