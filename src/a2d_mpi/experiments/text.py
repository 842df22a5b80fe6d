"""A text as bytes, cut into documents, and the batch of each training step."""

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
        Bytes; the target of a token is the next byte of its document, or -1 at the end.
    positions : (seqlen,) int64
        Positions in the document.
    cu_seqlens : (documents + 1,) int64
        First token of each document, and `seqlen`.
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
        Separator of documents.  Empty: the text is one document without an end.
    share : float
        Share of the documents that are held out; they are evenly spaced.
    held_out : bool
        True: only the held-out documents.  False: only the others.

    Attributes
    ----------
    bytes : (n,) int64
        All documents, one after the other.
    begins : (documents + 1,) int64
        First byte of each document, and the end of the last one.
    sha256 : str
        Checksum of the file.

    Raises
    ------
    ValueError
        If there is no text, or no document is left.
    OSError
        If the file cannot be read.
    """

    def __init__(
        self, path: Path, separator: bytes = b"\n\n\n", share: float = 0.0, held_out: bool = False
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
            raise ValueError(
                f"{path} has {count} documents, so a share of {share} holds out none or all"
            )
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.bytes = np.frombuffer(b"".join(parts), np.uint8).astype(np.int64)
        self.begins = np.cumsum([0, *map(len, parts)])
        self._separated = bool(separator)

    def batch(self, seqlen: int, seed: int, step: int) -> Batch:
        """Return the sequence of a step, `seqlen` bytes from a random place on.

        At the end of the text the sequence continues at its beginning.
        """
        rng = np.random.default_rng([seed, step])
        return self.at(int(rng.integers(len(self.bytes))), seqlen)

    def at(self, begin: int, seqlen: int) -> Batch:
        """Return the sequence of `seqlen` bytes from a place on; see `batch`."""
        where = (begin + np.arange(seqlen + 1)) % len(self.bytes)
        tokens = self.bytes[where]
        first = np.isin(where, self.begins[:-1]) & self._separated  # tokens that begin documents
        starts = np.union1d(np.flatnonzero(first[:-1]), [0])
        cu_seqlens = np.append(starts, seqlen)
        targets = tokens[1:].copy()
        targets[first[1:]] = -1
        return Batch(tokens[:-1], targets, positions_in(cu_seqlens), cu_seqlens)

    def sizes(self) -> dict[str, object]:
        """Return documents, bytes and unigram entropy by their names in result files."""
        sizes = {"documents": len(self.begins) - 1, "bytes": len(self.bytes)}
        return sizes | {"unigram_entropy": self.entropy()}

    def entropy(self) -> float:
        """Return the unigram entropy, nats per byte: the least loss of a model without context."""
        share = np.bincount(self.bytes, minlength=VOCAB) / len(self.bytes)
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())
