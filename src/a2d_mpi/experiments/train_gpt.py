"""The program of drivers/train.py gpt, and options of models and their training."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
from mpi4py import MPI

from a2d_mpi import Causal, Documents, LinearAttention, ProcessGrid
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import agree
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device
from a2d_mpi.experiments import options
from a2d_mpi.experiments.checkpoint import State, differences, resumed, save
from a2d_mpi.experiments.cli import holding, open_grid, together
from a2d_mpi.experiments.hdf5 import check_output, write_file
from a2d_mpi.experiments.measure import open_device, origin_of
from a2d_mpi.experiments.options import Parser, add_options, path, progress, real, tokens, whole
from a2d_mpi.experiments.origin import blas_name, cpu_name
from a2d_mpi.experiments.ranks import check_room, check_survive, surviving
from a2d_mpi.experiments.results import TRAINING_SCHEMA as SCHEMA
from a2d_mpi.gpt.config import LINEAR, POSITIONS, PRESETS, GPTConfig
from a2d_mpi.gpt.cost import training_bytes
from a2d_mpi.gpt.exchange import total
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.text import VOCAB, Batch, Text
from a2d_mpi.gpt.training import Training, learning_rate
from a2d_mpi.kernels import make_kernel
from a2d_mpi.planning.workload import Workload

# Options that must be the same when a run is resumed.
SAME = ("seqlen", "dtype", "seed", "rate", "warmup", "steps", "separator", "validate")
FLOATS = ("float32", "float64")  # storage dtypes of a model


def add_sizes(parser: Parser, **defaults: object) -> argparse._ArgumentGroup:
    """Add sizes of a model with their defaults.  Returns the group."""
    group = parser.add_argument_group("model")
    for name, default in defaults.items():
        add_options(group, name.replace("_", "-"), default=default)
    return group


def add_model(parser: Parser) -> argparse._ArgumentGroup:
    """Add the options of a GPT's sizes, see `model_of`; returns their group."""
    names = "layers", "width", "nheads", "nheads_kv", "headdim"
    group = add_sizes(parser, **dict.fromkeys(names))
    add = group.add_argument
    text = f"a model whose sizes are the defaults of the others: {', '.join(PRESETS)}"
    add("--preset", choices=PRESETS, metavar="MODEL", default="tiny", help=text)
    add("--positions", choices=POSITIONS, help="encoding of positions; default: the preset's")
    add("--recompute", action="store_true", help="keep less of each layer, and compute it again")
    return group


def add_training(parser: Parser) -> argparse._ArgumentGroup:
    """Add a text and how to train on it; returns the group of the options."""
    parser.add_argument("text", type=path, help="text file; its bytes are the tokens")
    group = parser.add_argument_group("training")
    add = group.add_argument
    add_options(group, "seqlen", type=tokens(2), default="1K", help="tokens per step: 1024, 64K")
    add_options(group, "separator", default=r"\n\n\n")
    add_options(group, "dtype", choices=FLOATS)
    text = "number of steps of the whole run"
    add("--steps", type=whole(1), metavar="N", default=200, help=text)
    add("--rate", type=real(0, 1e6), metavar="X", default=1e-3, help="highest learning rate")
    add_options(group, "seed")
    return group


def model_of(args: argparse.Namespace, **sizes: int) -> GPTConfig:
    """Return the sizes of a model, from the options of `add_model` and from `sizes`.

    Raises
    ------
    ValueError
        If sizes do not fit each other.
    """
    names = ("layers", "width", "nheads", "nheads_kv", "headdim", "positions", "layer_pattern")
    given = {x: getattr(args, x) for x in names if getattr(args, x, None) is not None}
    preset = PRESETS[args.preset].stored  # without a headdim that follows from the others
    if preset["nheads_kv"] == preset["nheads"]:
        preset["nheads_kv"] = None
    return GPTConfig(**{**preset, **sizes, **given})


def train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Train, or resume; return the exit code: 1 if the loss is no longer finite."""
    check_survive(comm, args.survive)
    text, held, config = together(comm, lambda: _validated(args))
    agree_on_text(comm, text)
    size = np.dtype(args.dtype).itemsize
    nbytes = training_bytes(config, -(-args.seqlen // comm.size), size, args.recompute)
    nbytes += 40 * args.seqlen  # a batch: tokens, targets and positions, on every rank
    what = f"{config.parameters} parameters (--layers, --width), {args.seqlen} tokens (--seqlen)"
    if args.device == "cpu":
        check_room(comm, f"{what}: weights and activations of one rank", nbytes)
    sizes = {"seqlen": args.seqlen, "dtype": args.dtype, **config.heads}
    device = open_device(comm, args.device)
    grid = open_grid(comm, args, Workload(**sizes, mask=Causal(), backward=True))
    together(comm, lambda: args.folder.mkdir(parents=True, exist_ok=True), on=0)
    trainer: Trainer | None = None

    def work(grid: ProcessGrid, comm: MPI.Intracomm) -> int:
        nonlocal trainer
        # The job's first rank locks the output against other jobs, as long as it lives.
        written = [] if 0 in grid.failures.numbers else options.files_written(args)
        with holding(comm, args.folder, *written):
            if trainer is None:
                with grid.failures.all_or_none():  # afterwards all ranks have a trainer, or none
                    state = _resumed(comm, args, config, text)
                    made = Trainer(comm, grid, args, text, state, device)
                trainer = made
            else:
                trainer.go_on(comm, grid)
            return trainer.finish(held)

    # No warnings: each step checks that its numbers are finite.
    with np.errstate(over="ignore", invalid="ignore"):
        code = surviving("train.py", grid, work, args.survive, args.method)
    if code is not None:
        if trainer.rank == 0 and code == 0:
            _report(trainer, text)
        trainer.free()
    return code or 0


class Trainer:
    """A training run on all ranks.

    Parameters
    ----------
    comm : Intracomm
    grid : ProcessGrid
    args : Namespace
        Options of drivers/train.py gpt.
    text : Text
    state : State
        State at the start.  Its arrays are on the host; the trainer takes them over.
    device : Device
        Device of weights and activations.

    Attributes
    ----------
    rank : int
        Rank of this process among the surviving ranks.
    state : State
        Its weights and moments are those of the start; see `host_state`.
    settings : dict
        Settings of all ranks that may change the bits of results.
    start : int
        Steps before this start.
    held_out : dict
        Loss and sizes of the held-out text, once it is evaluated.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        grid: ProcessGrid,
        args: argparse.Namespace,
        text: Text,
        state: State,
        device: Device = HOST,
    ) -> None:
        self._args, self._text, self._device = args, text, device
        self.state, self.start = state, state.step
        self.held_out: dict[str, object] = {}
        self._plan: AttentionPlan | None = None
        self._use(comm, grid)
        weights = Parameters(state.config, device.upload(state.weights))
        moments = device.upload(state.moments)
        self._training = Training(
            comm, weights, moments, state.step, args.recompute, args.transfers, grid.failures
        )

    def _use(self, comm: MPI.Intracomm, grid: ProcessGrid) -> None:
        """Use these ranks from now on.  Collective."""
        args = self._args
        self._comm, self.rank, self._grid = comm, comm.rank, grid
        kernel = make_kernel(args.kernel, self._device, np.dtype(args.dtype), 1.0)
        hosts = comm.allgather((cpu_name(), blas_name()))
        cpus, blas = ("; ".join(sorted(set(x))) for x in zip(*hosts))
        self.settings = {
            "method": args.method,
            **grid.layout.attributes,
            "threads": args.threads,
            "device": self._device.name,
            "kernel": kernel.name,
            "cpu": cpus,
            "blas": blas,
            "numpy": np.__version__,
        }

    def go_on(self, comm: MPI.Intracomm, grid: ProcessGrid) -> None:
        """Resume with the surviving ranks after a loss, from the last finished step.

        Collective over the surviving ranks.
        """
        self._forget()
        self._use(comm, grid)
        self._training.go_on(comm, grid.failures)
        self._say(f"continues after step {self.state.step}")
        if self.state.step:  # the rank that writes checkpoints may have died
            self._keep_if_due()

    def finish(self, held: Text | None) -> int:
        """Train to the last step, evaluate a held-out text, and write; return the exit code.

        If the loss, the gradients or the new weights are not finite, the training ends.
        Collective.
        """
        comm, args, state = self._comm, self._args, self.state
        if state.ranges and (changes := differences(state.ranges[-1], self.settings)):
            self._say(f"{changes}: from now on rounding differs from an uninterrupted run")
        try:
            with progress(range(state.step, args.steps), comm.rank, desc="steps") as shown:
                for _ in shown:
                    shown.set_postfix(loss=f"{self.step():.3f}")
                    self._keep_if_due()
        except FloatingPointError as error:
            self._say(f"step {state.step + 1}: {error}; the training ends, and the "
                      f"checkpoints in {args.folder} stay as they are")  # fmt: skip
            return options.FAILED_CHECK
        if held:
            self.held_out = {"loss": self.evaluate(held), **held.sizes()}
        if args.output:
            write_training(comm, args, self._device, self._text, {
                "loss": state.losses,
                "seconds": {"total": state.seconds},
                "config": state.run | asdict(state.config) | self.settings,
                "held_out": self.held_out,
                "ranges": {f"{i}": x for i, x in enumerate(state.ranges)},
            })  # fmt: skip
        return 0

    def _say(self, text: str) -> None:
        """Print a line on stderr, on rank 0."""
        if self.rank == 0:
            print(f"train.py: {text}", file=sys.stderr, flush=True)

    def _keep_if_due(self) -> None:
        """Write a checkpoint if this step is to have one.  Collective."""
        args, step = self._args, self.state.step
        if step % args.every == 0 or step == args.steps:
            together(self._comm, lambda: save(args.folder, self.host_state()), on=0)

    def host_state(self) -> State:
        """Return the state with the present weights and moments, as arrays on the host."""
        both = self._training.weights.flat, self._training.adam.moments
        weights, moments = map(self._device.download, both)
        return replace(self.state, weights=weights, moments=moments)

    def step(self) -> float:
        """Do one step; return the loss before it.  Collective.

        Raises
        ------
        FloatingPointError
            On all ranks, if the loss, the gradients or the new weights are not finite.
        """
        args, state, batch = self._args, self.state, self._batch()
        start = time.perf_counter()
        plan = self._plan_for(batch)
        planned = time.perf_counter() - start
        rate = learning_rate(state.step, args.rate, args.warmup, args.steps)
        loss, parts = self._training.step(plan, batch, rate)
        state.add_step(loss, planned + sum(parts.values()), self.settings)
        return loss

    def _batch(self) -> Batch:
        """Return the batch of the next step."""
        return self._text.batch(self._args.seqlen, self._args.seed, self.state.step)

    def evaluate(self, text: Text) -> float:
        """Compute the mean loss of a text, sequence after sequence.  Collective."""
        seqlen, loss, count = self._args.seqlen, 0.0, 0
        for begin in range(0, len(text.bytes) - seqlen + 1, seqlen):
            batch = text.at(begin, seqlen)
            loss += total(self._comm, self._training.loss(self._plan_for(batch), batch, 1))
            count += int((batch.targets >= 0).sum())
        return loss / max(1, count)

    def _plan_for(self, batch: Batch) -> AttentionPlan:
        """Return the plan of a batch; it is made anew only if the mask has changed."""
        args, config = self._args, self.state.config
        mask = Documents(batch.cu_seqlens, causal=True) if args.separator else Causal()
        if self._plan is None or self._plan.mask != mask:
            self._forget()
            sizes = {x: getattr(args, x) for x in ("seqlen", "dtype", "threads")}
            sizes |= config.heads
            ways = {"kernel": args.kernel, "transfers": args.transfers}
            plan = self._plan = make_plan(args.method, self._grid, mask, **sizes, **ways)
            if config.hybrid:  # a plan of linear attention with the same tokens
                del sizes["nheads_kv"]
                sizes["distribution"] = plan.distribution
                self._training.linear = LinearAttention(self._grid, mask, **sizes, **LINEAR)
        return self._plan

    def _forget(self) -> None:
        if self._plan:
            self._plan.free()
            self._plan = None

    def free(self) -> None:
        """Free the plan and the communicators.  Collective."""
        self._forget()
        self._training.free()


def agree_on_text(comm: MPI.Intracomm, text: Text) -> None:
    """Refuse texts that differ: nodes may have other files under the same path."""
    agree(comm, None, {"the text": f"a file with SHA-256 {text.sha256}"})


def write_training(
    comm: MPI.Intracomm, args: argparse.Namespace, device: Device, text: Text, tree: Mapping
) -> None:
    """Write the file of a training program: `tree`, the text and the origin.  Collective."""
    of_text = {"name": args.text.name, "sha256": text.sha256, **text.sizes()}
    tree = {**origin_of(comm, device), **tree, "text": of_text}
    together(comm, lambda: write_file(args.output, SCHEMA, tree), on=0)


def say_losses(
    parameters: int, losses: Sequence[float], seconds: float, text: Text, seqlen: int
) -> None:
    """Print the last lines of a training program; `seconds` of a step."""
    last, speed = losses[-20:], seqlen / seconds
    print(f"{parameters} parameters, {len(losses)} steps of {seqlen} tokens; {speed:.0f} tokens/s")
    print(
        f"loss {losses[0]:.4f} at first, {np.mean(last):.4f} in the last {len(last)} steps; "
        f"unigram entropy of the text {text.entropy():.4f} nats"
    )


def _validated(args: argparse.Namespace) -> tuple[Text, Text | None, GPTConfig]:
    """Read the training text and the held-out text; return them and the sizes of the model."""
    config = model_of(args, vocab=VOCAB, seqlen=args.seqlen)
    text, held = Text(args.text, args.separator, args.validate), None
    if args.validate:
        held = Text(args.text, args.separator, args.validate, held_out=True)
        if len(held.bytes) < args.seqlen:
            raise ValueError(
                f"--validate {args.validate} holds out {len(held.bytes)} bytes, but --seqlen "
                f"{args.seqlen} needs more"
            )
    if config.hybrid and (args.separator or args.device != "cpu"):
        raise ValueError(
            f"linear layers (--layer-pattern {config.layer_pattern}) see all earlier tokens, and "
            "run on the host: they need --separator '' and --device cpu"
        )
    return text, held, config


def _resumed(
    comm: MPI.Intracomm, args: argparse.Namespace, config: GPTConfig, text: Text
) -> State:
    """Return the state at the start on all ranks; rank 0 reads it."""
    run = {"text_sha256": text.sha256, **{x: str(getattr(args, x)) for x in SAME}}

    def earlier() -> State | None:
        check_output(args.output, SCHEMA)
        return resumed(args.folder, config, run, args.resume)

    state = comm.bcast(together(comm, earlier, on=0))
    if state is None:
        weights = initial(config, args.seed, args.dtype)
        moments = np.zeros((2, config.parameters), args.dtype)
        state = State(config, run, weights, moments, np.zeros(0), np.zeros(0))
    return state


def _report(trainer: Trainer, text: Text) -> None:
    """Print the short table."""
    state, held_out = trainer.state, trainer.held_out
    for name in held_out and ("loss", "unigram_entropy"):
        print(f"held-out text: {name.replace('_', ' ')} {held_out[name]:.4f} nats")
    if state.step == trainer.start:
        print(f"nothing to do: all {state.step} steps are done already")
        return
    seconds = np.median(state.seconds[trainer.start :])
    say_losses(state.config.parameters, state.losses, seconds, text, state.config.seqlen)
