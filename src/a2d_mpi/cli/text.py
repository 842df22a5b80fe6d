"""Texts as data sets of a Trainer: packed documents, cut into sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from a2d_mpi.core.atomic import read_regular


class Text:
    """Documents one after the other, and sequences that are cut from them.

    Sequence i is a dict of (seqlen,) int64: `input_ids`; `position_ids`, which count from 0 in
    each document, so that documents do not see each other; and `labels`, of which the first one
    of each document is -100, because nothing predicts it.

    Parameters
    ----------
    documents : sequence of (n,) int64
        The tokens of each document, at least one.
    seqlen : int
        Tokens of a sequence.
    number : int, optional
        Number of sequences, which begin at random places, and continue at the beginning of the
        text where it ends.  Default: the text is cut into sequences from its beginning on.
    seed : int
        Seed of the places.
    separated : bool
        False: the only document has no end, and goes on at its beginning.

    Attributes
    ----------
    tokens : (n,) int64
    longest : int
        Tokens of the longest document of a sequence.
    """

    def __init__(
        self,
        documents: Sequence[np.ndarray],
        seqlen: int,
        number: int | None = None,
        seed: int = 0,
        separated: bool = True,
    ) -> None:
        self.tokens, self._seqlen, self._seed = np.concatenate(documents), seqlen, seed
        self._number, self._begins = number, np.cumsum([0, *map(len, documents)])
        self._separated = separated
        self.longest = min(seqlen, max(map(len, documents)) if separated else seqlen)

    def __len__(self) -> int:
        return len(self.tokens) // self._seqlen if self._number is None else self._number

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        begin = i * self._seqlen
        if self._number is not None:
            begin = int(np.random.default_rng([self._seed, i]).integers(len(self.tokens)))
        place = np.arange(self._seqlen)
        where = (begin + place) % len(self.tokens)
        first = np.isin(where, self._begins[:-1]) & self._separated  # tokens that begin documents
        first[0] = True
        ids = self.tokens[where]
        return {
            "input_ids": ids,
            "position_ids": place - np.maximum.accumulate(np.where(first, place, 0)),
            "labels": np.where(first, -100, ids),
        }


def read_documents(
    paths: Sequence[Path],
    separator: bytes,
    share: float,
    encode: Callable[[bytes], Sequence[int]],
) -> tuple[list[np.ndarray], list[np.ndarray], str]:
    """Read files, and cut them into documents.

    Parameters
    ----------
    paths : sequence of Path
    separator : bytes
        Separator of documents.  Empty: each file is a document.
    share : float
        Share of the documents that are held out; they are evenly spaced.
    encode : callable
        Returns the tokens of a document.

    Returns
    -------
    list of (n,) int64
        Documents that are not held out.
    list of (n,) int64
        Documents that are held out.
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
    return rest, held, " ".join(digests)
