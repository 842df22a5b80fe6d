"""Work and traffic counted token by token, independently of the package's counts; masks to try."""

import numpy as np

from a2d_mpi import IntervalMask, Mask
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import MAX_MESSAGE
from a2d_mpi.schedules.steps import Message, Send
from a2d_mpi.schedules.writing import write


class Intervals(Mask):
    """A mask of several intervals per query, given as arrays."""

    def __init__(self, *intervals):
        self.arrays = [tuple(np.asarray(x, np.int64) for x in pair) for pair in intervals]

    def visible(self, q_tokens):
        return tuple((begin[q_tokens], end[q_tokens]) for begin, end in self.arrays)

    def aligned(self, seqlen, seqlen_kv):
        return self


def sinks(first, last, seqlen):
    """Return a mask that shows each query the first tokens and the last ones before it."""
    i = np.arange(seqlen)
    return Intervals((0 * i, np.minimum(first, i + 1)), (np.maximum(first, i - last + 1), i + 1))


def heavy_tailed(seqlen, seed, shortest=128):
    """Draw lengths of documents from a Pareto distribution of index 1; the last one is cut."""
    rng = np.random.default_rng(seed)
    lengths = []
    while (left := seqlen - sum(lengths)) > 0:
        lengths.append(min(left, int(shortest / (1 - rng.random()))))
    return np.array(lengths)


def documents(lengths, causal=True):
    """Return a mask of packed documents."""
    ends = np.cumsum(lengths)
    first, last = np.repeat(ends - lengths, lengths), np.repeat(ends, lengths)
    return IntervalMask(first, np.arange(ends[-1]) + 1 if causal else last)


def messages_of(method, layout, problem, rank):
    """Count the MPI messages [sent, received] of a rank; large tensors travel in pieces."""
    counted = {}
    for phase in PHASES:
        for program in write(method, phase, layout, problem, rank):
            for step in (x for x in program.steps if isinstance(x, Message)):
                sizes = program.group.row_bytes(program.arrays[step.rows.array])
                both = counted.setdefault((phase, step.channel), [0, 0])
                pieces = sum(-(-step.rows.count * x // MAX_MESSAGE) for x in sizes)
                both[not isinstance(step, Send)] += pieces
    return counted


def owners_of(shards, seqlen):
    """Return the owner of every token from the runs of every rank; each token must have one."""
    owner = np.full(seqlen, -1)
    for rank, runs in enumerate(shards):
        for run in runs:
            assert (owner[run.start : run.stop] == -1).all()
            owner[run.start : run.stop] = rank
    assert (owner >= 0).all()
    return owner


def tile_areas(mask, owner, rows, cols):
    """Count the visible pairs of every rank of a grid."""
    seqlen, area = len(owner), np.zeros(rows * cols)
    row, col = np.divmod(owner, cols)
    for c in range(cols):
        before = np.concatenate(([0], np.cumsum(col == c)))
        for begin, end in mask.visible(np.arange(seqlen)):
            begin, end = np.clip(begin, 0, seqlen), np.clip(np.maximum(begin, end), 0, seqlen)
            area += np.bincount(row * cols + c, before[end] - before[begin], rows * cols)
    return area


def node_traffic(visible, owners, rows, cols, node):
    """Count how often every rank of a node-aware grid receives the rows of each token.

    A plain grid is one with a node for each rank.

    A node gets the rows of a shard that its members in the row or column need together.  The k-th
    member of a node fetches the shard of the k-th member of another node, counted around.  It then
    gives each member of its node the rows that this member needs.  Partial results take the same
    way back.

    Parameters: `visible` is (n, m) bool, `owners` has the owners of queries, (n,), and of keys,
    (m,), and `node` is (ranks,).  Return (ranks, tokens) int64 by (of keys, on the way back,
    inside a node).
    """
    grid, both = np.arange(rows * cols).reshape(rows, cols), (False, True)
    found = {
        (of_keys, back, inside): np.zeros((rows * cols, len(owners[of_keys])), np.int64)
        for of_keys in both for back in both for inside in both
    }  # fmt: skip
    for of_keys, lines, across in ((False, grid, grid.T), (True, grid.T, grid)):
        meets = visible.T if of_keys else visible
        needs = {
            p: meets[:, np.isin(owners[not of_keys], line)].any(axis=1)
            for line in across for p in line
        }  # fmt: skip
        for line in lines:
            groups = {x: [p for p in line if node[p] == x] for x in {node[p] for p in line}}
            for p in line:
                own, place = owners[of_keys] == p, groups[node[p]].index(p)
                for x, members in groups.items():
                    source = p
                    if x != node[p]:
                        source = members[place % len(members)]
                        union = own & np.any([needs[m] for m in members], axis=0)
                        found[of_keys, False, False][source] += union
                        found[of_keys, True, False][p] += union
                    for m in members:
                        if m != source:
                            found[of_keys, False, True][m] += own & needs[m]
                            found[of_keys, True, True][source] += own & needs[m]
    return found


def linear_attention(q, k, v, dout, causal, feature_map, norm, decay, dtype=np.float64):
    """Compute out, dq, dk and dv by the definition, with all N x N weights."""
    q, k, v, dout = (np.asarray(x, dtype).swapaxes(0, 1) for x in (q, k, v, dout))  # (H, N, D)
    (fq, back), (fk, _) = (_features(feature_map, x) for x in (q, k))
    i = np.arange(q.shape[1])
    powers = np.asarray(decay, float).reshape(-1, 1, 1) ** np.maximum(i[:, None] - i, 0)
    shown = (i[:, None] >= i if causal else np.ones((len(i), len(i)), bool)) * powers
    shown = shown.astype(dtype)  # (H or 1, N, N)
    weights = (fq @ fk.swapaxes(1, 2)) * shown
    sums = weights @ v
    if norm == "none":
        out, dsums, dtotal = sums, dout, 0
    elif norm == "denominator":
        total = weights.sum(2, keepdims=True) + dtype(1e-6)
        out, dsums = sums / total, dout / total
        dtotal = -(dout * sums).sum(2, keepdims=True) / total**2
    else:  # of all heads of a token
        size = sums.shape[0] * sums.shape[2]
        root = np.sqrt((sums**2).sum((0, 2), keepdims=True) / size + dtype(1e-6))
        out = sums / root
        dsums = dout / root - sums * (dout * sums).sum((0, 2), keepdims=True) / (size * root**3)
        dtotal = 0
    dproducts = (dsums @ v.swapaxes(1, 2) + dtotal) * shown
    dq, dk = back(dproducts @ fk, q), back(dproducts.swapaxes(1, 2) @ fq, k)
    return [x.swapaxes(0, 1) for x in (out, dq, dk, weights.swapaxes(1, 2) @ dsums)]


def _features(name, x):
    """Return features of (H, N, D), and the function that gives the gradient of x."""
    if name == "none":
        return x, lambda dy, x: dy
    if name == "elu+1":
        return np.where(x > 0, x + 1, np.exp(x)), lambda dy, x: dy * np.where(x > 0, 1, np.exp(x))
    return x * (x > 0), lambda dy, x: dy * (x > 0)
