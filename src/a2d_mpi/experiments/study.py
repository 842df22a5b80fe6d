"""The tables of drivers/study.py; no MPI import."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from a2d_mpi.core.problem import Workload
from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.benchmark import read_benchmark
from a2d_mpi.experiments.mask_file import mask_of
from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.experiments.results import Result
from a2d_mpi.experiments.summary import Summary, phases_of, summarise, usual_trial
from a2d_mpi.planning import cost
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules import METHODS, problem_of

GRID, RING, *_ = METHODS  # the paper compares these two
PAPER = {"64x1": "h100-64x1.toml", "16x4": "a100-16x4.toml"}
LENGTH = 1 << 16  # tokens for which the paper's machines are asked
HEADER = ("cluster", "mask", "KV heads", "pass", "pick", RING, "other method", "other plan")
LINE = ["---"] * len(HEADER)
CLOSE = 1.1  # a pick that takes at most so many times the fastest is a good one


def study(args: argparse.Namespace) -> int:
    """Print the tables; returns the exit code."""
    passed, off, good, table = True, [], 0, []
    for path in args.files:
        results = read_benchmark(path)
        passed &= all(result.passed for result in results.values())
        rows = {name: summarise(result) for name, result in results.items()}
        print(f"{Path(path).name}: {len(rows)} runs, checks "
              f"{'passed' if all(x.passed for x in rows.values()) else 'FAILED'}")  # fmt: skip
        for workload, ranks in dict.fromkeys((x.workload, x.ranks) for x in rows.values()):
            these = [x for x in rows.values() if (x.workload, x.ranks) == (workload, ranks)]
            whole = [x for x in these if x.overlap]
            print(f"  {workload}, {ranks} ranks, {len(whole)} plans")
            match = _matches(args.machines, path, results, whole)
            others = _against_ring(results, whole), _in_turn(these), match
            others += (_against_causal(results, rows, whole),)
            for line in filter(None, (*others, *_against_grid(results, whole))):
                print(f"    {line}")
            if ratios := _pick(whole):
                pick, ring, strangers, others = ratios
                good += not others < 1 / CLOSE  # NaN: there are no others
                print(f"    pick {pick}: {ring:.2f}x the {RING}, {strangers:.2f}x the fastest of "
                      f"another method, {others:.2f}x of all others")  # fmt: skip
                c, phases = results[whole[0].name].config, phases_of(results[whole[0].name])
                kind = str(c["mask"]), f"{c['nheads_kv']} of {c['nheads']}", " + ".join(phases)
                times = (f"{x:.2f}" for x in (ring, strangers, others))
                table.append((Path(path).stem, *kind, f"`{pick}`", *times))
        for line in _scaling(results):
            print(f"  {line}")
        these = [x.predicted / x.seconds - 1 for x in rows.values() if not math.isnan(x.predicted)]
        off += these
        print(f"  model: {_errors(these)}")
    print(f"model, all files: {_errors(off)}")
    print(f"picks within {100 * (CLOSE - 1):.0f} % of the fastest: {good} of {len(table)}")
    if args.markdown:
        print("\n".join("| " + " | ".join(row) + " |" for row in (HEADER, LINE, *sorted(table))))
    return 0 if passed else FAILED_CHECK


def _errors(off: Sequence[float]) -> str:
    size = np.abs(off)
    if not len(size):
        return "no predictions"
    median, worst = 100 * np.median(size), 100 * size.max()
    return f"off by {median:.1f} % (median), {worst:.1f} % (worst of {len(size)} runs)"


def _ring(xs: Sequence[Summary]) -> Summary | None:
    return next((x for x in xs if x.family == RING), None)


def _against_ring(results: dict[str, Result], xs: Sequence[Summary]) -> str:
    """Seconds and bytes of the ring over those of the squarest pure grid, phase by phase."""
    ring, grids = _ring(xs), [x for x in xs if x.family == GRID]
    if not (ring and grids):
        return ""
    grid = min(grids, key=lambda x: abs(np.subtract(*_shape(results[x.name]))))
    parts = []
    for phases in {("forward",), phases_of(results[ring.name])}:
        one, other = (summarise(results[x.name], phases) for x in (ring, grid))
        seconds, moved = one.seconds / other.seconds, one.received / other.received
        parts.append(f"{' + '.join(phases)} {seconds:.2f} in time, {moved:.2f} in bytes "
                     f"({seconds / moved:.2f})")  # fmt: skip
    return f"{RING} / {grid.plan}: " + "; ".join(sorted(parts, key=len))


def _shape(result: Result) -> tuple[int, int]:
    return int(result.config["rows"]), int(result.config["cols"])


def _against_grid(results: dict[str, Result], xs: Sequence[Summary]) -> list[str]:
    """Seconds and bytes of the fastest grid over those of other plans with the same head axis.

    Bytes: those of the busiest node, sent to other nodes or received from them.
    """
    lines = []
    axis = {x.name: int(results[x.name].config["heads"]) for x in xs}
    for x in (x for x in xs if x.method not in (GRID, RING) and "nodes" in results[x.name].config):
        same = [y for y in xs if y.method == GRID and axis[y.name] == axis[x.name]]
        parts = []
        for phases in dict.fromkeys([("forward",), phases_of(results[x.name])]) if same else ():
            of = {y.name: summarise(results[y.name], phases).seconds for y in (x, *same)}
            grid = min(same, key=lambda y: of[y.name])
            seconds = of[grid.name] / of[x.name]
            both = [_busiest_node(results[y.name], phases) for y in (grid, x)]
            moved = both[0] / both[1] if both[1] else math.nan  # one node has all ranks
            parts.append(f"{' + '.join(phases)} {seconds:.2f} in time, {moved:.2f} in bytes "
                         f"({seconds / moved:.2f})")  # fmt: skip
        if parts:
            lines.append(f"{grid.plan} / {x.plan}: " + "; ".join(parts))
    return lines


def _against_causal(
    results: dict[str, Result], rows: dict[str, Summary], xs: Sequence[Summary]
) -> str:
    """Seconds of the fastest causal grid over those of this mask's plans: what a mask saves."""
    config, best = results[xs[0].name].config, min(xs, key=lambda x: x.seconds)
    whole = [
        x
        for x in rows.values()
        if _but_mask(results[x.name].config) == _but_mask(config)
        and phases_of(results[x.name]) == phases_of(results[xs[0].name])
        and (results[x.name].config["mask"], x.method, x.overlap) == ("causal", GRID, True)
        and int(results[x.name].config["heads"]) == 1
    ]
    if config["mask"] in ("full", "causal") or not whole:
        return ""
    grid = min(whole, key=lambda x: x.seconds)
    pick = next((x for x in xs if x.picked), best)
    both = [pick] if pick is best else [pick, best]
    ratios = (f"{grid.seconds / x.seconds:.2f} ({x.plan})" for x in both)
    return f"causal {grid.plan}, whatever the mask / pick, fastest: {', '.join(ratios)}"


def _but_mask(config: Mapping[str, object]) -> list[str]:
    """Sizes that make a workload, but for its mask."""
    return [str(config[x]) for x in ("seqlen", "nheads", "nheads_kv", "headdim", "dtype", "ranks")]


def _busiest_node(result: Result, phases: Sequence[str]) -> int:
    """Bytes that a node sends to others, or receives from them, at most in each phase."""
    c = result.config
    nodes = tuple(int(x) for x in str(c["nodes"]).split()) or tuple(range(int(c["ranks"])))
    layout = Layout(*(int(c[x]) for x in ("rows", "cols", "heads")), nodes=nodes)
    sizes = (int(c[x]) for x in ("seqlen", "nheads", "headdim", "nheads_kv"))
    work = Workload(*sizes, dtype=str(c["dtype"]), mask=mask_of(str(c["mask"]), int(c["seqlen"])))
    method = str(c["method"])
    problem = problem_of(method, layout, work, work.mask, str(c["distribution"]))
    node, most = np.array(nodes), 0
    for phase in phases:
        crossing = np.zeros((2, max(nodes) + 1), np.int64)
        for move in cost.moves(method, layout, problem, None, (phase,)):
            if node[move.rank] != node[move.peer]:
                crossing[int(move.sent), node[move.rank]] += move.nbytes
        most += int(crossing.max())
    return most


def _in_turn(xs: Sequence[Summary]) -> str:
    """With overlap, and phase by phase."""
    both = {(f"{x.method} {x.shape}", x.overlap): x.seconds for x in xs}
    return "; ".join(
        f"{plan}: {1e3 * both[plan, True]:.0f} ms overlapped, {1e3 * seconds:.0f} in turn"
        for (plan, overlap), seconds in both.items()
        if not overlap and (plan, True) in both
    )


def _pick(xs: Sequence[Summary]) -> tuple[str, float, float, float] | None:
    """The planner's choice, and how many times faster than the ring it is, than the fastest of
    another method, and than the fastest other plan.
    """
    its, ring = next((x for x in xs if x.picked), None), _ring(xs)
    if its is None or ring is None:
        return None
    others = [x for x in xs if x is not its]
    rivals = [ring], [x for x in others if x.family != its.family], others
    return its.plan, *(
        min((x.seconds for x in some), default=math.nan) / its.seconds for some in rivals
    )


def _matches(machines: Path, path: str, results: dict[str, Result], xs: Sequence[Summary]) -> str:
    """Compute : transfer of the ring's forward pass, and where the paper's machine has that."""
    profile, ring = Path(path).with_suffix(".toml"), _ring(xs)
    if Path(path).stem not in PAPER or not profile.exists() or ring is None:
        return ""
    result = results[ring.name]
    c, total = result.config, result.timings["forward/total"]
    compute = result.timings["forward/compute"][usual_trial(total)].mean()
    received = summarise(result, ["forward"]).received
    link = read_machine(profile).links(int(c["ranks"]))[1]
    here = compute / (received / link.bandwidth)
    paper = read_machine(machines / PAPER[Path(path).stem])
    nheads_kv = 96 * int(c["nheads_kv"]) // int(c["nheads"])
    work = Workload(LENGTH, 96, 128, nheads_kv, mask=mask_of(str(c["mask"]), LENGTH))
    layout = Layout(int(c["ranks"]), 1)
    moved = cost.traffic(RING, layout, problem_of(RING, layout, work, work.mask), 0)
    received = sum(x[1] for (phase, _), x in moved.items() if phase == "forward")
    transfer = received / paper.between.bandwidth
    there = float(predict(paper, RING, layout, work)["forward"].compute.mean()) / transfer
    tokens = LENGTH * here / there
    return (
        f"{RING} forward: compute / transfer {here:.3f}; match: {tokens:.0f} tokens, {paper.name}"
    )


def _scaling(results: dict[str, Result]) -> list[str]:
    """Elements that a rank receives forward, by workload, method and number of ranks."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for result in results.values():
        c = result.config
        rows, cols = _shape(result)
        ranks, square = int(c["ranks"]), rows == cols
        whole = int(c["seqlen"]) * int(c["nheads"]) * int(c["headdim"])
        lse = (cols - 1) / ranks / int(c["headdim"])
        known = {GRID: (square, 4 * (rows - 1) / ranks + lse), RING: (True, 2 - 2 / ranks)}
        fits, formula = known.get(str(c["method"]), (False, 0.0))
        if fits and int(c["heads"]) == 1 and c["nheads"] == c["nheads_kv"] and c["overlap"]:
            received = summarise(result, ["forward"]).received
            counted = received / np.dtype(str(c["dtype"])).itemsize / whole
            by_ranks = found.setdefault((str(c["workload"]), str(c["method"])), {})
            by_ranks[ranks] = f"{ranks} ranks {counted:.4f} ({formula:.4f})"
    return [
        f"received forward, {method}, {workload}: " + ", ".join(x for _, x in sorted(by.items()))
        for (workload, method), by in found.items()
        if len(by) > 1
    ]
