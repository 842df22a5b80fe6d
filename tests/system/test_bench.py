"""drivers/bench.py and drivers/plot.py: the contents of files, figures, and refusals."""

import os
import re
import shutil
from functools import partial
from itertools import product

import h5py
import helpers
import numpy as np
import pytest
from helpers import DEEPER, ROOT, assert_refused

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.bench_kernel import RandomTile
from a2d_mpi.experiments.hdf5 import flat, read_file
from a2d_mpi.experiments.results import (
    BENCHMARK_SCHEMA,
    TICKS,
    TIMED_PARTS,
    read_benchmark,
)
from a2d_mpi.experiments.sweep import Case, parse_plan, plans_for
from a2d_mpi.kernels.numpy import NumpyKernel
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning import planner
from a2d_mpi.planning.profile import read_machine

SMALL = ["--nheads", "4", "--headdim", "8", "--trials", "2"]
WORKLOAD = "full-n61-h4-kv2-d8-float32-backward"
PROFILE = ROOT / "data/results/16x1.toml"

bench = partial(helpers.drive, "bench.py")
plot = partial(helpers.drive, "plot.py", 0, "results")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run a small benchmark on 2 and 4 ranks; return its file and the second output."""
    folder = tmp_path_factory.mktemp("bench")
    output = folder / "bench.h5"
    for ranks in (2, 4):
        done = bench(
            ranks, "--output", output, *SMALL, "--seqlens", "61", "--masks", "causal,full",
            "--nheads-kv", "2", "--plans", "all,auto",
            "--profile", PROFILE, "--backward", "--spans", "all",
            "--overlap", *(["--no-overlap"] if ranks == 2 else ["--resume"]),
        )  # fmt: skip
    return output, done.stdout


@pytest.fixture(scope="module")
def results(finished):
    """Read the file of `finished` once, because reading takes a second or two."""
    return read_benchmark(finished[0])


@pytest.fixture(scope="module")
def workload(finished, results):
    """Return a file with the runs of one workload, for tests that read it often."""
    path = finished[0].with_name("workload.h5")
    with h5py.File(finished[0]) as old, h5py.File(path, "w") as new:
        new.attrs.update(old.attrs)
        for name in old.keys() - {"runs"}:
            old.copy(name, new)
        for name, run in old["runs"].items():
            if results[name].config["workload"] == WORKLOAD:
                old.copy(run, new.require_group("runs"), name)
    return path


def test_everything_is_there_and_checked(finished, results):
    found = results
    assert "FAILED" not in finished[1]
    assert {result.config["ranks"] for result in found.values()} == {2, 4}
    assert len({result.config["workload"] for result in found.values()}) == 2
    for name, result in found.items():
        config, ranks = result.config, result.config["ranks"]
        assert config["name"] == name
        assert config["rows"] * config["cols"] * config["heads"] == ranks
        assert result.passed and set(result.checks) == {
            *("out", "lse", "dq", "dk", "dv", "traffic", "repeat", "inputs")
        }
        for phase in ("forward", "backward"):
            assert result.timings[f"{phase}/total"].shape == (2, ranks)
            assert result.predicted[f"{phase} seconds"] > 0
            assert result.predicted[f"{phase} lower bound"] >= 0
        assert result.predicted["memory"] > 0 and result.predicted["machine"].startswith("16x1")
        assert result.area.sum() * config["nheads"] // config["heads"] >= 61 * 31
        assert len(result.provenance["hostnames"]) == ranks
    picked = {}
    for result in found.values():
        if result.config["picked"]:
            key = tuple(result.config[x] for x in ("workload", "ranks", "overlap"))
            picked[key] = picked.get(key, 0) + 1
    assert len(picked) == 2 * 2 + 2 and set(picked.values()) == {1}


def test_spans(results):
    for result in results.values():
        for phase, spans in result.spans.items():
            total = result.timings[f"{phase}/total"]
            for rank in range(result.config["ranks"]):
                mine = spans[spans["rank"] == rank]
                assert (mine["start"] >= 0).all() and (mine["end"] >= mine["start"]).all()
                whole = mine[mine["part"] == TIMED_PARTS.index("total")]
                assert len(whole) == 1
                trial = int(np.abs(total[:, rank] - whole["end"][0]).argmin())
                assert whole["end"][0] == pytest.approx(
                    total[trial, rank], rel=1e-6, abs=1 / TICKS
                )
                for part in TIMED_PARTS:
                    these = mine[mine["part"] == TIMED_PARTS.index(part)]
                    seconds = result.timings[f"{phase}/{part}"][trial, rank]
                    found = (these["end"] - these["start"]).sum(dtype=float)
                    assert found == pytest.approx(seconds, rel=1e-3, abs=1 / TICKS)


def test_nothing_is_done_twice(finished, results, tmp_path):
    output = tmp_path / "bench.h5"
    shutil.copy(finished[0], output)
    (tmp_path / ".bench.h5.123.tmp").write_text("left by a job that was killed")
    options = ["--output", output, *SMALL, "--profile", PROFILE, "--backward"]
    options += ["--plans", "ring,attention2d:2x1", "--seqlens", "61", "--nheads-kv", "2"]
    before = {name: x.timings for name, x in results.items()}
    done = bench(2, *options, "--resume")
    assert "2 configurations are in" in done.stdout
    after = read_benchmark(output)
    assert after.keys() == before.keys()
    for name, timings in before.items():
        assert all(np.array_equal(after[name].timings[x], y) for x, y in timings.items())
    assert sorted(x.name for x in tmp_path.iterdir()) == ["bench.h5"]


@pytest.mark.parametrize("which, kept", [("picked", 1), pytest.param("none", 0, marks=DEEPER)])
def test_spans_of_some(tmp_path, which, kept):
    bench(
        2, "--output", tmp_path / "bench.h5", *SMALL, "--seqlens", "64", "--plans", "auto:2",
        "--profile", PROFILE, "--spans", which,
    )  # fmt: skip
    found = read_benchmark(tmp_path / "bench.h5").values()
    assert len(found) == 2 and sum(bool(x.spans) for x in found) == kept
    assert all(x.config["picked"] for x in found if x.spans)
    # One number of ranks: all is drawn but what is not there.
    done = plot(tmp_path / "bench.h5", "--output", tmp_path / "drawn", "--format", "svg")
    assert "% of ideal" in (tmp_path / "drawn" / "scaling.svg").read_text()
    assert "formula" in (tmp_path / "drawn" / "bytes.svg").read_text()
    drawn = {f"{x}.svg" for x in FIGURES if kept or x != "timeline"}
    assert {x.name for x in (tmp_path / "drawn").iterdir()} == drawn
    assert ("not drawn: timeline: " in done.stderr) == (not kept)


def test_wrong_result(tmp_path):
    """A wrong result is kept, and the exit code is 1, also of the job that resumes."""
    output = tmp_path / "bench.h5"
    options = ["--output", output, *SMALL, "--seqlens", "64", "--plans", "attention2d:1x2,ring"]
    wrong = "import a2d_mpi.devices.host as b; b.merge = lambda *_: None"
    assert "FAILED" in bench(2, *options, sabotage=wrong, code=1).stdout
    assert not any(result.checks["out"].passed for result in read_benchmark(output).values())
    bench(2, *options, "--resume", code=1)


# Plots.

FIGURES = ("scaling", "phases", "bytes", "model", "timeline")


@pytest.mark.thorough
def test_plots_are_made_and_repeat(finished, tmp_path):
    for folder, what in (("first", FIGURES), ("second", ("timeline", "model"))):
        plot(finished[0], "--output", tmp_path / folder, "--what", ",".join(what))
    names = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert {x.name for x in (tmp_path / "first").iterdir()} == names
    assert len(list((tmp_path / "second").iterdir())) == 4
    for name in names:
        first, again = (tmp_path / "first" / name).read_bytes(), tmp_path / "second" / name
        assert not again.exists() or again.read_bytes() == first
        assert len(first) > 5000
        assert first.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


@pytest.mark.thorough
def test_plots_of_what_is_chosen(finished, results, tmp_path):
    name = next(x for x in results if x.startswith("ring-2x1x1"))
    plot(
        finished[0], "--output", tmp_path, "--what", "timeline,phases", "--format", "svg",
        "--run", name, "--ranks", "2", "--phase", "backward",
        "--workload", WORKLOAD,
    )  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["phases.svg", "timeline.svg"]


def test_kernels_on_one_core(tmp_path):
    """The file has the seconds of all trials of every mask, phase and kernel."""
    path = tmp_path / "tiles.h5"
    options = ["--shapes", "40x2x8", "--trials", "2", "--output", path, "--name", "here"]
    done = helpers.drive(
        "bench.py kernels", 0, *options, "--masks", "full,sliding_window:3,3", numba=True
    )
    ratios = re.findall(r"^40x2x8/sliding_window:3,3 .* \d+\.\d\d$", done.stdout, re.MULTILINE)
    assert len(ratios) == 4 and "all checks passed" in done.stdout
    found = read_file(path, BENCHMARK_SCHEMA)["figures"]["here"]
    names = set(product(("full", "sliding_window:3,3"), PHASES, ("numpy", "numba")))
    assert {tuple(x.split("/")[1:]) for x in flat(found)} == names
    assert all((x > 0).all() and len(x) == 2 for x in flat(found).values())
    assert found["right"] and found["tflop/40x2x8/full/forward"] > 0


def test_wrong_results_are_seen():
    """Wrong results are found for fewer queries than keys and fewer KV heads than heads."""
    tile = RandomTile(9, 20, 4, 2, 8, Causal())
    for call in tile.calls(NumpyKernel(np.float32, tile.softmax_scale)).values():
        call()
    assert all(x.passed and x.error < 1e-5 for x in tile.checks().values())
    for name, x in zip(("out", "dq", "dk", "dv"), (tile.out, *tile.gradients)):
        x += 0.1
        assert name in {name for name, check in tile.checks().items() if not check.passed}
        x -= 0.1


def test_study(finished, results, tmp_path):
    done = helpers.drive("plot.py", 0, "study", finished[0])
    row = r"  (\S.*) (forward|both) +[\d.]+ +([\d.]+) +[\d.]+ +[\d.]+ +\d* +passed(.*)"
    rows = re.findall(row, done.stdout)  # plan, phase, ratio, whether it is the pick
    assert len(rows) == 2 * len(results) and {x[1] for x in rows} == {"forward", "both"}
    assert any("in turn" in x[0] for x in rows)
    assert "1.00" in {x[2] for x in rows if "picked" in x[3]}
    assert f"worst of {len(results)})" in done.stdout
    assert re.search(r"of the fastest: \d of 4\n", done.stdout)
    done = helpers.drive("plot.py", 0, "study", tmp_path / "none.h5", code=2)
    assert_refused(done, "none.h5")


# What needs no ranks.


def test_parse_plan():
    assert parse_plan("ring", 6) == ("ring", Layout(6, 1, 1))
    assert parse_plan("attention2d", 6) == ("attention2d", Layout(2, 3, 1))
    assert parse_plan("double_ring:3x2", 6) == ("double ring", Layout(3, 2, 1))
    assert parse_plan("striped ring:3x1x2@ucr", 6) == (
        "striped ring",
        Layout(3, 1, 2, "ucr"),
    )
    blocks = Layout(4, 6, 1, "cru", (2, 3))
    assert parse_plan("node_aware:4x6@cru/2x3", 24) == ("node aware", blocks)
    assert parse_plan("node aware:4x6@cru/2x3", 24)[1].numbering == "cru/2x3"
    assert parse_plan("attention2d/1x1", 6) == ("attention2d", Layout(2, 3))
    with pytest.raises(ValueError, match="a double ring must be 2x3x1 or 3x2x1"):
        parse_plan("double ring:1x6", 6)


def test_auto(tmp_path):
    machine = read_machine(PROFILE)
    case = Case(64, 8, 16, mask="causal", backward=True)
    found = plans_for(case, ["auto:3", "ring"], 4, machine=machine)
    best = planner.candidates(machine, 4, case.work(), number=3)[:3]
    assert [(c.method, c.layout) for c in found[:3]] == [(x.method, x.layout) for x in best]
    assert [c.picked for c in found] == [True, *[False] * (len(found) - 1)]
    each = plans_for(case, ["auto:each"], 4, machine=machine)
    assert [c.method for c in each] == list(
        dict.fromkeys(x.method for x in planner.candidates(machine, 4, case.work(), number=None))
    )
    assert {c.method for c in each} >= {"attention2d", "ring", "striped ring", "double ring"}
    assert [c.picked for c in each] == [True] + [False] * (len(each) - 1) and each[0] == found[0]
    for bad in ("auto:0", "auto:x"):
        with pytest.raises(ValueError, match="auto"):
            plans_for(case, [bad], 4, machine=machine)


def test_names_are_different():
    configurations = [
        c
        for mask in ("full", "causal")
        for backward in (False, True)
        for kv in (8, 1)
        for ranks in (4, 8)
        for c in plans_for(
            Case(64, 8, 16, kv, mask=mask, backward=backward),
            ["all", "ring", "attention2d"],
            ranks,
            (True, False),
        )
    ]
    assert len({c.name for c in configurations}) == len(configurations) > 300
    assert not any("/" in c.name or " " in c.name for c in configurations)
