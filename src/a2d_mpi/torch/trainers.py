"""Trainers of transformers over ranks: rank 0 alone writes and reports, checkpoints are whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from copy import copy
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from a2d_mpi.comm.agreement import agree
from a2d_mpi.comm.roots import errors_of
from a2d_mpi.core.folders import new_folder, remove_folder
from a2d_mpi.torch.layers import replaced

if TYPE_CHECKING:
    from transformers import Trainer

    from a2d_mpi.torch.context import ContextParallel

# With use_cpu=True accelerate 1.15 reads the number of its processes from these, and sets up
# torch.distributed.
LAUNCHERS = "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"
DISTRIBUTED = (
    "the trainer shares batches among {} processes of torch.distributed, but the ranks of a "
    "ContextParallel share one sequence: make the ContextParallel before TrainingArguments, which "
    "takes {} for the number of its processes if use_cpu is set"
)
STATE = "trainer_state.json"  # the last file that a Trainer writes into a checkpoint


def hide_launcher() -> None:
    """Remove the variables by which accelerate knows that mpiexec has started this process.

    Without them each rank is one process for accelerate.  MPI reads them when it starts only.
    """
    for name in LAUNCHERS:
        os.environ.pop(name, None)


def attach(cp: ContextParallel, trainer: Trainer) -> None:
    """Let rank 0 alone save, log, report and show bars; see `ContextParallel.attach`."""
    from transformers.utils import logging

    grid, args, state = cp.grid, trainer.args, trainer.state
    with grid.failures.translated():
        several = args.world_size > 1
        agree(grid.comm, DISTRIBUTED.format(args.world_size, LAUNCHERS) if several else None)
    # A Trainer asks its arguments who saves.  The number in accelerate stays 0: by that trainers
    # of TRL take their part of what the processes of a job have generated.
    args.distributed_state = own = copy(args.distributed_state)
    own.process_index = own.local_process_index = grid.comm.rank
    state.is_world_process_zero = state.is_local_process_zero = grid.comm.rank == 0
    logging.set_verbosity(args.get_process_log_level())
    for make in (_save_checkpoint, save_model, _load_best_model, get_train_dataloader):
        method = MethodType(getattr(type(trainer), make.__name__), trainer)  # as before `attach`
        setattr(trainer, make.__name__, wraps(method)(make(cp, trainer, method)))


# Each returns what is called in place of the method of its name; `own` is the method.


def _save_checkpoint(cp: ContextParallel, trainer: Trainer, own: Callable) -> Callable:
    def save(model: Any, trial: Any) -> None:
        with _of_first(cp) as first:
            if first:
                _save_whole(trainer, own, model, trial)
        if not first:
            trainer.store_flos()
        found = cp.grid.comm.bcast(trainer.state.best_model_checkpoint)
        trainer.state.best_model_checkpoint = found

    return save


def save_model(cp: ContextParallel, trainer: Trainer, own: Callable) -> Callable:
    def save(output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call:  # for a checkpoint, on rank 0
            own(output_dir, _internal_call=True)
            return
        with _of_first(cp) as first:
            if first:
                own(output_dir)

    return save


def _load_best_model(cp: ContextParallel, trainer: Trainer, own: Callable) -> Callable:
    def load() -> None:
        best = trainer.state.best_model_checkpoint
        seen = os.path.isdir(best)
        with cp.grid.failures.translated():
            agree(cp.grid.comm, None if seen else f"{best} is missing: all ranks must see the "
                  "folder of the checkpoints")  # fmt: skip
        own()

    return load


def get_train_dataloader(cp: ContextParallel, trainer: Trainer, own: Callable) -> Callable:
    def get() -> Any:
        with replaced(trainer.args.distributed_state, "process_index", 0):
            return own()  # its workers draw by this number

    return get


@contextmanager
def _of_first(cp: ContextParallel) -> Any:
    """Give whether this is rank 0, whose error is an error of all ranks.  Collective."""
    with cp.grid.failures.translated(), errors_of(cp.grid.comm, 0):
        yield cp.grid.comm.rank == 0


def remove_left(folder: Path) -> None:
    """Remove what jobs that were killed have left of checkpoints."""
    for left in folder.glob(".checkpoint-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _save_whole(trainer: Trainer, save: Callable, model: Any, trial: Any) -> None:
    """Save a checkpoint that is complete or not there, whoever is killed.

    Raises
    ------
    OSError
        If it cannot be written; earlier checkpoints are kept.
    """
    folder, state = Path(trainer._get_output_dir(trial)), trainer.state
    final = folder / f"checkpoint-{state.global_step}"
    folder.mkdir(parents=True, exist_ok=True)
    remove_left(folder)
    with new_folder(final) as temporary:
        with replaced(trainer, "_get_output_dir", lambda trial: temporary):
            save(model, trial)
        inside = Path(temporary, final.name)
        if state.best_model_checkpoint == str(inside):
            state.best_model_checkpoint = str(final)
            state.save_to_json(str(inside / STATE))
        for x in inside.iterdir():
            x.rename(Path(temporary, x.name))
        inside.rmdir()
        if final.exists():  # the run was resumed from an earlier one
            remove_folder(final)
    limit, kept = trainer.args.save_total_limit, {str(final), state.best_model_checkpoint}
    if limit:
        found = sorted(folder.glob("checkpoint-*"), key=lambda x: x.stat().st_mtime)
        for old in [x for x in found if str(x) not in kept][: max(0, len(found) - limit)]:
            remove_folder(old)
