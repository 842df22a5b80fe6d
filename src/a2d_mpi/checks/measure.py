"""Checks and timings of one plan, and random inputs.

::

    run = Measurement(plan, tensors, backward=True)
    run.call()
    run.check(rows=16)  # against float64, before anything is timed
    for _ in range(trials):
        run.trial()
    result = run.result(args, config, origin)  # on rank 0

All methods are collective over the plan's ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Container, Mapping, Sequence
from socket import gethostname
from typing import Any

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.checks.check import Check, attributes_of, check_attention, digests, worse
from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.core.config import OF_KEYS
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.results.origin import provenance

RESULTS = ("out", "lse", "dq", "dk", "dv")
TENSORS = ("q", "k", "v", "dout")
TIMED_PARTS = ("compute", "merge", "wait", "total")  # as of `AttentionPlan.timings`
# Seconds are stored in eighths of a microsecond: finer digits are noise of barriers and Python,
# and would be most of a file, because noise cannot be packed.
TICKS = 1 << 23


def open_device(comm: MPI.Intracomm, name: str) -> Device:
    """Return the host ("cpu"), or the GPU of this rank ("gpu").

    Raises
    ------
    CollectiveError
        On all ranks, if a rank has no GPU.
    """
    if name == "cpu":
        return HOST
    from a2d_mpi.comm.gpus import bind_gpu

    try:
        return bind_gpu(comm)[0]
    except CollectiveError as error:
        raise CollectiveError(f"--device {name}: {error}") from None


def origin_of(comm: MPI.Intracomm, device: Device = HOST) -> dict[str, object]:
    """Return the provenance of a measurement on rank 0; an empty dict on other ranks."""
    hosts = comm.gather(gethostname())
    if comm.rank != 0:
        return {}
    return provenance(MPI.Get_library_version(), hosts, device.description)


class Measurement:
    """The measurement of a plan: calls, checks, and timed trials.

    After `check`, the trials alternate between two data sets in the same arrays: the given one,
    and `other_data` of it.

    Parameters
    ----------
    plan : AttentionPlan
    tensors : dict of arrays
        This rank's shards of q, k, v and, for the backward pass, dout; NumPy arrays.
    backward : bool
        Also compute the gradients.
    device : Device
        Device on which the plan computes.
    checked : bool
        Whether `check` will be called.  If not, the tensors are not hashed, which saves time.

    Attributes
    ----------
    plan : AttentionPlan
    phases : tuple of str
    tensors : dict of arrays
        The given tensors and, after a call, the results, on the device.  After `check`: the
        checked results.
    checks : dict of str to Check
        The checks so far.
    seconds : dict of str to list of float
        This rank's timings of all trials, by "phase/part" as in `AttentionPlan.timings`.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        tensors: Mapping[str, np.ndarray],
        backward: bool,
        device: Device = HOST,
        checked: bool = True,
    ) -> None:
        self.plan, self.device = plan, device
        self.phases = ("forward", "backward") if backward else ("forward",)
        self.tensors: dict[str, Array] = {x: device.upload(y) for x, y in tensors.items()}
        self.checks: dict[str, Check] = {}
        self._given = dict(self.tensors)
        self._given_bits = digests(tensors) if checked else {}
        # After a check: hashes of the results of each data set.
        self._result_bits: list[dict[str, bytes]] = []
        self._differ = 0  # results of trials that differed from the checked results
        self.seconds: dict[str, list[float]] = {
            f"{phase}/{part}": [] for phase in self.phases for part in TIMED_PARTS
        }

    def call(self, tensors: dict[str, Array] | None = None) -> None:
        """Run all phases; all ranks begin each phase together.

        Results are written to `tensors`, by default `self.tensors`.
        """
        t, comm = self.tensors if tensors is None else tensors, self.plan.grid.comm
        comm.Barrier()
        t["out"], t["lse"] = self.plan.forward(t["q"], t["k"], t["v"])
        if "backward" in self.phases:
            comm.Barrier()
            given = (t[name] for name in ("dout", "q", "k", "v", "out", "lse"))
            t["dq"], t["dk"], t["dv"] = self.plan.backward(*given)

    def check(self, rows: int | None, seed: int = 0) -> None:
        """Check the results of the latest call, and of a call on other data, against float64.

        Later trials must repeat these results bit for bit.  Parameters as of `check_attention`.
        """
        given = self._checked(self.tensors, rows, seed)
        tensors = dict(self._given)
        self._exchange()
        self.call(tensors)
        other = self._checked(tensors, rows, seed + 2)
        self._exchange(back=True)
        self._differ += self._overwritten()
        self.checks |= {name: worse(given[name], other[name]) for name in given}

    def _checked(
        self, tensors: Mapping[str, Array], rows: int | None, seed: int
    ) -> dict[str, Check]:
        """Check the results of one call, and remember their hashes."""
        self._result_bits.append(digests(self._results(tensors)))
        return check_attention(self.plan, self._on_host(tensors), rows, seed)

    def trial(self) -> None:
        """Run once; count the seconds and the bytes."""
        number = len(self.seconds["forward/total"])
        if not number:
            self.plan.traffic.clear()
        tensors, data = self.tensors, 0
        if self._result_bits:
            # 0, 1, 1, 0, ...: 0, 1, 0, 1 would hide errors of a plan that alternates two buffers.
            tensors, data = dict(self._given), (number + 1) // 2 % 2
        if data:
            self._exchange()
        self.call(tensors)
        timings = self.plan.timings
        for name, so_far in self.seconds.items():
            so_far.append(timings[name])
        if self._result_bits:
            results = self._results(tensors)
            if not self.plan.deterministic:
                results = {name: results[name] for name in ("out", "lse")}
            self._differ += _differing(results, self._result_bits[data]) + self._overwritten()
        if data:
            self._exchange(back=True)

    def _overwritten(self) -> int:
        """Count the first checked results that a later call has changed in memory."""
        return _differing(self._results(self.tensors), self._result_bits[0])

    def _exchange(self, back: bool = False) -> None:
        """Put the other data set into the given arrays, or with `back` the first one again."""
        for name, x in self._given.items():
            other = other_data(name, self.device.download(x), back)
            self.device.put(x, self.device.upload(other))

    def _on_host(self, tensors: Mapping[str, Array]) -> dict[str, np.ndarray]:
        """Return tensors as NumPy arrays."""
        return {name: self.device.download(x) for name, x in tensors.items()}

    def _results(self, tensors: Mapping[str, Array]) -> dict[str, np.ndarray]:
        """Return the results among the tensors as NumPy arrays."""
        return self._on_host({name: tensors[name] for name in RESULTS if name in tensors})

    def outputs(self) -> dict[str, np.ndarray | None]:
        """Return the results in the order of the sequence on rank 0; None for each on others."""
        from a2d_mpi.comm.shards import gather  # few runs keep them

        plan, found = self.plan, self._results(self.tensors)
        of = {x: plan.problem.keys if x in OF_KEYS else plan.distribution for x in found}
        return {name: gather(plan, of[name], x, 0) for name, x in found.items()}

    def result(
        self,
        args: argparse.Namespace,
        config: Mapping[str, object],
        origin: Mapping[str, object],
    ) -> dict[str, Any]:
        """Check the trials, and return what stands in files on rank 0, an empty dict on others.

        All trials must have had the same results.  Neither the inputs nor the first results may
        have changed in memory.  The counted bytes must be the predicted ones.

        Parameters
        ----------
        args : Namespace
            Options of the measurement: trials, warmup, check, seed, threads.
        config : mapping
            Config that is neither in the plan nor in `args`: mask, ...
        origin : mapping
            Result of `origin_of`; the hosts become those of the grid's ranks.

        Returns
        -------
        dict
            As docs/benchmarks.md describes.
        """
        comm, plan = self.plan.grid.comm, self.plan
        if self._result_bits:
            changed = _differing(self._on_host(self._given), self._given_bits)
            for name, number in (("repeat", self._differ), ("inputs", changed)):
                self.checks[name] = Check(float(comm.allreduce(number)), 0.0, comm.size)
        given = self.seconds, plan.traffic.bytes, plan.area(), gethostname(), plan.blocks
        gathered = comm.gather(given)
        if gathered is None:
            return {}
        seconds, counted, area, hosts, blocks = zip(*gathered)
        origin = {**origin, "hostnames": list(hosts)}
        trials = max(1, len(self.seconds["forward/total"]))
        traffic, off = _traffic(plan, self.phases, counted, trials)
        self.checks["traffic"] = Check(float(off), 0.0, comm.size)
        timings: dict[str, dict[str, np.ndarray]] = {phase: {} for phase in self.phases}
        for name in self.seconds:
            phase, part = name.split("/")
            of_ranks = np.array([x[name] for x in seconds]).T  # (trials, ranks)
            timings[phase][part] = np.round(of_ranks * TICKS) / TICKS
        by_kernel: dict[str, dict[str, np.ndarray]] = {phase: {} for phase in self.phases}
        for phase, kernel in sorted({x for of_rank in blocks for x in of_rank}):
            of_ranks = np.array([x.get((phase, kernel), 0) for x in blocks], np.int64)
            by_kernel[phase][kernel] = of_ranks
        options = {x: getattr(args, x) for x in ("check", "trials", "warmup", "seed", "threads")}
        phases = {"backward": len(self.phases) > 1, "device": self.device.name}
        return {
            "utc_time": origin.pop("utc_time"),
            "origin": origin,
            "config": {**_config(plan), **options, **phases, **config},
            "area": np.array(area, np.int64),
            "timings": timings,
            "traffic": traffic,
            "blocks": by_kernel,
            **attributes_of(self.checks),
        }


def _differing(tensors: Mapping[str, np.ndarray], bits: Mapping[str, bytes]) -> int:
    """Count the tensors whose bits do not have these hashes."""
    return sum(x != bits[name] for name, x in digests(tensors).items())


def _config(plan: AttentionPlan) -> dict[str, object]:
    return {
        "method": plan.method,
        "kernel": plan.kernel,
        **plan.layout.attributes,
        **plan.config.arguments,
        "logit_softcap": plan.logit_softcap or 0.0,  # 0: none
        "wire": plan.config.wire or "none",
        "overlap": plan.overlap,
        "slices": plan.layout.sliced,  # of the forward and the backward pass
        # Node of every grid rank; empty if each rank is alone on its node.
        "nodes": " ".join(map(str, plan.grid.layout.nodes or ())),
        "distribution": plan.distribution.name,
        # Path of tensors to MPI: directly, or copied to the host.
        "transfers": "host" if plan.staged_bytes else "direct",
    }


def _traffic(
    plan: AttentionPlan, phases: Sequence[str], counted: Sequence[Mapping], trials: int
) -> tuple[dict[str, dict[str, dict[str, np.ndarray]]], int]:
    """Return the measured and predicted bytes of a call by phase and communicator.

    `counted` has, for every rank, the bytes of all trials by phase and communicator.  The second
    result is the largest difference over all trials.
    """
    predicted = [plan.predicted_traffic(rank) for rank in range(len(counted))]
    traffic, off = {phase: {} for phase in phases}, 0
    for key in sorted({key for x in (*counted, *predicted) for key in x if key[0] in phases}):
        # (ranks, 2): sent, received
        sums, formula = (np.array([x.get(key, (0, 0)) for x in y]) for y in (counted, predicted))
        off = max(off, np.abs(sums - trials * formula).max())
        traffic[key[0]][key[1]] = {
            kind + direction: x[:, i]
            for kind, x in (("", sums // trials), ("predicted_", formula))
            for i, direction in enumerate(("sent", "received"))
        }
    return traffic, off


def other_data(name: str, x: np.ndarray, back: bool = False) -> np.ndarray:
    """Make other numbers with the same norms, for which kernels take the same time.

    The rows of a shard are reversed and negated, and their elements are rotated by a number that
    differs between tensors.

    Parameters
    ----------
    name : str
        Name of the tensor.
    x : (..., elements) float
    back : bool
        Invert the operation: return the first numbers, bit for bit.
    """
    by = 1 + TENSORS.index(name)
    return -(np.roll(x, -by, axis=-1)[::-1] if back else np.roll(x[::-1], by, axis=-1))


def random_inputs(
    plan: AttentionPlan, backward: bool, seed: int = 0, given: Container[str] = ()
) -> dict[str, np.ndarray]:
    """Draw this rank's shards of q, k, v and, with `backward`, dout, but not those in `given`.

    Elements are standard normal.  A row does not depend on the ranks or the distribution.
    """
    drawn = {}
    for stream, name in enumerate(("dout", "q", "k", "v")):
        if name in given or (name == "dout" and not backward):
            continue
        tokens = plan.tokens_kv if name in OF_KEYS else plan.tokens
        shape = plan.config.shape(name)
        drawn[name] = np.empty((len(tokens), *shape), plan.dtype)
        for row, token in zip(drawn[name], tokens.tolist()):
            philox = np.random.Philox(key=seed, counter=[0, 0, stream, token])
            row[...] = np.random.Generator(philox).standard_normal(shape)
    return drawn
