"""The table of drivers/plan.py: all candidates for a problem; no MPI import."""

from __future__ import annotations

import argparse
import math
from functools import partial

from a2d_mpi.core.sizes import misfit
from a2d_mpi.experiments.options import Parser, add_options, whole
from a2d_mpi.experiments.streams import aligned, progress
from a2d_mpi.experiments.sweep import SIZES, Case
from a2d_mpi.gpt.config import PRESETS, GPTConfig
from a2d_mpi.gpt.cost import STEP_PARTS, predict_step
from a2d_mpi.planning.candidate import Candidate
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.planner import candidates, duration, why_not
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.simulator import PARTS
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules import METHODS

# Share of ranks that may be idle, and most ranks for that: the search takes long for more.
IDLE, IDLE_RANKS = 0.1, 256


def add_problem(parser: Parser, ranks: int, needs_heads: bool = True) -> None:
    """Add the options of a problem on at most `ranks` ranks of a machine; see `read_problem`."""
    group = parser.add_argument_group("machine")
    add_options(group, "profile", required=True)
    text = f"ranks, at most {ranks}"
    group.add_argument("--ranks", type=whole(1, ranks), metavar="N", required=True, help=text)
    group = parser.add_argument_group("problem")
    add_options(group, "seqlen", required=True)
    add_options(group, "nheads", required=needs_heads)
    add_options(group, "nheads-kv")
    add_options(group, "headdim", default=128)
    add_options(group, "headdim-v")
    add_options(group, "dtype", default="bfloat16")
    add_options(group, "wire", "mask", "backward", "overlap")


def read_problem(args: argparse.Namespace) -> tuple[Machine, Case]:
    """Return the machine and the workload of the options of `add_problem`.

    Raises
    ------
    ValueError
        If an option is wrong, or the profile does not fit the options.
    OSError
        If the profile cannot be read.
    """
    if args.nheads is None:
        raise ValueError("give --nheads, or --gpt with the heads of a model")
    machine = read_machine(args.profile)
    given = {x: getattr(args, x) for x in (*SIZES, "mask", "backward")}
    given["wire"] = None if args.wire == "none" else args.wire
    case = Case(**given)
    machine.links(args.ranks)  # raises an error if the profile lacks a link
    if args.dtype not in machine.kernels:
        fixes = " or ".join(f"--dtype {x}" for x in machine.kernels) or "another profile"
        raise ValueError(f"{args.profile} has no kernel for {args.dtype}: give {fixes}")
    return machine, case


def plan(args: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    if args.gpt:
        if args.nheads or args.nheads_kv or args.headdim_v:
            raise ValueError("--gpt sets --nheads, --nheads-kv and --headdim-v: leave these out")
        vars(args).update(PRESETS[args.gpt].heads, backward=True)
    machine, case = read_problem(args)
    work = case.work(args.overlap)
    bar = partial(progress, desc="plans", delay=2)
    idle = IDLE if args.ranks <= IDLE_RANKS else 0.0
    number = None if args.simulate == "all" else 1
    options = {"methods": tuple(METHODS), "progress": bar, "idle": idle, "number": number}
    plans = candidates(machine, args.ranks, work, machine.memory, **options)
    _print(plans, args, machine, work)
    if args.gpt:
        _print_steps(plans[: args.top or None], machine, PRESETS[args.gpt], args)
    if not plans[0].fits:
        raise ValueError(f"no plan fits in {_bytes(machine.memory)} per rank")
    return 0


def _print(
    plans: list[Candidate],
    args: argparse.Namespace,
    machine: Machine,
    work: Workload,
) -> None:
    """Print the table, and say which plans are not in it."""
    ranks, memory = args.ranks, machine.memory
    room = f"{_bytes(memory)} per rank" if memory else "no limit: the profile has no memory"
    print(f"{machine.name}: {ranks} ranks, {machine.ranks_per_node} per node, {room}"
          + f" ({_bytes(machine.reserved)} reserved)" * bool(machine.reserved))  # fmt: skip
    if machine.computed_by:
        print(f"kernels: {machine.computed_by}")
    fitting = [plan for plan in plans if plan.fits]
    bounds = sum(not plan.phases for plan in fitting)
    print(
        f"{len(fitting)} plans fit"
        + f"; {bounds} of them are not simulated: they take at least (>=) as long as the first"
        * (bounds > 0)
        + f"; {len(plans) - len(fitting)} plans do not fit" * (len(plans) > len(fitting))
    )
    shown = plans[: args.top or None]
    head = ["method", "grid", "order", "total", *PARTS]
    head += ["received", "by a node", "x bound", "memory"]
    rows = [[*head, ""], *(_row(plan, ranks, plans[0]) for plan in shown)]
    print("\n" + aligned(rows, left=(0, 1, 2, len(head))))
    if len(shown) < len(plans):
        print(f"... {len(plans) - len(shown)} more plans: use --top 0")
    for heads in (x for x in range(2, ranks + 1) if ranks % x == 0):
        if why := misfit(work.nheads, work.nheads_kv, heads):
            print(f"no plan with {heads} ranks that share the heads: {why}")


def _print_steps(
    plans: list[Candidate], machine: Machine, config: GPTConfig, args: argparse.Namespace
) -> None:
    """Print the training steps of a model by these plans."""
    again = ", all but attention computed again" * args.recompute
    print(
        f"\ntraining steps of {args.gpt}{again}: {config.layers} layers of width {config.width}, "
        f"{config.parameters} parameters on every rank\n"
    )
    rows = [["method", "grid", "total", *STEP_PARTS, "tokens/s", "memory"]]
    for plan in (x for x in plans if x.phases):
        step = predict_step(machine, plan, config, args.seqlen, args.dtype, args.recompute)
        seconds = map(duration, (step.total, *step.seconds.values()))
        rate = f"{args.seqlen / step.total:.4g}"
        rows.append([plan.method, plan.layout.shape, *seconds, rate, _bytes(step.memory)])
    print(aligned(rows, left=(0, 1)))


def _row(plan: Candidate, ranks: int, best: Candidate) -> list[str]:
    """Return the cells of a plan: its numbers, or their bounds if it was not simulated."""
    cells, used = [plan.method, plan.layout.shape, plan.layout.numbering], plan.layout.size
    if plan.phases:
        cells += map(duration, (plan.seconds, *plan.split.values()))
        over_bound = f"{plan.over_bound:.2f}" if math.isfinite(plan.over_bound) else "-"
        cells += [_bytes(plan.received), _bytes(plan.crossing), over_bound]
        cells.append(_bytes(plan.memory))
    else:
        cells += [f">= {duration(plan.bound)}", *["-"] * 7, f">= {_bytes(plan.memory)}"]
    idle = f"{used} of {ranks} ranks, {1 - used / ranks:.0%} idle" if used < ranks else ""
    sliced = f"{plan.layout.sliced} slices" * (plan.layout.sliced != "1x1")
    notes = plan.layout.distribution, sliced, plan.known_as, idle, why_not(plan, best)
    return [*cells, "; ".join(filter(None, notes))]


def _bytes(n: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} B"
