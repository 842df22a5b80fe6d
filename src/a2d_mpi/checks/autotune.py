"""Measurements of this machine: its profile for the planner, and the fastest plan of a workload.

`a2d_mpi.planning.calibration` fits the profile to the measured seconds.
"""

from __future__ import annotations

import math
import operator
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.methods import Attention2D, RingAttention
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.checks.measure import Measurement, open_device, random_inputs
from a2d_mpi.checks.timing import in_turn, kernel_calls, plan_of, seconds_of
from a2d_mpi.cli.options import aligned, progress
from a2d_mpi.cli.run import together
from a2d_mpi.comm.agreement import CollectiveError, agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.dtypes import as_dtype
from a2d_mpi.core.layout import Layout
from a2d_mpi.core.merge import merge
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device
from a2d_mpi.kernels import make_kernel
from a2d_mpi.kernels.threads import BlasThreads
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.planning.calibration import Sample, fit_kernel, fit_link, fit_steps, steadiness
from a2d_mpi.planning.choice import Choice
from a2d_mpi.planning.machine import KernelModel, Link, Machine
from a2d_mpi.planning.planner import best_candidates, duration
from a2d_mpi.planning.workload import Workload
from a2d_mpi.results.origin import blas_name

CALIBRATION = 5.0  # s to measure a machine of which there is no profile
# Queries, keys, nheads, nheads_kv, headdim, mask: small and large values of each.
SHAPES = (
    (16, 16, 16, 16, 16, Full()),
    (16, 16, 2, 2, 64, Full()),
    (16, 128, 16, 16, 32, Full()),
    (32, 128, 16, 2, 32, Causal()),
    (64, 64, 8, 8, 32, Full()),
    (512, 16, 8, 8, 32, Full()),
    (64, 64, 4, 1, 32, Full()),
    (64, 64, 1, 1, 128, Causal()),
    (64, 1024, 2, 2, 64, Full()),
    (1024, 64, 2, 2, 64, Full()),
    (256, 256, 4, 4, 32, Causal()),
    (256, 1024, 2, 1, 128, Full()),
    (1024, 256, 4, 4, 64, Full()),
    (1024, 1024, 2, 2, 64, Causal()),
    (1024, 1024, 1, 1, 128, Full()),
    (1536, 1536, 2, 2, 32, Full()),
)
FLOOD = 32  # number of tiny messages that are posted together
LARGEST = 16 << 20  # bytes of the largest message
HOPS = 8  # number of large messages one after the other


def measure(
    comm: MPI.Intracomm,
    dtypes: list[str],
    seconds: float,
    name: str | None = None,
    threads: int | None = 1,
) -> tuple[Machine, list[str]]:
    """Measure the machine for some seconds, with the kernels of `dtypes` on the host.

    Collective over `comm`; the same on all ranks.

    Parameters
    ----------
    comm : Intracomm
    dtypes : list of str
    seconds : float
    name : str, optional
        Name of the machine.  Default: the name of its first node.
    threads : int or None
        BLAS threads of a rank; None: as many as a plan takes by default.

    Returns
    -------
    Machine
    list of str
        Notes on the nodes and the errors, for people.

    Raises
    ------
    CollectiveError
        If the name is not valid, or nodes have different numbers of ranks.
    """
    machine, hosts, partners = _here(comm, name)
    notes = [f"{comm.size} ranks on {len(hosts)} nodes: {', '.join(hosts[:8])}"]
    kernels, links = {}, {}
    with BlasThreads(
        threads, max(1, int(machine.cores_per_node) // machine.ranks_per_node)
    ).limited():
        for dtype in progress(dtypes, comm.rank, desc="kernels"):
            kernels[dtype], new = _kernels(comm, machine, dtype, 0.5 * seconds / len(dtypes))
            notes += new
        for link, peers in progress(partners.items(), comm.rank, desc="links"):
            if peers:
                links[link] = _link(comm, peers, 0.15 * seconds)
            else:
                notes.append(f"link.{link} was not measured: no two ranks have it")
        copy, merging = _memory_rates(comm, 0.05 * seconds)
        # A barrier right after a barrier: seconds until the last rank has started.
        start = float(np.median(in_turn({"": comm.Barrier}, 20, comm)[""]))
        work, grid, ring = _tiny(comm, dtypes[0])
    if between := links.get("between"):
        # All ranks of a node sent at once, so their shared link carries the sum of their rates.
        rate = between.bandwidth * machine.ranks_per_node
        links["between"] = replace(between, bandwidth=rate)
    made = (f"{x}: {make_kernel('auto', HOST, as_dtype(x), 1.0).name}" for x in dtypes)
    used = "1 thread" if threads == 1 else f"threads: {threads or 'default'}"
    machine = replace(
        machine,
        **links,
        kernels=kernels,
        start=start,
        copy=copy / machine.share,
        merge=merging / machine.share,
        computed_by=f"{', '.join(made)}; {blas_name()[:100]}; {used}",
    )
    measured = {"step": (Attention2D.method, grid), "hop_overhead": (RingAttention.method, ring)}
    return fit_steps(machine, comm.size, work, measured), notes


def _here(
    comm: MPI.Intracomm, name: str | None
) -> tuple[Machine, list[str], dict[str, list[int]]]:
    """Return the machine of these ranks, without what is measured; its nodes; and partners.

    Partners are the ranks with which this rank exchanges messages "inside" its node and "between"
    nodes, one rank of each other node.  They are in the order of a ring, from the rank after this
    one on.

    The environment variable ``A2D_MPI_NODE_CORES`` lowers the number of cores, for nodes whose CPU
    time is limited (by a cgroup) and for emulated nodes, which share one host.
    """
    own = socket.gethostname()
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0]
    everyone = comm.allgather((own, [(own, core) for core in usable]))
    names = list(dict.fromkeys(node for node, _ in everyone))
    nodes = [[r for r, x in enumerate(everyone) if x[0] == node] for node in names]
    uneven = len({len(ranks) for ranks in nodes}) > 1
    agree(comm, "calibrate needs the same number of ranks on every node" if uneven else None)
    cores = len({core for _, cores in everyone for core in cores}) / len(nodes)
    cores = min(cores, float(os.environ.get("A2D_MPI_NODE_CORES") or "inf"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(nodes[0])
    sizes = {"ranks_per_node": len(nodes[0]), "cores_per_node": cores, "memory": memory}
    name = names[0] if name is None else name
    machine = together(comm, lambda: Machine(name, None, None, {}, **sizes))
    node = names.index(own)
    local = nodes[node].index(comm.rank)
    inside = nodes[node][local + 1 :] + nodes[node][:local]
    between = [x[local] for x in nodes[node + 1 :] + nodes[:node]]
    return machine, names, {"inside": inside, "between": between}


def _kernels(
    comm: MPI.Intracomm, machine: Machine, dtype: str, seconds: float
) -> tuple[dict[str, KernelModel], list[str]]:
    """Measure kernels by phase; also return notes on the errors."""
    calls, samples = {}, []
    for phase, shape in product(PHASES, SHAPES):
        by_phase, sample = _kernel_calls(dtype, shape)
        # Repeated for so long that ranks on one core have taken turns.
        once = _mean(comm, call := by_phase[phase])
        n = min(200, max(1, math.ceil(0.02 / machine.share / once)))
        calls[phase, shape] = lambda call=call, n=n: [call() for _ in range(n)]
        samples.append((phase, sample, n))
    rounds = _rounds(comm, calls, seconds)
    fitted: dict[str, list[Sample]] = {phase: [] for phase in PHASES}
    for (phase, sample, n), taken in zip(samples, np.median(rounds, axis=0).tolist()):
        fitted[phase].append(sample._replace(seconds=taken / n * machine.share))
    kernels, notes = {}, [f"{dtype}: {steadiness(rounds)}"]
    for phase, of_phase in fitted.items():
        kernels[phase], worst = fit_kernel(of_phase, phase == "backward")
        notes.append(f"{dtype} {phase}: fitted within {100 * worst:.0f} %")
    return kernels, notes


def _kernel_calls(
    dtype: str, shape: tuple, poll: Callable | None = None
) -> tuple[dict[str, Callable], Sample]:
    """Return the calls of a kernel by phase, and their `Sample` without seconds."""
    nq, nk, nheads, nheads_kv, headdim, mask = shape
    rng, storage = np.random.default_rng(0), as_dtype(dtype)
    q, dout = rng.standard_normal((2, nq, nheads, headdim)).astype(storage)
    k, v = rng.standard_normal((2, nk, nheads_kv, headdim)).astype(storage)
    kernel = make_kernel("auto", HOST, storage, headdim**-0.5, poll)
    calls = kernel_calls(kernel, mask, {"q": q, "k": k, "v": v, "dout": dout})
    calls["forward"]()
    area = mask.area(np.arange(nq), np.arange(nk))
    cut = 0 if isinstance(mask, Full) else nq - 1
    return calls, Sample((area, nq, nk, cut), (nheads, nheads_kv, headdim, headdim), 0.0)


def _link(comm: MPI.Intracomm, peers: list[int], seconds: float) -> Link:
    """Measure a link: all ranks send to the next rank or node at once, and receive likewise.

    Many messages go to different ranks, as in a gather.  TCP would join messages to one rank.
    """
    buffers = np.zeros((2, LARGEST), np.uint8)

    def post(nbytes: int, number: int = 1) -> list[MPI.Request]:
        sent, received = buffers[:, :nbytes]
        turns = [(i, i % len(peers)) for i in range(number)]
        return [
            *(comm.Irecv(received, peers[-1 - turn], i) for i, turn in turns),
            *(comm.Isend(sent, peers[turn], i) for i, turn in turns),
        ]

    def hop(nbytes: int) -> float:
        """Time a message in a row of messages, as in a ring; return seconds."""
        return _step(comm, lambda: MPI.Request.Waitall(post(nbytes)), HOPS, 3 * HOPS)

    hop(8)
    sizes, times = [8], [hop(8)]
    # The first one is not counted: it connects the ranks.
    posted = [_mean(comm, lambda: MPI.Request.Waitall(post(8, FLOOD))) for _ in range(6)][1:]
    while sizes[-1] < LARGEST and (len(sizes) < 2 or times[-1] < 0.002 * seconds):
        sizes.append(max(1 << 15, 4 * sizes[-1]))
        times.append(hop(sizes[-1]))
    nbytes, taken = sizes[-1], times[-1]
    link = fit_link(sizes, times, (FLOOD, float(np.median(posted))))
    hidden, late = _busy(comm, post, nbytes, taken)
    return replace(link, latency=link.latency + late, hidden=hidden)


def _busy(comm: MPI.Intracomm, post: Callable, nbytes: int, taken: float) -> tuple[float, float]:
    """Measure a link while its ranks compute.

    Returns
    -------
    float
        `Link.hidden`: share of a large transfer that is hidden by one and a half times as much
        computing.
    float
        Seconds by which a message is late when ranks compute for a third of its time, because no
        rank looks for it at once.
    """
    calls, _ = _kernel_calls(
        "float32", (128, 128, 1, 1, 64, Full()), lambda: comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    )

    def both(number: int, most: int) -> float:
        """Time a step that computes and transfers; return seconds."""

        def step() -> None:
            requests = post(nbytes)
            for _ in range(number):
                calls["forward"]()
            MPI.Request.Waitall(requests)

        return _step(comm, step, 1, most)

    repeats = math.ceil(0.02 / _mean(comm, calls["forward"]))
    once = _step(comm, calls["forward"], repeats, 2 * repeats)
    number, few = max(1, math.ceil(1.5 * taken / once)), max(1, round(taken / 3 / once))
    lost = both(number, 3) - max(number * once, taken)
    hidden = float(np.clip(1 - lost / min(number * once, taken), 0, 1))
    late = both(few, HOPS) - max(taken, few * once + (1 - hidden) * taken)
    # A rank looks after each kernel call; any longer delay is due to other work on the core.
    return hidden, float(np.clip(late, 0, once))


def _tiny(comm: MPI.Intracomm, dtype: str) -> tuple[Workload, float, float]:
    """Time forward passes on tiny shards; return their workload, and seconds of two methods.

    The methods are a grid of one column, in which a rank gets all keys at once, and a ring.
    """
    work = Workload(2 * comm.size, 2, 16, dtype=dtype)
    q, k, v = np.zeros((3, 2, work.nheads, work.headdim), as_dtype(dtype))
    grid = ProcessGrid(comm, comm.size, 1)
    plans = [kind(grid, work.mask, **work.arguments) for kind in (Attention2D, RingAttention)]
    calls = {i: lambda plan=plan: plan.forward(q, k, v) for i, plan in enumerate(plans)}
    seconds = in_turn(calls, 9, comm)
    grid.free()
    return work, *(float(np.median(x)) for x in seconds.values())


def _memory_rates(comm: MPI.Intracomm, seconds: float) -> tuple[float, float]:
    """Measure the bytes/s of copies, and of merged partial outs, by one rank."""
    rng = np.random.default_rng(0)
    out, out2 = (rng.standard_normal((16384, 4, 64), np.float32) for _ in range(2))
    lse, lse2 = (rng.standard_normal((16384, 4)).astype(np.float32) for _ in range(2))
    compensation = np.zeros_like(lse)
    calls = {
        "copy": lambda: [np.copyto(out2, out) for _ in range(10)],
        "merge": lambda: merge(out, lse, compensation, out2, lse2),
    }
    copies, merges = np.median(_rounds(comm, calls, seconds), axis=0)
    return 10 * out.nbytes / float(copies), out.nbytes / float(merges)


def _mean(comm: MPI.Intracomm, action: Callable[[], object]) -> float:
    """Time `action`; return the mean of the seconds over the ranks."""
    return seconds_of(action, comm, operator.add) / comm.size


def _step(comm: MPI.Intracomm, step: Callable[[], object], few: int, many: int) -> float:
    """Time one step in a row of steps; return seconds.

    The first `few` steps do not count, because a link that was idle may let them pass at once.
    """

    def seconds(number: int) -> float:
        return _mean(comm, lambda: [step() for _ in range(number)])

    differences = [seconds(many) - seconds(few) for _ in range(3)]
    return max(float(np.median(differences)) / (many - few), 1e-9)


def _rounds(comm: MPI.Intracomm, calls: Mapping[Any, Callable], seconds: float) -> np.ndarray:
    """Time calls again and again; return the seconds of the slowest rank, (rounds, calls)."""
    end, rounds = time.perf_counter() + seconds, []
    while not rounds or comm.bcast(time.perf_counter() < end):
        taken = in_turn(calls, 1, comm, warmup=0)
        rounds.append(np.concatenate(list(taken.values())))
    return np.array(rounds)


class Tried(NamedTuple):
    """A plan that was measured.

    Attributes
    ----------
    choice : Choice
    predicted, seconds : float
        Of the slowest rank, all phases; `seconds` is the median of the trials, and inf if the plan
        failed.
    problem : str
        Why it failed; empty if it did not.
    """

    choice: Choice
    predicted: float
    seconds: float
    problem: str = ""


class Tuned(NamedTuple):
    """The fastest plan; ``print(tuned)`` shows the table.

    Attributes
    ----------
    grid : ProcessGrid
        Plans on it take its distribution and slices by default.
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    table : list of Tried
        All measured plans, fastest first.
    """

    grid: ProcessGrid
    method: str
    table: list[Tried]

    def __str__(self) -> str:
        rows = [("method", "grid", "order", "slices", "distribution", "predicted", "measured")]
        for x in self.table:
            layout, shown = x.choice.layout, x.problem or duration(x.seconds)
            cells = layout.shape, layout.numbering, layout.sliced, layout.distribution or "default"
            rows.append((x.choice.method, *cells, duration(x.predicted), shown))
        return aligned(rows, left=range(5))


def autotune(
    comm: MPI.Intracomm,
    work: Workload,
    machine: Machine | None = None,
    top: int = 3,
    trials: int = 3,
    *,
    methods: Sequence[str] | None = None,
    device: str = "cpu",
    **options: object,
) -> Tuned:
    """Run the planner's first plans on the real machine, and return the fastest on all ranks.

    Each plan is made, called once, timed, and released before the next one.  Collective over
    `comm`.

    Parameters
    ----------
    comm : Intracomm
        Communicator whose ranks fill the nodes one after the other.
    work : Workload
    machine : Machine, optional
        Default: the ranks measure links and kernels on the host for some seconds.
    top, trials : int
        Plans that run, and timed calls of each.
    methods : sequence of str, optional
        Default: all of `a2d_mpi.schedules.method.METHODS`.
    device : {"cpu", "gpu"}
        Where the plans compute.
    **options
        Arguments of the plans, such as `kernel`, `transfers` and `threads`.

    Returns
    -------
    Tuned

    Raises
    ------
    ValueError
        On all ranks, if no plan fits, all plans fail, or arguments differ between ranks.
    """
    wrong = f"top and trials must be at least 1, got {top} and {trials}"
    name = machine and machine.name
    given = {"mask": work.seen.digest, "backward": work.backward}
    given |= {"overlap": work.overlap, "machine": name, "top": top, "trials": trials}
    given |= {"methods": methods, "device": device, **work.arguments, **options}
    agree(comm, wrong if min(top, trials) < 1 else None, given)
    used = open_device(comm, device)
    # With the threads of the plans: a profile of one core would make their kernels too slow.
    threads = options.get("threads")
    machine = machine or measure(comm, [work.dtype], CALIBRATION, threads=threads)[0]
    picks = together(
        comm, lambda: best_candidates(machine, comm.size, work, top, methods=methods), on=0
    )
    picks = comm.bcast(picks and [(x.method, x.layout, x.seconds) for x in picks])
    table = []
    for method, layout, predicted in picks:
        choice = Choice(method, layout, work)
        table.append(Tried(choice, predicted, *_tried(comm, choice, trials, used, options)))
    table.sort(key=lambda x: x.seconds)
    if table[0].problem:
        raise CollectiveError(f"no plan runs; the first one fails: {table[0].problem}")
    best = table[0].choice
    return Tuned(ProcessGrid.from_layout(comm, best.layout), best.method, table)


def _tried(
    comm: MPI.Intracomm, choice: Choice, trials: int, device: Device, options: dict[str, object]
) -> tuple[float, str]:
    """Run a plan; return its seconds, or inf, and why it failed.  The same on all ranks."""
    grids: dict[Layout, ProcessGrid] = {}
    try:
        plan = plan_of(comm, choice, grids, **options)
        return _seconds(plan, choice.work.backward, trials, device), ""
    except CollectiveError as error:
        return float("inf"), str(error)
    finally:
        for grid in grids.values():
            grid.free()


def _seconds(plan: AttentionPlan, backward: bool, trials: int, device: Device) -> float:
    """Return the seconds of the slowest rank in all phases, median of the trials."""
    inputs = together(plan.grid.comm, lambda: random_inputs(plan, backward))
    run = Measurement(plan, inputs, backward, device, checked=False)
    taken = in_turn({"": run.call}, trials, plan.grid.comm, device=device)
    return float(np.median(taken[""]))
