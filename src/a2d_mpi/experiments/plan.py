"""The programs of drivers/plan.py: candidates for a problem, plans on networks; no MPI import.

A file of `simulate_all`::

    /       attributes: schema, schema_version, and the origin of the latest simulations
    /runs   a table: arrays of one length, where NaN means that a simulation has no value

====================================  ==========================================================
``name``                              plan, network and machine
``method``, ``mask``, ...             plan and workload, as in a benchmark's config
``machine``, ``network``, ...         where it was simulated
``<phase> simulated``, ``predicted``  seconds of the slowest rank, on the network and on a switch
``<phase> simulated wait``, ...       mean wait of all ranks
``memory``, ``room``                  peak bytes of a rank; bytes that a rank may use
====================================  ==========================================================
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.sizes import misfit
from a2d_mpi.experiments.hdf5 import check_output, read_file, write_file
from a2d_mpi.experiments.model_layers import Model, read_model
from a2d_mpi.experiments.options import Parser, add_options, aligned, log, progress, whole
from a2d_mpi.experiments.origin import provenance
from a2d_mpi.experiments.results import Summary, flat
from a2d_mpi.experiments.sweep import make_workload, plans_for, workloads_of
from a2d_mpi.planning.candidate import Candidate, Stack
from a2d_mpi.planning.layouts import known_as
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import most_memory
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.network import SWITCH, Network, parse_network
from a2d_mpi.planning.planner import candidates, duration, why_not
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.simulator import PARTS
from a2d_mpi.planning.workload import SIZES, Choice, Workload, workload_name
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.slices import slices_of
from a2d_mpi.schedules.writing import problem_of

# Share of ranks that may be idle, and most ranks for that: the search takes long for more.
IDLE, IDLE_RANKS = 0.1, 256
SCHEMA = ("a2d_mpi simulation", 2)
RANKS = 4096  # most ranks that are simulated


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
    add_options(group, "headdim", help="elements of a head of q and k; default: 128")
    add_options(group, "headdim-v")
    add_options(group, "dtype", default=None, help="storage dtype; default: bfloat16")
    add_options(group, "wire", "mask", "backward", "overlap")


def read_problem(args: argparse.Namespace) -> tuple[Machine, Workload]:
    """Return the machine and the workload of the options of `add_problem`.

    Raises
    ------
    ValueError
        If an option is wrong.
    OSError
        If the profile cannot be read.
    """
    machine = read_machine(args.profile)
    given = {x: getattr(args, x) for x in (*SIZES, "wire", "backward", "overlap")}
    given["headdim"], given["dtype"] = args.headdim or 128, args.dtype or "bfloat16"
    return machine, make_workload(args.mask, **given)


def rank(args: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    if args.model is None and args.nheads is None:
        raise ValueError("give --nheads, or --model FILE that has the heads")
    if model := args.model and read_model(args.model):
        if args.nheads or args.nheads_kv or args.headdim or args.headdim_v:
            raise ValueError("--model sets the heads: leave out --nheads, --nheads-kv, --headdim")
        vars(args).update(model.heads, dtype=args.dtype or model.dtype)
    machine, work = read_problem(args)
    layers = model.workloads(work) if model else work
    options = {
        "number": None if args.simulate == "all" else 1,
        "idle": IDLE if args.ranks <= IDLE_RANKS else 0.0,
        "progress": partial(progress, desc="plans", delay=2),
    }
    plans = candidates(machine, args.ranks, layers, machine.memory, tuple(METHODS), **options)
    if model:
        _print_model(model, work, args.ranks)
    _print(plans, args, machine, work)
    if not plans[0].fits:
        raise ValueError(f"no plan fits in {_bytes(machine.memory)} per rank")
    return 0


def _print_model(model: Model, work: Workload, ranks: int) -> None:
    """Print what the file of a model says, and the bytes of its weights and its KV cache."""
    kinds = (f"{n} {kind}{f' of {size}' * (size > 0)}" for (kind, size), n in model.layers.items())
    values = f" and {work.headdim_v}" * (work.headdim_v != work.headdim)
    print(
        f"{model.family}: layers: {', '.join(kinds)}; {work.nheads} heads of {work.headdim}",
        end="",
    )
    print(f"{values}, {work.nheads_kv} KV heads; {work.dtype}")
    size, n = DTYPES[work.dtype].itemsize, model.parameters
    weights = f"{_bytes(n)[:-1]} parameters: {_bytes(n * size)} on every rank"
    cache = size * model.cache(work.seqlen)
    print(f"{weights}; KV cache: {_bytes(cache)}, {_bytes(cache // ranks)} on a rank")
    print("seconds and bytes are of all layers on one grid, and memory of the plans of all masks")


def _print(
    plans: list[Candidate | Stack], args: argparse.Namespace, machine: Machine, work: Workload
) -> None:
    """Print the table, and say which plans are not in it."""
    ranks, memory, shown = args.ranks, machine.memory, plans[: args.top or None]
    room = f"{_bytes(memory)} per rank" if memory else "no limit: the profile has no memory"
    reserved = f" ({_bytes(machine.reserved)} reserved)" * bool(machine.reserved)
    print(f"{machine.name}: {ranks} ranks, {machine.ranks_per_node} per node, {room}{reserved}")
    if machine.computed_by:
        print(f"kernels: {machine.computed_by}")
    fitting = [plan for plan in plans if plan.fits]
    bounds, others = sum(not x.phases for x in fitting), len(plans) - len(fitting)
    print(
        f"{len(fitting)} plans fit"
        + f"; {bounds} of them are not simulated: they take at least (>=) as long as the first"
        * (bounds > 0)
        + f"; {others} plans do not fit" * (others > 0)
    )
    head = ("method", "grid", "order", "total", *PARTS, "received", "by a node", "x bound")
    rows = [[*head, "memory", ""], *(_row(plan, ranks, plans[0]) for plan in shown)]
    for row, plan in zip(rows[1:], shown):
        row[-1] = "; ".join(filter(None, (row[-1], _untold(plan, machine, work))))
    print("\n" + aligned(rows, left=(0, 1, 2, len(rows[0]) - 1)))
    if len(shown) < len(plans):
        print(f"... {len(plans) - len(shown)} more plans: use --top 0")
    for heads in (x for x in range(2, ranks + 1) if ranks % x == 0):
        if why := misfit(work.nheads, work.nheads_kv, heads):
            print(f"no plan with {heads} ranks that share the heads: {why}")


def _row(plan: Candidate | Stack, ranks: int, best: Candidate | Stack) -> list[str]:
    """Return the cells of a plan: its numbers, or their bounds if it was not simulated."""
    cells, used = [plan.method, plan.layout.shape, plan.layout.numbering], plan.layout.size
    if plan.phases:
        cells += map(duration, (plan.seconds, *plan.split.values()))
        over_bound = f"{plan.over_bound:.2f}" if math.isfinite(plan.over_bound) else "-"
        cells += _bytes(plan.received), _bytes(plan.crossing), over_bound, _bytes(plan.memory)
    else:
        cells += [f">= {duration(plan.bound)}", *["-"] * 7, f">= {_bytes(plan.memory)}"]
    idle = f"{used} of {ranks} ranks, {1 - used / ranks:.0%} idle" if used < ranks else ""
    sliced = f"{plan.layout.sliced} slices" * (plan.layout.sliced != "1x1")
    known = known_as(plan.method, plan.layout)
    notes = plan.layout.distribution, sliced, known, idle, why_not(plan, best)
    return [*cells, "; ".join(filter(None, notes))]


def _untold(plan: Candidate | Stack, machine: Machine, work: Workload) -> str:
    """Say how many slices a plan without a head axis takes that is not told a number."""
    layout = replace(plan.layout, slices=None, nodes=tuple(machine.node_of(plan.layout)))
    one = layout.heads > 1 or METHODS[plan.method].ring or not work.overlap
    slices = replace(layout, slices=slices_of(None, work, layout, one)).sliced
    return f"{slices} slices if not told" * (slices not in ("1x1", plan.layout.sliced))


def _bytes(n: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} B"


def _simulated(what: Choice, machine: Machine, network: Network) -> dict[str, object]:
    """Simulate a plan on a network and on a switch; return the attributes of its entry."""
    work = what.work
    problem = problem_of(what.method, what.layout, work, work.seen)
    plan = machine, what.method, what.layout, work
    predicted = predict(*plan)
    simulated = predicted if network == SWITCH else predict(*plan, network=network)
    entry = {
        **what.attributes,
        "machine": machine.name,
        "network": network.name,
        "distribution": problem.queries.name,
        "memory": most_memory(what.method, what.layout, problem, work.backward),
        "room": float((machine.memory or np.inf) - machine.reserved),
    }
    for name, phases in (("predicted", predicted), ("simulated", simulated)):
        for phase, parts in phases.items():
            entry[f"{phase} {name}"] = float(parts.total.max())
            entry[f"{phase} {name} wait"] = float(parts.wait.mean())
    return entry


def simulate_all(args: argparse.Namespace) -> int:
    """Run the simulations that a file lacks, one after the other; return the exit code."""
    networks = [parse_network(x) for x in args.networks]
    there = check_output(args.output, SCHEMA, args.resume)
    done = read_simulations(args.output) if there else {}
    origin, before = provenance("none", ["simulated"]), 0
    for what, machine, network in _plans(args, networks):
        name = f"{what.name}-{network.name}-{machine.name}".replace("/", "_")
        entry = done.get(name)
        if entry is None:
            entry = _simulated(what, machine, network)
            both = (f"{x} {seconds(entry, x):.4g} s" for x in ("predicted", "simulated"))
            print(f"{name}: {', '.join(both)}", flush=True)
        else:
            before += 1
            if entry["picked"] or not what.picked:
                continue
            entry["picked"] = True  # an earlier run named this plan, now the planner picks it
        done[name] = entry
        write_file(args.output, SCHEMA, {**origin, "runs": _table(done)})
    if before:
        log.info("%d simulations were in %s already", before, args.output)
    print(f"written to {args.output}")
    return 0


def _plans(
    args: argparse.Namespace, networks: list[Network]
) -> Iterator[tuple[Choice, Machine, Network]]:
    """Yield each plan with its machine and network; the planner runs lazily."""
    for path, ranks, work in product(args.profile, args.ranks, workloads_of(args)):
        machine = read_machine(path)
        if args.links_alone:
            machine = machine.links_alone()
        for what in plans_for(work, args.plans, ranks, machine):
            yield from ((what, machine, network) for network in networks)


def read_simulations(path: str | Path) -> dict[str, dict[str, object]]:
    """Read the attributes of all entries of a file, by name.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If its schema is wrong.
    """
    table = flat(read_file(path, SCHEMA)["runs"])
    columns = (np.char.decode(x) if x.dtype.kind == "S" else x for x in table.values())
    rows = [dict(zip(table, values)) for values in zip(*(x.tolist() for x in columns))]
    return {row.pop("name"): row for row in rows}


def _table(rows: Mapping[str, Mapping[str, object]]) -> dict[str, np.ndarray]:
    """Return the columns of a table; bytes in place of text, because HDF5 packs only these."""
    names = {name: None for row in rows.values() for name in row}
    table = {x: np.array([row.get(x, np.nan) for row in rows.values()]) for x in names}
    table["name"] = np.array([*rows])
    return {
        name: np.char.encode(x, errors="backslashreplace") if x.dtype.kind == "U" else x
        for name, x in table.items()
    }


def read_summaries(path: str | Path) -> list[Summary]:
    """Read the summaries of all simulations in a file whose plans fit in memory.

    Raises
    ------
    OSError, ValueError
        As `read_simulations`.
    """
    return [
        Summary(
            name,
            {**x, "workload": f"{workload_name(x)}-{x['network']}-{x['machine']}"},
            "both" if x["backward"] else "forward",
            seconds(x, "simulated"),
            {"wait": seconds(x, "simulated", " wait")},
            predicted=seconds(x, "predicted"),
        )
        for name, x in read_simulations(path).items()
        if x["memory"] <= x["room"]
    ]


def seconds(entry: Mapping[str, object], kind: str, part: str = "") -> float:
    """Sum the "simulated" or "predicted" seconds of an entry over its phases.

    With the `part` " wait", sum the waits.
    """
    phases = ("forward", "backward") if entry["backward"] else ("forward",)
    return sum(float(entry[f"{phase} {kind}{part}"]) for phase in phases)
