r"""Plans for a machine: the fastest methods and grids, also on other networks.

    python -m a2d_mpi plan --profile data/machines/h100-64x1.toml --ranks 64 --seqlen 1M \
        --nheads 96 --headdim 128 --mask causal --backward
    python -m a2d_mpi plan simulate --output results/scale.h5 --ranks 4 --seqlens 4K \
        --profile data/machines/a100-16x4.toml --networks switch --plans ring,attention2d

Nothing is run, and no MPI is needed.

Exit code 0: done.  2: bad input, or no plan fits.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from a2d_mpi.cli.model_layers import Model, read_model
from a2d_mpi.cli.options import Parser, add_options, aligned, listed, log, path, progress, whole
from a2d_mpi.cli.workloads import (
    PLANNED,
    add_plans,
    add_problem,
    add_workloads,
    plans_for,
    read_problem,
    workloads_of,
)
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.sizes import misfit
from a2d_mpi.planning.candidate import Candidate
from a2d_mpi.planning.choice import Choice, workload_name
from a2d_mpi.planning.layouts import known_as
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import most_memory
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.network import SWITCH, Network, parse_network
from a2d_mpi.planning.planner import candidates, duration, why_not
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.simulator import PARTS
from a2d_mpi.planning.workload import Workload
from a2d_mpi.results.hdf5 import check_output, flat, read_file, write_file
from a2d_mpi.results.origin import provenance
from a2d_mpi.results.tables import Summary
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.writing import problem_of

# Share of ranks that may be idle, and most ranks for that: the search takes long for more.
IDLE, IDLE_RANKS = 0.1, 256
SCHEMA = ("a2d_mpi simulation", 2)


def rank(parser: Parser) -> Callable:
    r"""List methods and grids for a problem on a machine, the fastest first.

        python -m a2d_mpi plan --profile data/machines/h100-64x1.toml --ranks 64 --seqlen 1M \
            --nheads 96 --headdim 128 --mask causal --backward
        python -m a2d_mpi plan --profile data/machines/h100-8.toml --ranks 8 --seqlen 128K \
            --model FOLDER

    --model FILE takes heads, layers, windows and dtype from the config.json of a model of
    transformers, in place of --nheads, --nheads-kv, --headdim and --headdim-v, and needs PyTorch
    and transformers: pip install -e '.[torch]'.  Seconds and bytes
    are then of the attention in all layers, which have one grid.  --mask is what layers without a
    window see; layers with a window see what is also inside the window.  --dtype replaces the
    dtype of the file.

    The table has a line for each plan:

      method, grid   rows x cols x ranks that share the heads
      order          the axes from nodes to ranks; "ucr": neighbouring ranks differ in r
      total, ...     seconds in all, and by part
      received       bytes that a rank receives
      by a node      bytes that a node gets from other nodes
      x bound        bytes over all ranks, as a multiple of the least that exact attention needs
                     without a head axis
      memory         of a rank
      the end        what the plan loses against the first plan
    """
    add_problem(parser, PLANNED, needs_heads=False)
    text = "config.json of a model of transformers, or a folder that has one; see above"
    parser.add_argument("--model", type=path, metavar="FILE", help=text)
    add = parser.add_argument_group("plans and table").add_argument
    text = "best: simulate plans until the fastest is certain; all: simulate every plan"
    add("--simulate", choices=("best", "all"), default="best", help=text)
    add("--top", type=whole(0), metavar="N", default=20, help="number of plans to print; 0: all")
    return rank_plans


def simulate(parser: Parser) -> Callable:
    r"""Simulate plans x ranks x lengths x networks, beside the same plans on one switch.

        python -m a2d_mpi plan simulate --output results/scale.h5 --ranks 4 --seqlens 4K \
            --profile data/machines/a100-16x4.toml --networks switch --plans ring,attention2d
        python -m a2d_mpi plan simulate --output results/scale.h5 --ranks 64,256,1024 \
            --profile data/machines/a100-16x4.toml --networks "switch,fat tree:2,dragonfly" \
            --seqlens 1M --nheads-kv 32,8 --backward --plans "ring,auto:each" --resume

    A network is "switch", "fat tree", "fat tree:4" (four times oversubscribed) or "dragonfly".
    Every simulation is added to the file when it is done.  --resume continues where an earlier run
    ended.
    """
    group = parser.add_argument_group("machines")
    add = group.add_argument
    text = "TOML files of machines, see data/machines"
    add_options(group, "profile", type=listed(path), metavar="FILE,...", required=True, help=text)
    text = "numbers of ranks: 64,256"
    add("--ranks", type=listed(whole(1, PLANNED)), metavar="N,...", default="64", help=text)
    text = "networks, see above: switch,fat tree:4"
    add("--networks", type=listed(str), metavar="NETWORK,...", default="switch", help=text)
    text = "ranks compute, copy and merge in no time"
    add("--links-alone", action="store_true", help=text)
    add_workloads(parser)
    parser.set_defaults(seqlens="1M", nheads="32", headdim="128", dtypes="bfloat16")
    group = parser.add_argument_group("plans")
    add_plans(parser, group, default="auto:each")
    group = parser.add_argument_group("output")
    add_options(group, "output", required=True)
    add_options(group, "resume")
    return simulate_all


def rank_plans(args: argparse.Namespace) -> int:
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
    plans = candidates(machine, args.ranks, layers, tuple(METHODS), **options)
    if model:
        _print_model(model, work, args.ranks, machine)
    _print(plans, args, machine, work)
    if not plans[0].fits:
        raise ValueError(f"no plan fits in {_bytes(machine.memory)} per rank")
    return 0


def _print_model(model: Model, work: Workload, ranks: int, machine: Machine) -> None:
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
    if model.recurrent:
        link = machine.between if ranks > machine.ranks_per_node else machine.inside
        piece = 4 * model.states
        received = piece * model.recurrent * 2 * (ranks - 1) * len(work.phases)
        print(
            f"{model.recurrent} recurrent layers are not in the table: {_bytes(piece)} of states "
            f"of a piece, two pieces a rank; a rank receives {_bytes(received)}, in at least "
            f"{received / link.bandwidth:.3g} s (assumed: at the full bandwidth of its link)"
        )


def _print(
    plans: list[Candidate], args: argparse.Namespace, machine: Machine, work: Workload
) -> None:
    """Print the table, and say which plans are not in it."""
    ranks, memory, shown = args.ranks, machine.memory, plans[: args.top or None]
    room = f"{_bytes(memory)} per rank" if memory else "no limit: the profile has no memory"
    reserved = f" ({_bytes(machine.reserved)} reserved)" * bool(machine.reserved)
    print(f"{machine.name}: {ranks} ranks, {machine.ranks_per_node} per node, {room}{reserved}")
    if machine.computed_by:
        print(f"kernels: {machine.computed_by}")
    fitting = [plan for plan in plans if plan.fits]
    bounds, others = sum(not x.was_simulated for x in fitting), len(plans) - len(fitting)
    print(
        f"{len(fitting)} plans fit"
        + f"; {bounds} of them are not simulated: they take at least (>=) as long as the first"
        * (bounds > 0)
        + f"; {others} plans do not fit" * (others > 0)
    )
    head = ("method", "grid", "order", "total", *PARTS, "received", "by a node", "x bound")
    rows = [[*head, "memory", ""], *(_row(plan, ranks, plans[0]) for plan in shown)]
    print("\n" + aligned(rows, left=(0, 1, 2, len(rows[0]) - 1)))
    if len(shown) < len(plans):
        print(f"... {len(plans) - len(shown)} more plans: use --top 0")
    for heads in (x for x in range(2, ranks + 1) if ranks % x == 0):
        if why := misfit(work.nheads, work.nheads_kv, heads):
            print(f"no plan with {heads} ranks that share the heads: {why}")


def _row(plan: Candidate, ranks: int, best: Candidate) -> list[str]:
    """Return the cells of a plan: its numbers, or their bounds if it was not simulated."""
    cells, used = [plan.method, plan.layout.shape, plan.layout.numbering], plan.layout.size
    if plan.was_simulated:
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
        "room": float(machine.room),
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
    for profile, ranks, work in product(args.profile, args.ranks, workloads_of(args)):
        machine = read_machine(profile)
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
            config={**x, "workload": f"{workload_name(x)}-{x['network']}-{x['machine']}"},
            phase="both" if x["backward"] else "forward",
            seconds=seconds(x, "simulated"),
            parts={"wait": seconds(x, "simulated", " wait")},
            predicted=seconds(x, "predicted"),
        )
        for x in read_simulations(path).values()
        if x["memory"] <= x["room"]
    ]


def seconds(entry: Mapping[str, object], kind: str, part: str = "") -> float:
    """Sum the "simulated" or "predicted" seconds of an entry over its phases.

    With the `part` " wait", sum the waits.
    """
    phases = ("forward", "backward") if entry["backward"] else ("forward",)
    return sum(float(entry[f"{phase} {kind}{part}"]) for phase in phases)


COMMANDS, DEFAULT = (rank, simulate), "rank"
