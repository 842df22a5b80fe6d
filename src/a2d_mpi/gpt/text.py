"""Text as bytes, packed documents, and the batch of each step."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.atomic import read_regular
from a2d_mpi.masks.documents import positions_in

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
        Between documents; empty: the text is one, without an end.
    share : float
        Share of the documents that is held out: evenly spaced ones.
    held_out : bool
        These, and not the others.

    Attributes
    ----------
    bytes : (n,) int64
        All documents, one after the other.
    begins : (documents + 1,) int64
        Where they begin, and the end of the last one.
    sha256 : str
        Of the file.

    Raises
    ------
    ValueError
        If there is no text, or no document is held out.
    OSError
        If it cannot be read.
    """

    def __init__(
        self,
        path: Path,
        separator: bytes = b"\n\n\n",
        share: float = 0.0,
        held_out: bool = False,
    ) -> None:
        content = read_regular(path)
        parts = [x for x in content.split(separator) if x] if separator else [content]
        if not any(parts):
            raise ValueError(f"{path} has no text")
        count = len(parts)
        parts = [
            x for i, x in enumerate(parts) if held_out == (int((i + 1) * share) > int(i * share))
        ]
        if not parts:
            raise ValueError(f"{path} has {count} documents: a share of {share} is none or all")
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.bytes = np.frombuffer(b"".join(parts), np.uint8).astype(np.int64)
        self.begins = np.cumsum([0, *map(len, parts)])  # of documents, and the end
        self._separated = bool(separator)

    def batch(self, seqlen: int, seed: int, step: int) -> Batch:
        """The sequence of a step: `seqlen` bytes from a random place on, round the end."""
        rng = np.random.default_rng([seed, step])
        return self.at(int(rng.integers(len(self.bytes))), seqlen)

    def at(self, begin: int, seqlen: int) -> Batch:
        """The sequence of `seqlen` bytes from a place on, round the end."""
        where = (begin + np.arange(seqlen + 1)) % len(self.bytes)
        tokens = self.bytes[where]
        first = np.isin(where, self.begins[:-1]) & self._separated  # of a document
        starts = np.union1d(np.flatnonzero(first[:-1]), [0])
        cu_seqlens = np.append(starts, seqlen)
        targets = tokens[1:].copy()
        targets[first[1:]] = -1
        return Batch(tokens[:-1], targets, positions_in(cu_seqlens), cu_seqlens)

    def sizes(self) -> dict[str, object]:
        """Documents, bytes and unigram entropy, as result files name them."""
        documents = len(self.begins) - 1
        return {
            "documents": documents,
            "bytes": len(self.bytes),
            "unigram_entropy": self.entropy(),
        }

    def entropy(self) -> float:
        """Nats a byte of the bytes' frequencies: the loss of the best model without context."""
        share = np.bincount(self.bytes, minlength=VOCAB) / len(self.bytes)
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())
