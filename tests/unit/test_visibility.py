"""Traffic follows the mask: only required rows travel."""

from collections import Counter

import numpy as np
import pytest
from helpers import deeper
from hypothesis import given
from hypothesis import strategies as st
from oracles import documents, heavy_tailed, node_traffic

from a2d_mpi import Causal, Full
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.masks.compiled import compile_mask
from a2d_mpi.masks.intervals import size
from a2d_mpi.masks.patterns import PATTERNS, make_mask
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.steps import Receive, Send
from a2d_mpi.schedules.writing import problem_of, write
from a2d_mpi.sharding.visibility import Visibility

SEQLEN, RANKS = 2048, 6
MASKS = {
    **{name: make_mask(name, SEQLEN) for name in PATTERNS},
    "window": IntervalMask(np.arange(SEQLEN) - 30, np.arange(SEQLEN) + 1),
    "nothing": IntervalMask(np.full(SEQLEN, 5), np.full(SEQLEN, 5)),
}
NAMES = ("contiguous", "zigzag", "striped", "balanced")


def problem(method, layout, mask, name):
    config = AttentionConfig(SEQLEN, 4, 8, 2, dtype="float64")
    return problem_of(method, layout, config, mask, name)


@pytest.mark.parametrize("mask", deeper(MASKS, ["causal", "window", "share_question"]))
@pytest.mark.parametrize("method", [x for x in METHODS if "ring" in x])
def test_a_ring_passes_on_what_somebody_sees(mask, method):
    """Every key that comes is seen by a query, here or at a rank to which it is passed on."""
    layout, mask = Layout(2, 3), MASKS[mask]
    sizes = problem(method, layout, mask, METHODS[method].distribution or "zigzag")
    tokens = map(sizes.queries.tokens, range(RANKS))
    seen = [mask.dense(x, np.arange(SEQLEN)).any(axis=0) for x in tokens]
    for phase in ("forward", "backward"):
        for rank in range(RANKS):
            (program,) = write(method, phase, layout, sizes, rank)
            for step in program.steps:
                if not isinstance(step, Receive):
                    continue
                assert len(received := program.tokens(step.rows)), step
                if program.arrays[step.rows.array].kind == "kv":
                    ((owner, _),) = program.pieces(step.rows)
                    others = [seen[p] for p in range(RANKS) if p != owner]
                    assert np.any(others, axis=0)[received].all()


@pytest.mark.parametrize("distribution", deeper(NAMES, ["zigzag"]))
@pytest.mark.parametrize("seqlen_kv", deeper([240, 151], [151]))
@pytest.mark.parametrize("shape, node", [
    *[((r, 6 // r), None) for r in (1, 2, 6)],
    ((2, 2), (0, 0, 1, 1)), ((2, 2), (0, 1, 1, 1)), ((1, 6), (0, 0, 0, 1, 2, 2)),
    ((4, 4), (0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3)),
    ((4, 3), (0, 0, 1, 0, 2, 2, 1, 1, 1, 0, 0, 2)),
    ((3, 5), (2, 0, 1, 1, 1, 0, 2, 2, 2, 1, 0, 0, 0, 0, 0)), ((1, 7), (1, 0, 1, 1, 0, 1, 2)),
])  # fmt: skip
def test_tokens_that_travel(shape, node, seqlen_kv, distribution):
    """Each token is received as often as an oracle says, on plain grids and with nodes."""
    n, layout, method = 240, Layout(*shape, nodes=node), "node aware" if node else "attention2d"
    i, ends = np.arange(n), np.random.default_rng(1).integers(-40, seqlen_kv + 40, (2, n))
    config = AttentionConfig(n, 4, 8, 2, seqlen_kv=seqlen_kv)
    for mask in (
        Causal(),
        IntervalMask(i - 30, i + 1),
        documents(heavy_tailed(n, 1, 20)),
        IntervalMask(*(np.stack(x) for x in zip(*make_mask("share_question", n).visible(i)))),
        IntervalMask(*np.where(i % 3, np.sort(ends, axis=0), 7)),
    ):
        sizes = problem_of(method, layout, config, mask, distribution)
        owners = [np.empty(x, int) for x in (n, seqlen_kv)]
        for owner, shards in zip(owners, (sizes.queries, sizes.keys)):
            for p in range(layout.size):
                owner[shards.tokens(p)] = p
        visible = sizes.mask.dense(i, np.arange(seqlen_kv))
        traffic = node_traffic(visible, owners, *shape, node or range(layout.size))
        for phase in ("forward", "backward"):
            returned = {key: phase == "backward" or key[:2] != (True, True) for key in traffic}
            expected = {key: x * returned[key] for key, x in traffic.items()}
            found, ways = {key: 0 * x for key, x in expected.items()}, (Counter(), Counter())
            for rank in range(layout.size):
                (program,) = write(method, phase, layout, sizes, rank)
                for key, x in travelling(program):
                    sent, tokens = isinstance(x, Send), program.tokens(x.rows)
                    ends = (rank, x.peer) if sent else (x.peer, rank)
                    ways[sent][key, ends, tokens.tobytes()] += 1
                    if not sent:
                        np.add.at(found[key][rank], tokens, 1)
            assert ways[0] == ways[1]
            for key, x in found.items():
                assert np.array_equal(x, expected[key]), (mask, phase, key)


def travelling(program):
    """Return messages with the keys of `node_traffic`."""
    for x in program.steps:
        if isinstance(x, Send | Receive):
            array = program.arrays[x.rows.array]
            key = array.of_keys, array.kind in ("out", "dq", "dkv"), x.channel.endswith("node")
            yield key, x


@given(st.data())
def test_required_rows_are_the_definition(data):
    """Required rows equal their definition for any mask and shards."""
    n, ranks = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
    ends = st.lists(st.integers(-2, n + 2), min_size=n, max_size=n)
    drawn = IntervalMask(np.array(data.draw(ends)), np.array(data.draw(ends)))
    mask = data.draw(st.sampled_from([drawn, Full(), Causal(), documents(heavy_tailed(n, 1, 3))]))
    config = AttentionConfig(n, 1, 1)
    name = data.draw(st.sampled_from(NAMES))
    shards = problem_of("attention2d", Layout(1, ranks), config, mask, name).queries
    found = Visibility(compile_mask(mask, n, n), shards, shards)
    tokens = [shards.tokens(p) for p in range(ranks)]
    visible = mask.dense(np.arange(n), np.arange(n))
    others = tuple(sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))))
    for of_keys in (False, True):
        seen = visible.T if of_keys else visible
        for owner in range(ranks):
            theirs = np.concatenate([tokens[p] for p in others])
            wanted = np.flatnonzero(seen[np.ix_(tokens[owner], theirs)].any(axis=1))
            runs = found.required(of_keys, owner, others)
            where = np.concatenate([[], *(np.arange(*run) for run in runs)])
            assert where.tolist() == wanted.tolist() and size(runs) == len(wanted)
