"""Checkpoints: the files in a folder, how a run resumes, and what it reports about rounding."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from helpers import ROOT, drive, drive_each

from a2d_mpi.experiments.checkpoint import State, load, resumed, save
from a2d_mpi.gpt.config import GPTConfig

CONFIG, RUN = GPTConfig(4, 1, 2, 1, 4), {"seed": "0"}
TEXT = ROOT / "LICENSE"
TRAIN = [TEXT, "--layers", "1", "--width", "8", "--nheads", "2", "--seqlen", "40", "--steps", "9"]


def state(step, **changes):
    n = CONFIG.parameters
    arrays = np.full(n, float(step)), np.zeros((2, n)), np.ones(step), np.ones(step)
    return replace(State(CONFIG, RUN, *arrays), **changes)


def damage(path):
    path.write_bytes(path.read_bytes()[:-100])
    return path


def names(folder):
    return sorted(str(x.relative_to(folder)) for x in folder.rglob("*"))


def contents(folder):
    return {x.name: x.read_bytes() for x in folder.iterdir()}


def path_of(folder, step):
    return folder / f"step-{step:09}.h5"


def test_keeps_all_but_its_own_earlier_ones(tmp_path):
    """A run deletes only its own earlier checkpoints, never other, damaged or later ones."""
    for step in (2, 4):
        save(tmp_path, state(step))
    save(tmp_path, state(3, run={"seed": "1"}))
    save(tmp_path, state(5, config=replace(CONFIG, layers=2)))
    for step in (7, 8, 9):
        damage(save(tmp_path, state(step, run={"seed": "2"})))
    for step in (6, 7):
        assert load(save(tmp_path, state(step))).step == step
    kept = [3, 5, 6, 7, 8, 9]
    assert names(tmp_path) == [path_of(tmp_path, x).name for x in kept]


def test_goes_on_from_the_latest_that_is_whole(tmp_path, capsys):
    for step in (2, 4):
        save(tmp_path, state(step))
    damage(path_of(tmp_path, 4))
    before = contents(tmp_path)
    choose = "has checkpoints; --resume continues from the latest"
    for config, run, resume, told in (
        (CONFIG, RUN, False, choose),
        (CONFIG, {"seed": "1"}, True, "has other options: seed was 0, now 1"),
        (replace(CONFIG, layers=3), RUN, True, "has other options: layers was 1, now 3"),
    ):
        with pytest.raises(ValueError, match=told):
            resumed(tmp_path, config, run, resume)
        assert contents(tmp_path) == before
    assert capsys.readouterr().err == ""
    assert resumed(tmp_path, CONFIG, RUN, True).step == 2
    told = capsys.readouterr().err
    assert told.startswith("renamed to step-000000004.h5.damaged, because ")
    assert str(path_of(tmp_path, 4)) in told and told.count("\n") == 1
    assert [*contents(tmp_path).values()] == [*before.values()]


def test_does_not_begin_again(tmp_path):
    """If all checkpoints are damaged, a run stops."""
    for step in (8, 9):
        save(tmp_path, state(step))
        damage(path_of(tmp_path, step))
    before = contents(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no complete checkpoint: .*000009"):
            resumed(tmp_path, CONFIG, RUN, True)
        assert contents(tmp_path) == before
    for step in (8, 9):  # renamed ones stand for a run, too
        path_of(tmp_path, step).rename(path_of(tmp_path, step).with_suffix(".h5.damaged"))
    with pytest.raises(ValueError, match="no complete checkpoint: damaged ones were renamed"):
        resumed(tmp_path, CONFIG, RUN, True)


def test_damage_is_told(tmp_path):
    """A file with another number than was written, or no checkpoint, is refused in one line."""
    path = save(tmp_path, state(3))
    with h5py.File(path, "r+") as file:
        file["weights"][-1] += 1
    with pytest.raises(OSError, match=f"^cannot read {path} as HDF5: .*its checksum does not"):
        load(path)
    for name in ("config", "run", "ranges", "sha256"):
        for text in ('{"layers": ', '{"a": 1}', 3.0):
            path = save(tmp_path, state(3))
            with h5py.File(path, "r+") as file:
                file.attrs[name] = text
            with pytest.raises(OSError, match=f"^cannot read {path} as HDF5: it is damaged"):
                load(path)


def test_says_what_computed_which_steps(tmp_path):
    """Files have ranges of steps by grid and kernel, and a line reports a change of rounding."""
    train = [*TRAIN, "--separator", "", "--every", "2", "--folder", tmp_path / "run"]
    log = tmp_path / "log.h5"
    other = ["--rows", "2", "--kernel", "numpy", "--output", log]
    drive("train.py gpt", 2, *train)
    path_of(tmp_path / "run", 9).unlink()  # as if the run had been killed after step 8
    done, found = drive_each([
        ("train.py gpt", [*train, "--resume", *other], []),
        ("train.py gpt", [*train, "--folder", tmp_path / "wild", "--rate", "1e6"], []),
    ], 2)  # fmt: skip
    assert [code for code, _ in found] == [0, 1], done.stderr
    assert done.stderr.count("rows was 1, now 2; cols was 2, now 1") == 1
    assert done.stderr.count("rounding differs from an uninterrupted run") == 1
    ranges = load(path_of(tmp_path / "run", 9)).ranges
    assert [(x["begin"], x["end"], x["rows"]) for x in ranges] == [(0, 8, 1), (8, 9, 2)]
    assert all(x["kernel"] in ("numpy", "numba") and x["blas"] and x["cpu"] for x in ranges)
    with h5py.File(log) as file:
        assert [dict(file[f"ranges/{i}"].attrs) for i in range(2)] == ranges
        assert file["config"].attrs["kernel"] == "numpy" and file["config"].attrs["rows"] == 2
    # A loss that is not finite ends the training, and its checkpoints stay.
    assert "the loss is nan; the training ends, and the checkpoints in" in done.stderr
    left = [load(x) for x in sorted(Path(tmp_path, "wild").glob("*.h5"))]
    assert left and all(np.isfinite(x.weights).all() for x in left)


def test_reader_beside_a_run_that_goes_on(tmp_path, monkeypatch):
    """If the run removes a checkpoint that a reader has listed, the reader lists again."""
    from a2d_mpi.experiments import checkpoint

    save(tmp_path, state(2))

    def late(path, real=load):
        if path.name == path_of(tmp_path, 2).name:
            save(tmp_path, state(4))
            path.unlink()
        return real(path)

    monkeypatch.setattr(checkpoint, "load", late)
    found, refused = checkpoint.latest(tmp_path)
    assert found.step == 4 and not refused
