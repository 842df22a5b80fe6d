"""The program of drivers/train.py: train a model of transformers, by all ranks together."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
from mpi4py import MPI
from torch.nn.functional import cross_entropy

import a2d_mpi.torch
from a2d_mpi.comm.agreement import CollectiveError, agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device
from a2d_mpi.experiments import options
from a2d_mpi.experiments.bench_parts import check_step
from a2d_mpi.experiments.checkpoint import State, differences, path_of, resumed, save
from a2d_mpi.experiments.cli import open_grid, together
from a2d_mpi.experiments.files import Check, attributes_of
from a2d_mpi.experiments.hdf5 import check_output, write_file
from a2d_mpi.experiments.measure import open_device, origin_of, seconds_of_calls
from a2d_mpi.experiments.models import Tokenizer, checkpoint_of, open_model
from a2d_mpi.experiments.options import progress
from a2d_mpi.experiments.origin import blas_name, cpu_name
from a2d_mpi.experiments.ranks import check_room, check_survive, surviving
from a2d_mpi.experiments.results import TRAINING_SCHEMA as SCHEMA
from a2d_mpi.experiments.text import Batch, Text, read_texts
from a2d_mpi.kernels import make_kernel
from a2d_mpi.planning.workload import Workload
from a2d_mpi.torch import ContextParallel, GradientHooks, keep_attention
from a2d_mpi.torch.layers import layers_of
from a2d_mpi.torch.sums import total

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIMIZER = "optimizer.pt"  # file of a checkpoint
PARTS = ("attention", "wait", "gradients", "optimizer", "other")  # of a step's seconds
# Options that must be the same when a run is resumed.
SAME = ("seqlen", "accumulate", "dtype", "seed", "rate", "warmup", "steps", "clip", "separator",
        "validate")  # fmt: skip
ORIGIN = ("architectures", "transformers_version", "_name_or_path")  # in configs, may differ
# AdamW of GPT-3 (arXiv:2005.14165).  DECAY is for matrices only.
BETAS, EPSILON, DECAY = (0.9, 0.95), 1e-8, 0.1
ROUNDING = 2.0**-8  # of bfloat16


def learning_rate(step: int, rate: float, warmup: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine down to a tenth.

    Source: GPT-3 (arXiv:2005.14165).

    Parameters
    ----------
    step : int
        From 0.
    rate : float
        Highest learning rate.
    warmup, steps : int
        Steps of the warm-up, and steps in all.
    """
    if step < warmup:
        return rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Train, or resume; return the exit code: 1 if a number is not finite or the check failed."""
    check_survive(comm, args.survive)
    torch.set_num_threads(args.threads)
    device = open_device(comm, args.device)
    trainer = opened(comm, args, device)
    check_rooms(comm, trainer)
    grid = open_grid(comm, args, together(comm, trainer.workload))
    if args.folder:
        together(comm, lambda: args.folder.mkdir(parents=True, exist_ok=True), on=0)
    elif comm.rank == 0:
        print("train.py: no --folder: the weights are not kept", file=sys.stderr, flush=True)

    def work(grid: ProcessGrid, comm: MPI.Intracomm) -> int:
        if trainer.begun:
            trainer.go_on(comm, grid)
        else:
            with grid.failures.all_or_none():  # afterwards all ranks have begun, or none
                trainer.begin(comm, grid)
            trainer.begun = True
        return trainer.finish()

    code = surviving("train.py", grid, work, args.survive, args.method)
    if code is not None:
        trainer.report()
        trainer.free()
    return code or 0


def opened(comm: MPI.Intracomm, args: argparse.Namespace, device: Device) -> Trainer:
    """Open model and texts of the options, the same on all ranks.  Collective."""

    def read() -> Trainer:
        dtype = "float32" if args.dtype == "bfloat16" else args.dtype
        model, tokenizer = open_model(args.model, dtype, args.seed)
        if getattr(model.config, "output_router_logits", False):
            raise ValueError("train.py adds no balance loss of MoE layers (output_router_logits)")
        if args.resume and not args.folder:
            raise ValueError("--resume needs --folder")
        texts = read_texts(args.text, args.separator, args.validate, tokenizer.encode)
        if comm.rank == 0 and tokenizer.own is None and not texts[0].tokens.all():
            text = "train.py: TEXT has zero bytes, as binary files have; tokens are bytes"
            print(text, file=sys.stderr, flush=True)
        return Trainer(args, device, model.train(), tokenizer, *texts)

    args.model = comm.bcast(together(comm, lambda: checkpoint_of(args.model), on=0))
    trainer = together(comm, read)
    agree(comm, None, {f"{x} of the run": y for x, y in trainer.run.items()})
    return trainer


def check_rooms(comm: MPI.Intracomm, trainer: Trainer) -> None:
    """Refuse work for which there is too little memory, before anything is allocated for it."""
    args, config = trainer.args, trainer.model.config.get_text_config()
    size = trainer.model.num_parameters()
    layers = 1 if args.checkpoint_layers else config.num_hidden_layers
    row = 3 * config.vocab_size + (24 * layers + config.num_hidden_layers) * config.hidden_size
    width, own = trainer.model.dtype.itemsize, -(-args.seqlen // comm.size)
    what = f"{size} parameters and {args.seqlen} tokens (--seqlen)"
    nbytes = width * (5 * size + own * row) + 40 * args.seqlen
    if args.device == "cpu":
        check_room(comm, f"{what}: weights and activations of one rank", nbytes)
    if args.check == "first":
        n = trainer.text.longest(args.seqlen)
        matrices = 4 * config.num_attention_heads * n * n
        what += ": matrices of the check in float64 (--check none leaves it out)"
        check_room(comm, what, 8 * (2 * size + n * row + matrices), 1)


class Trainer:
    """A training run on all ranks.

    Parameters
    ----------
    args : Namespace
        Options of drivers/train.py.
    device : Device
        Device of weights and activations.
    model : PreTrainedModel
        On the CPU, in training mode.
    tokenizer : Tokenizer
    text : Text
    held : Text or None
        Text that is held out.
    sha256 : str
        Of the files of the texts.

    Attributes
    ----------
    args, model, text
        As above.
    run : dict
        What must be the same when the run is resumed.
    begun : bool
        The caller sets it when all ranks have begun.
    state : State
        Its history; set by `begin`.
    settings : dict
        Settings of all ranks that may change the bits of results.
    held_out : dict
        Loss and sizes of the held-out text, once it is evaluated.
    checks : dict of str to Check
        Of the first step, if this job has made it.
    sent : Counter
        Bytes that the plans of this rank have sent in the latest step, by "phase/communicator".
    """

    def __init__(
        self,
        args: argparse.Namespace,
        device: Device,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        text: Text,
        held: Text | None,
        sha256: str,
    ) -> None:
        if held and len(held.tokens) < args.seqlen:
            raise ValueError(
                f"--validate {args.validate} holds out {len(held.tokens)} tokens, but --seqlen "
                f"{args.seqlen} needs more"
            )
        self.args, self.text, self.model, self.begun = args, text, model, False
        self._device, self._tokenizer, self._held = device, tokenizer, held
        self._where = "cpu" if device is HOST else f"cuda:{device.index}"
        config = model.config.to_diff_dict().items()
        self.run = {x: str(y) for x, y in config if x not in ORIGIN}
        self.run |= {x: str(getattr(args, x)) for x in SAME} | {"text": sha256}
        self.held_out: dict[str, object] = {}
        self.checks: dict[str, Check] = {}
        self.sent: Counter[str] = Counter()
        self._cp: ContextParallel | None = None
        self._hooks: GradientHooks | None = None
        if args.checkpoint_layers:
            how = {"use_reentrant": False, "context_fn": keep_attention}
            old = model.gradient_checkpointing_enable  # its name before transformers 5.20
            getattr(model, "activation_checkpointing_enable", old)(how)

    def workload(self) -> Workload:
        """Return what attention in the first layer computes, for the choice of a grid."""
        config, n = self.model.config.get_text_config(), self.text.longest(self.args.seqlen)
        try:
            kind = next(iter(layers_of(self.model, n).values()))
        except ValueError:
            if n > (most := getattr(config, "max_position_embeddings", n)):
                raise ValueError(
                    f"documents have {n} tokens, the model {most} positions: --seqlen {most}"
                ) from None
            raise
        sizes = kind._asdict() | {"seqlen": self.args.seqlen, "dtype": self.args.dtype}
        return Workload(**sizes, backward=True)

    def begin(self, comm: MPI.Intracomm, grid: ProcessGrid) -> None:
        """Begin the run, or resume it from the checkpoint that rank 0 reads.  Collective."""
        args, model = self.args, self.model.cpu()

        def earlier() -> tuple[State, dict | None]:
            check_output(args.output, SCHEMA)
            path, state = None, None
            if args.folder:
                path, state = resumed(args.folder, self.run, args.resume)
            if state is None:
                return State(self.run), None
            found, _ = open_model(path, str(model.dtype).removeprefix("torch."))
            model.load_state_dict(found.state_dict())
            return state, torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)

        self.state, moments = comm.bcast(together(comm, earlier, on=0))
        self.start = self.state.step
        for x in model.state_dict().values():
            comm.Bcast(x.numpy())
        model.to(self._where)
        groups: tuple[list, list] = [], []
        for x in model.parameters():
            groups[x.dim() > 1].append(x)
        groups = [{"params": x, "weight_decay": y} for x, y in zip(groups, (0.0, DECAY))]
        self._optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON)
        if moments:
            self._optimizer.load_state_dict(moments)
        self._use(comm, grid)
        if self.start:
            self._say(f"resumes after step {self.start} of {args.steps}")

    def _use(self, comm: MPI.Intracomm, grid: ProcessGrid) -> None:
        """Use these ranks from now on.  Collective."""
        self.free()
        args = self.args
        self._comm, self.rank, self._grid = comm, comm.rank, grid
        names = ("seqlen", "method", "dtype", "threads", "kernel", "transfers")
        longest = max(x.longest(args.seqlen) for x in (self.text, self._held) if x)
        sizes = {x: getattr(args, x) for x in names}
        self._cp = ContextParallel(grid, self.model, longest=longest, **sizes)
        self._hooks = GradientHooks(self.model, comm, grid.failures)
        kernel = make_kernel(args.kernel, self._device, DTYPES[args.dtype], 1.0)
        hosts = comm.allgather(f"{cpu_name()}, {blas_name()}")
        versions = (f"{x.__name__} {x.__version__}" for x in (np, torch, transformers))
        self.settings = {
            "method": args.method,
            **grid.layout.attributes,
            "threads": args.threads,
            "device": self._device.name,
            "kernel": kernel.name,
            "cpu": "; ".join(sorted(set(hosts))),
            "versions": ", ".join(versions),
        }

    def go_on(self, comm: MPI.Intracomm, grid: ProcessGrid) -> None:
        """Resume with the surviving ranks after a loss, from the last finished step.

        Collective over the surviving ranks.
        """
        self._use(comm, grid)
        self._say(f"continues after step {self.state.step}")
        self._keep_if_due()  # the rank that writes checkpoints may have died

    def finish(self) -> int:
        """Train to the last step, evaluate a held-out text, and write; return the exit code.

        If the loss, the gradients or the new weights are not finite, the training ends.
        Collective.
        """
        comm, args, state = self._comm, self.args, self.state
        if state.ranges and (changes := differences(state.ranges[-1], self.settings)):
            self._say(f"{changes}: from now on rounding differs from an uninterrupted run")
        try:
            with progress(range(state.step, args.steps), comm.rank, desc="steps") as shown:
                for _ in shown:
                    loss = self.step()
                    speed = args.accumulate * args.seqlen / sum(state.seconds[-1])
                    shown.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:.0f}")
                    if state.step % args.every == 0 and not sys.stderr.isatty():  # without a bar
                        self._say(f"step {state.step} of {args.steps}: loss {loss:.3f}")
                    self._keep_if_due()
        except FloatingPointError as error:
            self._say(f"step {state.step + 1}: {error}; the training ends, and its checkpoints "
                      "stay as they are")  # fmt: skip
            return options.FAILED_CHECK
        if self._held:
            self.held_out = {"loss": self.evaluate(self._held), **self._held.sizes()}
        if args.output:
            self._write()
        return 0 if all(x.passed for x in self.checks.values()) else options.FAILED_CHECK

    def _say(self, text: str) -> None:
        """Print a line on stderr, on rank 0."""
        if self.rank == 0:
            print(f"train.py: {text}", file=sys.stderr, flush=True)

    def _keep_if_due(self) -> None:
        """Write a checkpoint if this step is to have one.  Collective."""
        args, step = self.args, self.state.step
        if args.folder and step and (step % args.every == 0 or step == args.steps):
            together(self._comm, lambda: save(args.folder, self.state, self._save), on=0)

    def _save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        if self._tokenizer.own:
            self._tokenizer.own.save_pretrained(folder)
        torch.save(self._optimizer.state_dict(), folder / OPTIMIZER)

    def step(self) -> float:
        """Do one step; return the loss before it.  Collective.

        Raises
        ------
        FloatingPointError
            On all ranks, if the loss, the gradients or the new weights are not finite.
        RanksLost
            On all surviving ranks, if a rank died; the weights have not changed.
        """
        args, state, spent = self.args, self.state, Counter()
        first = state.step * args.accumulate
        batches = [self.text.batch(args.seqlen, args.seed, first + i)
                   for i in range(args.accumulate)]  # fmt: skip
        nlabels = max(1, sum(x.nlabels for x in batches))
        marks, self.sent = [time.perf_counter()], Counter()
        with self._grid.failures.all_or_none():
            loss = 0.0
            self._optimizer.zero_grad()
            for batch in batches:
                own = self._shard(batch)
                with seconds_of_calls(self._cp.plans.values()) as seconds:
                    term = self._loss(own) * (own.nlabels / nlabels)
                    term.backward()
                loss += term.item()
                spent += seconds
                for plan in self._cp.plans.values():
                    for (phase, name), (sent, _) in plan.traffic.bytes.items():
                        self.sent[f"{phase}/{name}"] += sent
                    plan.traffic.clear()
            marks.append(time.perf_counter())
            self._hooks.finish()
            loss = total(self._comm, loss)
            marks.append(time.perf_counter())
            if state.step == 0 and args.check == "first":
                self._check(batches, nlabels, loss)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        begin = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(state.step, args.rate, args.warmup, args.steps)
        self._update()
        computed, summed = np.diff(marks).tolist()
        optimizer, other = time.perf_counter() - begin, computed - spent["total"]
        attention = spent["total"] - spent["wait"]
        state.add_step(loss, [attention, spent["wait"], summed, optimizer, other], self.settings)
        return loss

    def _shard(self, batch: Batch) -> a2d_mpi.torch.Batch:
        """Return this rank's part of a sequence.  Collective."""
        alone = len(batch.cu_seqlens) == 2
        own = self._cp.shard(batch.tokens, cu_seqlens=None if alone else batch.cu_seqlens)
        if own.nlabels != batch.nlabels:
            raise CollectiveError(
                "the model must predict the next token: its masks are not causal"
            )
        return own

    def _loss(self, own: a2d_mpi.torch.Batch) -> torch.Tensor:
        """Return this rank's part of the mean loss of a sequence."""
        with self._autocast():
            return self._cp.loss(self.model(**own.inputs, use_cache=False).logits, own)

    def _autocast(self, where: str | None = None) -> torch.autocast:
        kind = torch.device(where or self._where).type
        return torch.autocast(kind, torch.bfloat16, enabled=self.args.dtype == "bfloat16")

    def _update(self) -> None:
        """Clip the gradients, and change the weights.  Local."""
        clip = self.args.clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the gradient is {norm}")
        self._optimizer.step()
        if not all(x.isfinite().all() for x in self.model.parameters()):
            raise FloatingPointError("some weights are not finite")

    def _check(self, batches: Sequence[Batch], nlabels: int, loss: float) -> None:
        """Check loss and gradients of the first step against one process.  Collective.

        The bound of bfloat16 is twice the error of one process in bfloat16, and a rounding.
        """
        args = self.args

        def compare() -> dict[str, Check]:
            sizes = ("float32" if args.dtype == "bfloat16" else args.dtype), nlabels
            exact = self._alone(batches, "float64")
            checks = check_step((loss, _gradient(self.model)), exact, *sizes)
            if args.dtype == "bfloat16":
                with self._autocast("cpu"):
                    same = check_step(self._alone(batches, "float32"), exact, *sizes)
                checks = {x: Check(y.error, 2 * same[x].error + ROUNDING, nlabels)
                          for x, y in checks.items()}  # fmt: skip
            return checks

        self.checks = self._comm.bcast(together(self._comm, compare, on=0))

    def _alone(self, batches: Sequence[Batch], dtype: str) -> tuple[float, np.ndarray]:
        """Compute loss and gradient of a step by plain transformers, document by document."""
        model, loss = open_model(self.args.model, dtype, self.args.seed)[0].train(), 0.0
        nlabels = sum(x.nlabels for x in batches)
        documents = (x for batch in batches for x in batch.documents if len(x) > 1)
        for ids in map(torch.from_numpy, documents):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            term = cross_entropy(logits, ids[1:], reduction="sum") / nlabels
            term.backward()
            loss += term.item()
        return loss, _gradient(model)

    @torch.no_grad()
    def evaluate(self, text: Text) -> float:
        """Compute the mean loss of a text, sequence after sequence.  Collective."""
        seqlen, loss, count = self.args.seqlen, 0.0, 0
        for begin in range(0, len(text.tokens) - seqlen + 1, seqlen):
            own = self._shard(text.at(begin, seqlen))
            loss += total(self._comm, self._loss(own).item()) * own.nlabels
            count += own.nlabels
        return loss / max(1, count)

    def _write(self) -> None:
        """Write the output.  Collective."""
        args, state, comm = self.args, self.state, self._comm
        bytes_of = comm.gather(self.sent) or []
        names = sorted(set().union(*bytes_of))
        config = {x: y if isinstance(y, (int, float)) else str(y) for x, y in vars(args).items()}
        config |= self.settings | {"parameters": self.model.num_parameters()}
        seconds = np.array(state.seconds).reshape(-1, len(PARTS))
        tree = {
            **origin_of(comm, self._device),
            "loss": np.array(state.losses),
            "seconds": dict(zip(PARTS, seconds.T.copy())) | {"total": seconds.sum(axis=1)},
            "traffic": {x: np.array([y[x] for y in bytes_of]) for x in names},
            "config": config,
            "text": {"name": ", ".join(x.name for x in args.text), "sha256": self.run["text"],
                     **self.text.sizes()},
            "held_out": self.held_out,
            "ranges": {f"{i}": x for i, x in enumerate(state.ranges)},
            **attributes_of(self.checks),
        }  # fmt: skip
        together(comm, lambda: write_file(args.output, SCHEMA, tree), on=0)

    def report(self) -> None:
        """Print the short table on rank 0."""
        if self.rank != 0:
            return
        for name, x in self.checks.items():
            print(f"first step, {name}: error {x.error:.1e} against one process in float64 "
                  f"({x.verdict}, bound {x.bound:.0e})")  # fmt: skip
        for name in self.held_out and ("loss", "unigram_entropy"):
            print(f"held-out text: {name.replace('_', ' ')} {self.held_out[name]:.4f} nats")
        state, tokens = self.state, self.args.accumulate * self.args.seqlen
        if state.step == self.start:
            print(f"nothing to do: all {state.step} steps are done already")
            return
        last, seconds = state.losses[-20:], np.sum(state.seconds[self.start :], axis=1)
        entropy, size = self.text.sizes()["unigram_entropy"], self.model.num_parameters()
        print(f"{size} parameters, {state.step} steps of {tokens} tokens; "
              f"{tokens / np.median(seconds):.0f} tokens/s\n"
              f"loss {state.losses[0]:.4f} at first, {np.mean(last):.4f} in the last {len(last)} "
              f"steps; unigram entropy of the text {entropy:.4f} nats")  # fmt: skip
        if self.args.folder:
            print(f"latest checkpoint: {path_of(self.args.folder, state.step)}")

    def free(self) -> None:
        """Free the plans and the communicators.  Collective, also after a loss."""
        if self._hooks:
            self._hooks.free()
        if self._cp:
            self._cp.free()
        self._hooks = self._cp = None


def _gradient(model: PreTrainedModel) -> np.ndarray:
    """Return the gradients of all parameters in a row, in float64."""
    parts = [x.grad.double().flatten().cpu() for x in model.parameters() if x.grad is not None]
    return torch.cat(parts).numpy()
