"""The program `train`: transformers' Trainer, over all ranks."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.utils.data import SequentialSampler, default_collate
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.checks.check import Check, attributes_of
from a2d_mpi.checks.measure import open_device, origin_of
from a2d_mpi.cli.models import Tokenizer, checkpoint_of, open_model, workload_of
from a2d_mpi.cli.options import FAILED_CHECK, log, progress
from a2d_mpi.cli.run import open_grid, together
from a2d_mpi.cli.survivors import check_survive, surviving
from a2d_mpi.cli.text import Text, read_documents
from a2d_mpi.comm.agreement import agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.config import PHASES
from a2d_mpi.devices.protocol import Device
from a2d_mpi.results.hdf5 import TRAINING_SCHEMA as SCHEMA
from a2d_mpi.results.hdf5 import check_output, write_file
from a2d_mpi.torch import ContextParallel
from a2d_mpi.torch.trainers import STATE, hide_launcher, remove_left

CURVES = "loss", "learning_rate", "grad_norm"  # by step
# Options that must be the same when a run is resumed.
SAME = ("model", "seqlen", "steps", "dtype", "seed", "separator", "validate", "set")
# Of TrainingArguments, where they are not transformers' own.
DEFAULTS = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "report_to": []}
# Largest relative errors of a step.  transformers computes the loss of every dtype in float32.
BOUNDS = {"float32": 1e-5, "float64": 1e-6, "bfloat16": 0.05}


def train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Train, or resume; return the exit code: 1 if a number is not finite or the check failed."""
    check_survive(comm, args.survive)
    torch.set_num_threads(args.threads)
    device = open_device(comm, args.device)
    hide_launcher()
    args.model = comm.bcast(together(comm, lambda: checkpoint_of(args.model), on=0))
    job = together(comm, lambda: Job(args))
    agree(comm, None, {f"{x} of the run": y for x, y in job.run.items()})
    grid, work = open_grid(comm, args, job.workload), partial(job.work, device)
    return surviving("train.py", grid, work, args.survive, args.method) or 0


class Job:
    """A training on all ranks; `args` are the options of the program.

    Attributes
    ----------
    args : Namespace
    run : dict
        What must be the same when the run is resumed.
    workload : Workload
        What attention in the first layer computes.
    of_step : int
        Sequences of a step.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if args.resume and not args.folder:
            raise ValueError("--resume needs --folder")
        self.args, self._begun, self._arguments = args, False, arguments_of(args)
        (model, tokenizer), given = self.open(), self._arguments
        read = read_documents(args.text, args.separator, args.validate, tokenizer.encode)
        rest, held, sha256 = read
        self.of_step = given.train_batch_size * given.gradient_accumulation_steps
        separated, number = bool(args.separator) or len(rest) > 1, args.steps * self.of_step
        self._text = Text(rest, args.seqlen, number, args.seed, separated)
        self._held = Text(held, args.seqlen) if held else None
        if held and not len(self._held):
            n = len(self._held.tokens)
            raise ValueError(f"--validate holds out {n} tokens, but --seqlen needs {args.seqlen}")
        self._longest = max(x.longest for x in (self._text, self._held) if x)
        self.workload = workload_of(model, args.seqlen, self._longest, args.dtype)
        self.run = {x: str(getattr(args, x)) for x in SAME} | {"text": sha256}

    def open(self, dtype: str | None = None) -> tuple[torch.nn.Module, Tokenizer]:
        """Open the model, with the weights before the first step, and its tokenizer."""
        wide = self.args.dtype.replace("bfloat16", "float32")  # autocast computes in bfloat16
        model, tokenizer = open_model(self.args.model, dtype or wide, self.args.seed)
        return model.train(), tokenizer

    def first_step(self) -> tuple[float, np.ndarray]:
        """Return loss and clipped gradient of the first step, by one process in float64."""
        (model, _), clip = self.open("float64"), self._arguments.max_grad_norm
        batch = default_collate([self._text[i] for i in range(self.of_step)])
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss.item(), gradient(model)

    def work(self, device: Device, grid: ProcessGrid, comm: MPI.Intracomm) -> int:
        """Train from the latest checkpoint on; return the exit code.

        After a loss it is called again, with a smaller grid.  Collective.
        """
        args, notes = self.args, Notes(self, comm)
        path = comm.bcast(together(comm, self._checkpoint, on=0))
        self._begun, (model, tokenizer) = True, self.open()
        trainer = Trainer(model, self._arguments, default_collate, self._text, self._held,
                          tokenizer.own, callbacks=[notes])  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer._get_train_sampler = lambda *_: SequentialSampler(self._text)
        names = ("method", "threads", "kernel", "transfers")
        given = {"longest": self._longest} | {x: getattr(args, x) for x in names}
        cp = ContextParallel(grid, model, **given)
        try:
            cp.attach(trainer)
            with notes.counting():
                trainer.train(resume_from_checkpoint=path)
            held = trainer.evaluate()["eval_loss"] if self._held else None
        except FloatingPointError as error:  # on all ranks
            if comm.rank == 0:
                log.error("%s: the training ends, and its checkpoints stay as they are", error)
            return FAILED_CHECK
        finally:
            cp.free()
        steps = [x for x in trainer.state.log_history if "loss" in x]
        sent, rows = comm.gather(notes.sent) or [], lambda x: np.array([*x])
        options = {x: y if isinstance(y, (int, float)) else str(y) for x, y in vars(args).items()}
        options |= {"sequences": self.of_step, "parameters": model.num_parameters()}
        tree = {
            **origin_of(comm, device),
            "config": options | grid.layout.attributes,
            "text": {"name": ", ".join(x.name for x in args.text), "sha256": self.run["text"]},
            "held_out": {} if held is None else {"loss": held},
            "seconds": {x: rows(y["seconds"][x] for y in steps) for x in steps[0]["seconds"]},
            "traffic": {x: rows(y.get(x, 0) for y in sent) for x in notes.sent},
            **{x: rows(y.get(x, np.nan) for y in steps) for x in CURVES},
            **attributes_of(notes.checks),
        }  # fmt: skip
        if args.output:
            together(comm, lambda: write_file(args.output, SCHEMA, tree), on=0)
        if comm.rank == 0:
            report(tree, args.seqlen * self.of_step, notes.checks)
        return 0 if tree["passed"] else FAILED_CHECK

    def _checkpoint(self) -> str | None:
        """Return the checkpoint from which to go on; None at the beginning."""
        args = self.args
        check_output(args.output, SCHEMA)
        if args.folder is None or not Path(args.folder).is_dir():
            return None
        if (path := get_last_checkpoint(args.folder)) is None:
            return None
        if not (args.resume or self._begun):
            raise ValueError(f"{args.folder} has checkpoints; --resume continues from the latest")
        was = json.loads(Path(path, STATE).read_text())["stateful_callbacks"]
        was = was.get(Notes.__name__, {}).get("args", {})
        for name, now in self.run.items():
            if was.get(name) != now:
                what = f"{name} was {was.get(name)}, now {now}"
                raise ValueError(f"the run in {args.folder} has other options: {what}")
        remove_left(Path(args.folder))  # after the last step nothing more is saved
        if not args.quiet:  # after a loss another rank may say it
            print(f"train.py: resumes from {path}", file=sys.stderr, flush=True)
        return path


class Notes(TrainerCallback, ExportableState):
    """What a run notes in each step; checkpoints keep the options of the run and the seconds.

    Parameters
    ----------
    job : Job
    comm : Intracomm

    Attributes
    ----------
    checks : dict of str to Check
        Of the first step, if this job has made it.
    sent : dict of str to int
        Bytes that the plans of this rank have sent in the latest step, by "phase/communicator".
    """

    def __init__(self, job: Job, comm: MPI.Intracomm) -> None:
        self._job, self._comm = job, comm
        self.checks: dict[str, Check] = {}
        self.sent: dict[str, int] = {}
        self._spent: Counter[str] = Counter()  # seconds and bytes of plans

    def state(self) -> dict[str, dict]:
        """Return what a checkpoint keeps."""
        return {"args": self._job.run, "attributes": {}}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count seconds and bytes of all calls of plans in this context."""

        def counted(method: Callable, phase: str) -> Callable:
            @wraps(method)
            def call(plan: AttentionPlan, *tensors: Any, **given: Any) -> Any:
                plan.traffic.clear()
                results = method(plan, *tensors, **given)
                self._spent.update({x: plan.timings[f"{phase}/{x}"] for x in ("total", "wait")})
                self._spent.update({"/".join(x): y[0] for x, y in plan.traffic.bytes.items()})
                return results

            return call

        methods = {x: getattr(AttentionPlan, x) for x in PHASES}
        for phase, method in methods.items():
            setattr(AttentionPlan, phase, counted(method, phase))
        try:
            with progress(None, self._comm.rank, total=self._job.args.steps, desc="steps") as bar:
                self._bar = bar
                yield
        finally:
            for phase, method in methods.items():
                setattr(AttentionPlan, phase, method)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._spent.clear()
        self._begin = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **given: Any) -> None:
        if state.global_step == 0 and self._job.args.check == "first":
            exact = self._comm.bcast(together(self._comm, self._job.first_step, on=0))
            self._loss, off = exact[0], gradient(given["model"]) - exact[1]
            self._check("gradients", np.linalg.norm(off) / np.linalg.norm(exact[1]))
        self._updates = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._updated = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict, **_: Any) -> None:
        """Note the seconds of a step, and end the run if its loss or gradient is not finite."""
        if "loss" not in logs:
            return
        for name in ("loss", "grad_norm"):
            if not math.isfinite(found := logs.get(name, 0.0)):
                raise FloatingPointError(f"step {state.global_step}: {name} is {found}")
        if self.checks and state.global_step == 1:
            self._check("loss", abs(logs["loss"] / self._loss - 1))
        total, wait = time.perf_counter() - self._begin, self._spent.pop("wait", 0.0)
        seconds = {"attention": self._spent.pop("total", 0.0) - wait, "wait": wait}
        self.sent, seconds["optimizer"] = dict(self._spent), self._updated - self._updates
        seconds |= {"other": total - sum(seconds.values()), "total": total}
        state.log_history[-1]["seconds"] = seconds
        speed = self._job.of_step * self._job.args.seqlen / total
        self._bar.set_postfix(
            loss=f"{logs['loss']:.3f}", tokens_per_s=f"{speed:.0f}", refresh=False
        )
        self._bar.update(state.global_step - self._bar.n)

    def _check(self, name: str, error: float) -> None:
        args = self._job.args
        error = float(np.nan_to_num(error, nan=math.inf))
        self.checks[name] = Check(error, BOUNDS[args.dtype], args.seqlen)


def arguments_of(args: argparse.Namespace) -> TrainingArguments:
    """Return the arguments of the Trainer, some of which are options of the program.

    Raises
    ------
    ValueError
        If an argument of --set is unknown, or TrainingArguments refuses it.
    """
    given = dict(args.set)
    fixed = {
        "output_dir": args.folder or tempfile.gettempdir(), "max_steps": args.steps,
        "seed": args.seed, "use_cpu": args.device == "cpu", "bf16": args.dtype == "bfloat16",
        "logging_steps": 1, "logging_nan_inf_filter": False, "remove_unused_columns": False,
        "prediction_loss_only": True, "restore_callback_states_from_checkpoint": False,
        "log_level": "error", "disable_tqdm": True,
        **({} if args.folder else {"save_strategy": "no"}),
    }  # fmt: skip
    if both := given.keys() & fixed.keys():
        raise ValueError(f"--set {min(both)}: the program sets it, by its other options")
    try:
        return TrainingArguments(**DEFAULTS | given | fixed)
    except TypeError as error:  # an unknown one
        raise ValueError(f"--set: {error}") from None


def gradient(model: torch.nn.Module) -> np.ndarray:
    """Return the gradients of all parameters in a row, in float64."""
    parts = [x.grad.double().flatten().cpu() for x in model.parameters() if x.grad is not None]
    return torch.cat(parts).numpy()


def report(tree: Mapping[str, Any], tokens: int, checks: Mapping[str, Check]) -> None:
    """Print the short table of a run with so many tokens in a step."""
    for name, x in checks.items():
        print(f"first step, {name}: error {x.error:.1e} against one process in float64 "
              f"({x.verdict}, bound {x.bound:.0e})")  # fmt: skip
    loss, rate = tree["loss"], tokens / np.median(tree["seconds"]["total"])
    print(f"{tree['config']['parameters']} parameters, {len(loss)} steps of {tokens} tokens; "
          f"{rate:.0f} tokens/s\nloss {loss[0]:.4f} at first, {loss[-20:].mean():.4f} in the last "
          f"{len(loss[-20:])} steps")  # fmt: skip
    if held := tree["held_out"]:
        print(f"held-out text: loss {held['loss']:.4f}")
