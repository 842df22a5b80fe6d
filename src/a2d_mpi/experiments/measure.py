"""One plan, checked and timed.

::

    run = Measurement(plan, tensors, backward=True)
    run.check(rows=16)  # against float64, before anything is timed
    for _ in range(trials):
        run.trial()
    run.finish()
    result = run.result(config, origin)  # on rank 0

All functions and methods are collective over the plan's ranks.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import CollectiveError, agree
from a2d_mpi.comm.gpus import bind_gpu
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.problem import Workload
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.experiments.check import check_attention
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.origin import provenance
from a2d_mpi.experiments.results import PARTS, SPAN, Check, Result
from a2d_mpi.experiments.summary import usual_trial
from a2d_mpi.experiments.sweep import grid_shape
from a2d_mpi.planning.profile import read_machine

RESULTS = ("out", "lse", "dq", "dk", "dv")
SAMPLE = 16  # query rows and key rows that are looked at in a sampled check


def open_device(comm: MPI.Intracomm, name: str) -> Device:
    """The host ("cpu"), or the GPU of this rank ("gpu")."""
    try:
        return HOST if name == "cpu" else bind_gpu(comm)[0]
    except CollectiveError as error:
        raise CollectiveError(f"--device {name}: {error}") from None


def check_grid(args: argparse.Namespace) -> None:
    """Refuse options of a grid that exclude each other."""
    if (args.grid == "auto") != (args.profile is not None):
        raise ValueError("--grid auto and --profile need each other")
    shape = args.rows, args.cols, args.heads, args.order, args.block
    if args.grid and shape != (None, None, 1, "rcu", (1, 1)):
        raise ValueError(
            "--grid auto leaves no choice of --rows, --cols, --heads, --order and --block"
        )


def open_grid(comm: MPI.Intracomm, args: argparse.Namespace, work: Workload) -> ProcessGrid:
    """The grid that the options of `add_grid` ask for; the grid itself refuses misfits."""
    if args.grid == "auto":
        machine = together(comm, lambda: read_machine(args.profile))
        return ProcessGrid.auto(comm, machine, work, method=args.method)
    rows, cols = together(comm, lambda: grid_shape(comm.size, args.rows, args.cols, args.heads))
    return ProcessGrid(comm, rows, cols, args.heads, args.order, args.block)


def random_rows(
    tokens: Iterable[int], shape: tuple[int, ...], dtype: np.dtype, seed: int, stream: int = 0
) -> np.ndarray:
    """Standard normal numbers for tokens, the same whatever the ranks and the distribution.

    Parameters
    ----------
    tokens : iterable of int
    shape : tuple of int
        Of one token.
    dtype : dtype
    seed, stream : int
        Other numbers for another seed, and for another stream (tensor).

    Returns
    -------
    (tokens, *shape) dtype
    """
    generators = (
        np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, stream, token]))
        for token in tokens
    )
    rows = [generator.standard_normal(shape).astype(dtype) for generator in generators]
    return np.array(rows, dtype).reshape(len(rows), *shape)


def random_inputs(plan: AttentionPlan, backward: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """This rank's shards of q, k, v and perhaps dout, `random_rows` each."""
    return {
        name: random_rows(plan.tokens.tolist(), plan.config.shape(name), plan.dtype, seed, stream)
        for stream, name in enumerate(("dout", "q", "k", "v"))
        if name != "dout" or backward
    }


def refuse_nan(comm: MPI.Intracomm, tensors: Mapping[str, np.ndarray]) -> None:
    """ValueError on all ranks if any number on any rank is NaN or infinite."""
    bad = {name: int(x.size - np.isfinite(x).sum()) for name, x in tensors.items()}
    found = [f"{name} has {n} elements that are NaN or infinite" for name, n in bad.items() if n]
    agree(comm, "; ".join(found) + ": nothing can be checked" if found else None)


def origin_of(comm: MPI.Intracomm, device: Device = HOST) -> dict[str, object]:
    """Provenance of what these ranks measure; rank 0's, empty on the others."""
    hosts = comm.gather(socket.gethostname())
    if comm.rank != 0:
        return {}
    return provenance(MPI.Get_library_version(), hosts, device.description)


class Measurement:
    """A plan and its tensors, run again and again.

    Parameters
    ----------
    plan : AttentionPlan
    tensors : dict of arrays
        This rank's shards of q, k, v and, for the backward pass, dout, and perhaps the "sink";
        NumPy arrays.
    backward : bool
        Also the gradients.
    device : Device
        Where the tensors go.

    Attributes
    ----------
    plan
    phases : tuple of str
    tensors : dict of arrays
        Those given and, after a call, the results, on the device.
    checks : dict of str to Check
        Those done so far.
    seconds : dict of str to list of float
        This rank's timings of all trials, by "phase/part" as in `AttentionPlan.timings`.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        tensors: Mapping[str, np.ndarray],
        backward: bool,
        device: Device = HOST,
    ) -> None:
        self.plan, self.device = plan, device
        self.phases = ("forward", "backward") if backward else ("forward",)
        self.tensors: dict[str, Array] = {x: device.upload(y) for x, y in tensors.items()}
        self.checks: dict[str, Check] = {}
        self._checked: dict[str, np.ndarray] | None = None
        self._differ = 0  # results of trials that were not the checked ones
        self.seconds: dict[str, list[float]] = {
            f"{phase}/{part}": [] for phase in self.phases for part in PARTS
        }
        self._spans: list[dict[str, list]] = []

    def forward(self) -> None:
        """Run the forward pass; out and lse go to `tensors`."""
        t = self.tensors
        t["out"], t["lse"] = self.plan.forward(t["q"], t["k"], t["v"], t.get("sink"))

    def backward(self) -> None:
        """Run the backward pass on the latest out and lse; the gradients go to `tensors`."""
        t = self.tensors
        given = (t[name] for name in ("dout", "q", "k", "v", "out", "lse"))
        gradients = self.plan.backward(*given, t.get("sink"))
        t |= zip(("dq", "dk", "dv", "dsink"), gradients)  # dsink only with a sink

    def call(self) -> None:
        """Run all phases, each begun by all ranks together."""
        for phase in self.phases:
            self.plan.grid.comm.Barrier()
            getattr(self, phase)()

    def check(self, rows: int | None = SAMPLE, seed: int = 0) -> None:
        """Check the results of the latest call against float64.

        Later trials must repeat them bit for bit.  Arguments as of `check_attention`.
        """
        self._checked = self.on_host()
        self.checks |= check_attention(self.plan, self._checked, rows, seed)

    def trial(self) -> None:
        """Run once, timed and counted."""
        if not self._spans:
            self.plan.traffic.clear()
        self.call()
        timings = self.plan.timings
        for name, so_far in self.seconds.items():
            so_far.append(timings[name])
        self._spans.append({phase: self.plan.spans(phase) for phase in self.phases})
        if self._checked is not None:
            found = self.on_host()
            names = (*RESULTS, "dsink") if self.plan.deterministic else ("out", "lse")
            self._differ += sum(
                self._checked[name].tobytes() != found[name].tobytes()
                for name in names
                if name in found
            )

    def finish(self) -> None:
        """After the trials: check what was counted, and that the results were always the same."""
        self.checks["traffic"] = self._traffic_check()
        if self._checked is not None:
            self.checks["repeat"] = self._repeat_check()

    def on_host(self) -> dict[str, np.ndarray]:
        """The tensors as NumPy arrays."""
        return {name: self.device.download(x) for name, x in self.tensors.items()}

    def outputs(self) -> dict[str, np.ndarray]:
        """Whole results in the order of the sequence, on rank 0; empty on the others."""
        comm, plan, tensors, whole = self.plan.grid.comm, self.plan, self.on_host(), {}
        for name in (x for x in RESULTS if x in tensors):
            parts = comm.gather(tensors[name])
            if comm.rank == 0:
                whole[name] = np.empty((plan.seqlen, *parts[0].shape[1:]), parts[0].dtype)
                for rank, part in enumerate(parts):
                    whole[name][plan.distribution.tokens(rank)] = part
        return whole

    def result(
        self, config: Mapping[str, object], origin: Mapping[str, object], **others: Any
    ) -> Result | None:
        """Everything, on rank 0.

        Parameters
        ----------
        config : mapping
            What `plan` does not know: method, mask, trials, ...
        origin : mapping
            From `origin_of`, of these ranks in any order.
        **others
            Further fields of the `Result`.
        """
        comm, plan = self.plan.grid.comm, self.plan
        seconds = {name: comm.gather(trials) for name, trials in self.seconds.items()}
        traffic = comm.gather(self._per_call)
        area = comm.gather(plan.area())
        spans = comm.gather(self._spans)
        hosts = comm.gather(socket.gethostname())
        if comm.rank != 0:
            return None
        timings = {name: np.array(ranks).T for name, ranks in seconds.items()}
        return Result(
            provenance={**origin, "hostnames": hosts},
            config={
                **_config(plan),
                "backward": len(self.phases) > 1,
                **config,
                "kernel": plan.kernel,  # not "auto"
            },
            area=np.array(area),
            timings=timings,
            traffic=_traffic(plan, traffic, comm.size),
            checks=self.checks,
            spans={
                phase: _usual_spans(phase, timings[f"{phase}/total"], spans)
                for phase in self.phases
            },
            **others,
        )

    @property
    def _per_call(self) -> dict[tuple[str, str], list[int]]:
        """Bytes [sent, received] of one call by (phase, communicator)."""
        trials = max(1, len(self._spans))
        counted = self.plan.traffic.bytes
        return {key: [nbytes // trials for nbytes in both] for key, both in counted.items()}

    def _traffic_check(self) -> Check:
        """Largest difference, in bytes of all trials, between what was counted and its formula."""
        comm, traffic, nothing = self.plan.grid.comm, self.plan.traffic.bytes, (0, 0)
        trials = max(1, len(self._spans))
        expected = {
            key: both
            for key, both in self.plan.predicted_traffic().items()
            if key[0] in self.phases
        }
        off = [
            abs(a - trials * b)
            for key in {*traffic, *expected}
            for a, b in zip(traffic.get(key, nothing), expected.get(key, nothing))
        ]
        return Check(float(comm.allreduce(max(off, default=0), op=MPI.MAX)), 0.0, comm.size)

    def _repeat_check(self) -> Check:
        """Number of results, of all trials and ranks, that are not the checked ones to the bit."""
        comm = self.plan.grid.comm
        return Check(float(comm.allreduce(self._differ)), 0.0, comm.size)


def _config(plan: AttentionPlan) -> dict[str, object]:
    return {
        **{x: getattr(plan.grid, x) for x in ("rows", "cols", "heads")},
        **plan.config.arguments,
        "logit_softcap": plan.logit_softcap or 0.0,  # 0: none
        "overlap": plan.overlap,
        "order": plan.grid.layout.order,
        "block": "x".join(map(str, plan.grid.layout.block)),
        # Of every logical rank; empty: each is alone on its node.
        "nodes": " ".join(map(str, plan.grid.layout.nodes or ())),
        "distribution": plan.distribution.name,
        # How tensors got to MPI: from memory as they are, or copied to the host.
        "transfers": "host" if plan.staged_bytes else "direct",
    }


def _traffic(plan: AttentionPlan, measured: list, size: int) -> dict[str, dict[str, np.ndarray]]:
    """Measured and predicted bytes, as in `Result`."""
    predicted = [plan.predicted_traffic(rank) for rank in range(size)]
    return {
        f"{phase}/{name}": {
            kind + direction: np.array([rank.get((phase, name), [0, 0])[i] for rank in ranks])
            for kind, ranks in (("", measured), ("predicted_", predicted))
            for i, direction in enumerate(("sent", "received"))
        }
        for phase, name in sorted({key for rank in measured for key in rank})
    }


def _usual_spans(phase: str, total: np.ndarray, spans: list) -> np.ndarray:
    """Spans of the trial whose slowest rank took the median time, of all ranks."""
    trial = usual_trial(total)
    rows = [
        (rank, PARTS.index(part), start, end)
        for rank, trials in enumerate(spans)
        for part, start, end in trials[trial][phase]
    ]
    return np.array(rows, SPAN)
