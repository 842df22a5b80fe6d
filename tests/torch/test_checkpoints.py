"""Checkpoints of drivers/train.py: folders of transformers, how a run resumes, what it reports.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import json
import re
import shutil

import pytest
import torch
import transformers
from helpers import ROOT, drive_each, launch
from safetensors.torch import load_file

from a2d_mpi.experiments import checkpoint
from a2d_mpi.experiments.checkpoint import RUN, State, latest, load, resumed, save
from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.models import checkpoint_of, open_model
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


def test_killed_while_writing(tmp_path):
    """Whenever a rank is killed, a checkpoint is complete or not there."""
    # Calls 0 to 6 write step 3, calls 7 to 13 write step 4, and then step 2 is removed.
    calls = [0, 1, 3, 4, 5, 11, 12, 14, 15]
    for call in calls:
        (tmp_path / f"{call}").mkdir()
        keep(tmp_path / f"{call}", 2)
    code = f"""
import os, shutil
from pathlib import Path
from a2d_mpi.experiments.checkpoint import State, save
def counted(real):
    def call(*given, **options):
        global calls
        calls += 1
        if calls == last + 1:
            os._exit(9)
        return real(*given, **options)
    return call
for owner, name in ((os, "mkdir"), (os, "fsync"), (os, "rename"), (shutil, "rmtree")):
    setattr(owner, name, counted(getattr(owner, name)))
for last in {calls}:
    calls = 0
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    state = State({{"seed": "0"}})
    folder = Path({str(tmp_path)!r}, str(last))
    for step in (3, 4):
        while state.step < step:
            state.add_step(1.0, [0.0], {{}})
        save(folder, state, lambda x: (x / "weights").write_text("1"))
    os._exit(0)
"""
    assert launch(0, "-c", code, timeout=60).stdout.split() == ["9"] * len(calls)
    for call in calls:
        folder = tmp_path / f"{call}"
        _, history, refused = latest(folder)
        assert not refused and history.step == (2 if call < 5 else 3 if call < 12 else 4), call


def bits(folder, step):
    """Return all bits of a checkpoint but its seconds: weights, moments and losses."""
    path = path_of(folder, step)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    moments = torch.load(path / "optimizer.pt", weights_only=True)
    tensors = [*model.state_dict().values()]
    tensors += [y for x in moments["state"].values() for y in x.values()]
    return [x.numpy().tobytes() for x in tensors], load(path).losses, moments["param_groups"]


# Of runs in the folder "nodes" only rank 0 sees files.  Files of runs in the folder "full" cannot
# become larger while a checkpoint is written; MPI needs files, too.
SABOTAGE = """
import builtins, contextlib, resource
from a2d_mpi.experiments import checkpoint
real_open, real_folder = builtins.open, checkpoint.new_folder
def hide(file, *args, **kwargs):
    if rank and str(file).startswith("{0}/nodes"):
        raise OSError(f"rank {{rank}} opens {{file}}")
    return real_open(file, *args, **kwargs)
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
builtins.open, checkpoint.new_folder = hide, limited
"""
BITS = {"cut": [], "damaged": [], "nodes": []}  # runs with the bits of one without a break
OTHERS = {"whole": [], "grid": ["--cols", 2], "changed": ["--rate", 0.1], "full": []}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train, and resume copies of the run, in two launches.

    Return their folder, the bits without a break, exit code and stdout by name, and the stderr
    of both launches.
    """
    path = tmp_path_factory.mktemp("runs")
    whole = [*TRAIN, "--steps", 6, "--every", 2, "--folder"]
    infinite = [*TRAIN, "--steps", 30, "--every", 1, "--rate", 1e6, "--clip", 0, "--folder"]
    cases = [("train.py", [*whole, path / "whole"], []),
             ("train.py", [*infinite, path / "infinite"], [])]  # fmt: skip
    first, (started, ended) = drive_each(cases, 2, timeout=LONG)
    assert started[0] == 0, first.stderr
    assert names(path / "whole") == ["step-000000004", "step-000000006"]
    expected, cases = bits(path / "whole", 6), {}
    for name, more in (BITS | OTHERS | {"ranks": []}).items():
        if name != "whole":
            shutil.copytree(path / "whole", path / name)
        if name not in ("whole", "damaged"):
            shutil.rmtree(path_of(path / name, 6))
        more = [*more, "--resume", "--output", path / f"{name}.h5"]
        cases[name] = "train.py", [*whole, path / name, *more], [], 2 + (name == "ranks")
    weights = path_of(path / "damaged", 6) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    done, found = drive_each([*cases.values()], 3, SABOTAGE.format(path), timeout=LONG)
    found = dict(zip(cases, found)) | {"infinite": ended}
    return path, expected, found, first.stderr, done.stderr


def test_resumes(runs):
    """A resumed run has the bits of one without a break, on other grids the numbers.

    Only rank 0 reads and writes checkpoints.
    """
    path, expected, found, _, stderr = runs
    for name in BITS:
        assert found[name][0] == 0 and bits(path / name, 6) == expected, name + stderr
    assert [found[x][0] for x in ("whole", "grid", "ranks", "changed")] == [0, 0, 0, 2], stderr
    assert names(path / "damaged") == [*names(path / "whole"), "step-000000006.damaged"]
    assert stderr.count("because") == 1 and "nothing to do" in found["whole"][1]
    said = [x for x in stderr.splitlines() if x.startswith("train.py: ")]
    assert said.count("train.py: resumes after step 4 of 6") == 6, said
    said = [x for x in said if not re.match("train.py: (resumes|steps?:?) ", x)]
    assert len(said) == 4 and "rows was 2, now 1; cols was 1, now 2: from now on" in said[0]
    assert "has other options: rate was 0.001, now 0.1" in said[1]
    assert "ranks was 2, now 3; " in said[3] and ": from now on" in said[3]
    for name in ("grid", "ranks"):
        losses = load(path_of(path / name, 6)).losses
        assert losses[:4] == expected[1][:4]
        assert losses == pytest.approx(expected[1], rel=1e-5)
    ranges = load(path_of(path / "ranks", 6)).ranges
    assert [(x["begin"], x["end"], x["ranks"]) for x in ranges] == [(0, 4, 2), (4, 6, 3)]
    run = read_file(path / "grid.h5", TRAINING_SCHEMA)
    assert [x["rows"] for x in run["ranges"].values()] == [2, 1] and len(run["loss"]) == 6


def test_model_of_a_folder_of_checkpoints(runs, tmp_path, capsys):
    """A model is taken from the latest checkpoint that is whole, and others are told."""
    path = shutil.copytree(runs[0] / "whole", tmp_path / "run")
    weights = path_of(path, 6) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    found = open_model(checkpoint_of(path))[0].state_dict()
    told = capsys.readouterr().err
    assert told.startswith(f"refused: {path_of(path, 6)} is damaged: ") and told.count("\n") == 1
    expected = load_file(path_of(path, 4) / "model.safetensors")
    assert all(torch.equal(found[x], y) for x, y in expected.items())


def test_full_disk(runs):
    """If a checkpoint cannot be written, the job ends, and earlier ones stay."""
    path, _, found, _, stderr = runs
    assert found["full"][0] == 2 and "Traceback" not in stderr
    assert f"train.py: error: cannot write {path_of(path / 'full', 6)}: " in stderr
    assert names(path / "full") == ["step-000000004"]
    assert bits(path / "full", 4) == bits(path / "whole", 4)


def test_not_finite(runs):
    """A loss that is not finite ends the training, and its checkpoints stay."""
    path, _, found, stderr, _ = runs
    assert found["infinite"][0] == 1, stderr
    assert "the training ends, and its checkpoints stay" in stderr
    for step in (path / "infinite").iterdir():
        model = transformers.AutoModelForCausalLM.from_pretrained(step)
        assert all(x.isfinite().all() for x in model.parameters())
    assert len(names(path / "infinite")) in (1, 2)
