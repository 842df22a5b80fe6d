"""The program of `drivers/plan.py simulate`: replay plans on networks; no MPI import.

The file::

    /       attributes: schema, schema_version, and the origin of the latest simulations
    /runs   a table: arrays of one length, where NaN and "" mean that a simulation has no value

====================================  ==========================================================
``name``                              plan, network and machine
``method``, ``mask``, ...             plan and workload, as in a benchmark's config
``machine``, ``network``, ...         where it was simulated
``<phase> simulated``, ``predicted``  seconds of the slowest rank
``<phase> simulated wait``, ...       mean wait of all ranks
``memory``, ``room``                  peak bytes of a rank; bytes that a rank may use
``coarse``                            seconds within which ends of messages were one event
====================================  ==========================================================
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import numpy as np

from a2d_mpi.experiments.hdf5 import check_output, read_file, write_file
from a2d_mpi.experiments.origin import provenance
from a2d_mpi.experiments.results import Summary, flat
from a2d_mpi.experiments.sweep import Configuration, cases_of, plans_for
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import most_memory
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.network import Network, parse_network
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.simgrid import replayer, simulate
from a2d_mpi.schedules import problem_of

SCHEMA = ("a2d_mpi simulation", 2)
RANKS = 4096


def _simulated(
    what: Configuration, machine: Machine, network: Network, coarse: float
) -> dict[str, object]:
    """Run the simulation of a plan; return the attributes of its entry.

    `coarse` is a share of the predicted time of the shortest phase.
    """
    layout, work = what.layout, what.case.work(what.overlap)
    problem = problem_of(what.method, layout, work, work.mask)
    plan = machine, what.method, layout, work
    predicted = predict(*plan)
    coarse *= min(float(x.total.max()) for x in predicted.values())
    room = np.inf if machine.memory is None else float(machine.memory - machine.reserved)
    entry = {
        **what.attributes,
        "machine": machine.name,
        "network": network.name,
        "distribution": problem.queries.name,
        "memory": most_memory(what.method, layout, problem, work.backward),
        "room": room,
        "coarse": coarse,
    }
    simulated = simulate(*plan, network=network, coarse=coarse)
    for name, phases in (("predicted", predicted), ("simulated", simulated)):
        for phase, parts in phases.items():
            entry[f"{phase} {name}"] = float(parts.total.max())
            entry[f"{phase} {name} wait"] = float(parts.wait.mean())
    return entry


def simulate_all(args: argparse.Namespace) -> int:
    """Run the simulations that a file lacks, one after the other; return the exit code."""
    networks = [parse_network(x) for x in args.networks]
    replayer()  # raises an error now if SimGrid is not installed
    there = check_output(args.output, SCHEMA, args.resume)
    done = read_simulations(args.output) if there else {}
    origin, before = provenance("none", ["simulated"]), 0
    for what, machine, network in _plans(args, networks):
        name = f"{what.name}-{network.name}-{machine.name}".replace("/", "_")
        entry = done.get(name)
        if entry is None:
            entry = _simulated(what, machine, network, args.coarse)
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
        print(f"{before} simulations were in {args.output} already")
    print(f"written to {args.output}")
    return 0


def _plans(
    args: argparse.Namespace, networks: list[Network]
) -> Iterator[tuple[Configuration, Machine, Network]]:
    """Yield each plan with its machine and network; the planner runs lazily."""
    for path, ranks, case in product(args.profile, args.ranks, cases_of(args)):
        machine = read_machine(path)
        if args.links_alone:
            machine = machine.links_alone()
        for what in plans_for(case, args.plans, ranks, machine=machine):
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
    simulations = {}
    table = flat(read_file(path, SCHEMA)["runs"])
    columns = [np.char.decode(x) if x.dtype.kind == "S" else x for x in table.values()]
    for values in zip(*(x.tolist() for x in columns)):
        row = {x: y for x, y in zip(table, values) if y == y and y != ""}  # NaN is not itself
        simulations[row.pop("name")] = row
    return simulations


def _table(rows: Mapping[str, Mapping[str, object]]) -> dict[str, np.ndarray]:
    """Return the columns of a table; bytes in place of text, because HDF5 packs only these."""
    table = {"name": np.char.encode(list(rows))}
    for name, x in {x: y for row in rows.values() for x, y in row.items()}.items():
        is_text = isinstance(x, str)
        column = np.array([row.get(name, "" if is_text else np.nan) for row in rows.values()])
        table[name] = np.char.encode(column, errors="backslashreplace") if is_text else column
    return table


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
            # The name of a plan is method, shape and order, and then the name of the workload.
            {**x, "workload": name.split("-", 3)[3]},
            "both" if x["backward"] else "forward",
            seconds(x, "simulated"),
            {"wait": seconds(x, "simulated", " wait")},
            predicted=seconds(x, "predicted"),
        )
        for name, x in read_simulations(path).items()
        if x["memory"] <= x["room"]
    ]


def seconds(entry: Mapping[str, object], kind: str, part: str = "") -> float:
    """Sum the "simulated" or "predicted" seconds of an entry over its phases; NaN without any.

    With the `part` " wait", sum the waits.
    """
    phases = ("forward", "backward") if entry["backward"] else ("forward",)
    return sum(float(entry.get(f"{phase} {kind}{part}", np.nan)) for phase in phases)
