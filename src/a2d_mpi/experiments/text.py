"""Texts as tokens, cut into documents, and the sequences of training steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.atomic import read_regular


class Batch(NamedTuple):
    """One sequence of packed documents.

    Attributes
    ----------
    tokens : (seqlen,) int64
    cu_seqlens : (documents + 1,) int64
        First token of each document, and `seqlen`.
    """

    tokens: np.ndarray
    cu_seqlens: np.ndarray

    @property
    def nlabels(self) -> int:
        """Tokens that have a label: all but the last one of each document."""
        return len(self.tokens) - len(self.cu_seqlens) + 1

    @property
    def documents(self) -> list[np.ndarray]:
        """The tokens of each document."""
        return np.split(self.tokens, self.cu_seqlens[1:-1])


class Text:
    """Documents, one after the other.

    Parameters
    ----------
    documents : sequence of (n,) int64
        The tokens of each document, at least one.
    separated : bool
        False: the only document has no end, and goes on at its beginning.

    Attributes
    ----------
    tokens : (n,) int64
    begins : (documents + 1,) int64
        First token of each document, and the end of the last one.
    """

    def __init__(self, documents: Sequence[np.ndarray], separated: bool = True) -> None:
        self.tokens = np.concatenate(documents)
        self.begins = np.cumsum([0, *map(len, documents)])
        self._separated = separated

    def longest(self, seqlen: int) -> int:
        """Return the tokens of the longest document of a sequence."""
        longest = np.diff(self.begins).max() if self._separated else seqlen
        return int(min(longest, seqlen))

    def batch(self, seqlen: int, seed: int, number: int) -> Batch:
        """Return one of the sequences of a run, `seqlen` tokens from a random place on.

        At the end of the text the sequence continues at its beginning.
        """
        rng = np.random.default_rng([seed, number])
        return self.at(int(rng.integers(len(self.tokens))), seqlen)

    def at(self, begin: int, seqlen: int) -> Batch:
        """Return the sequence of `seqlen` tokens from a place on; see `batch`."""
        where = (begin + np.arange(seqlen)) % len(self.tokens)
        first = np.isin(where, self.begins[:-1]) & self._separated  # tokens that begin documents
        starts = np.union1d(np.flatnonzero(first), [0])
        return Batch(self.tokens[where], np.append(starts, seqlen))

    def sizes(self) -> dict[str, object]:
        """Return documents, tokens and unigram entropy by their names in result files.

        The unigram entropy, nats per token, is the least loss of a model without context.
        """
        share = np.unique(self.tokens, return_counts=True)[1] / len(self.tokens)
        sizes = {"documents": len(self.begins) - 1, "tokens": len(self.tokens)}
        return sizes | {"unigram_entropy": float(-(share * np.log(share)).sum())}


def read_texts(
    paths: Sequence[Path],
    separator: bytes,
    share: float,
    encode: Callable[[bytes], Sequence[int]],
) -> tuple[Text, Text | None, str]:
    """Read files, and cut them into documents.

    Parameters
    ----------
    paths : sequence of Path
    separator : bytes
        Separator of documents.  Empty: each file is a document, and a single one has no end.
    share : float
        Share of the documents that are held out; they are evenly spaced.
    encode : callable
        Returns the tokens of a document.

    Returns
    -------
    Text
        What is not held out.
    Text or None
        What is held out, if `share` is positive.
    str
        SHA-256 of each file.

    Raises
    ------
    ValueError
        If a file has no text, or no tokens, or no document is left or held out.
    OSError
        If a file cannot be read.
    """
    documents, digests = [], []
    for path in paths:
        content = read_regular(path)
        parts = content.split(separator) if separator else [content]
        try:
            encoded = [np.array(encode(x), np.int64) for x in parts if x]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not any(map(len, encoded)):
            raise ValueError(f"{path} has no text")
        documents += [x for x in encoded if len(x)]
        digests.append(hashlib.sha256(content).hexdigest())
    of_part: tuple[list, list] = [], []
    for i, x in enumerate(documents):
        of_part[int((i + 1) * share) > int(i * share)].append(x)
    rest, held = of_part
    if not rest or (share and not held):
        raise ValueError(
            f"the text has {len(documents)} documents, so a share of {share} holds out none or all"
        )
    separated = bool(separator) or len(documents) > 1
    return Text(rest, separated), Text(held) if held else None, " ".join(digests)
