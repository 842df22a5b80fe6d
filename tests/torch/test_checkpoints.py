"""Checkpoints of drivers/train.py: folders of transformers, how a run resumes, what it reports.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import json
import os
import re
import shutil

import pytest
import torch
import transformers
from helpers import ROOT, drive, drive_each, launch

from a2d_mpi.core.atomic import locked
from a2d_mpi.experiments import checkpoint
from a2d_mpi.experiments.checkpoint import RUN, State, latest, load, resumed, save
from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import TRAINING_SCHEMA

TEXT = ROOT / "LICENSE"
TRAIN = ["llama-tiny", TEXT, "--seqlen", 64, "--separator", r"\n\n", "--warmup-steps", 2,
         "--kernel", "numpy", "--check", "none"]  # fmt: skip
SETTINGS = {"rows": 1}
LONG = 600  # s: PyTorch takes long to import on busy machines


def state(step, seed="0"):
    made = State({"seed": seed})
    for i in range(step):
        made.add_step(1 / (i + 1), [0.1 * i], SETTINGS)
    return made


def keep(folder, step, seed="0"):
    """Write a checkpoint without a model; return its folder."""
    save(folder, state(step, seed), lambda x: (x / "weights").write_text(f"{step}"))
    return path_of(folder, step)


def damage(path):
    (path / "weights").write_text("x")


def path_of(folder, step):
    return folder / f"step-{step:09}"


def names(folder):
    return sorted(x.name for x in folder.iterdir())


def test_keeps_all_but_its_own_earlier_ones(tmp_path):
    """A run deletes only its own earlier checkpoints, never other, damaged or later ones."""
    for step, seed in ((2, "0"), (4, "0"), (3, "1")):
        keep(tmp_path, step, seed)
    for step in (7, 8, 9):
        (keep(tmp_path, step, "2") / RUN).write_text("")
    (path_of(tmp_path, 1)).mkdir()
    assert load(keep(tmp_path, 6)) == state(6)
    kept = [path_of(tmp_path, x).name for x in (1, 3, 4, 6, 7, 8, 9)]
    assert names(tmp_path) == kept
    keep(tmp_path, 7)  # it is there: a rank that died since has written it
    assert names(tmp_path) == [x for x in kept if x != path_of(tmp_path, 4).name]
    assert (path_of(tmp_path, 7) / RUN).read_text() == ""


def test_goes_on_from_the_latest_that_is_whole(tmp_path, capsys):
    for step in (2, 4):
        keep(tmp_path, step)
    damage(path_of(tmp_path, 4))
    before = names(tmp_path)
    for run, resume, told in (
        ({"seed": "0"}, False, "has checkpoints; --resume continues from the latest"),
        ({"seed": "1"}, True, "has other options: seed was 0, now 1"),
    ):
        with pytest.raises(ValueError, match=told):
            resumed(tmp_path, run, resume)
        assert names(tmp_path) == before
    assert capsys.readouterr().err == ""
    assert resumed(tmp_path, {"seed": "0"}, True) == (path_of(tmp_path, 2), state(2))
    told = capsys.readouterr().err
    assert told.startswith("renamed to step-000000004.damaged, because ") and told.count("\n") == 1
    assert "the checksum of weights does not match" in told
    assert names(tmp_path) == [*before[:1], "step-000000004.damaged"]
    damage(path_of(tmp_path, 2))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no complete checkpoint: .*000002"):
            resumed(tmp_path, {"seed": "0"}, True)
    shutil.rmtree(path_of(tmp_path, 2))
    with pytest.raises(ValueError, match="no complete checkpoint: damaged ones were renamed"):
        resumed(tmp_path, {"seed": "0"}, True)
    assert resumed(tmp_path / "empty", {"seed": "0"}, False) == (None, None)


def test_damage_is_told(tmp_path):
    """A folder with other numbers, other files, or no history is refused in one line."""

    def edited(path, **changes):
        tree = json.loads((path / RUN).read_text())
        (path / RUN).write_text(json.dumps(tree | changes))

    for change in (
        damage,
        lambda x: (x / "weights").unlink(),
        lambda x: (x / RUN).unlink(),
        lambda x: (x / RUN).write_text((x / RUN).read_text()[:-3]),
        lambda x: (x / RUN).write_text("[3]"),
        lambda x: edited(x, losses=[1.0, 0.5, 0.25]),
        lambda x: edited(x, files={}),
    ):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "run").mkdir()
        path = keep(tmp_path / "run", 3)
        change(path)
        with pytest.raises(OSError, match=f"^{path} is damaged: ") as told:
            load(path)
        assert "\n" not in str(told.value)
        found, _, refused = latest(tmp_path / "run")
        assert found is None and [*refused] == [path]


def test_reader_beside_a_run_that_goes_on(tmp_path, monkeypatch):
    """If the run removes a checkpoint that a reader has listed, the reader lists again."""
    keep(tmp_path, 2)

    def late(path, real=load):
        if path == path_of(tmp_path, 2):
            keep(tmp_path, 4)
            shutil.rmtree(path)
        return real(path)

    monkeypatch.setattr(checkpoint, "load", late)
    found, history, refused = latest(tmp_path)
    assert found == path_of(tmp_path, 4) and history.step == 4 and not refused


def test_unreadable_checkpoints_are_not_damaged(tmp_path, monkeypatch):
    """A checkpoint that this process may not read might be whole: it is not renamed."""
    keep(tmp_path, 2)
    keep(tmp_path, 4)

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "sha256", forbidden)
    before = names(tmp_path)
    with pytest.raises(PermissionError):
        resumed(tmp_path, {"seed": "0"}, True)
    assert names(tmp_path) == before


# Calls 0 to 6 write step 3, calls 7 to 13 write step 4, and then step 2 is removed.
@pytest.mark.parametrize("call", [0, 1, 3, 4, 5, 11, 12, 14, 15])
def test_killed_while_writing(tmp_path, call):
    """Whenever a rank is killed, a checkpoint is complete or not there, and nothing is left."""
    keep(tmp_path, 2)
    code = f"""
import os, shutil, sys
sys.path[:0] = {[str(ROOT / "tests" / "torch"), str(ROOT / "tests" / "support")]!r}
from pathlib import Path
from a2d_mpi.core.atomic import locked
from a2d_mpi.experiments.checkpoint import State, save
calls = 0
def counted(real):
    def call(*given, **options):
        global calls
        calls += 1
        if calls == {call + 1}:
            os._exit(9)
        return real(*given, **options)
    return call
for owner, name in ((os, "mkdir"), (os, "fsync"), (os, "rename"), (shutil, "rmtree")):
    setattr(owner, name, counted(getattr(owner, name)))
state = State({{"seed": "0"}})
folder = Path({str(tmp_path)!r})
with locked(folder):
    for step in (3, 4):
        while state.step < step:
            state.add_step(1.0, [0.0], {{}})
        save(folder, state, lambda x: (x / "weights").write_text("1"))
"""
    launch(0, "-c", code, timeout=60, code=9)
    _, history, refused = latest(tmp_path)
    assert not refused and history.step == (2 if call < 5 else 3 if call < 12 else 4)
    keep(tmp_path, 5)
    with locked(tmp_path):
        pass
    assert not [x for x in names(tmp_path) if x.startswith(".")], names(tmp_path)


def bits(folder, step):
    """Return all bits of a checkpoint but its seconds: weights, moments and losses."""
    path = path_of(folder, step)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    moments = torch.load(path / "optimizer.pt", weights_only=True)
    tensors = [*model.state_dict().values()]
    tensors += [y for x in moments["state"].values() for y in x.values()]
    return [x.numpy().tobytes() for x in tensors], load(path).losses, moments["param_groups"]


def test_resumes(tmp_path):
    """A resumed run has the bits of one without a break, on other grids the numbers."""
    options = [*TRAIN, "--steps", 6, "--every", 2]

    def of(name, *more):
        return "train.py", [*options, "--folder", tmp_path / name, *more], []

    done, found = drive_each([of("whole"), of("other")], 2, timeout=LONG)
    assert [code for code, _ in found] == [0, 0], done.stderr
    assert names(tmp_path / "whole") == ["step-000000004", "step-000000006"]
    expected = bits(tmp_path / "whole", 6)
    for name in ("cut", "damaged", "grid", "ranks"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
    for name in ("cut", "grid", "ranks", "other"):
        shutil.rmtree(path_of(tmp_path / name, 6))
    weights = path_of(tmp_path / "damaged", 6) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    cases = [of(x, "--resume") for x in ("cut", "damaged", "whole")]
    cases.append(of("grid", "--resume", "--cols", 2, "--output", tmp_path / "grid.h5"))
    cases.append(of("other", "--resume", "--rate", 0.1))
    done, found = drive_each(cases, 2, timeout=LONG)
    assert [code for code, _ in found] == [0, 0, 0, 0, 2], done.stderr
    for name in ("cut", "damaged"):
        assert bits(tmp_path / name, 6) == expected
    assert names(tmp_path / "damaged") == [*names(tmp_path / "whole"), "step-000000006.damaged"]
    assert done.stderr.count("because") == 1 and "nothing to do" in found[2][1]
    said = [x for x in done.stderr.splitlines() if x.startswith("train.py: ")]
    resumed = ["train.py: resumes after step 4 of 6"] * 3
    assert [x for x in said if "resumes after step 4" in x] == resumed, said
    said = [x for x in said if not re.match("train.py: (resumes|step) ", x)]
    assert len(said) == 2 and "rows was 2, now 1; cols was 1, now 2: from now on" in said[0]
    assert "has other options: rate was 0.001, now 0.1" in said[1]
    drive("train.py", 3, *options, "--folder", tmp_path / "ranks", "--resume", timeout=LONG)
    for name in ("grid", "ranks"):
        losses = load(path_of(tmp_path / name, 6)).losses
        assert losses[:4] == expected[1][:4]
        assert losses == pytest.approx(expected[1], rel=1e-5)
    ranges = load(path_of(tmp_path / "ranks", 6)).ranges
    assert [(x["begin"], x["end"], x["ranks"]) for x in ranges] == [(0, 4, 2), (4, 6, 3)]
    run = read_file(tmp_path / "grid.h5", TRAINING_SCHEMA)
    assert [x["rows"] for x in run["ranges"].values()] == [2, 1] and len(run["loss"]) == 6


def test_ranks_of_other_nodes_need_no_folder(tmp_path):
    """Only rank 0 reads and writes checkpoints."""
    options = [*TRAIN, "--folder", tmp_path / "run", "--every", 2]
    drive("train.py", 2, *options, "--steps", 4, timeout=LONG)
    shutil.rmtree(path_of(tmp_path / "run", 4))
    hidden = f"""
import builtins
real = builtins.open
def hide(file, *args, **kwargs):
    if rank and str(file).startswith({str(tmp_path)!r}):
        raise OSError(f"rank {{rank}} opens {{file}}")
    return real(file, *args, **kwargs)
builtins.open = hide
"""
    drive("train.py", 2, *options, "--steps", 4, "--resume", sabotage=hidden, timeout=LONG)
    assert load(path_of(tmp_path / "run", 4)).step == 4


# Files cannot become larger while a checkpoint is written; MPI needs files, too.
FULL = """
import resource
from a2d_mpi.experiments import checkpoint
real = checkpoint.new_folder
def limited(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    return real(path)
checkpoint.new_folder = limited
"""


def test_full_disk(tmp_path):
    """If a checkpoint cannot be written, the job ends, and earlier ones stay."""
    options = [*TRAIN, "--folder", tmp_path / "run", "--every", 2, "--steps", 4]
    drive("train.py", 2, *options, timeout=LONG)
    shutil.rmtree(path_of(tmp_path / "run", 4))
    before = bits(tmp_path / "run", 2)
    done = drive("train.py", 2, *options, "--resume", sabotage=FULL, timeout=LONG, code=2)
    assert done.stderr.count("train.py: error: ") == 1 and "Traceback" not in done.stderr
    assert f"train.py: error: cannot write {path_of(tmp_path / 'run', 4)}: " in done.stderr
    assert names(tmp_path / "run") == ["step-000000002"] and bits(tmp_path / "run", 2) == before


def test_not_finite(tmp_path):
    """A loss that is not finite ends the training, and its checkpoints stay."""
    done = drive("train.py", 2, *TRAIN, "--folder", tmp_path, "--every", 1, "--steps", 30,
                 "--rate", 1e6, "--clip", 0, timeout=LONG, code=1)  # fmt: skip
    assert "the training ends, and its checkpoints stay" in done.stderr
    for path in tmp_path.iterdir():
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        assert all(x.isfinite().all() for x in model.parameters())
    assert len(os.listdir(tmp_path)) in (1, 2)
