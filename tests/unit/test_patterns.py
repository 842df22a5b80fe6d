"""Every mask against its definition, written again as conditions on i and j."""

import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2d_mpi import (
    BlockCausal,
    Causal,
    CausalBlockwise,
    Documents,
    Full,
    GlobalSlidingWindow,
    PrefixLM,
    PrefixLMDocuments,
    SharedQuestion,
    SlidingWindow,
    check_mask,
    make_mask,
)
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.masks.intervals import keys_per_query, queries_per_key
from a2d_mpi.masks.longca import documents, long_documents
from a2d_mpi.masks.patterns import PATTERNS, parse_mask, split_masks
from a2d_mpi.sharding.distribution import Distribution

sizes = st.integers(0, 12)


def matrix(seqlen, condition, seqlen_kv=None):
    nk = seqlen if seqlen_kv is None else seqlen_kv
    found = [[bool(condition(i, j)) for j in range(nk)] for i in range(seqlen)]
    return np.array(found).reshape(seqlen, nk)


def document_of(cu_seqlens, i):
    """Return the document of a token; None after the last document."""
    for d, (a, b) in enumerate(zip(cu_seqlens, cu_seqlens[1:])):
        if a <= i < b:
            return d
    return None


def assert_shows(mask, seqlen, condition, seqlen_kv=None):
    """Assert that a mask shows these pairs, densely and on subsets of queries and keys."""
    nk = seqlen if seqlen_kv is None else seqlen_kv
    assert mask.aligned(seqlen, nk) == mask or seqlen != nk
    expected = matrix(seqlen, condition, seqlen_kv)
    q, k = np.arange(seqlen), np.arange(nk)
    assert np.array_equal(mask.dense(q, k), expected), mask
    rows, some = q[q % 4 != 2], k[k % 3 != 1]
    intervals, shown = mask.intervals(rows, some), expected[np.ix_(rows, some)]
    found = np.zeros(shown.shape, int)
    for begin, end in intervals:
        assert (begin >= 0).all() and (begin <= end).all() and (end <= len(some)).all()
        for row, (b, e) in enumerate(zip(begin, end)):
            found[row, b:e] += 1  # intervals do not overlap
    assert np.array_equal(found, shown), mask
    assert mask.area(rows, some) == shown.sum()
    assert np.array_equal(keys_per_query(intervals), shown.sum(axis=1))
    assert np.array_equal(queries_per_key(intervals, len(some)), shown.sum(axis=0))


@st.composite
def packed(draw, most=6, longest=8):
    """Draw cu_seqlens with empty and short documents, and a sequence length."""
    lengths = draw(st.lists(st.integers(0, longest), max_size=most))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    return cu_seqlens, int(cu_seqlens[-1]) + draw(st.integers(0, 3))


POSITIONAL = {
    Causal: lambda i, j: j <= i,
    SlidingWindow: lambda i, j, left, right: i - left <= j <= i + right,
    GlobalSlidingWindow: lambda i, j, tokens, left, right: (
        0 <= i < tokens or j < tokens or i - left <= j <= i + right
    ),
    PrefixLM: lambda i, j, prefix: j < prefix or j <= i,
    BlockCausal: lambda i, j, block: j // block <= i // block,
}


@st.composite
def positional(draw):
    """Draw a mask by position, and its condition."""
    kind = draw(st.sampled_from(list(POSITIONAL)))
    n = {Causal: 0, SlidingWindow: 2, GlobalSlidingWindow: 3}.get(kind, 1)
    numbers = [draw(sizes) + (kind is BlockCausal) for _ in range(n)]
    return kind(*numbers), lambda i, j: POSITIONAL[kind](i, j, *numbers)


@given(positional(), st.integers(0, 25), st.integers(0, 20))
def test_masks_by_position(case, seqlen, seqlen_kv):
    """Also of two sequences, which end together."""
    mask, shows = case
    assert_shows(mask, seqlen, shows)
    moved = mask.aligned(seqlen, seqlen_kv)
    assert_shows(moved, seqlen, lambda i, j: shows(i + seqlen_kv - seqlen, j), seqlen_kv)
    assert moved == mask.aligned(seqlen, seqlen_kv) == moved.aligned(seqlen, seqlen_kv)
    assert moved.aligned(seqlen, seqlen) == mask
    assert Full().aligned(seqlen, seqlen_kv) == Full()
    if seqlen != seqlen_kv:
        with pytest.raises(ValueError, match="needs cu_seqlens_kv"):
            Documents([0]).aligned(seqlen, seqlen_kv)


@given(packed(), positional(), st.booleans())
def test_documents(case, inner, causal):
    cu_seqlens, seqlen = case
    mask, shows = inner

    def same(i, j):
        return document_of(cu_seqlens, i) == document_of(cu_seqlens, j) is not None

    def inside(i, j):
        first = cu_seqlens[document_of(cu_seqlens, i)] if same(i, j) else 0
        return same(i, j) and shows(i - first, j - first)

    assert_shows(
        Documents(cu_seqlens, causal), seqlen, lambda i, j: same(i, j) and (j <= i or not causal)
    )
    assert_shows(Documents(cu_seqlens, inside=mask), seqlen, inside)
    both = mask & Documents(cu_seqlens, causal)
    assert_shows(both, seqlen, lambda i, j: same(i, j) and shows(i, j) and (j <= i or not causal))


@given(packed(), st.data())
def test_documents_of_queries_and_of_keys(case, data):
    cu_seqlens, seqlen = case
    lengths = [data.draw(st.integers(0, 8)) for _ in cu_seqlens[1:]]
    cu_kv = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    seqlen_kv = int(cu_kv[-1]) + data.draw(st.integers(0, 2))

    def shows(causal):
        def condition(i, j):
            d = document_of(cu_seqlens, i)
            if d is None or d != document_of(cu_kv, j):
                return False
            # Counted from the ends of the document: the last query is beside the last key.
            return not causal or cu_kv[d + 1] - j >= cu_seqlens[d + 1] - i

        return condition

    for causal in (False, True):
        mask = Documents(cu_seqlens, causal, cu_seqlens_kv=cu_kv)
        assert_shows(mask, seqlen, shows(causal), seqlen_kv)
    assert mask.aligned(seqlen, seqlen_kv) is mask
    with pytest.raises(ValueError, match="the last document ends at"):
        mask.aligned(seqlen, int(cu_kv[-1]) - 1)
    window = (SlidingWindow(3) & mask).aligned(seqlen, seqlen_kv)

    def both(i, j):
        last = i + seqlen_kv - seqlen
        return shows(True)(i, j) and last - 3 <= j <= last

    assert_shows(window, seqlen, both, seqlen_kv)


@given(packed(), st.data())
def test_masks_of_documents(case, data):
    cu, seqlen = case
    n = len(cu) - 1
    prefixes = [data.draw(sizes) for _ in range(n)]
    block, one = 1 + data.draw(sizes), data.draw(sizes)
    questions = data.draw(st.lists(st.integers(0, max(0, n - 1)), max_size=3))
    last = max((d for d in range(n) if cu[d + 1] > cu[d]), default=None)

    def question_of(d):
        return max((x for x in questions if x <= d), default=None)

    def of_document(condition):
        def shows(i, j):
            d, e = document_of(cu, i), document_of(cu, j)
            return d is not None and e is not None and condition(i, j, d, e)

        return shows

    cases = {
        PrefixLMDocuments(cu, np.array(prefixes, int)): lambda i, j, d, e: (
            d == e and (j <= i or j - cu[d] < prefixes[d])
        ),
        PrefixLMDocuments(cu, one): lambda i, j, d, e: d == e and (j <= i or j - cu[d] < one),
        Documents(cu, inside=BlockCausal(block)): lambda i, j, d, e: (
            d == e and (j - cu[d]) // block <= (i - cu[d]) // block
        ),
        SharedQuestion(cu): lambda i, j, d, e: (d == e and j <= i) or e == 0 < d,
        SharedQuestion(cu, questions=questions): lambda i, j, d, e: (
            (d == e and j <= i) or (d != e == question_of(d))
        ),
        CausalBlockwise(cu): lambda i, j, d, e: j <= i and d in (e, last),
    }
    for mask, condition in cases.items():
        assert_shows(mask, seqlen, of_document(condition))


CU = [0, 5, 5, 6, 13, 20]
TEXTS = {  # by name, with arguments
    "full": Full(),
    "causal": Causal(),
    "full_document:0,5,5,6,13,20": Documents(CU),
    "causal_document:0,5,5,6,13,20": Documents(CU, causal=True),
    "share_question:0,5,5,6,13,20": SharedQuestion(CU),
    "causal_blockwise:0,5,5,6,13,20": CausalBlockwise(CU),
    "prefix_lm_causal:7": PrefixLM(7),
    "prefix_lm_document:0,5,5,6,13,20,prefix=3": PrefixLMDocuments(CU, 3),
    "sliding_window:3": SlidingWindow(3),
    "sliding_window:3,1": SlidingWindow(3, 1),
    "sliding_window_causal:3": SlidingWindow(3),
    "global_sliding_window:2": GlobalSlidingWindow(2, 2, 2),
    "global_sliding_window:2,4,1": GlobalSlidingWindow(2, 4, 1),
    "block_causal_document:0,5,5,6,13,20,block=2": Documents(CU, inside=BlockCausal(2)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    assert make_mask(text, 24) == TEXTS[text]


def test_the_fourteen():
    """Every one has a text above; every query sees itself; drawn ones have a seed."""
    assert make_mask("sliding_window_causal:3", 5, 8) == SlidingWindow(3).aligned(5, 8)
    assert len(PATTERNS) == 14 and {x.split(":")[0] for x in TEXTS} == {
        x for x in PATTERNS if not x.endswith("_long")
    }
    for seqlen in (1, 2, 17, 300):
        for name in PATTERNS:
            mask = make_mask(name, seqlen)
            seen = mask.dense(np.arange(seqlen), np.arange(seqlen))
            assert seen.diagonal().all()  # of these, every query sees itself
            assert mask == make_mask(name, seqlen) and hash(mask) == hash(make_mask(name, seqlen))
    drawn = [x for x in PATTERNS if "document" in x or x in ("share_question", "causal_blockwise")]
    for name in (*drawn, "prefix_lm_causal"):
        assert make_mask(name, 5000) == make_mask(f"{name}:seed=0", 5000)
        assert make_mask(name, 5000) != make_mask(f"{name}:seed=1", 5000)


def test_drawn_documents():
    cu = documents(1 << 20, seed=3)
    lengths = np.diff(cu)
    assert cu[0] == 0 and cu[-1] == 1 << 20 and lengths.min() > 0
    assert 400 < np.median(lengths) < 650 and 1200 < lengths.mean() < 2100
    assert lengths.max() > 20 * np.median(lengths)  # a heavy tail
    assert np.array_equal(cu, documents(1 << 20, seed=3))
    assert documents(1).tolist() == [0, 1] and documents(0).tolist() == [0]
    lengths = np.diff(long_documents(1 << 20, seed=1))
    long = lengths[lengths >= 8192]
    assert 0.5 < long.sum() / (1 << 20) < 0.8 and long.max() <= 1 << 16
    small = np.diff(long_documents(1 << 13, seed=1))  # a sixteenth of all lengths
    assert small.sum() == 1 << 13 and 480 < small.max() <= 1920


def test_equal_masks_are_equal_keys():
    cu = np.array([0, 3, 9])
    same = Documents(cu, causal=True), Documents(cu.astype(np.int32).tolist(), inside=Causal())
    assert same[0] == same[1] and len({*same}) == 1
    others = (
        Documents(cu), Documents([0, 4, 9], True), Documents(cu, True, cu_seqlens_kv=cu),
        PrefixLMDocuments(cu, 0), PrefixLMDocuments(cu, [0, 1]), SharedQuestion(cu),
        SharedQuestion(cu, questions=(1,)), CausalBlockwise(cu), SlidingWindow(3, 1), Causal(),
        Documents(cu, inside=BlockCausal(2)), SlidingWindow(3), SlidingWindow(3) & Documents(cu),
    )  # fmt: skip
    assert len({same[0], *others}) == 1 + len(others)
    cu[1] = 7  # the mask has its own
    assert same[0].cu_seqlens.tolist() == [0, 3, 9]
    with pytest.raises(ValueError, match="read-only"):
        same[0].cu_seqlens[1] = 7


def overlapping():
    begin = np.tile([[4], [1], [9]], 70_003)
    end = begin + 2
    begin[:, :70_001], end[1, 70_001] = 0, 5
    end[:, :70_001] = 0  # many equal empty ones
    return IntervalMask(begin, end)


EMPTY = np.zeros((2, 3), int)
THREE = IntervalMask(np.arange(3), np.arange(3))
OF_THREE = "of 3 queries, but the sequence has "
BAD = [  # what is called, with what, and what is said
    (IntervalMask, (np.arange(3), np.arange(4)), "got (3,) and (4,)"),
    (IntervalMask, (np.zeros(3), np.arange(3)), "float64"),
    (IntervalMask, (EMPTY, EMPTY.T), "got (2, 3) and (3, 2)"),
    (IntervalMask, ([[[1]]], [[[2]]]), "got shape (1, 1, 1)"),
    (overlapping, (), "intervals [1, 5] and [4, 6] of query 70001 overlap"),
    (THREE.aligned, (5, 5), OF_THREE + "5"),
    (IntervalMask(EMPTY, EMPTY).aligned, (2, 5), OF_THREE + "2"),
    (check_mask, (THREE, 5), OF_THREE + "5"),
    (Distribution, ("no such", 4, 2), "no such"),
    (Distribution, ("triangle", 10, 4, 1), "3 or 6, got 4"),
    (Distribution, ("triangle", 10, 8, 2), "3 or 6, got 4"),
    (Distribution, ("triangle", 10, 2, 1), "1 or 3, got 2"),
    (Documents, ([0, 5, 3],), "document 1 begins at 5 and ends at 3"),
    (Documents, ([2, 5],), "must begin with 0, got 2"),
    (Documents, ([],), "got shape (0,) of float64"),
    (Documents, ([[0, 5]],), "got shape (1, 2) of int64"),
    (partial(Documents, cu_seqlens_kv=[0, 2, 5]), ([0, 5],), "same length, got 2 and 3"),
    (partial(Documents, cu_seqlens_kv=[0, 5, 4]), ([0, 5],), "cu_seqlens_kv must be sorted"),
    (partial(Documents, inside=Full()), ([0, 5], True),
     "inside must be a Mask, given instead of causal=True, got inside=Full()"),
    (partial(Documents, inside="causal"), ([0, 5],), "must be a Mask"),
    (Documents([0, 5]).aligned, (4, 4), "the last document ends at 5, the sequence at 4"),
    (Documents(np.array([0, 1 << 63], np.uint64)).aligned, (4, 4), "ends at 9223372036854775807"),
    (PrefixLMDocuments, ([0, 5], -1), "got shape () of int64, the least -1"),
    (PrefixLMDocuments, ([0, 5], [1, 2]), "or 1 of them"),
    (PrefixLMDocuments, ([0, 5], 0.5), "of float64"),
    (BlockCausal, (0,), "block must be a positive integer"),
    (partial(SharedQuestion, questions=(1,)), ([0, 5],), "questions must be indices below 1"),
    (SlidingWindow, (-1,), "left must be a whole number of at least 0, got -1"),
    (SlidingWindow, (1, 0.5), "right must be a whole number of at least 0, got 0.5"),
    (PrefixLM, (True,), "prefix must be a whole number of at least 0, got True"),
    (make_mask, ("causal:3", 9), "mask must be causal, got 'causal:3'"),
    (make_mask, ("sparse", 9), "mask must be one of full, causal, full_document"),
    (make_mask, ("sliding_window:", 9), "mask sliding_window: '' is not a whole number"),
    (make_mask, ("sliding_window:1,2,3", 9), "must be sliding_window[:left,right], got"),
    (make_mask, ("sliding_window:1.5", 9), "'1.5' is not a whole number"),
    (make_mask, ("sliding_window:left=1,left=2", 9), "'left=2' is one argument too many"),
    (make_mask, ("full_document:sead=1", 9), "full_document[:cu_seqlens,...,seed=], got"),
    (make_mask, ("full_document:seed=-1", 9), "seed must be at least 0, got -1"),
    (make_mask, ("full_document:0,4,seed=1", 9), "give documents or a seed, not both, got [0, 4"),
    (make_mask, ("prefix_lm_causal:3,seed=1", 9), "give a prefix or a seed, not both, got pre"),
    (make_mask, ("full_document", 9, 12), "of 9 queries and 12 keys needs cu_seqlens_kv"),
]  # fmt: skip


@pytest.mark.parametrize("make, given, text", BAD)
def test_bad_input(make, given, text):
    with pytest.raises(ValueError) as error:
        make(*given)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_lists_of_texts():
    texts = ["full", "sliding_window:8,4", "causal_document:0,3,9", "prefix_lm_causal:seed=2"]
    assert split_masks(", ".join(texts)) == texts
    assert split_masks("all") == list(PATTERNS)
    assert split_masks("sliding_window:1K,2K,full") == ["sliding_window:1K,2K", "full"]
    short = parse_mask("prefix_lm_causal:1K"), parse_mask("causal_document:seed=1K")
    assert short == (("prefix_lm_causal", [1024], {}), ("causal_document", [], {"seed": 1024}))
    assert split_masks("causal,none") == ["causal", "none"]  # to be refused by name
    assert split_masks(" , ") == []


def test_a_million_queries_take_few_calls():
    """No pattern has a Python loop over the queries."""
    tokens = np.arange(10**6)
    for name in PATTERNS:
        mask, calls = make_mask(name, len(tokens)), []
        sys.setprofile(lambda *event, calls=calls: calls.append(event[1]))
        try:
            mask.visible(tokens)
        finally:
            sys.setprofile(None)
        assert len(calls) < 1000, name  # seen: 225 at most
