"""Masks of packed documents: several texts in one sequence, given by ``cu_seqlens``.

Document d is the tokens ``cu_seqlens[d] <= i < cu_seqlens[d + 1]``, as in FlashAttention's
functions for sequences of variable length.  Documents may be empty.  Tokens after the last
document are masked: they see no key, and no query sees them.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import numpy as np

from a2d_mpi.masks.arrays import ArrayMask, Integers
from a2d_mpi.masks.intervals import EVERYTHING, Interval
from a2d_mpi.masks.mask import Causal, Full, Mask
from a2d_mpi.masks.windows import SlidingWindow


@dataclass(frozen=True, eq=False, repr=False)
class _Packed(ArrayMask):
    """Base of masks of packed documents; a document is causal unless a subclass says otherwise.

    Parameters
    ----------
    cu_seqlens : (documents + 1,) integers
        First token of each document, and the end of the last document; ascending from 0.
    cu_seqlens_kv : (documents + 1,) integers, optional
        The same numbers for the keys, if the keys belong to another sequence; keyword only.  The
        queries of each document are aligned with the end of its keys.
    """

    cu_seqlens: Integers
    _: KW_ONLY
    cu_seqlens_kv: Integers | None = None

    def __post_init__(self) -> None:
        given = {"cu_seqlens": self.cu_seqlens, "cu_seqlens_kv": self.cu_seqlens_kv}
        self._set(**{name: _checked(name, x) for name, x in given.items() if x is not None})
        if self.cu_seqlens_kv is not None and len(self.cu_seqlens_kv) != len(self.cu_seqlens):
            raise ValueError(
                f"cu_seqlens and cu_seqlens_kv must have the same length, got "
                f"{len(self.cu_seqlens)} and {len(self.cu_seqlens_kv)} numbers"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ndocuments} documents)"

    @property
    def ndocuments(self) -> int:
        """Number of documents."""
        return len(self.cu_seqlens) - 1

    def aligned(self, seqlen: int, seqlen_kv: int) -> Mask:
        if self.cu_seqlens_kv is None and seqlen_kv != seqlen:
            raise ValueError(
                f"{type(self).__name__} of {seqlen} queries and {seqlen_kv} keys needs "
                f"cu_seqlens_kv, the documents of the keys"
            )
        for name, n in (("cu_seqlens", seqlen), ("cu_seqlens_kv", seqlen_kv)):
            ends = getattr(self, name)
            if ends is not None and ends[-1] > n:
                raise ValueError(
                    f"{name}: the last document ends at {ends[-1]}, the sequence at {n}"
                )
        return self

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        q = np.asarray(q_tokens, np.int64)
        document, first, end = self._keys_of(q)
        n = end - first
        # Aligned at the end: the last query of a document has the position of its last key.
        position = q - np.append(self.cu_seqlens[1:], 0)[document] + n
        return tuple(
            (first + a.clip(0, n), first + b.clip(0, n))
            for a, b in self._inside(position, document)
        )

    def _inside(self, position: np.ndarray, document: np.ndarray) -> tuple[Interval, ...]:
        """Return the visible keys of queries, counted from the first key of their documents."""
        return Causal().visible(position)

    def _keys_of(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the document of each query, its first key and the end of its keys.

        Tokens after the last document belong to one more document, which has no keys.
        """
        document = np.searchsorted(self.cu_seqlens, q, side="right") - 1
        return document, self._bounds[document], self._bounds[document + 1]

    @cached_property
    def _bounds(self) -> np.ndarray:
        """First key of each document, and the bounds of one more document, which has no keys."""
        bounds = self.cu_seqlens if self.cu_seqlens_kv is None else self.cu_seqlens_kv
        return np.append(bounds, bounds[-1])


@dataclass(frozen=True, eq=False, repr=False)
class Documents(_Packed):
    """A query sees keys of its own document only.

    Parameters
    ----------
    cu_seqlens : (documents + 1,) integers
        First token of each document, and the end of the last document; ascending from 0.
    causal : bool
        Whether a query sees only itself and the keys before it in its document.
    inside : Mask, optional
        Mask of every document, used instead of `causal`.  Its positions are counted from the
        document's first token.  It may be a window, a prefix, blocks, or any other mask.
    cu_seqlens_kv : (documents + 1,) integers, optional
        The same numbers for the keys, if the keys belong to another sequence; keyword only.  The
        queries of each document are aligned with the end of its keys.

    Raises
    ------
    ValueError
        If the numbers are not sorted or do not begin with 0, or two arguments contradict each
        other.
    """

    causal: bool = False
    inside: Mask | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        inside = self.inside
        if inside is None:
            inside = Causal() if self.causal else Full()
        if not isinstance(inside, Mask) or (self.causal and inside != Causal()):
            raise ValueError(
                f"inside must be a Mask, given instead of causal=True, got inside={inside!r} and "
                f"causal={self.causal}"
            )
        object.__setattr__(self, "inside", inside)
        object.__setattr__(self, "causal", inside == Causal())

    def __repr__(self) -> str:
        return f"Documents({self.ndocuments} documents, inside={self.inside!r})"

    def _inside(self, position: np.ndarray, document: np.ndarray) -> tuple[Interval, ...]:
        return self.inside.visible(position)

    def corners(self, seqlen_kv: int) -> np.ndarray | None:
        inside = SlidingWindow(0) if self.inside in (Full(), Causal()) else self.inside
        if type(inside) is not SlidingWindow:
            return None
        last = self.cu_seqlens[1:]
        first = last - np.diff(self._bounds[:-1])  # the query that stands at the first key
        before = inside.right + 1  # positions before the first key may see nothing
        ends = first - before, first + inside.left, last - before
        return np.concatenate([self.cu_seqlens, *ends])


@dataclass(frozen=True, eq=False, repr=False)
class PrefixLMDocuments(_Packed):
    """Every document has a prefix that all of its queries see; the rest of the document is causal.

    Parameters
    ----------
    cu_seqlens : (documents + 1,) integers
        As in `Documents`.
    prefix : int or (documents,) integers
        Number of prefix tokens, for all documents or for each document.  If a document is shorter
        than its prefix, all of its tokens see each other.
    cu_seqlens_kv : (documents + 1,) integers, optional
        As in `Documents`.

    Raises
    ------
    ValueError
        If `prefix` is not a non-negative integer or an array of non-negative integers, one for
        each document.  Also as in `Documents`.
    """

    prefix: int | Integers

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix = np.array(self.prefix)
        valid = prefix.dtype.kind in "iu" and prefix.shape in ((), (self.ndocuments,))
        if not valid or (prefix < 0).any():
            least = f", the least {prefix.min()}" * valid
            raise ValueError(
                f"prefix must be a whole number of at least 0, or {self.ndocuments} of them, got "
                f"shape {prefix.shape} of {prefix.dtype}{least}"
            )
        prefix = prefix.clip(max=EVERYTHING).astype(np.int64)
        self._set(prefix=np.broadcast_to(prefix, self.ndocuments).copy())

    def _inside(self, position: np.ndarray, document: np.ndarray) -> tuple[Interval, ...]:
        ends = np.maximum(position + 1, np.append(self.prefix, 0)[document])
        return ((np.zeros_like(position), ends),)


@dataclass(frozen=True, eq=False, repr=False)
class SharedQuestion(_Packed):
    """An answer sees its question and is causal itself; it sees no other answer.

    Parameters
    ----------
    cu_seqlens : (documents + 1,) integers
        As in `Documents`.  The answers to a question are the documents that follow it.
    questions : sequence of int
        Indices of the documents that are questions.  Default: the first document.
    cu_seqlens_kv : (documents + 1,) integers, optional
        As in `Documents`.

    Raises
    ------
    ValueError
        If an index is not below the number of documents, or as in `Documents`.
    """

    questions: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        questions = tuple(int(x) for x in self.questions)
        if any(not 0 <= x <= max(0, self.ndocuments - 1) for x in questions):
            raise ValueError(
                f"questions must be indices below {self.ndocuments}, the number of documents, "
                f"got {questions}"
            )
        object.__setattr__(self, "questions", tuple(sorted(set(questions))))

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        (own,) = super().visible(q_tokens)
        document = self._keys_of(np.asarray(q_tokens, np.int64))[0]
        # Find the last question up to this document; -1 stands for no question.
        questions = np.array((-1, *self.questions))
        question = questions[np.searchsorted(questions, document, side="right") - 1]
        none = (question < 0) | (question == document) | (document == self.ndocuments)
        shared = (np.where(none, 0, self._bounds[question + x]) for x in (0, 1))
        return tuple(shared), own


@dataclass(frozen=True, eq=False, repr=False)
class CausalBlockwise(_Packed):
    """Documents are causal, and the last document also sees all others.

    In in-context learning the first documents are examples, which do not see each other.  The last
    document is the text that uses the examples.

    Parameters
    ----------
    cu_seqlens : (documents + 1,) integers
        As in `Documents`.
    cu_seqlens_kv : (documents + 1,) integers, optional
        As in `Documents`.

    Raises
    ------
    ValueError
        As in `Documents`.
    """

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        ((begin, end),) = super().visible(q_tokens)
        document = self._keys_of(np.asarray(q_tokens, np.int64))[0]
        last = np.flatnonzero(np.diff(self.cu_seqlens))[-1:]  # empty documents have no queries
        return ((np.where(np.isin(document, last), 0, begin), end),)


def _checked(name: str, cu_seqlens: np.ndarray) -> np.ndarray:
    """Return a copy of the bounds of documents as int64; raise ValueError if they are invalid."""
    array = np.array(cu_seqlens)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a (documents + 1,) integer array, got shape {array.shape} of "
            f"{array.dtype}"
        )
    array = array.clip(max=EVERYTHING).astype(np.int64)  # uint64 holds larger numbers
    if array[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {array[0]}")
    descents = np.flatnonzero(array[1:] < array[:-1])
    if len(descents):
        d = int(descents[0])
        raise ValueError(
            f"{name} must be sorted: document {d} begins at {array[d]} and ends at {array[d + 1]}"
        )
    return array
