"""drivers/bench.py and drivers/plot.py: the contents of files, and figures."""

import re
import shutil
from collections import Counter
from functools import partial
from itertools import product

import helpers
import numpy as np
import pytest
from helpers import ROOT, read_runs

from a2d_mpi.cli.workloads import make_workload, parse_plan, plans_for
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.layout import Layout
from a2d_mpi.planning import planner
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.results.hdf5 import BENCHMARK_SCHEMA, flat, read_file

SMALL = ["--nheads", "4", "--headdim", "8", "--trials", "2"]
WORKLOAD = "full-n61-h4-kv2-d8-float32-backward"
PROFILE = ROOT / "data/results/16x1.toml"

bench = partial(helpers.drive, "bench.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run a small benchmark on 2 and 4 ranks; return its file and the second output."""
    folder = tmp_path_factory.mktemp("bench")
    output = folder / "bench.h5"
    for ranks, plans, more in ((2, "all", "--no-overlap"), (4, "ring:2x1x2", "--resume")):
        done = bench(
            ranks, "--output", output, *SMALL, "--seqlens", "61", "--masks", "causal,full",
            "--nheads-kv", "2", "--plans", f"{plans},auto", "--profile", PROFILE, "--backward",
            "--overlap", more,
        )  # fmt: skip
    return output, done.stdout


@pytest.fixture(scope="module")
def results(finished):
    """Read the file of `finished` once, because reading takes a second or two."""
    return read_runs(finished[0])


def test_everything_is_there_and_checked(finished, results):
    found = results
    assert "FAILED" not in finished[1]
    assert {result["config"]["ranks"] for result in found.values()} == {2, 4}
    assert len({result["config"]["workload"] for result in found.values()}) == 2
    for name, result in found.items():
        config, ranks = result["config"], result["config"]["ranks"]
        assert config["name"] == name
        assert config["rows"] * config["cols"] * config["heads"] == ranks
        checked = "out", "lse", "dq", "dk", "dv", "traffic", "repeat", "inputs"
        assert result["passed"] and set(result["checks"]) == set(checked)
        for phase in ("forward", "backward"):
            assert result["timings"][phase]["total"].shape == (2, ranks)
            assert result["predicted"][f"{phase} seconds"] > 0
        assert result["predicted"]["memory"] > 0
        assert result["predicted"]["machine"].startswith("16x1")
        assert result["area"].sum() * config["nheads"] // config["heads"] >= 61 * 31
        assert len(result["origin"]["hostnames"]) == ranks
    picked = Counter(
        tuple(x["config"][y] for y in ("workload", "ranks", "overlap"))
        for x in found.values() if x["config"]["picked"]
    )  # fmt: skip
    assert len(picked) == 2 * 2 + 2 and set(picked.values()) == {1}


def test_nothing_is_done_twice(finished, results, tmp_path):
    output = tmp_path / "bench.h5"
    shutil.copy(finished[0], output)
    options = ["--output", output, *SMALL, "--profile", PROFILE, "--backward"]
    options += ["--plans", "ring,attention2d:2x1", "--seqlens", "61", "--nheads-kv", "2"]
    before = {name: flat(x["timings"]) for name, x in results.items()}
    done = bench(2, *options, "--resume")
    assert "2 configurations are in" in done.stderr
    after = read_runs(output)
    assert after.keys() == before.keys()
    for name, timings in before.items():
        assert all(np.array_equal(flat(after[name]["timings"])[x], y) for x, y in timings.items())


def test_wrong_result(tmp_path):
    """A wrong result is kept, and the exit code is 1, also of the job that resumes."""
    output = tmp_path / "bench.h5"
    options = ["--output", output, *SMALL, "--seqlens", "64", "--plans", "attention2d:1x2,ring"]
    wrong = "import a2d_mpi.devices.host as b; b.merge = lambda *_: None"
    assert "FAILED" in bench(2, *options, sabotage=wrong, code=1).stdout
    assert not any(result["checks"]["out"]["passed"] for result in read_runs(output).values())
    bench(2, *options, "--resume", code=1)


def test_plots(finished, tmp_path):
    """The output's name says its format; --ranks and --workload choose what a figure shows."""
    cases = {
        "whole.svg": [finished[0]],
        "some.svg": [finished[0], "--ranks", "2", "--workload", WORKLOAD],
        "kernels.png": [ROOT / "data/results/tiles.h5", "--what", "kernels"],
        "crossover.pdf": [ROOT / "data/results/crossover", "--what", "crossover"],
    }
    words = [("plot.py results", [x, tmp_path / name, *y], []) for name, (x, *y) in cases.items()]
    done, found = helpers.drive_each(words, 0)
    assert [code for code, _ in found] == [0] * 4, done.stdout + done.stderr
    assert (tmp_path / "whole.svg").read_bytes() != (tmp_path / "some.svg").read_bytes()


def test_kernels_on_one_core(tmp_path):
    """The file has the seconds of all trials of every mask, phase and kernel."""
    path = tmp_path / "tiles.h5"
    options = ["--shapes", "40x2x8", "--trials", "2", "--output", path, "--name", "here"]
    done = helpers.drive(
        "bench.py kernels", 0, *options, "--masks", "full,sliding_window:3,3", numba=True
    )
    rows = re.findall(r"^40x2x8/sliding_window:3,3 ", done.stdout, re.MULTILINE)
    assert len(rows) == 4 and "all checks passed" in done.stdout
    found = read_file(path, BENCHMARK_SCHEMA)["figures"]["here"]
    names = set(product(("full", "sliding_window:3,3"), PHASES, ("numpy", "numba")))
    assert {tuple(x.split("/")[1:]) for x in flat(found)} == names
    assert all((x > 0).all() and len(x) == 2 for x in flat(found).values())
    assert found["right"] and found["tflop/40x2x8/full/forward"] > 0


WRONG = """
import a2d_mpi.kernels.numpy as n
backward = n.NumpyKernel.backward
def wrong(self, *given, **options):
    backward(self, *given, **options)
    for x in given[-3:]:
        x += 0.1
n.NumpyKernel.backward = wrong
"""


def test_wrong_kernels_are_seen():
    """Only the wrong results fail, also with fewer KV heads than heads; the exit code is 1."""
    options = ["--shapes", "40x4x8", "--nheads-kv", "2", "--trials", "1", "--masks", "causal"]
    done = helpers.drive("bench.py kernels", 0, *options, sabotage=WRONG, code=1)
    failed = re.findall(r"FAILED 40x4x8/causal, numpy, (\w+): error 1.00e-01", done.stdout)
    assert failed == ["dq", "dk", "dv"] == re.findall(r"FAILED .*, (\w+):", done.stdout)


def test_study(finished, results):
    done = helpers.drive("plot.py", 0, "study", finished[0])
    row = r"  (\S.*) both +[\d.]+ +([\d.]+) +[\d.]+ +[\d.]+ +\d* +passed(.*)"
    rows = re.findall(row, done.stdout)  # plan, ratio, whether it is the pick
    assert len(rows) == len(results) and any("in turn" in plan for plan, *_ in rows)
    assert "1.00" in {ratio for _, ratio, pick in rows if "picked" in pick}
    assert f"worst of {len(results)})" in done.stdout
    assert re.search(r"of the fastest: \d of 4\n", done.stdout)


# What needs no ranks.


def test_parse_plan():
    assert parse_plan("ring", 6) == ("ring", Layout(6, 1, 1))
    assert parse_plan("attention2d", 6) == ("attention2d", Layout(2, 3, 1))
    assert parse_plan("double_ring:3x2", 6) == ("double ring", Layout(3, 2, 1))
    assert parse_plan("striped ring:3x1x2@ucr", 6) == ("striped ring", Layout(3, 1, 2, "ucr"))
    blocks = Layout(4, 6, 1, "cru", (2, 3))
    assert parse_plan("node_aware:4x6@cru/2x3", 24) == ("node aware", blocks)
    assert parse_plan("node aware:4x6@cru/2x3", 24)[1].numbering == "cru/2x3"
    assert parse_plan("attention2d/1x1", 6) == ("attention2d", Layout(2, 3))
    with pytest.raises(ValueError, match="a double ring must be 2x3x1 or 3x2x1"):
        parse_plan("double ring:1x6", 6)


def test_auto():
    machine = read_machine(PROFILE)
    work = make_workload(
        "causal", 64, "none", nheads=8, headdim=16, dtype="float32", backward=True
    )
    found = plans_for(work, ["auto:3", "ring"], 4, machine)
    best = planner.candidates(machine, 4, work, number=3)[:3]
    assert [(c.method, c.layout) for c in found[:3]] == [(x.method, x.layout) for x in best]
    assert [c.picked for c in found] == [True, *[False] * (len(found) - 1)]
    each = plans_for(work, ["auto:each"], 4, machine)
    assert [c.method for c in each] == list(
        dict.fromkeys(x.method for x in planner.candidates(machine, 4, work, number=None))
    )
    assert {c.method for c in each} >= {"attention2d", "ring", "striped ring", "double ring"}
    assert [c.picked for c in each] == [True] + [False] * (len(each) - 1) and each[0] == found[0]
    for bad in ("auto:0", "auto:x"):
        with pytest.raises(ValueError, match="auto"):
            plans_for(work, [bad], 4, machine)


def test_names_are_different():
    plans = ["all", "ring", "attention2d"]
    names = [
        c.name
        for mask, backward, overlap, kv, ranks in product(
            ("full", "causal"), (False, True), (False, True), (8, 1), (4, 8)
        )
        for c in plans_for(
            make_workload(mask, 64, "none", nheads=8, headdim=16, nheads_kv=kv, backward=backward,
                          overlap=overlap),
            plans, ranks,
        )
    ]  # fmt: skip
    assert len(set(names)) == len(names) > 300 and not any("/" in x or " " in x for x in names)
