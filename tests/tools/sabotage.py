"""Sabotages of the package, and the check, test or fuzzer that catches each.

    python tests/tools/sabotage.py [--tests] [--fuzz SECONDS] [NAME ...]

prints the table: by name, the checks of ``drivers/attention.py --check full`` that fail; with
--tests the first test that fails; with --fuzz how many random configurations it takes.  Exit code
1 if anything that was asked for caught nothing.

``mpiexec -n 4 python tests/tools/sabotage.py --run NAME PROGRAM OPTIONS`` runs a program under
one.  As a plugin of pytest (``-p sabotage``) this module applies the one that A2D_TEST_SABOTAGE
names.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from a2d_mpi import onepage
from a2d_mpi.attention.executor import CompiledPhase, Executor
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.channel import Channel, Traffic
from a2d_mpi.comm.transport import Transport
from a2d_mpi.devices.host import Host
from a2d_mpi.kernels.blocks import Blocker
from a2d_mpi.kernels.numpy import NumpyKernel
from a2d_mpi.masks.mask import Mask
from a2d_mpi.schedules import passes, pipeline
from a2d_mpi.schedules.line import Line
from a2d_mpi.schedules.steps import Add, Attend, AttendAndMerge, Copy, Merge, Receive

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "drivers" / "attention.py"
SAMPLE = ROOT / "data" / "minilm_l3_1536.h5"
OPTIONS = ("--seqlen", 301, "--rows", 2, "--cols", 2, "--backward", "--slices", 3, "--trials", 4)
RANKS = 4
RESULTS = "tests/ranks/test_attention.py"
CALLS = "tests/ranks/test_options.py"
PAGE, IMPORTS = "tests/ranks/test_onepage.py", "tests/unit/test_folders.py"


class Sabotage(NamedTuple):
    """A sabotage: its patches, as a function of the rank, and the tests that see it first."""

    patches: Callable[[int], list]
    tests: str
    says: str
    by_results: bool  # whether results differ, so that the driver and the fuzzer see it


SABOTAGES: dict[str, Sabotage] = {}


@contextmanager
def sabotaged(name: str | None) -> Iterator[None]:
    """Apply a sabotage to the package inside the context; None: no sabotage."""
    from mpi4py import MPI

    with ExitStack() as stack:
        for patcher in SABOTAGES[name].patches(MPI.COMM_WORLD.rank) if name else ():
            stack.enter_context(patcher)
        yield


def sabotage(tests: str, by_results: bool = True):
    """Register a sabotage: a function of the rank that returns patches."""

    def register(patches):
        name = patches.__name__.replace("_", "-")
        SABOTAGES[name] = Sabotage(patches, tests, patches.__doc__, by_results)
        return patches

    return register


def around(owner: type, name: str, wrong: Callable) -> object:
    """Return a patch of a method by `wrong`, whose first argument is the right method."""
    right = vars(owner)[name]

    def method(*args, **options):
        return wrong(right, *args, **options)

    return patch.object(owner, name, method)


def after(owner: type, name: str, change: Callable) -> object:
    """Return a patch of a method that calls it, and then `change` with its arguments."""

    def wrong(right, *args, **options):
        found = right(*args, **options)
        change(*args, **options)
        return found

    return around(owner, name, wrong)


def after_call(phase: str, change: Callable) -> object:
    """Return a patch of a phase of plans; `change` takes plan, call number and results."""

    def wrong(right, self, *args):
        found = right(self, *args)
        numbers = vars(self).setdefault("_sabotaged", dict.fromkeys(("forward", "backward"), 0))
        numbers[phase] += 1
        change(self, numbers[phase], *found)
        return found

    return around(AttentionPlan, phase, wrong)


def sent(change: Callable) -> object:
    """Return a patch of sends; `change` takes a copy of the bytes, and the peer."""
    kept = []  # MPI may still read what it was given

    def wrong(right, self, comm, x, peer, tag):
        x = np.array(x)
        kept.append(x)
        change(x, peer)
        return right(self, comm, x, peer, tag)

    return around(Transport, "send", wrong)


# Kernels.


@sabotage(RESULTS)
def softmax_scale_off_by_1e_4(rank):
    """Logits of the forward pass are too large by a relative 1e-4."""

    def wrong(right, self, q, *others, **options):
        q = (q.astype(np.float64) * 1.0001).astype(q.dtype)
        right(self, q, *others, **options)

    return [around(NumpyKernel, "forward", wrong)]


@sabotage(RESULTS)
def last_key_hidden(rank):
    """The last visible key of a block's last query is hidden."""

    def wrong(right, self, intervals, *sizes):
        (begin, end), *others = intervals
        last = np.arange(len(end)) == len(end) - 1
        return right(self, ((begin, end - last), *others), *sizes)

    return [around(Blocker, "blocking", wrong)]


@sabotage(RESULTS)
def gradients_overwrite(rank):
    """A kernel overwrites gradients that it should add to."""

    def wrong(right, *x, fresh=False, **options):
        right(*x, fresh=x[9].size > 0, **options)

    return [around(NumpyKernel, "backward", wrong)]


@sabotage(RESULTS)
def no_delta(rank):
    """The backward pass takes delta for zero."""

    def wrong(right, self, dout, q, k, v, lse, delta, *others, **options):
        right(self, dout, q, k, v, lse, 0 * delta, *others, **options)

    return [around(NumpyKernel, "backward", wrong)]


@sabotage(RESULTS)
def heads_exchanged(rank):
    """The first two heads of out change places in large blocks."""

    def change(self, q, k, v, intervals, out, lse, **options):
        if len(q) > 16 and q.shape[1] > 1:
            out[:, :2] = out[:, 1::-1].copy()

    return [after(NumpyKernel, "forward", change)]


@sabotage(RESULTS)
def ten_bits_of_out(rank):
    """Partial outs have the ten bits of float16."""

    def change(self, q, k, v, intervals, out, lse, **options):
        out[...] = out.astype(np.float16)

    return [after(NumpyKernel, "forward", change)]


@sabotage(RESULTS)
def lse_of_one_row_of_a_block(rank):
    """The lse of the last row of every large block is off by 1e-3."""

    def change(self, q, k, v, intervals, out, lse, **options):
        if len(q) > 16:
            lse[-1] += 1e-3

    return [after(NumpyKernel, "forward", change)]


@sabotage(RESULTS)
def mask(rank):
    """Every query sees one key more."""

    def wrong(right, self, q_tokens, k_tokens):
        (begin, end), *others = right(self, q_tokens, k_tokens)
        return (begin, np.minimum(end + 1, len(k_tokens))), *others

    return [around(Mask, "intervals", wrong)]


# Merges and sums.


@sabotage(RESULTS)
def merge_off_by_3e_6(rank):
    """A merged out is too large by a relative 3e-6."""

    def change(self, out, *others):
        out *= 1 + 3e-6

    return [after(Host, "merge", change)]


@sabotage(RESULTS)
def merge_weights_exchanged(rank):
    """A merge weights each partial out as the other one."""

    def wrong(right, self, out, lse, rest, out2, lse2):
        held = out.copy()
        out[...], other = out2, held.astype(out2.dtype)
        right(self, out, lse, rest, other, lse2)

    return [around(Host, "merge", wrong)]


@sabotage(RESULTS)
def lse_is_the_larger_one(rank):
    """A merged lse is the larger of the two."""

    def wrong(right, self, out, lse, rest, out2, lse2):
        larger = np.maximum(lse, lse2)
        right(self, out, lse, rest, out2, lse2)
        lse[...] = larger

    return [around(Host, "merge", wrong)]


@sabotage(RESULTS)
def partial(rank):
    """The first partial result that has travelled is not merged, or not added."""

    def wrong(right, self, programs):
        arrived = {x.rows.array for p in programs for x in p.steps if isinstance(x, Receive)}
        sums = (x for p in programs for x in p.steps if isinstance(x, Merge | Add))
        first = next((x for x in sums if x.source.array in arrived), None)
        right(self, [p.with_steps(x for x in p.steps if x is not first) for p in programs])

    return [around(CompiledPhase, "__init__", wrong)]


@sabotage(RESULTS)
def partial_results_overwrite(rank):
    """No partial result is merged: each one overwrites the one before."""

    def wrong(program):
        kinds = {AttendAndMerge: Attend}
        return program.with_steps(kinds.get(type(x), type(x))(*x) for x in program.steps)

    changed = (wrong if x == passes.merged else x for x in passes.PASSES)
    return [patch.object(passes, "PASSES", tuple(changed))]


@sabotage(RESULTS)
def keys_in_the_order_of_arrival(rank):
    """Keys that should be in the order of tokens are copied in the order in which they arrived."""

    def wrong(program):
        new = passes.keys_by_token(program)
        return new.with_steps(
            x._replace(target=new.rows(x.target.array))
            if isinstance(x, Copy) and new.arrays[x.target.array].by_token
            else x
            for x in new.steps
        )

    changed = (wrong if x == passes.keys_by_token else x for x in passes.PASSES)
    return [patch.object(passes, "PASSES", tuple(changed))]


@sabotage(RESULTS)
def rows_in_another_order(rank):
    """A parent in a tree sends the second half of an owner's rows before the first half."""

    def wrong(right, self, peer, owner, rows):
        (run,) = rows.runs if len(rows.runs) == 1 else (range(0),)
        if len(run) > 2:
            middle = run.start + len(run) // 2
            halves = range(middle, run.stop), range(run.start, middle)
            rows = rows._replace(runs=halves)
        right(self, peer, owner, rows)

    return [around(Line, "_send", wrong)]


@sabotage(CALLS)
def a_slice_repeated(rank):
    """The second slice of the heads takes the heads of the first one."""

    def wrong(right, self, step, whole):
        self.slice -= (second := self.slice == 1)
        right(self, step, whole)
        self.slice += second

    return [around(Executor, "_move_heads", wrong)]


@sabotage(CALLS)
def a_slice_in_the_buffers_of_its_neighbour(rank):
    """All slices use the same buffers, although their messages are under way at once."""
    return [patch.object(pipeline, "ALIVE", 1)]


@sabotage(RESULTS)
def sums_overwrite(rank):
    """A contribution overwrites the sum that it should be added to."""
    return [around(Host, "put", lambda right, self, to, x, add=False: right(self, to, x))]


@sabotage(RESULTS)
def added_twice(rank):
    """A contribution to a gradient is added twice."""

    def change(self, to, x, add=False):
        if add:
            to += x

    return [after(Host, "put", change)]


# Messages.


@sabotage(RESULTS)
def message_without_its_end(rank):
    """The last four bytes of large messages are zero."""

    def change(x, peer):
        if len(x) > 100:
            x[-4:] = 0

    return [sent(change)]


@sabotage(RESULTS)
def message_moved_by_an_element(rank):
    """Messages begin with their last element."""

    def change(x, peer):
        if peer:
            x[:] = np.roll(x, 8)

    return [sent(change)]


@sabotage(RESULTS)
def one_bit_of_one_message(rank):
    """A bit of the seventh large message of one rank is another one."""
    large = []

    def change(x, peer):
        large.extend([0] * (len(x) > 1000))
        if len(large) == 7 and len(x) > 1000 and rank == 1:
            x[len(x) // 2 // 4 * 4 + 2] ^= 64

    return [sent(change)]


@sabotage(CALLS)
def messages_of_the_first_call(rank):
    """Messages hold what the first ones of their peer, tag and length did."""
    first = {}

    def wrong(right, self, comm, x, peer, tag):
        key = comm.py2f(), peer, tag, len(x)
        return right(self, comm, first.setdefault(key, np.array(x)), peer, tag)

    return [around(Transport, "send", wrong)]


@sabotage(RESULTS)
def keys_and_values_exchanged(rank):
    """Two tensors of one size arrive in each other's place."""

    def wrong(right, self, tensors, peer, tag):
        if len({(x.shape, x.dtype) for x in tensors}) == 1:
            tensors = tensors[::-1]
        return right(self, tensors, peer, tag)

    return [around(Channel, "irecv", wrong)]


@sabotage(RESULTS)
def bytes_counted_wrong(rank):
    """One message in thirty is counted as one byte longer."""
    numbers = []

    def wrong(right, self, phase, name, direction, nbytes, messages):
        numbers.append(0)
        right(self, phase, name, direction, nbytes + (len(numbers) % 30 == 0), messages)

    return [around(Traffic, "count", wrong)]


# Buffers, and data of other calls.


def _kept_results(slots: int) -> list:
    kept = {}

    def wrong(right, self, array, wide):
        number, found = kept.setdefault((id(self), array.kind, wide), ([0], [{}] * slots))
        number[0] += 1
        slot = number[0] % slots
        if not found[slot]:
            found[slot] = self, right(self, array, wide)  # kept: no other has this id
        return dict(found[slot][1])

    return [around(Executor, "_result", wrong)]


@sabotage(CALLS)
def results_in_buffers(rank):
    """Results lie in memory of the plan, which the next call overwrites."""
    return _kept_results(1)


@sabotage(CALLS)
def results_in_two_buffers(rank):
    """Results lie in one of two buffers, in turn."""
    return _kept_results(2)


@sabotage(CALLS)
def inputs_changed_after_use(rank):
    """A plan leaves k halved."""

    def change(self, q, k, v, *others):
        k *= k.dtype.type(0.5)

    return [after(AttentionPlan, "forward", change)]


@sabotage(CALLS)
def inputs_changed_before_use(rank):
    """A plan doubles q in place, and computes with it: right results of a wrong q."""

    def wrong(right, self, q, *others):
        q *= q.dtype.type(2)
        return right(self, q, *others)

    return [around(AttentionPlan, "forward", wrong)]


@sabotage(CALLS)
def keys_of_the_first_call(rank):
    """A plan keeps the k and v of its first call."""

    def forward(right, self, q, k, v, *others):
        vars(self).setdefault("_sabotaged_kv", (k.copy(), v.copy()))
        return right(self, q, *self._sabotaged_kv, *others)

    def backward(right, self, dout, q, k, v, *others):
        return right(self, dout, q, *self._sabotaged_kv, *others)

    return [around(AttentionPlan, "forward", forward), around(AttentionPlan, "backward", backward)]


@sabotage(CALLS)
def inputs_known_by_identity(rank):
    """A plan knows the q of an array that it has seen before."""

    def wrong(right, self, q, *others):
        known = vars(self).setdefault("_sabotaged_q", {})
        return right(self, known.setdefault(id(q), (q.copy(), q))[0], *others)

    return [around(AttentionPlan, "forward", wrong)]


@sabotage(CALLS)
def delta_of_the_call_before(rank):
    """The backward pass takes delta from the call before."""
    kept = []

    def wrong(right, self, dout, out):
        kept.append(right(self, dout, out))
        return kept[-2] if len(kept) > 1 and kept[-2].shape == kept[-1].shape else kept[-1]

    return [around(Host, "delta", wrong)]


# One rank, one call, one row.


@sabotage(RESULTS)
def dq_of_the_last_rank(rank):
    """The last rank's dq is too large by a relative 1e-3."""

    def change(self, number, dq, *others):
        if self.grid.comm.rank == self.grid.comm.size - 1:
            dq *= dq.dtype.type(1 + 1e-3)

    return [after_call("backward", change)]


@sabotage(CALLS)
def one_element_in_one_call(rank):
    """One element of dv is off by 1e-3, on one rank, in the fourth call only."""

    def change(self, number, dq, dk, dv):
        if number == 4 and self.grid.comm.rank == 0:
            dv.flat[:1] += dv.dtype.type(1e-3)

    return [after_call("backward", change)]


@sabotage(CALLS)
def last_bit_in_one_call(rank):
    """The last bit of one lse is another one, on one rank, in the fifth call only."""

    def change(self, number, out, lse):
        if number == 5 and self.grid.comm.rank == 0:
            lse.flat[:1] = np.nextafter(lse.flat[:1], np.inf)

    return [after_call("forward", change)]


@sabotage(RESULTS)
def one_row_of_out(rank):
    """The out of one token is off by a hundredth of a nat in its weights."""

    def change(self, number, out, lse):
        out[self.tokens == self.seqlen // 3] *= out.dtype.type(1.01)

    return [after_call("forward", change)]


@sabotage(RESULTS)
def one_row_of_dk(rank):
    """The dk of one token is zero."""

    def change(self, number, dq, dk, dv):
        dk[self.tokens_kv == self.seqlen // 3] = 0

    return [after_call("backward", change)]


# The page, and imports.


@sabotage(PAGE)
def page_returns_rows_of_others(rank):
    """onepage.py returns a rank the rows of another rank's tokens."""

    def wrong(right, line, own, x):
        parts = np.split(x, np.cumsum(line.allgather(len(own)))[:-1])
        others = parts[1:] + parts[:1]
        return line.alltoall([np.resize(y, z.shape) for y, z in zip(others, parts)])

    return [around(onepage, "returned", wrong)]


# Python imports this module before all others.
HOOKED = """
import sys
class Replaces:
    def find_spec(self, name, path=None, target=None):
        if name == "a2d_mpi.core.merge":
            sys.excepthook = print
sys.meta_path.insert(0, Replaces())
"""


@sabotage(IMPORTS, by_results=False)
def hook_replaced_at_import(rank):
    """The import of a module of the package replaces sys.excepthook."""
    folder = TemporaryDirectory()
    Path(folder.name, "sitecustomize.py").write_text(HOOKED)
    return [folder, patch.dict(os.environ, PYTHONPATH=folder.name)]


def run(name: str, program: str, *options: str) -> None:
    """Run a program under a sabotage; "none": without sabotage."""
    sys.argv = [program, *options]
    with sabotaged(None if name == "none" else name):
        runpy.run_path(program, run_name="__main__")


def by_check(runs: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Return the checks of the driver that fail, by sabotage and --check."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from helpers import drive_each

    common = [DRIVER, SAMPLE, *OPTIONS, "--check"]
    drives = [(str(Path(__file__)), ["--run", name, *common, check], []) for name, check in runs]
    done, found = drive_each(drives, RANKS, timeout=60 + 20 * len(runs), numba=True)
    caught = []
    for run, (code, stdout) in zip(runs, found):
        caught.append(re.findall(r"^(\w+) .*FAILED", stdout, re.MULTILINE))
        assert code == bool(caught[-1]), f"{run}: exit code {code}\n{stdout}{done.stderr}"
    return caught


def by_tests(name: str) -> str:
    """Return the first test that fails in the test file of a sabotage, or ""."""
    from helpers import launch

    tests = ROOT / SABOTAGES[name].tests
    command, ranks = ["-m", "pytest", "-p", "sabotage", tests], 0
    if "mark.mpi" in tests.read_text():
        command, ranks = [*command, "--with-mpi", "-m", "mpi"], RANKS
    env = {"A2D_TEST_SABOTAGE": name, "PYTHONPATH": str(ROOT / "tests" / "tools")}
    command += ["-x", "-q", "--color=no", "--no-header"]
    done = launch(ranks, *command, timeout=400, env=env, code=None)
    found = re.search(r"^FAILED \S+?(test_\w+\.py::\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else ""


def by_fuzzer(name: str, seconds: float) -> str:
    """Return the first configuration that shows a sabotage, and how, or ""."""
    from helpers import launch

    options = ["--fault", name, "--first", 0, "--seconds", seconds]
    done = launch(RANKS, ROOT / "tests/tools/fuzz.py", *options, timeout=seconds + 200, code=None)
    found = re.findall(r"--case (\d+) \d+: (.*?) in Case", done.stdout)
    return "{}: {}".format(*min(found, key=lambda x: int(x[0]))) if found else ""


def main() -> int:
    """Print the table, and return the exit code."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tests", action="store_true", help="also the first test that fails")
    parser.add_argument("--fuzz", type=float, default=0, help="seconds of the fuzzer for each")
    parser.add_argument("--check", default="full", help="of the driver (default %(default)s)")
    parser.add_argument("names", nargs="*", help="default: all")
    args = parser.parse_args()
    names, missed = args.names or list(SABOTAGES), 0
    driven = ["none", *(x for x in names if SABOTAGES[x].by_results)]
    caught = dict(zip(driven, by_check([(name, args.check) for name in driven])))
    assert not caught["none"], "the driver fails without a sabotage"
    for number, name in enumerate(names, 1):
        columns = [", ".join(caught[name])] if name in caught else []
        columns += [by_tests(name)] if args.tests or name not in caught else []
        columns += [by_fuzzer(name, args.fuzz)] if args.fuzz and name in caught else []
        missed += not all(columns)
        print(number, name, *(x or "NOT CAUGHT" for x in columns), sep=" | ", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(*sys.argv[2:])
    else:
        sys.exit(main())
elif os.environ.get("A2D_TEST_SABOTAGE"):
    _held = sabotaged(os.environ["A2D_TEST_SABOTAGE"])
    _held.__enter__()
