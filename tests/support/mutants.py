"""Twelve faults of the package, one in each stage, that tests must find."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np

from a2d_mpi.attention.executor import CompiledPhase, Executor
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.channel import Traffic
from a2d_mpi.comm.transport import Transport
from a2d_mpi.devices.host import Host
from a2d_mpi.kernels.numpy import NumpyKernel
from a2d_mpi.masks.intervals import Intervals
from a2d_mpi.masks.mask import Mask
from a2d_mpi.schedules import passes, pipeline
from a2d_mpi.schedules.line import Line
from a2d_mpi.schedules.steps import Add, Copy, Merge, Receive

MUTANTS = {}  # by name: a context in which the package is wrong, made with the rank


def mutant(function):
    """Register a function of the rank that returns patches."""

    @contextmanager
    def applied(rank):
        with ExitStack() as stack:
            for x in function(rank):
                stack.enter_context(x)
            yield

    MUTANTS[function.__name__] = applied
    return function


def around(owner, name, wrong):
    """Return a patch of a method by `wrong`, whose first argument is the right method."""
    right = vars(owner)[name]
    return patch.object(owner, name, lambda *given, **named: wrong(right, *given, **named))


@mutant
def mask(rank):
    """Every query sees one key more."""

    def wrong(right, self, q_tokens, k_tokens):
        (begin, end), *others = right(self, q_tokens, k_tokens)
        return Intervals([(begin, np.minimum(end + 1, len(k_tokens))), *others])

    return [around(Mask, "intervals", wrong)]


@mutant
def forward_kernel(rank):
    """Logits are too large by a relative 1e-4."""

    def wrong(right, self, q, *others, **options):
        right(self, (q.astype(float) * 1.0001).astype(q.dtype), *others, **options)

    return [around(NumpyKernel, "forward", wrong)]


@mutant
def backward_kernel(rank):
    """The backward pass takes delta for zero."""

    def wrong(right, self, dout, q, k, v, lse, delta, *others, **options):
        right(self, dout, q, k, v, lse, 0 * delta, *others, **options)

    return [around(NumpyKernel, "backward", wrong)]


@mutant
def merge(rank):
    """A merged out is too large by a relative 3e-6."""

    def wrong(right, self, out, *others):
        right(self, out, *others)
        out *= 1 + 3e-6

    return [around(Host, "merge", wrong)]


@mutant
def executor(rank):
    """The first partial result that has travelled is not merged, or not added."""

    def wrong(right, self, programs):
        arrived = {x.rows.array for p in programs for x in p.steps if isinstance(x, Receive)}
        sums = (x for p in programs for x in p.steps if isinstance(x, Merge | Add))
        first = next((x for x in sums if x.source.array in arrived), None)
        right(self, [p.with_steps(x for x in p.steps if x is not first) for p in programs])

    return [around(CompiledPhase, "__init__", wrong)]


@mutant
def passes_(rank):
    """Keys that should be in the order of tokens are in the order of arrival."""

    def wrong(program, right=passes.keys_by_token):
        new = right(program)
        return new.with_steps(
            x._replace(target=new.rows(x.target.array))
            if isinstance(x, Copy) and new.arrays[x.target.array].by_token
            else x
            for x in new.steps
        )

    return [patch.object(passes, "keys_by_token", wrong)]


@mutant
def trees(rank):
    """A parent in a tree sends the second half of an owner's rows before the first half."""

    def wrong(right, self, peer, owner, rows):
        (run,) = rows.runs if len(rows.runs) == 1 else (range(0),)
        if len(run) > 2:
            middle = run.start + len(run) // 2
            rows = rows._replace(runs=(range(middle, run.stop), range(run.start, middle)))
        right(self, peer, owner, rows)

    return [around(Line, "_send", wrong)]


@mutant
def slices(rank):
    """All slices use the same buffers, although their messages are under way at once."""
    return [patch.object(pipeline, "ALIVE", 1)]


@mutant
def messages(rank):
    """The last four bytes of large messages are zero."""
    kept = []  # MPI may still read what it was given

    def wrong(right, self, comm, x, peer, tag):
        kept.append(x := np.array(x))
        if len(x) > 100:
            x[-4:] = 0
        return right(self, comm, x, peer, tag)

    return [around(Transport, "send", wrong)]


@mutant
def counting(rank):
    """One message in thirty is counted as one byte longer."""
    numbers = []

    def wrong(right, self, phase, name, direction, nbytes, messages):
        numbers.append(0)
        right(self, phase, name, direction, nbytes + (len(numbers) % 30 == 0), messages)

    return [around(Traffic, "count", wrong)]


@mutant
def results(rank):
    """Results lie in one of two buffers of the plan, in turn."""
    kept = {}

    def wrong(right, self, array, wide):
        number, found = kept.setdefault((id(self), array.kind, wide), ([0], [{}, {}]))
        number[0] += 1
        slot = number[0] % 2
        if not found[slot]:
            found[slot] = self, right(self, array, wide)  # kept: no other has this id
        return dict(found[slot][1])

    return [around(Executor, "_result", wrong)]


@mutant
def plan(rank):
    """The dk of one token is zero."""

    def wrong(right, self, *given, **named):
        dq, dk, dv, *others = right(self, *given, **named)
        dk[self.tokens_kv == self.seqlen // 3] = 0
        return dq, dk, dv, *others

    return [around(AttentionPlan, "backward", wrong)]
