"""The patterns of LongCA-bench (arXiv:2510.17896) that have sizes.

Random sizes of the benchmark (lengths of documents, prefixes) are drawn from ``seed``, 0 by
default.  Windows and blocks have 1024 tokens, as in the benchmark.  In a sequence of less than
16384 tokens they have a 16th of the sequence.  Each function has the name of its pattern in
`a2d_mpi.masks.patterns.PATTERNS`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from a2d_mpi.masks.documents import (
    CausalBlockwise,
    Documents,
    PrefixLMDocuments,
    SharedQuestion,
)
from a2d_mpi.masks.mask import Mask
from a2d_mpi.masks.windows import BlockCausal, GlobalSlidingWindow, PrefixLM, SlidingWindow

WINDOW = 1024  # tokens of the benchmark's windows and blocks
# Median of the lengths of documents in tokens, and standard deviation of its logarithm.  The mean
# is ``MEDIAN exp(SIGMA^2 / 2)``, 1577, and one length in a hundred is above 16,800.
MEDIAN, SIGMA = 512, 1.5
LONG = (8192, 30720)  # shortest and longest of the benchmark's long documents, in tokens
SHORT_SHARE = 0.4  # share of the tokens that are in short documents, in a mix with long ones


def documents(seqlen: int, seed: int = 0, median: float | None = None) -> np.ndarray:
    """Draw packed documents of log-normal lengths: few long documents hold most of the tokens.

    A length is ``ceil(median exp(SIGMA x))`` with a standard normal x.  Lengths are drawn until
    they fill the sequence, and the last document is cut at the end of the sequence.

    Parameters
    ----------
    seqlen : int
        Tokens of the sequence.
    seed : int
        Seed of the random lengths.
    median : float, optional
        Median length in tokens.  Default: 512, or a 32nd of a sequence of less than 16384 tokens.

    Returns
    -------
    (documents + 1,) int64
        ``cu_seqlens``: first token of each document, and `seqlen`.
    """
    median = min(MEDIAN, max(1, seqlen / 32)) if median is None else median
    rng = np.random.default_rng(seed)
    return _packed(seqlen, lambda n: np.ceil(median * np.exp(SIGMA * rng.standard_normal(n))))


def long_documents(seqlen: int, seed: int = 0) -> np.ndarray:
    """Draw a mix of short and long documents, in random order.

    Short documents from `documents`, with a median of 512 tokens, hold 40 % of the tokens.  Long
    documents hold 60 %; their lengths are uniform from 8192 to 30720 tokens.  The last document of
    each kind is cut.  In a sequence of less than 131072 tokens all lengths shrink in proportion.

    Parameters
    ----------
    seqlen : int
        Tokens of the sequence.
    seed : int
        Seed of the random lengths and of the order.

    Returns
    -------
    (documents + 1,) int64
        ``cu_seqlens``: first token of each document, and `seqlen`.
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
    """Return ``cu_seqlens`` of documents whose lengths are drawn until they fill the sequence."""
    ends = [np.zeros(1, np.int64)]
    while ends[-1][-1] < seqlen:
        lengths = np.minimum(draw(256), seqlen).astype(np.int64)
        ends.append(ends[-1][-1] + np.cumsum(lengths))
    cu_seqlens = np.concatenate(ends)
    return np.append(cu_seqlens[cu_seqlens < seqlen], seqlen)


def _size(seqlen: int) -> int:
    return min(WINDOW, max(1, seqlen // 16))


def _given(seqlen: int, cu_seqlens: tuple[int, ...], seed: int | None) -> np.ndarray:
    """Return the given documents; draw documents if none are given."""
    if cu_seqlens and seed is not None:
        raise ValueError(
            f"give documents or a seed, not both, got {list(cu_seqlens)} and seed={seed}"
        )
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
        raise ValueError(f"give a prefix or a seed, not both, got prefix={prefix} and seed={seed}")
    # The prefix is uniform over the sequence, as in the benchmark.
    return PrefixLM(_drawn(1, seqlen, seed) if prefix is None else prefix)


def prefix_lm_document(
    seqlen: int, *cu_seqlens: int, prefix: int | None = None, seed: int | None = None
) -> Mask:
    packed = _given(seqlen, cu_seqlens, seed)
    # One prefix for all documents is uniform over the first document, as in the benchmark.
    prefix = _drawn(1, max(1, packed[1:2].sum()), seed) if prefix is None else prefix
    return PrefixLMDocuments(packed, prefix)


def sliding_window(seqlen: int, left: int | None = None, right: int | None = None) -> Mask:
    if left is None:  # the pattern of LongCA-bench looks to both sides
        left = _size(seqlen)
        right = left if right is None else right
    return SlidingWindow(left, right or 0)


def sliding_window_causal(seqlen: int, left: int | None = None) -> Mask:
    return SlidingWindow(_size(seqlen) if left is None else left)


def global_sliding_window(
    seqlen: int, tokens: int | None = None, left: int | None = None, right: int | None = None
) -> Mask:
    tokens = _size(seqlen) if tokens is None else tokens
    if left is None:
        left = tokens
        right = left if right is None else right
    return GlobalSlidingWindow(tokens, left, right or 0)


def block_causal_document(
    seqlen: int, *cu_seqlens: int, block: int | None = None, seed: int | None = None
) -> Mask:
    block = _size(seqlen) if block is None else block
    inside = BlockCausal(block)
    if cu_seqlens:
        return Documents(_given(seqlen, cu_seqlens, seed), inside=inside)
    rng = np.random.default_rng([seed or 0, 3])
    packed = _packed(seqlen, lambda n: block * rng.integers(1, 9, n))
    return Documents(packed, inside=inside)


def full_document_long(seqlen: int, *, seed: int | None = None) -> Mask:
    return Documents(long_documents(seqlen, seed or 0))


def causal_document_long(seqlen: int, *, seed: int | None = None) -> Mask:
    return Documents(long_documents(seqlen, seed or 0), causal=True)
