"""The patterns of LongCA-bench (arXiv:2510.17896) that need more than their name.

Random sizes of the benchmark (lengths of documents, prefixes) are drawn from ``seed``, 0 by
default.  Its fixed sizes, windows and blocks of 1024 tokens, are a 16th of a sequence of less than
16384 tokens.  Each pattern is a function of its name in `a2d_mpi.masks.patterns.PATTERNS`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from a2d_mpi.masks.documents import (
    BlockCausalDocuments,
    CausalBlockwise,
    Documents,
    PrefixLMDocuments,
    SharedQuestion,
)
from a2d_mpi.masks.mask import Mask
from a2d_mpi.masks.windows import GlobalSlidingWindow, PrefixLM, SlidingWindow

WINDOW = 1024  # tokens of the benchmark's windows and blocks
MEDIAN, SIGMA = 512, 1.5  # of the lengths of documents: mean 1577, one in a hundred above 16 800
LONG = (8192, 30720)  # shortest and longest of the benchmark's long documents
SHORT_SHARE = 0.4  # of the tokens of a mix with long documents


def documents(
    seqlen: int, seed: int = 0, median: float | None = None, sigma: float = SIGMA
) -> np.ndarray:
    """Draw the lengths of packed documents: few long ones hold most of the tokens.

    Lengths are log-normal, ``ceil(median exp(sigma x))`` with a standard normal x, drawn one after
    the other until they fill the sequence; the last document is cut at its end.

    Parameters
    ----------
    seqlen : int
        Tokens of the sequence.
    seed : int
        Other lengths for another seed.
    median : float, optional
        Median length in tokens.  Default: 512, or a 32nd of a sequence of less than 16384 tokens.
    sigma : float
        Standard deviation of the logarithm; the mean length is ``median exp(sigma^2 / 2)``.

    Returns
    -------
    (documents + 1,) int64
        ``cu_seqlens``: first token of each document, and `seqlen`.
    """
    median = min(MEDIAN, max(1, seqlen / 32)) if median is None else median
    rng = np.random.default_rng(seed)
    return _packed(seqlen, lambda n: np.ceil(median * np.exp(sigma * rng.standard_normal(n))))


def long_documents(seqlen: int, seed: int = 0) -> np.ndarray:
    """Draw a mix of short and long documents, in random order.

    40 % of the tokens are in documents of `documents`, with a median of 512 tokens, and 60 % in
    long ones of 8192 to 30720 tokens, each length as likely; the last one of each kind is cut.
    For sequences of less than 131072 tokens all of these lengths shrink in proportion.

    Parameters
    ----------
    seqlen : int
        Tokens of the sequence.
    seed : int
        Other documents for another seed.

    Returns
    -------
    (documents + 1,) int64
        ``cu_seqlens``.
    """
    scale, rng = min(1.0, seqlen / (1 << 17)), np.random.default_rng([seed, 1])
    low, high = (max(1, round(scale * x)) for x in LONG)
    short = int(SHORT_SHARE * seqlen)
    packed = (
        documents(short, seed, max(1, scale * MEDIAN)),
        _packed(seqlen - short, lambda n: rng.integers(low, high + 1, n)),
    )
    lengths = rng.permutation(np.concatenate([np.diff(x) for x in packed]))
    return np.concatenate([[0], np.cumsum(lengths)])


def _packed(seqlen: int, draw: Callable[[int], np.ndarray]) -> np.ndarray:
    """Ends of documents of drawn lengths, as many as fill the sequence."""
    ends = [np.zeros(1, np.int64)]
    while ends[-1][-1] < seqlen:
        lengths = np.minimum(draw(256), seqlen).astype(np.int64)
        ends.append(ends[-1][-1] + np.cumsum(lengths))
    found = np.concatenate(ends)
    return np.append(found[found < seqlen], seqlen)


def _size(seqlen: int) -> int:
    return min(WINDOW, max(1, seqlen // 16))


def _given(seqlen: int, cu_seqlens: tuple[int, ...], seed: int | None) -> np.ndarray:
    """The documents that are given, or drawn ones."""
    if cu_seqlens and seed is not None:
        raise ValueError(f"either documents or a seed, got {list(cu_seqlens)} and seed={seed}")
    return np.array(cu_seqlens) if cu_seqlens else documents(seqlen, seed or 0)


def _drawn(low: int, high: int, seed: int | None) -> int:
    return int(np.random.default_rng([seed or 0, 4]).integers(low, high + 1))


def full_document(seqlen: int, *cu_seqlens: int, seed: int | None = None) -> Mask:
    return Documents(_given(seqlen, cu_seqlens, seed))


def causal_document(seqlen: int, *cu_seqlens: int, seed: int | None = None) -> Mask:
    return Documents(_given(seqlen, cu_seqlens, seed), causal=True)


def share_question(seqlen: int, *cu_seqlens: int, seed: int | None = None) -> Mask:
    return SharedQuestion(_given(seqlen, cu_seqlens, seed))


def causal_blockwise(seqlen: int, *cu_seqlens: int, seed: int | None = None) -> Mask:
    return CausalBlockwise(_given(seqlen, cu_seqlens, seed))


def prefix_lm_causal(seqlen: int, prefix: int | None = None, *, seed: int | None = None) -> Mask:
    if prefix is not None and seed is not None:
        raise ValueError(f"either a prefix or a seed, got {prefix} and seed={seed}")
    # Uniform, as the benchmark draws it.
    return PrefixLM(_drawn(1, seqlen, seed) if prefix is None else prefix)


def prefix_lm_document(
    seqlen: int, *cu_seqlens: int, prefix: int | None = None, seed: int | None = None
) -> Mask:
    packed = _given(seqlen, cu_seqlens, seed)
    # One prefix for all documents, uniform over the first of them, as the benchmark draws it.
    prefix = _drawn(1, max(1, packed[1:2].sum()), seed) if prefix is None else prefix
    return PrefixLMDocuments(packed, prefix)


def sliding_window(seqlen: int, left: int | None = None, right: int | None = None) -> Mask:
    left = _size(seqlen) if left is None else left
    return SlidingWindow(left, left if right is None else right)


def sliding_window_causal(seqlen: int, left: int | None = None) -> Mask:
    return SlidingWindow(_size(seqlen) if left is None else left)


def global_sliding_window(
    seqlen: int, tokens: int | None = None, left: int | None = None, right: int | None = None
) -> Mask:
    tokens = _size(seqlen) if tokens is None else tokens
    left = tokens if left is None else left
    return GlobalSlidingWindow(tokens, left, left if right is None else right)


def block_causal_document(
    seqlen: int, *cu_seqlens: int, block: int | None = None, seed: int | None = None
) -> Mask:
    block = _size(seqlen) if block is None else block
    if cu_seqlens:
        return BlockCausalDocuments(_given(seqlen, cu_seqlens, seed), block)
    rng = np.random.default_rng([seed or 0, 3])
    return BlockCausalDocuments(_packed(seqlen, lambda n: block * rng.integers(1, 9, n)), block)


def full_document_long(seqlen: int, *, seed: int | None = None) -> Mask:
    return Documents(long_documents(seqlen, seed or 0))


def causal_document_long(seqlen: int, *, seed: int | None = None) -> Mask:
    return Documents(long_documents(seqlen, seed or 0), causal=True)
