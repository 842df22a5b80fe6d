import inspect
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a2d_mpi import Documents, PrefixLM, SlidingWindow, check_mask, make_mask
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.masks.compiled import compile_mask, visible_keys
from a2d_mpi.masks.mask import Causal, Full, Mask
from a2d_mpi.masks.patterns import PATTERNS
from a2d_mpi.schedules.writing import problem_of


class TwoIntervals(Mask):
    """Shows the first keys and a window, as attention sinks do."""

    def visible(self, q_tokens):
        q = np.asarray(q_tokens)
        start = np.maximum(q - 4, 2)
        return (np.zeros(len(q), int), np.minimum(q + 1, 2)), (start, np.maximum(q + 1, start))


@st.composite
def masks(draw):
    seqlen = draw(st.integers(1, 60))
    kind = draw(st.sampled_from(["full", "causal", "interval", "two"]))
    if kind == "interval":
        ends = st.lists(st.integers(-3, seqlen + 3), min_size=seqlen, max_size=seqlen)
        return IntervalMask(np.array(draw(ends)), np.array(draw(ends))), seqlen
    return {"full": Full(), "causal": Causal(), "two": TwoIntervals()}[kind], seqlen


def test_digest_tells_what_a_mask_shows():
    def digest(mask, n):
        return compile_mask(mask, n, n).digest

    a, b = IntervalMask(np.arange(3), np.arange(3)), IntervalMask(np.arange(3), np.arange(1, 4))
    assert digest(a, 3) != digest(b, 3)
    assert digest(a, 3) == digest(IntervalMask(np.arange(3), np.arange(3)), 3)
    assert digest(Full(), 9) != digest(Causal(), 9)
    # What counts is what they see, not how they were made.
    tokens = np.arange(70_000)
    assert digest(IntervalMask(0 * tokens, tokens + 1), 70_000) == digest(Causal(), 70_000)


def test_interval_masks_of_any_arrays():
    """They keep a copy, and take large unsigned numbers."""
    begin, end = np.zeros(3, np.uint64), np.full(3, np.iinfo(np.uint64).max)
    mask = IntervalMask(begin, end)
    begin[:] = 2
    assert mask.area(np.arange(3), np.arange(3)) == 9


@st.composite
def several(draw):
    """Draw disjoint intervals of a few queries in any order, and the visible pairs."""
    nq, m, nk = draw(st.integers(0, 5)), draw(st.integers(1, 4)), 12
    seen, rows = np.zeros((nq, nk), bool), []
    for i in range(nq):
        points = sorted(draw(st.lists(st.integers(0, nk), min_size=2 * m, max_size=2 * m)))
        pairs = draw(st.permutations([tuple(points[2 * x : 2 * x + 2]) for x in range(m)]))
        for a, b in pairs:
            seen[i, a:b] = True
        far = {0: draw(st.integers(-3, 0)), nk: draw(st.integers(nk, nk + 3))}  # out of range
        pairs = [(far.get(a, a), far.get(b, b)) for a, b in pairs]
        rows.append([(b, a) if draw(st.booleans()) and a == b else (a, b) for a, b in pairs])
    begin, end = np.array(rows, int).reshape(nq, m, 2).transpose(2, 1, 0)
    return begin, end, seen


@given(several())
def test_several_intervals_a_query(case):
    begin, end, seen = case
    mask, (nq, nk) = IntervalMask(begin, end), seen.shape
    assert mask.aligned(nq, nk) is mask
    assert np.array_equal(mask.dense(np.arange(nq), np.arange(nk)), seen)
    found = mask.intervals(np.arange(nq), np.arange(nk))
    for row in range(nq):
        steps = np.flatnonzero(np.diff([0, *seen[row].astype(int), 0]))
        pairs = [(int(b[row]), int(e[row])) for b, e in found]
        shown = [x for x in pairs if x[0] < x[1]]
        assert shown == list(zip(steps[::2].tolist(), steps[1::2].tolist()))  # as few as can be
        assert pairs[: len(shown)] == shown  # empty ones come last
    assert len(found) == 1 or any(b < e for b, e in zip(*found[-1]))
    # Visible keys count, not the number of intervals.
    turned = IntervalMask(begin[::-1], end[::-1])
    assert compile_mask(mask, nq, nk).digest == compile_mask(turned, nq, nk).digest
    assert mask == IntervalMask(begin.tolist(), end) if nq else True


@st.composite
def packed(draw):
    """Draw masks of packed documents, whose queries may belong to another sequence."""
    nq, nk = (draw(st.integers(10, 40)) for _ in range(2))
    number = draw(st.integers(1, 4))
    cu, cu_kv = ([0, *sorted(draw(st.integers(0, n)) for _ in range(number))] for n in (nq, nk))
    window = SlidingWindow(*(draw(st.integers(0, 9)) for _ in range(2)))
    inside = draw(st.sampled_from([Full(), Causal(), PrefixLM(3), window, window, window]))
    if draw(st.booleans()):
        return Documents(cu, inside=inside), nq, nq
    return Documents(cu, inside=inside, cu_seqlens_kv=cu_kv), nq, nk


@settings(max_examples=400)
@given(packed() | masks().map(lambda x: (*x, x[1])))
def test_stairs(case):
    """They show what the mask shows; the corners of a mask leave nothing out."""
    mask, nq, nk = case
    q, k = np.arange(nq), np.arange(nk)
    seen = mask.dense(q, k)
    shown = np.zeros_like(seen)
    compiled = compile_mask(mask, nq, nk)
    assert compiled.area == seen.sum()
    for stairs in compiled.stairs:
        for first, last, begin, end, step_begin, step_end in zip(*stairs):
            assert first < last and begin < end
            for i in range(last - first):
                shown[first + i, begin + i * step_begin : end + i * step_end] = True
    assert np.array_equal(shown, seen)
    every = IntervalMask(*zip(*visible_keys(compiled.mask, q, nk)))  # it has no corners
    one, other = (
        np.concatenate(x.stairs, axis=1) for x in (compiled, compile_mask(every, nq, nk))
    )
    assert np.array_equal(one, other)


def test_corners_that_are_left_out():
    class Halves(Mask):
        def visible(self, q_tokens):
            return ((0 * q_tokens, np.where(q_tokens < 4, 2, 1)),)

        def corners(self, seqlen_kv):
            return np.array([0])

    with pytest.raises(ValueError, match="corners leaves out a query"):
        check_mask(Halves(), 9)


def test_corners_of_a_parent_do_not_count():
    class Late(Documents):
        def visible(self, q_tokens):
            return ((0 * q_tokens, np.where(q_tokens == 3, 2, 1)),)

    (stairs,) = compile_mask(Late([0, 9]), 9, 9).stairs
    assert stairs.first.tolist() == [0, 3, 4]


def test_masks_of_a_users_own_are_not_mixed_up():
    """Masks of a subclass that has more state than its parent are compared by identity."""

    class Late(Causal):
        def __init__(self, by):
            object.__setattr__(self, "by", by)

        def visible(self, q_tokens):
            return ((0 * q_tokens, q_tokens + 1 - self.by),)

    one, other = Late(0), Late(1)
    assert one != other and one == one and Causal() == Causal() and one != Causal()
    assert len({one, other, Causal(), Causal()}) == 3


def own(visible, **others):
    """Make a user's mask with this method `visible` and other attributes."""
    return type("Own", (Mask,), {"visible": visible, **others})()


def overlapping(self, q):
    return (0 * q, q + 1), (np.maximum(q - 20, 0), np.where(q == 70, 60, 0))


def generator(self, q):
    yield 0 * q, q + 1


def raising(self, q):
    first = 0 * q
    return ((first, q.max() + first),)


# Methods `visible` that a plan refuses; what it says, and on which of their lines they raise.
WRONG = [
    (overlapping, "intervals [0, 71] and [50, 60] of query 70 overlap", None),
    (lambda self, q: ((0 * q, q + 1), (q, q + 1)), " overlap", None),
    (generator, "must return pairs (begin, end) of (80,) signed integers, got object", None),
    (raising, "ValueError: zero-size array to reduction operation maximum", 2),
    (lambda self, q: None, "got object of shape ()", None),
    (lambda self, q: (), "got float64 of shape (0,)", None),
    (lambda self, q: (0 * q, q + 1), "got int64 of shape (2, 80)", None),
    (lambda self, q: ((0 * q, q / 2),), "signed integers, got float64", None),
    (lambda self, q: ((0, q + 1),), "(80,) signed integers, got object", None),
    (lambda self, q: ((0 * q, q[:3]),), "got object of shape ()", None),
    (lambda self, q: ((0 * q, q.__iadd__(1)),), "ValueError: output array is read-only", 0),
    (lambda self, q: ((0 * q, np.arange(len(q))),), "in a call with other queries", None),
    (lambda self, q: ((0 * q, 0 * q + len(q)),), "in a call with other queries", None),
]  # fmt: skip


@pytest.mark.parametrize("visible, text, line", WRONG)
def test_wrong_answers_of_a_users_mask(visible, text, line):
    """Plans and predictions refuse a wrong `visible`, with the user's line if it raises."""
    mask, config = own(visible, positional=True), AttentionConfig(80, 2, 8)
    place = f"({__file__}, line {inspect.getsourcelines(visible)[1] + (line or 0)})"
    for action in (
        lambda: problem_of("attention2d", Layout(2, 2), config, mask),
        lambda: check_mask(mask, 80),
        lambda: check_mask(mask, 80, 90),
    ):
        with pytest.raises(ValueError) as error:
            action()
        assert str(error.value).startswith("Own.visible: ")
        assert text in str(error.value)
        assert line is None or place in str(error.value)


@dataclass(frozen=True)
class OfArray(Mask):
    x: np.ndarray
    visible = Causal.visible


@dataclass
class Melted(Mask):
    x: int = 0
    visible = Causal.visible


def test_masks_that_cannot_be_hashed():
    for mask in (OfArray(np.arange(3)), Melted()):
        with pytest.raises(ValueError, match=f"{type(mask).__name__} cannot be hashed .*frozen"):
            problem_of("attention2d", Layout(2, 2), AttentionConfig(9, 1, 8), mask)


def test_distributions_that_masks_ask_for():
    mask = own(Causal.visible, default_distribution="even")
    with pytest.raises(ValueError, match=r"must be one of contiguous, .*, got 'even'"):
        check_mask(mask, 40)


def test_a_mask_is_compiled_once():
    """A problem is given a compiled mask, and asks for its visible keys no more."""
    calls = []

    def visible(self, q):
        calls.append(len(q))
        return ((0 * q, q + 1),)

    seen, config = compile_mask(own(visible), 80, 80), AttentionConfig(80, 2, 8)
    assert max(calls) == 80 and calls.count(80) == 1
    calls.clear()
    problem = problem_of("attention2d", Layout(2, 2), config, seen)
    assert problem.seen is problem.cp_group(2).seen is seen and not calls
    with pytest.raises(ValueError, match="compiled for 80 queries and 80 keys, got 9 and 9"):
        problem_of("attention2d", Layout(2, 2), AttentionConfig(9, 2, 8), seen)


def test_check_mask():
    for name in PATTERNS:
        check_mask(make_mask(name, 60), 60)
    check_mask(Causal(), 40, 50)
    twice = IntervalMask(np.zeros((2, 3), int), np.zeros((2, 3), int))
    assert twice.aligned(3, 5) is twice  # its intervals are of keys, however many
