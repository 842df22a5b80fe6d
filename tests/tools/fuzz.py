"""Compare random configurations with a dense float64 computation; see jobs/run.py.

    mpiexec -n 4 python tests/tools/fuzz.py --seconds 60
    mpiexec -n 4 python tests/tools/fuzz.py --case 123456789
    mpiexec -n 4 python tests/tools/fuzz.py --fault merge
    mpiexec -n 4 python tests/tools/fuzz.py --wire any --cases 1000 --seconds 3600

The fuzzer checks results, bytes, messages, buffers and areas of each case.  Every plan is called
on two data sets, which no call may change.  Results of the first data set must not change in calls
on the second.  Some cases repeat both calls, on the same plan or on a new plan, and must give the
same bits.  A batch has a case for each rank, and each rank judges one case.

Cases are drawn from a seed, not by Hypothesis: all ranks must draw the same case without a
message, and a case that fails by a deadlock ends the job, so that nothing is left to shrink it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import argparse
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import numpy as np
from a2d_mpi.experiments.check_wire import WireErrors
from blocks import BFLOAT16
from cases import accounts
from fuzz_cases import Case, draw, solve
from helpers import bounds_for, distance
from mpi4py import MPI
from sabotage import SABOTAGES, sabotaged

from a2d_mpi import ProcessGrid
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.core.config import OF_KEYS
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.wire import FORMATS
from a2d_mpi.experiments.check import _reference
from a2d_mpi.kernels.numpy import NumpyKernel

TOO_MANY = 3  # failures, after which there is no use in going on
PATIENCE = 60  # seconds for one case: beyond that a rank waits for ever
COMM = MPI.COMM_WORLD

_grids: dict[tuple, ProcessGrid] = {}


def main() -> int:
    """Run the fuzzer; return the exit code, 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, help="seed of the first case; default: any")
    parser.add_argument("--case", type=int, help="run this one only, and say how far off it is")
    parser.add_argument("--cases", type=int, help="so many at most, in whole batches")
    wires = (*FORMATS, "any")
    parser.add_argument("--wire", choices=wires, help="format of messages; any: one of each")
    parser.add_argument("--dtype", choices=DTYPES, help="of all cases; default: one of each")
    parser.add_argument("--fault", choices=SABOTAGES, help="of the package, on purpose")
    args = parser.parse_args()
    with sabotaged(args.fault):
        if args.case is not None:
            return int(run([args.case], args.wire, args.dtype, verbose=True) > 0)
        first = args.first
        if first is None:
            first = COMM.bcast(int.from_bytes(os.urandom(4), "little"))
        start, done, failed = time.monotonic(), 0, 0

        def goes_on() -> bool:
            return time.monotonic() - start < args.seconds and done < (args.cases or math.inf)

        while COMM.bcast(goes_on()) and failed < TOO_MANY:
            seeds = range(first + done, first + done + COMM.size)
            failed += run(seeds, args.wire, args.dtype)
            done += COMM.size
    if COMM.rank == 0:
        seconds = f"{time.monotonic() - start:.0f} s"
        print(f"fuzz: {done} configurations on {COMM.size} ranks in {seconds}, {failed} failed")
    return int(failed > 0)


def run(
    seeds: Sequence[int], wire: str | None = None, dtype: str | None = None, verbose: bool = False
) -> int:
    """Run a batch of at most one case per rank; return the number of failed cases."""
    mine, bad = None, []
    for judge, seed in enumerate(seeds):
        with _watched(seed, wire):
            case = draw(seed, COMM.size, wire, dtype)
            try:
                record = _run(case)
            except CollectiveError as error:  # on all ranks, which are still in step
                record = {"bad": [f"refused: {error}"]}
            except Exception as error:
                _complain(seed, wire, f"{type(error).__name__}: {error}")
                raise
            records = COMM.gather(record, root=judge)
        if COMM.rank == judge:
            mine = case, records
    if mine:
        case, records = mine
        bad = [f"{x} (rank {rank})" for rank, y in enumerate(records) for x in y["bad"]]
        bad = bad or _judge(case, records, verbose)
    failed = COMM.gather((mine[0], bad) if bad else None) or []
    for case, why in filter(None, failed):
        _complain(case.seed, wire, f"{'; '.join(why)} in {case}")
    return COMM.bcast(sum(x is not None for x in failed))


def _run(case: Case) -> dict[str, object]:
    """Return this rank's results for both data sets, its tokens and area, and errors."""
    rows, keys, align, grain = case.blocks
    nodes = case.nodes if case.method == "node aware" else None
    key = case.shape, case.order, nodes
    if key not in _grids:
        _grids[key] = ProcessGrid(COMM, *case.shape, order=case.order, nodes=nodes)
    defaults = (None, rows, keys, None, None)

    def make():
        return make_plan(
            case.method, _grids[key], case.mask, **case.sizes, dtype=case.dtype, **case.options
        )

    with (
        patch.object(NumpyKernel.__init__, "__defaults__", defaults),
        patch("a2d_mpi.kernels.blocks.ALIGN", align),
        patch.multiple("a2d_mpi.kernels.onednn", FEWEST=align, LEAST=0)
        if BFLOAT16 == "onednn"
        else nullcontext(),
        patch("a2d_mpi.schedules.line.GRAIN", grain),
        np.errstate(all="ignore"),
    ):
        plan = make()
        calls = _Calls(case, plan)
        if case.in_turn:
            for which in (0, 1):
                calls.forward(plan, which)
            for which in (0, 1):
                calls.backward(plan, which)
        else:
            for which in (0, 1):
                calls.forward(plan, which)
                calls.backward(plan, which)
        calls.bad += accounts(plan, case.backward, calls=2)
        widening = [calls.widening(plan, which) for which in (0, 1)]
        area, tokens, tokens_kv = plan.area(), plan.tokens, plan.tokens_kv
        if case.again == "fresh after free":
            plan.free()
        if case.again != "none":
            other = plan if case.again == "the same" else make()
            for which in (1, 0):  # 0, 1, 1, 0: two buffers in turn would not show in 0, 1, 0
                calls.forward(other, which)
                calls.backward(other, which)
            other.free()
        plan.free()
    if nodes:  # there are more of them than MPI has communicators
        _grids.pop(key).free()
    tokens = tokens, tokens_kv
    return {
        "results": calls.results[:2],
        "tokens": tokens,
        "area": area,
        "widening": widening,
        "bad": calls.wrong(),
    }


class _Calls:
    """Calls plans on a rank's shards of two data sets, and collects errors.

    No call may change its arguments, nor the results of earlier calls; results of the same data
    must have the same bits.
    """

    def __init__(self, case: Case, plan: AttentionPlan) -> None:
        owned = plan.tokens, plan.tokens_kv, plan.tokens_kv, plan.tokens
        self._data = [[x[y] for x, y in zip(case.inputs(i), owned)] for i in (0, 1)]
        self._kept = [[x.tobytes() for x in shards] for shards in self._data]
        self._arrays = [x.copy() for x in self._data[0]] if case.refilled else None
        self._case, self._dtypes = case, {"lse": plan.compute_dtype}
        self._which: list[int] = []  # data set of each forward call
        self._bits: list[dict[str, bytes]] = []
        self.results: list[dict[str, np.ndarray]] = []
        self.bad: list[str] = []

    def forward(self, plan: AttentionPlan, which: int) -> None:
        q, k, v, _ = given = self._given(which)
        self._which.append(which)
        self.results.append({})
        self._bits.append({})
        self._add(-1, given, ("out", "lse"), plan.forward(q, k, v))

    def backward(self, plan: AttentionPlan, which: int) -> None:
        """Call `backward` with the results of the latest forward call on the data set."""
        if not self._case.backward:
            return
        number = len(self._which) - 1 - self._which[::-1].index(which)
        q, k, v, dout = given = self._given(which)
        found = (self.results[number][x] for x in ("out", "lse"))
        gradients = plan.backward(dout, q, k, v, *found)
        self._add(number, given, ("dq", "dk", "dv"), gradients)

    def widening(self, plan: AttentionPlan, which: int) -> dict[str, float]:
        """Return what a format of the wire adds to the bounds of a data set; collective."""
        if plan.config.wire is None:
            return {}
        owned = plan.tokens, plan.tokens, plan.tokens, plan.tokens
        whole = self._case.rounded(self._case.inputs(which))
        given = dict(zip(("q", "k", "v", "dout"), (x[y] for x, y in zip(whole, owned))))
        local, narrow = given | self.results[self._which.index(which)], WireErrors(plan)
        for _ in _reference(plan, local, None, 0, narrow=narrow):
            pass  # it counts the contributions
        return narrow.widening()

    def wrong(self) -> list[str]:
        """Describe what is wrong after all calls."""
        for which, results, bits in zip(self._which, self.results, self._bits):
            for x, y in results.items():
                if y.tobytes() != bits[x]:
                    self.bad.append(f"{x} of data set {which} was changed by a later call")
                if y.dtype != self._dtypes.get(x, self._case.dtype):
                    self.bad.append(f"{x} is {y.dtype}")
                if bits[x] != self._bits[which][x]:
                    self.bad.append(f"{x} does not repeat")
        return self.bad

    def _given(self, which: int) -> list[np.ndarray]:
        if not self._arrays:
            return self._data[which]
        for to, x in zip(self._arrays, self._data[which]):
            to[...] = x
        return self._arrays

    def _add(self, number: int, given: list, names: Sequence[str], found: Sequence) -> None:
        self.results[number].update(zip(names, found))
        self._bits[number].update((x, y.tobytes()) for x, y in zip(names, found))
        kept = self._kept[self._which[number]]
        for name, x, bits in zip(("q", "k", "v", "dout"), given, kept):
            if x.tobytes() != bits:
                self.bad.append(f"{name} was overwritten")


def _judge(case: Case, records: list[dict], verbose: bool) -> list[str]:
    """Describe what is wrong with a case."""
    for length, owned in zip(case.seen.shape, zip(*(x["tokens"] for x in records))):
        if not np.array_equal(np.sort(np.concatenate(owned)), np.arange(length)):
            return [f"tokens {owned}"]
    bad, pairs = [], int(case.seen.sum()) * case.shape[2]  # every layer has its heads' pairs
    area = sum(x["area"] for x in records)
    if area != pairs:
        bad.append(f"areas add up to {area}, not {pairs}")
    for data in (0, 1):
        bad += _compared(case, data, records, verbose)
    return bad


def _compared(case: Case, data: int, records: list[dict], verbose: bool) -> list[str]:
    """Describe the results of a data set that are out of their bounds."""
    found, bad = {}, []
    for name, part in records[0]["results"][data].items():
        of_keys = name in OF_KEYS
        found[name] = np.empty((case.seen.shape[of_keys], *part.shape[1:]))
        for x in records:
            found[name][x["tokens"][of_keys]] = x["results"][data][name]
    exact, same, whole = solve(case, data, found["out"])
    scale = case.options["softmax_scale"]
    scale = case.sizes["headdim"] ** -0.5 if scale is None else scale
    bounds = bounds_for(case.dtype, scale, whole, exact, same)
    for name, more in records[0]["widening"][data].items():
        bounds[name] += more
    for name, right in exact.items():
        error = distance(found[name], right)
        if verbose:
            print(f"{name}: error {error:.3g}, bound {bounds[name]:.3g}, plain {same[name]:.3g}")
        if not error <= bounds[name]:
            bad.append(f"{name} of data set {data} {error:.3g} > {bounds[name]:.3g}")
    return bad


@contextmanager
def _watched(seed: int, wire: str | None):
    """End the job with a message if a case takes too long."""

    def end() -> None:
        _complain(seed, wire, f"not done after {PATIENCE} s (rank {COMM.rank})")
        os._exit(1)

    timer = threading.Timer(PATIENCE, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _complain(seed: int, wire: str | None, why: str) -> None:
    case = f"{seed} {COMM.size}" + f" {wire}" * (wire is not None)
    print(f"fuzz: FAILED: python jobs/run.py fuzz --case {case}: {why}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # the others would wait
        traceback.print_exc()
        COMM.Abort(1)
