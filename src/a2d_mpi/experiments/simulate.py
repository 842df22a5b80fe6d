"""The job of drivers/simulate.py: plans x ranks x lengths x networks, replayed; no MPI import.

The file::

    /              attributes: schema, schema_version, and the origin of the latest entries
    /runs/<name>   attributes: plan and workload, as in a benchmark's config; machine, network;
                   for each phase "forward/simulated", "forward/predicted": seconds of the slowest
                   rank, and "forward/simulated wait", "forward/predicted wait": of all ranks, in
                   the mean; "memory", bytes that a rank holds at most, and "room", what it has;
                   "cost seconds", "cost memory", "cost messages": of the simulation; "coarse":
                   seconds within which messages ended at once; "timeout": seconds after which it
                   was given up, and then nothing simulated
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from a2d_mpi.experiments.benchmark import Entry, extends, read_entries, write_entries
from a2d_mpi.experiments.origin import provenance
from a2d_mpi.experiments.streams import progress
from a2d_mpi.experiments.summary import Summary
from a2d_mpi.experiments.sweep import Configuration, cases_of, plans_for
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import most_memory
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.network import Network, parse_network
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.simgrid import replayer, simulate
from a2d_mpi.schedules import problem_of

SCHEMA = ("a2d_mpi simulation", 1)
RANKS = 4096


@dataclass(frozen=True)
class Task:
    """A plan on a machine with a network.

    `coarse`: as of `simulate`, as a share of the predicted time of the shortest phase.
    """

    what: Configuration
    machine: Machine
    network: Network
    slow_rank: float = 1.0
    coarse: float = 0.0

    @property
    def name(self) -> str:
        """Of its entry."""
        network, odd = self.network, ""
        for word, factor in (("rank", self.slow_rank), ("port", network.slow_port)):
            odd += f"-slow {word} {factor:g}" * (factor > 1)
        return f"{self.what.name}-{network.name}{odd}-{self.machine.name}".replace("/", "_")

    def run(self, timeout: float) -> dict[str, object]:
        """The attributes of its entry."""
        what, layout, work = self.what, self.what.layout, self.what.case.work(self.what.overlap)
        found: dict[str, object] = {
            **what.attributes,
            "machine": self.machine.name,
            "network": self.network.name,
            "slow_rank": self.slow_rank,
            "slow_port": self.network.slow_port,
        }
        problem = problem_of(what.method, layout, work, work.mask)
        found["distribution"] = problem.shards.name
        found["memory"] = most_memory(what.method, layout, problem, work.backward)
        found["room"] = np.inf
        if self.machine.memory is not None:
            found["room"] = float(self.machine.memory - self.machine.reserved)
        plan = self.machine, what.method, layout, work
        predicted = predict(*plan)
        found["coarse"] = self.coarse * min(float(x.total.max()) for x in predicted.values())
        slow = np.ones(layout.size)
        slow[0] = self.slow_rank
        both = {"predicted": predicted}
        options = {"slow": slow, "timeout": timeout, "coarse": found["coarse"]}
        try:
            replay = simulate(*plan, network=self.network, **options)
        except TimeoutError:
            found["timeout"] = timeout
        else:
            both["simulated"] = replay.phases
            for name in ("seconds", "memory", "messages"):
                found[f"cost {name}"] = getattr(replay, name)
        for name, phases in both.items():
            for phase, parts in phases.items():
                found[f"{phase}/{name}"] = float(parts.total.max())
                found[f"{phase}/{name} wait"] = float(parts.wait.mean())
        return found


def simulate_all(args: argparse.Namespace) -> int:
    """Simulate what a file lacks, one plan after the other; returns the exit code."""
    replayer()  # or say what to install
    done = read_simulations(args.output) if extends(args.output, args.resume) else {}
    origin, before = Entry(provenance("none", ["simulated"]), {}), 0
    with progress(_tasks(args), unit="plan") as bar:
        for task in bar:  # planned when it is needed
            found = done.get(task.name)
            # Once more, if it was given up and there is more time now.
            if found is None or found.get("timeout", np.inf) < args.timeout:
                found = task.run(args.timeout)
                bar.write(_line(task.name, found))
            else:
                before += 1
                if found["picked"] or not task.what.picked:
                    continue
                found["picked"] = True  # it was asked for before
            done[task.name] = found
            entries = {"/": origin, f"runs/{task.name}": Entry(found, {})}
            write_entries(args.output, SCHEMA, entries)
    if before:
        print(f"{before} were in {args.output} already")
    print(f"written to {args.output}")
    return 0


def read_simulations(path: str | Path) -> dict[str, dict[str, object]]:
    """The attributes of all entries of a file, by name.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If its schema is another.
    """
    return {name: entry.attributes for name, entry in read_entries(path, SCHEMA).items()}


def read_summaries(path: str | Path) -> list[Summary]:
    """The simulations in a file that ended in time, of plans for which the ranks have the memory.

    Raises what `read_simulations` does.
    """
    return [
        Summary(
            name,
            # A plan's name begins with method, shape and order; the rest is its workload's.
            {**x, "workload": name.split("-", 3)[3]},
            "both" if x["backward"] else "forward",
            seconds(x, "simulated"),
            {"wait": seconds(x, "simulated", " wait")},
            predicted=seconds(x, "predicted"),
        )
        for name, x in read_simulations(path).items()
        if "timeout" not in x and x["memory"] <= x["room"]
    ]


def seconds(found: Mapping[str, object], kind: str, part: str = "") -> float:
    """Of all phases of an entry, "simulated" or "predicted"; NaN: there are none.

    `part`: " wait", or all.
    """
    phases = ("forward", "backward") if found["backward"] else ("forward",)
    return sum(float(found.get(f"{phase}/{kind}{part}", np.nan)) for phase in phases)


def _tasks(args: argparse.Namespace) -> Iterator[Task]:
    networks = [replace(parse_network(x), slow_port=args.slow_port) for x in args.networks]
    cases = cases_of(args, args.masks)
    for path, ranks, case in product(args.profile, args.ranks, cases):
        machine = read_machine(path)
        if args.links_alone:
            machine = machine.links_alone()
        if args.latency != 1:
            links = {
                name: replace(link, latency=link.latency * args.latency)
                for name in ("inside", "between")
                if (link := getattr(machine, name))
            }
            name = f"{machine.name}, latency x {args.latency:g}"
            machine = replace(machine, name=name, **links)
        for what in plans_for(case, args.plans, ranks, machine=machine):
            for network in networks:
                yield Task(what, machine, network, args.slow_rank, args.coarse)


def _line(name: str, found: Mapping[str, object]) -> str:
    line = f"{name}: predicted {seconds(found, 'predicted'):.4g} s, "
    if "timeout" in found:
        return line + f"not simulated in {found['timeout']:g} s"
    return line + f"simulated {seconds(found, 'simulated'):.4g} in {found['cost seconds']:.1f} s"
