"""Masks by name: ``sliding_window:256``, ``full_document:seed=3``, ``full_document:0,100,400``.

The fourteen patterns are those of LongCA-bench (arXiv:2510.17896).  Random sizes of the benchmark
(lengths of documents, prefixes) are drawn from ``seed``, 0 by default.  Its fixed sizes, windows
and blocks of 1024 tokens, are a 16th of a sequence of less than 16384 tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import numpy as np

from a2d_mpi.core.documents import (
    BlockCausalDocuments,
    CausalBlockwise,
    Documents,
    PrefixLMDocuments,
    SharedQuestion,
)
from a2d_mpi.core.masks import Causal, Full, Mask
from a2d_mpi.core.windows import GlobalSlidingWindow, PrefixLM, SlidingWindow

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


def _full(seqlen):
    return Full()


def _causal(seqlen):
    return Causal()


def _full_document(seqlen, *cu_seqlens, seed=None):
    return Documents(_given(seqlen, cu_seqlens, seed))


def _causal_document(seqlen, *cu_seqlens, seed=None):
    return Documents(_given(seqlen, cu_seqlens, seed), causal=True)


def _share_question(seqlen, *cu_seqlens, seed=None):
    return SharedQuestion(_given(seqlen, cu_seqlens, seed))


def _causal_blockwise(seqlen, *cu_seqlens, seed=None):
    return CausalBlockwise(_given(seqlen, cu_seqlens, seed))


def _prefix_lm_causal(seqlen, prefix=None, *, seed=None):
    if prefix is not None and seed is not None:
        raise ValueError(f"either a prefix or a seed, got {prefix} and seed={seed}")
    # Uniform, as the benchmark draws it.
    return PrefixLM(_drawn(1, seqlen, seed) if prefix is None else prefix)


def _prefix_lm_document(seqlen, *cu_seqlens, prefix=None, seed=None):
    packed = _given(seqlen, cu_seqlens, seed)
    # One prefix for all documents, uniform over the first of them, as the benchmark draws it.
    prefix = _drawn(1, max(1, packed[1:2].sum()), seed) if prefix is None else prefix
    return PrefixLMDocuments(packed, prefix)


def _sliding_window(seqlen, left=None, right=None):
    left = _size(seqlen) if left is None else left
    return SlidingWindow(left, left if right is None else right)


def _sliding_window_causal(seqlen, left=None):
    return SlidingWindow(_size(seqlen) if left is None else left)


def _global_sliding_window(seqlen, tokens=None, left=None, right=None):
    tokens = _size(seqlen) if tokens is None else tokens
    left = tokens if left is None else left
    return GlobalSlidingWindow(tokens, left, left if right is None else right)


def _block_causal_document(seqlen, *cu_seqlens, block=None, seed=None):
    block = _size(seqlen) if block is None else block
    if cu_seqlens:
        return BlockCausalDocuments(_given(seqlen, cu_seqlens, seed), block)
    rng = np.random.default_rng([seed or 0, 3])
    return BlockCausalDocuments(_packed(seqlen, lambda n: block * rng.integers(1, 9, n)), block)


def _full_document_long(seqlen, *, seed=None):
    return Documents(long_documents(seqlen, seed or 0))


def _causal_document_long(seqlen, *, seed=None):
    return Documents(long_documents(seqlen, seed or 0), causal=True)


# By name: called with the length of the sequence and the arguments of the text.
PATTERNS: dict[str, Callable[..., Mask]] = {
    f.__name__[1:]: f
    for f in (
        *(_full, _causal, _full_document, _causal_document, _share_question, _causal_blockwise),
        *(_prefix_lm_causal, _prefix_lm_document, _sliding_window, _sliding_window_causal),
        *(_global_sliding_window, _block_causal_document, _full_document_long),
        _causal_document_long,
    )
}


def register_mask(name: str, make: Callable[..., Mask]) -> None:
    """Give a mask of one's own a name, which `make_mask` and the drivers take.

    Parameters
    ----------
    name : str
        Lower-case letters, digits and underscores, a letter first.
    make : callable
        Called with the length of the sequence, and the whole numbers of the text: those behind the
        colon of ``name:3,window=4`` as positional and keyword arguments.  Returns the mask.

    Raises
    ------
    ValueError
        If the name is taken or no such name, or `make` cannot be called.
    """
    if name in (*PATTERNS, "all", "file"):
        raise ValueError(f"there is a mask {name!r} already")
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(f"a mask's name must be of a-z, 0-9 and _, got {name!r}")
    if not callable(make):
        raise ValueError(f"mask {name!r} must be made by a function, got {make!r}")
    PATTERNS[name] = make


def parse_mask(text: str) -> tuple[str, list[int], dict[str, int]]:
    """Take the text of a mask apart.

    Parameters
    ----------
    text : str
        ``NAME``, or ``NAME:ARGUMENTS``: whole numbers and ``name=number``, with commas.

    Returns
    -------
    name : str
        One of `PATTERNS`.
    arguments : list of int
    named : dict of str to int

    Raises
    ------
    ValueError
        If there is no such mask, or it takes no such arguments.
    """
    name, colon, rest = (x.strip() for x in text.partition(":"))
    if name not in PATTERNS:
        raise ValueError(f"mask must be one of {', '.join(PATTERNS)}, got {text[:40]!r}")
    arguments, named = [], {}
    for item in rest.split(",") if colon else ():
        key, number = re.fullmatch(r"(?:\s*(\w+)\s*=)?(.*)", item, re.DOTALL).groups()
        if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", number):
            raise ValueError(f"mask {name}: {item[:40]!r} is no whole number")
        if key is None and not named:
            arguments.append(int(number))
        elif key is None or key in named:
            raise ValueError(f"mask {name}: {item[:40]!r} is one argument too many")
        else:
            named[key] = int(number)
    try:
        inspect.signature(PATTERNS[name]).bind(None, *arguments, **named)
    except TypeError:
        raise ValueError(f"mask must be {usage(name)}, got {text[:60]!r}") from None
    for key, number in named.items():
        if number < 0:
            raise ValueError(f"mask {name}: {key} must be at least 0, got {number}")
    return name, arguments, named


def make_mask(text: str, seqlen: int, seqlen_kv: int | None = None) -> Mask:
    """The mask of a name with arguments, for a sequence of `seqlen` tokens.

    Parameters
    ----------
    text : str
        As of `parse_mask`: "causal", "sliding_window_causal:256", "causal_document:0,100,400".
    seqlen : int
        Tokens of the sequence, from which sizes that are not given follow.
    seqlen_kv : int, optional
        Keys, with whose end the queries are aligned.  Default: as many as queries.

    Returns
    -------
    Mask

    Raises
    ------
    ValueError
        If there is no such mask, it takes no such arguments, or it does not fit the sequence.
    """
    name, arguments, named = parse_mask(text)
    try:
        mask = PATTERNS[name](seqlen, *arguments, **named)
        return mask.aligned(seqlen, seqlen if seqlen_kv is None else seqlen_kv)
    except ValueError as error:
        raise ValueError(f"mask {name}: {error}") from None


def split_masks(text: str) -> list[str]:
    """Split texts of masks with commas between them; "all": every name of `PATTERNS`.

    ``"full,sliding_window:8,4,causal_document:seed=1"`` are three: a number, or ``name=number``,
    belongs to the mask before it.
    """
    found: list[str] = []
    for item in filter(None, (x.strip() for x in text.split(","))):
        if found and ":" in found[-1] and re.fullmatch(r"[+-]?\d+|\w+\s*=.*", item):
            found[-1] += f",{item}"
        else:
            found.extend(PATTERNS if item == "all" else [item])
    return found


def usage(name: str) -> str:
    """The text of a mask with the names of its arguments: "sliding_window:left,right"."""
    shown = []
    for x in list(inspect.signature(PATTERNS[name]).parameters.values())[1:]:
        several = x.kind is x.VAR_POSITIONAL
        shown.append(f"{x.name},..." if several else x.name + "=" * (x.kind is x.KEYWORD_ONLY))
    return name + (f"[:{','.join(shown)}]" if shown else "")
