"""Checkpoints of the program train, and of trainers over ranks: complete or not there.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_all, drive, drive_each
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from a2d_mpi.results.hdf5 import TRAINING_SCHEMA, read_file
from a2d_mpi.torch import ContextParallel
from a2d_mpi.torch.trainers import hide_launcher

STEPS = 6
TRAIN = ["llama-tiny", ROOT / "LICENSE", "--seqlen", 64, "--separator", r"\n\n", "--check", "none",
         "--kernel", "numpy", "--set", "learning_rate=1e-3", "--steps"]  # fmt: skip
LONG = 600  # s: PyTorch takes long to import on busy machines


def names(folder):
    return sorted(x.name for x in folder.iterdir())


def bits(path):
    """Return all bits of a checkpoint but its seconds: weights, moments and losses."""
    history = json.loads((path / "trainer_state.json").read_text())["log_history"]
    moments = torch.load(path / "optimizer.pt", weights_only=True)["state"]
    tensors = [*load_file(path / "model.safetensors").values()]
    tensors += [y for x in moments.values() for y in x.values()]
    return [x.numpy().tobytes() for x in tensors], [x["loss"] for x in history if "loss" in x]


# Files of runs in the folder "full" cannot become larger while a checkpoint is written; MPI needs
# files, too.
SABOTAGE = """
import contextlib, resource
from a2d_mpi.torch import trainers
real_folder = trainers.new_folder
@contextlib.contextmanager
def limited(path):
    endless = resource.RLIM_INFINITY
    most = 1 << 20 if str(path).startswith("{0}/full") else endless
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, endless))
    try:
        with real_folder(path) as temporary:
            yield temporary
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (endless, endless))
trainers.new_folder = limited
"""
OTHERS = {"cut": [], "whole": [], "grid": ["--cols", 2], "changed": ["--seed", 1], "full": []}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train, and resume copies of the run, in two launches.

    Return their folder, exit code and stdout by name, and the stderr of both launches.
    """
    path = tmp_path_factory.mktemp("runs")
    sets = ["--set", "save_steps=2", "--set", "save_total_limit=2", "--folder"]
    infinite = [*TRAIN, 30, "--set", "save_steps=1", "--set", "max_grad_norm=0", "--folder"]
    cases = [("train.py", [*TRAIN, STEPS, *sets, path / "whole"], []),
             ("train.py", [*infinite, path / "infinite", "--set", "learning_rate=1e30"], []),
             ("train.py", [*TRAIN, STEPS, *sets, path / "whole"], [])]  # fmt: skip
    first, (started, ended, again) = drive_each(cases, 2, timeout=LONG)
    assert started[0] == 0, first.stderr
    assert names(path / "whole") == ["checkpoint-4", "checkpoint-6"]
    cases = {}
    for name, more in (OTHERS | {"ranks": []}).items():
        if name != "whole":
            shutil.copytree(path / "whole", path / name)
            shutil.rmtree(path / name / "checkpoint-6")
        more = [*more, "--resume", "--output", path / f"{name}.h5"]
        cases[name] = "train.py", [*TRAIN, STEPS, *sets, path / name, *more], [], 2
    cases["ranks"] = *cases["ranks"][:3], 3
    done, found = drive_each([*cases.values()], 3, SABOTAGE.format(path), timeout=LONG)
    found = dict(zip(cases, found)) | {"infinite": ended, "again": again}
    return path, found, first.stderr, done.stderr


def test_resumes(runs):
    """A resumed run has the bits of one without a break, on other grids the numbers."""
    path, found, first, stderr = runs
    expected = bits(path / "whole" / "checkpoint-6")
    assert [found[x][0] for x in ("cut", "whole", "grid", "ranks")] == [0] * 4, stderr
    assert bits(path / "cut" / "checkpoint-6") == expected
    assert stderr.count("/checkpoint-4") >= 4
    for name in ("grid", "ranks"):
        _, losses = bits(path / name / "checkpoint-6")
        assert losses[:4] == expected[1][:4]
        assert losses == pytest.approx(expected[1], rel=1e-5)
    assert len(read_file(path / "grid.h5", TRAINING_SCHEMA)["loss"]) == STEPS
    assert found["changed"][0] == 2 and "has other options: seed was 0, now 1" in stderr
    assert found["again"][0] == 2 and "has checkpoints; --resume continues" in first


def test_full_disk(runs):
    """If a checkpoint cannot be written, the job ends, and earlier ones stay."""
    path, found, _, stderr = runs
    assert found["full"][0] == 2 and "Traceback" not in stderr
    assert f"train.py: error: cannot write {path / 'full' / 'checkpoint-6'}: " in stderr
    assert names(path / "full") == ["checkpoint-4"]
    assert bits(path / "full" / "checkpoint-4") == bits(path / "whole" / "checkpoint-4")


def test_not_finite(runs):
    """A loss that is not finite ends the training, and its checkpoints stay."""
    path, found, stderr, _ = runs
    assert found["infinite"][0] == 1, stderr
    assert "step 2: loss is nan: the training ends, and its checkpoints stay" in stderr
    assert names(path / "infinite") == ["checkpoint-1"]


# A rank dies: rank 0 at a random call while it writes a checkpoint, or any after random seconds.
KILLED = """
import random, shutil, threading, torch, transformers
from a2d_mpi.commands.train_job import Notes
from a2d_mpi.torch import trainers
draw, left = random.Random({seed}), -1
def die():
    os.kill(os.getpid(), 9)
def begin(self, *_, real=Notes.on_step_begin, **__):
    global timer
    if not {saving} and rank == draw.randrange({ranks}) and "timer" not in globals():
        timer = threading.Timer(draw.uniform(0, {seconds}), die)
        timer.start()
    real(self)
def save(*given, real=trainers._save_whole):
    global left
    left = draw.randrange(40)
    real(*given)
    left = -1
def counted(real):
    def call(*given, **options):
        global left
        left -= left >= 0
        if left != 0:
            return real(*given, **options)
        if real is torch_save:  # in the middle of a file
            real(*given, **options)
            os.truncate(given[1], os.path.getsize(given[1]) // 2)
        die()
    return call
torch_save, Notes.on_step_begin = torch.save, begin
if {saving} and rank == 0:
    trainers._save_whole = save
    for owner, name in ((os, "mkdir"), (os, "fsync"), (os, "rename"), (shutil, "rmtree"),
                        (torch, "save"), (transformers.PreTrainedModel, "save_pretrained")):
        setattr(owner, name, counted(getattr(owner, name)))
"""


@pytest.mark.launches
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.thorough)])
def test_killed(tmp_path, kills, ranks=2):
    """Whenever ranks are killed, checkpoints are complete, and the run ends with the same bits.

    Every other kill is while a checkpoint is written.
    """
    train = [*TRAIN, 40, "--set", "save_steps=4", "--set", "save_total_limit=2", "--resume"]
    drive("train.py", ranks, *train, "--folder", tmp_path / "whole", timeout=LONG)
    expected, code = bits(tmp_path / "whole" / "checkpoint-40"), 1
    killed = ended = launched = 0
    while killed < kills or code:
        folder, sabotage = tmp_path / f"{ended}", ""
        # As of a job that was killed when it removed an old checkpoint after its last step.
        (folder / ".checkpoint-32.1-ab.tmp").mkdir(parents=True, exist_ok=True)
        if killed < kills:
            saving = killed % 2 == 0
            sabotage = KILLED.format(seed=launched, saving=saving, ranks=ranks, seconds=4)
        done = drive("train.py", ranks, *train, "--folder", folder, sabotage=sabotage,
                     timeout=LONG, code=None)  # fmt: skip
        code, launched = done.returncode, launched + 1
        # The other rank may just then read the memory of a killed one, which MPICH says.
        errors = done.stderr.count("process_vm_readv failed") if code else 0
        assert done.stderr.count("Traceback") <= errors and (code == 0 or sabotage), done.stderr
        for path in folder.glob("checkpoint-*"):
            bits(path)
        killed += code != 0
        if code == 0:  # and then another folder
            assert bits(folder / "checkpoint-40") == expected, f"after {killed} kills"
            assert len(names(folder)) == 2, names(folder)
            ended += 1
    print(f"{killed} kills, {ended} runs to the end")


def small(folder):
    """Return a Trainer of a small model and of random texts."""
    hide_launcher()
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    data = [{"input_ids": x, "labels": x} for x in torch.randint(32, (10, 24))]
    given = {"max_steps": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    return Trainer(model, TrainingArguments(folder, **given), train_dataset=data)


@pytest.mark.mpi
def test_attached_trainer(comm, grid, tmp_path):
    """Rank 0 alone writes; its errors are those of all ranks, and leave nothing behind."""
    folder = Path(comm.bcast(str(tmp_path)))
    trainer = small(folder / "ranks")
    os.environ["PMI_SIZE"] = "2"
    cp = ContextParallel(grid, trainer.model)
    assert_all(comm, "PMI_SIZE" not in os.environ, "use_cpu=True would be refused")
    cp.attach(trainer)
    small(folder / "other")  # its arguments reset accelerate's state
    trainer.train()
    first = comm.rank == 0
    assert_all(comm, trainer.is_world_process_zero() == first, "reports")
    assert_all(comm, trainer.state.is_world_process_zero == first, "reports")
    assert_all(comm, names(folder / "ranks") == ["checkpoint-2"], "files")

    def full(*_):
        raise OSError(28, "No space left on device")

    trainer._save_scaler = trainer._save = full  # of which rank 0 alone hears
    for what in (lambda: trainer._save_checkpoint(None, None), trainer.save_model):
        with pytest.raises(ValueError, match="No space left"):
            what()
    assert_all(comm, names(folder / "ranks") == ["checkpoint-2"], "leftovers")
    comm.Barrier()
    cp.free()


@pytest.mark.mpi(min_size=2)
def test_attach_refused(comm, grid, tmp_path):
    """A Trainer whose batches torch.distributed would share is refused on all ranks."""
    trainer = small(tmp_path)
    cp = ContextParallel(grid, trainer.model)
    if comm.rank == 1:
        trainer.args.distributed_state.num_processes = 2
    with pytest.raises(ValueError, match="make the ContextParallel before TrainingArguments"):
        cp.attach(trainer)
    trainer.args.distributed_state.num_processes = 1
    cp.free()
