"""The job of drivers/train_gpt.py: a GPT, trained on a text by all ranks together."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.documents import Documents
from a2d_mpi.core.masks import Causal, Mask
from a2d_mpi.core.problem import Workload
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device
from a2d_mpi.experiments.checkpoint import State, put_away, resumed, save
from a2d_mpi.experiments.cli import check_room, holding, together
from a2d_mpi.experiments.hdf5 import check_output
from a2d_mpi.experiments.loss_plots import SCHEMA
from a2d_mpi.experiments.measure import check_grid, open_device, open_grid, origin_of
from a2d_mpi.experiments.options import FAILED_CHECK, model_of
from a2d_mpi.experiments.origin import blas_name, cpu_name
from a2d_mpi.experiments.results import new_file, set_attributes
from a2d_mpi.gpt.adam import LearningRate
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.cost import PARTS as STEP_PARTS
from a2d_mpi.gpt.cost import training_bytes
from a2d_mpi.gpt.gradients import total
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.text import VOCAB, Batch, Text
from a2d_mpi.gpt.training import Training
from a2d_mpi.kernels import make_kernel

PARTS = (*STEP_PARTS, "plan")  # of a step's seconds
# Options that a run must go on with.
SAME = ("seqlen", "dtype", "seed", "rate", "warmup", "steps", "separator", "validate")


def train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Train, or go on; returns the exit code: 1 if the loss is no longer finite."""
    text, held, config = together(comm, lambda: _validated(args))
    size = np.dtype(args.dtype).itemsize
    nbytes = training_bytes(config, -(-args.seqlen // comm.size), size, args.recompute)
    nbytes += 40 * args.seqlen  # of a batch: tokens, targets, positions, on every rank
    what = f"{config.parameters} parameters (--layers, --width), {args.seqlen} tokens (--seqlen)"
    if args.device == "cpu":
        check_room(comm, f"{what}: weights and activations of one rank", nbytes)
    sizes = {"seqlen": args.seqlen, "dtype": args.dtype, **config.heads}
    device = open_device(comm, args.device)
    grid = open_grid(comm, args, Workload(**sizes, mask=Causal(), backward=True))
    together(comm, lambda: args.folder.mkdir(parents=True, exist_ok=True), on=0)
    with holding(comm, args.folder):
        return _train(comm, grid, args, config, (text, held), device)


def _train(
    comm: MPI.Intracomm,
    grid: ProcessGrid,
    args: argparse.Namespace,
    config: GPTConfig,
    texts: tuple[Text, Text | None],
    device: Device,
) -> int:
    text, held = texts
    state = _resumed(comm, args, config, text)
    # Whether numbers are finite is looked at, step by step.
    with threadpool_limits(args.threads), np.errstate(over="ignore", invalid="ignore"):
        trainer = Trainer(comm, grid, args, config, text, state, device)
        if comm.rank == 0 and (why := state.other_bits(trainer.ranges)):
            print(f"train_gpt.py: {why}", file=sys.stderr, flush=True)
        steps = range(state.step, args.until or args.steps)
        with tqdm(steps, "steps", disable=comm.rank != 0, leave=False) as shown:
            for step in shown:
                try:
                    loss = trainer.step()
                except FloatingPointError as error:
                    shown.close()
                    if comm.rank == 0:
                        print(f"train_gpt.py: step {step + 1}: {error}; the training ends, and "
                              f"the checkpoints in {args.folder} stay as they are",
                              file=sys.stderr, flush=True)  # fmt: skip
                    return FAILED_CHECK
                shown.set_postfix(loss=f"{loss:.3f}")
                if (step + 1) % args.every == 0 or step + 1 == steps.stop:
                    together(comm, lambda: trainer.keep(args.folder), on=0)
        traffic = comm.gather(trainer.traffic())  # of the steps
        held_out = {"loss": trainer.evaluate(held), **held.sizes()} if held else {}
    origin = origin_of(comm, device)
    if comm.rank == 0:
        _report(trainer, text, held_out, args)
    if args.output:
        texts = {"name": args.text.name, "sha256": text.sha256, **text.sizes()}, held_out
        together(comm, lambda: write(args.output, trainer, origin, texts, traffic), on=0)
    trainer.free()
    grid.free()
    return 0


class Trainer:
    """A training run on all ranks.

    Parameters
    ----------
    comm : Intracomm
    grid : ProcessGrid
    args : Namespace
        Of drivers/train_gpt.py.
    config : GPTConfig
    text : Text
    state : State
        To go on from; on the host, its arrays become the run's.
    device : Device
        Of weights and activations.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        grid: ProcessGrid,
        args: argparse.Namespace,
        config: GPTConfig,
        text: Text,
        state: State,
        device: Device = HOST,
    ) -> None:
        self._comm, self._grid, self._args, self._text = comm, grid, args, text
        self._device = device
        self.config, self.done, self._run = config, state.step, state.run
        self.ranges = state.ranges_with(self._settings())
        weights = Parameters(config, device.upload(state.weights))
        moments = device.upload(state.moments)
        self._training = Training(
            comm, weights, moments, state.step, args.recompute, args.transfers
        )
        self._rates = LearningRate(args.rate, args.warmup, args.steps)
        self._plan: AttentionPlan | None = None
        self._bytes: dict[str, np.ndarray] = {}
        self.losses, self.seconds = list(state.losses), list(state.seconds)
        self.parts: list[list[float]] = []  # of this rank, by step and `PARTS`

    def step(self) -> float:
        """One step; returns the loss before it.  Collective."""
        args = self._args
        batch = self._text.batch(args.seqlen, args.seed, self.done, not args.separator)
        start = time.perf_counter()
        plan = self._plan_for(batch)
        planned = time.perf_counter() - start
        loss, parts = self._training.step(plan, batch, self._rates.at(self.done))
        self.done += 1
        self.losses.append(loss)
        self.seconds.append(planned + sum(parts.values()))
        self.parts.append([*parts.values(), planned])
        return loss

    def evaluate(self, text: Text) -> float:
        """Mean loss of a text, in sequences that follow each other.  Collective."""
        seqlen, loss, count = self._args.seqlen, 0.0, 0
        for begin in range(0, len(text.bytes) - seqlen + 1, seqlen):
            batch = text.at(begin, seqlen, not self._args.separator)
            loss += total(self._comm, self._training.loss(self._plan_for(batch), batch, 1))
            count += int((batch.targets >= 0).sum())
        return loss / max(1, count)

    def _plan_for(self, batch: Batch) -> AttentionPlan:
        """The plan of a batch: the same again if its mask is."""
        if self._plan and not self._args.separator:
            return self._plan
        mask: Mask = Causal()
        if self._args.separator:
            mask = Documents(batch.cu_seqlens, causal=True)
        self._forget()
        args = self._args
        self._plan = make_plan(
            *(args.method, self._grid, mask),
            seqlen=args.seqlen,
            **self.config.heads,
            dtype=args.dtype,
            threads=args.threads,
            kernel=args.kernel,
            transfers=args.transfers,
        )
        return self._plan

    def _forget(self) -> None:
        if self._plan:
            for key, counts in self._plan.traffic.bytes.items():
                found = self._bytes.setdefault("/".join(key), np.zeros(2, np.int64))
                found += counts
            self._plan.free()
            self._plan = None

    def layout(self) -> dict[str, object]:
        """The method and its grid, as result files name them."""
        names = ("rows", "cols", "heads")
        return {"method": self._args.method, **{x: getattr(self._grid, x) for x in names}}

    def _settings(self) -> dict[str, object]:
        """What may change the bits, of all ranks.  Collective."""
        args, grid = self._args, self._grid
        kernel = make_kernel(args.kernel, self._device, np.dtype(args.dtype), 1.0)
        hosts = self._comm.allgather((cpu_name(), blas_name()))
        cpus, blas = ("; ".join(sorted(set(x))) for x in zip(*hosts))
        return {
            **self.layout(),
            "order": grid.layout.order,
            "block": "x".join(map(str, grid.layout.block)),
            "ranks": self._comm.size,
            "threads": args.threads,
            "device": self._device.name,
            "kernel": kernel.name,
            "cpu": cpus,
            "blas": blas,
            "numpy": np.__version__,
        }

    def traffic(self) -> dict[str, np.ndarray]:
        """Bytes that this rank has sent and received, by phase and communicator."""
        self._forget()
        return {**self._bytes, "gradients/all": np.array([self._training.sum.nbytes] * 2)}

    def weights(self) -> np.ndarray:
        """The weights, flat, on the host."""
        return self._device.download(self._training.weights.flat)

    def keep(self, folder: Path) -> None:
        """Write a checkpoint."""
        arrays = self.weights(), self._device.download(self._training.adam.moments)
        log = np.array(self.losses), np.array(self.seconds)
        self.ranges[-1]["end"] = self.done
        save(folder, State(self.config, self._run, self.done, *arrays, *log, self.ranges))

    def free(self) -> None:
        """Free plan and communicators.  Collective."""
        self._forget()
        self._training.free()


def _validated(args: argparse.Namespace) -> tuple[Text, Text | None, GPTConfig]:
    """Read the text, and the part that is held out, and fill in the sizes of the model."""
    check_grid(args)
    config = model_of(args, vocab=VOCAB, seqlen=args.seqlen)
    if not 0 <= args.validate < 1:
        raise ValueError(
            f"--validate must be a share of at least 0 and less than 1, got {args.validate}"
        )
    text, held = Text(args.text, args.separator, args.validate), None
    if args.validate:
        held = Text(args.text, args.separator, args.validate, held_out=True)
        if len(held.bytes) < args.seqlen:
            raise ValueError(
                f"--validate {args.validate} holds out {len(held.bytes)} bytes, fewer than "
                f"--seqlen {args.seqlen}"
            )
    if args.until and args.until > args.steps:
        raise ValueError(f"--until {args.until} is beyond the last of --steps {args.steps}")
    return text, held, config


def _resumed(
    comm: MPI.Intracomm, args: argparse.Namespace, config: GPTConfig, text: Text
) -> State:
    """The state to go on from: rank 0 reads it, all get it."""
    run = {"text_sha256": text.sha256, **{x: str(getattr(args, x)) for x in SAME}}

    def earlier() -> State | None:
        if args.output:
            check_output(args.output, SCHEMA)
        if args.anew:
            put_away(args.folder)
        return resumed(args.folder, config, run, args.resume)

    state = comm.bcast(together(comm, earlier, on=0))
    if state is None:
        weights = initial(config, args.seed, args.dtype)
        moments = np.zeros((2, config.parameters), args.dtype)
        state = State(config, run, 0, weights, moments, np.zeros(0), np.zeros(0))
    return state


def write(
    path: Path,
    trainer: Trainer,
    origin: dict,
    texts: tuple[dict, dict],
    traffic: list[dict],
) -> None:
    """Write losses, seconds and traffic of a run; `texts`: trained on, and held out."""
    with new_file(path) as file:
        set_attributes(file, {"schema": SCHEMA[0], "schema_version": SCHEMA[1], **origin})
        config = file.create_group("config")
        set_attributes(config, trainer._run | asdict(trainer.config) | trainer.layout())
        for name, x in zip(("text", "held_out"), texts):
            set_attributes(file.create_group(name), x)
        for i, x in enumerate(trainer.ranges):
            set_attributes(file.create_group(f"ranges/{i}"), x)
        file["loss"] = np.array(trainer.losses)
        file["seconds/total"] = np.array(trainer.seconds)
        for name, x in zip(PARTS, np.array(trainer.parts).reshape(-1, len(PARTS)).T):
            file[f"seconds/{name}"] = x  # rank 0's, of the steps of this start
        for name in traffic[0]:
            both = np.array([x[name] for x in traffic])  # (ranks, 2)
            file[f"traffic/{name}/sent"], file[f"traffic/{name}/received"] = both.T


def _report(trainer: Trainer, text: Text, held_out: dict, args: argparse.Namespace) -> None:
    """Print the short table."""
    for name in held_out and ("loss", "unigram_entropy"):
        print(f"held-out text: {name.replace('_', ' ')} {held_out[name]:.4f} nats")
    if not trainer.parts:
        print(f"nothing to do: {trainer.done} steps were done before")
        return
    losses, last = np.array(trainer.losses), slice(-min(20, len(trainer.losses)), None)
    seconds = np.median(trainer.seconds[-len(trainer.parts) :])
    print(f"{trainer.config.parameters} parameters, {trainer.done} steps of {args.seqlen} tokens; "
          f"{args.seqlen / seconds:.0f} tokens/s\n"
          f"loss {losses[0]:.4f} at first, {losses[last].mean():.4f} in the last "
          f"{len(losses[last])} steps; unigram entropy of the text {text.entropy():.4f} nats\n"
          "seconds of a step (median, rank 0): "
          + ", ".join(f"{name} {x:.3f}"
                      for name, x in zip(PARTS, np.median(trainer.parts, axis=0))))  # fmt: skip
