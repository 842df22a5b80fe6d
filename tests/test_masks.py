import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2d_mpi.core.masks import Causal, Full, IntervalMask, Mask, keys_per_query, queries_per_key


class TwoIntervals(Mask):
    """The first keys, and a window: what attention sinks with a sliding window see."""

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


@given(masks(), st.data())
def test_intervals_are_the_definition_on_any_subset(case, data):
    mask, seqlen = case
    tokens = st.lists(st.integers(0, seqlen - 1), unique=True)
    q = np.array(data.draw(tokens), int)
    k = np.sort(np.array(data.draw(tokens), int))
    expected = np.zeros((len(q), len(k)), bool)
    for row, intervals in enumerate(zip(*[zip(*pair) for pair in mask.visible(q)])):
        for begin, end in intervals:
            expected[row] |= np.array([begin <= j < end for j in k], bool)
    found = np.zeros_like(expected)
    for begin, end in mask.intervals(q, k):
        assert (begin >= 0).all() and (begin <= end).all() and (end <= len(k)).all()
        for row, (b, e) in enumerate(zip(begin, end)):
            assert not found[row, b:e].any()  # intervals do not overlap
            found[row, b:e] = True
    assert np.array_equal(found, expected)
    assert np.array_equal(mask.dense(q, k), expected)
    assert mask.area(q, k) == expected.sum()
    intervals = mask.intervals(q, k)
    assert np.array_equal(keys_per_query(intervals), expected.sum(axis=1))
    assert np.array_equal(queries_per_key(intervals, len(k)), expected.sum(axis=0))


def test_interval_mask_refuses():
    with pytest.raises(ValueError, match="3 rows, end has 4"):
        IntervalMask(np.arange(3), np.arange(4))
    with pytest.raises(ValueError, match="float64"):
        IntervalMask(np.zeros(3), np.arange(3))
    with pytest.raises(ValueError, match="3 rows for a sequence of 5"):
        IntervalMask(np.arange(3), np.arange(3)).check(5)


def test_digest_tells_what_a_mask_shows():
    a, b = IntervalMask(np.arange(3), np.arange(3)), IntervalMask(np.arange(3), np.arange(1, 4))
    assert a.digest(3) != b.digest(3)
    assert a.digest(3) == IntervalMask(np.arange(3), np.arange(3)).digest(3)
    assert Full().digest(9) != Causal().digest(9)
    # What counts is what they see, not how they were made.
    tokens = np.arange(70_000)
    assert IntervalMask(0 * tokens, tokens + 1).digest(70_000) == Causal().digest(70_000)


def test_interval_mask_keeps_its_own_copy():
    begin = np.zeros(3, int)
    mask = IntervalMask(begin, begin + 3)
    begin[:] = 2
    assert mask.area(np.arange(3), np.arange(3)) == 9


def test_interval_mask_takes_large_unsigned_numbers():
    end = np.full(3, np.iinfo(np.uint64).max)
    assert IntervalMask(np.zeros(3, np.uint64), end).area(np.arange(3), np.arange(3)) == 9


@st.composite
def several(draw):
    """Disjoint intervals of a few queries in any order, some empty, and the visible pairs."""
    nq, m, nk = draw(st.integers(0, 5)), draw(st.integers(1, 4)), 12
    seen, rows = np.zeros((nq, nk), bool), []
    for i in range(nq):
        points = sorted(draw(st.lists(st.integers(0, nk), min_size=2 * m, max_size=2 * m)))
        pairs = draw(st.permutations([tuple(points[2 * x : 2 * x + 2]) for x in range(m)]))
        for a, b in pairs:
            seen[i, a:b] = True
        rows.append([(b, a) if draw(st.booleans()) and a == b else (a, b) for a, b in pairs])
    begin, end = np.array(rows, int).reshape(nq, m, 2).transpose(2, 1, 0)
    return begin, end, seen


@given(several())
def test_several_intervals_a_query(case):
    begin, end, seen = case
    mask, (nq, nk) = IntervalMask(begin, end), seen.shape
    mask.check(nq)
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
    assert mask.digest(nq, nk) == IntervalMask(begin[::-1], end[::-1]).digest(nq, nk)
    assert mask == IntervalMask(begin.tolist(), end) if nq else True


def test_overlapping_intervals_are_refused():
    with pytest.raises(
        ValueError, match=r"intervals \[1, 5\] and \[4, 6\] of query 70001 overlap"
    ):
        begin = np.tile([[4], [1], [9]], 70_003)
        end = begin + 2
        begin[:, :70_001], end[1, 70_001] = 0, 5
        end[:, :70_001] = 0  # many equal empty ones
        IntervalMask(begin, end)
    with pytest.raises(ValueError, match="begin has 2 x 3 rows, end has 3 x 2 rows"):
        IntervalMask(np.zeros((2, 3), int), np.zeros((3, 2), int))
    with pytest.raises(ValueError, match=r"got shape \(1, 1, 1\)"):
        IntervalMask([[[1]]], [[[2]]])
    with pytest.raises(ValueError, match="3 rows for a sequence of 2"):
        IntervalMask(np.zeros((2, 3), int), np.zeros((2, 3), int)).aligned(2, 5)
    mask = IntervalMask(np.zeros((2, 3), int), np.zeros((2, 3), int))
    assert mask.aligned(3, 5) is mask  # its intervals are of keys, however many


def test_masks_of_a_users_own_are_not_mixed_up():
    """Caches know equal masks; a subclass may have a state that Causal does not compare."""

    class Late(Causal):
        def __init__(self, by):
            object.__setattr__(self, "by", by)

        def visible(self, q_tokens):
            return ((0 * q_tokens, q_tokens + 1 - self.by),)

    one, other = Late(0), Late(1)
    assert one != other and one == one and Causal() == Causal() and one != Causal()
    assert len({one, other, Causal(), Causal()}) == 3
