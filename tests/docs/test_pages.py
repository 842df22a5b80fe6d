"""What pages of docs/ show is what runs print, and what the code computes."""

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
from helpers import ROOT, SAMPLE, drive, launch
from pages import blocks, found, read, run, run_code, table
from tables import made, marked

import a2d_mpi
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.core.sizes import parse_count
from a2d_mpi.experiments.sweep import parse_plan
from a2d_mpi.masks.patterns import PATTERNS, make_mask
from a2d_mpi.planning.memory import buffers
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.planner import best_candidate
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.writing import problem_of

pytestmark = pytest.mark.thorough
DOCS, START = ROOT / "docs", "docs/tutorial.md"
DRIVERS = [f"drivers/{x.name}" for x in sorted((ROOT / "drivers").glob("*.py"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


@pytest.mark.parametrize("page, number, ranks, told", [
    ("planning", None, 0, ["Layout(rows="]), ("linear", None, 0, ["{} True\n"]),  # one rank
    ("extending", 3, 0, [" [1 1 0 0 1 1 1 1]]\n", "\n33 visible pairs\n"]),
    ("masks", None, 0, [f"{sum(n * (n + 1) // 2 for n in (100, 300, 600))} visible pairs\n"]),
    ("tutorial", None, 4, ["(256, 8, 32)"]),
    ("merging", None, 4, []),  # tests/ranks/test_merging.py compares it with float64
])  # fmt: skip
def test_code(tmp_path, page, number, ranks, told):
    """The Python of a page runs, and each rank prints what it should."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    code = [x.replace("ranks=64", "ranks=4") for x in blocks(f"docs/{page}.md", "python")]
    (tmp_path / "x.py").write_text("\n".join(code) if number is None else code[number])
    done = launch(ranks, "x.py", "Attention2D", cwd=tmp_path, timeout=100)
    assert [done.stdout.count(x) for x in told] == [max(1, ranks)] * len(told), done.stdout


def test_every_page_is_listed():
    pages = {x.stem for x in DOCS.glob("*.md")} - {"README"}
    assert pages == {Path(path).stem for path, _ in LINK.findall(read("docs/README.md"))}
    listed = set(re.findall(r"^   ([\w-]+)$", read("docs/index.rst"), re.MULTILINE))
    assert listed == pages | {x.stem for x in DOCS.glob("*.rst")} - {"index"}


def test_reference_has_all_public_names_and_drivers():
    names = re.findall(r"auto(?:class|function):: ([\w.]+)$", read("docs/api.rst"), re.MULTILINE)
    assert set(a2d_mpi.__all__) == {x for x in names if "." not in x}
    shown = re.findall(r"driver-help:: (\w+)$", read("docs/drivers.rst"), re.MULTILINE)
    assert {f"drivers/{x}.py" for x in shown} == set(DRIVERS)


def test_reports_name_tests_that_exist():
    text = read("docs/never_silently_wrong.md")
    rows = re.findall(r"^\| \[.+ \d+\]\((\S+)\) .* `(\S+)::(\w+)` \|$", text, re.MULTILINE)
    assert f" {len(rows)} public reports" in text and len({x[0] for x in rows}) == len(rows)
    for link, file, name in rows:
        assert re.fullmatch(r"https://github\.com/[\w-]+/[\w.-]+/(pull|issues)/\d+", link)
        texts = [x.read_text() for x in (ROOT / "tests").rglob(file)]
        assert [x for x in texts if re.search(rf"^def {name}\(", x, re.M)], (file, name)


def test_program():
    printed = run_code(blocks("docs/architecture.md", "python")[0])
    assert printed.rstrip() in [x.rstrip() for x in blocks("docs/architecture.md", "text")]


def test_masks():
    named = re.findall(r"^\| `(\w+)` \|", read("docs/masks.md"), re.MULTILINE)
    assert named[: len(PATTERNS)] == list(PATTERNS)


def test_reading_a_result(tmp_path):
    (tmp_path / "results").mkdir()
    drive(
        "attention.py", 4, SAMPLE, "--backward", "--seqlen", "64",
        "--output", tmp_path / "results" / "local.h5",
    )  # fmt: skip
    printed = run_code("\n".join(blocks("docs/benchmarks.md", "python")), tmp_path)
    assert len(re.findall(" 1$", printed, re.MULTILINE)) == 8


# What pages show is what runs print.

RINGS = ("ring", "striped ring", "double ring")
TOKENS = ("64K", "256K", "1M")  # columns of the table of common sizes
PROFILES = {"H100": "h100-8", "A100": "a100-16x4"}


def steady(text):
    """Remove from a text what differs between runs: times, errors, the CPU."""
    text = re.sub(r" *(\d\.\d+e-\d+|\d+\.\d+)", " #", text)
    return re.sub(r" +", " ", re.sub(r"(?<=, float32, ).*", "CPU", text))


def within_bounds(text):
    """Return True if each error in the text is within its bound."""
    pairs = re.findall(r"error (\S+), bound (\S+)$", text, re.MULTILINE)
    return bool(pairs) and all(float(error) <= float(bound) for error, bound in pairs)


def test_tutorial(tmp_path, monkeypatch):
    """A run prints what is shown below its command; the run on a grid prints nothing else."""
    end = read(START).index("\n## Arguments of a plan\n")
    code = [x[1] for x in found(START, "python") if x.end() < end]
    (tmp_path / "tutorial.py").write_text("\n".join(code))
    (tmp_path / "numba.py").write_text("raise ImportError")  # which takes as long as all the rest
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # as the first block does
    # The first two blocks make the environment.
    _, _, *commands = found(START, "bash")
    ends = [x.end() for x in commands[1:]] + [len(read(START))]
    for block, end in zip(commands, ends):
        command = block[1]
        shown = "".join(x[1] for x in found(START, "text") if block.end() < x.end() < end)
        printed = run(command, tmp_path)
        assert shown and steady(shown) in steady(printed), command
        if "tutorial.py" in command:
            assert within_bounds(printed)
        if "tutorial.py Attention2D" in command:
            assert steady(printed) == steady(shown) and within_bounds(shown)
    assert len(commands) == 2


def test_output_of_plan():
    """The output of plan.py is shown, and each column is explained in order."""
    page = "docs/planning.md"
    shown = next(found(page, "text"))
    command = [x for x in found(page, "bash") if x.end() < shown.end()][-1]
    assert run(command[1]) == shown[1]
    heading = next(x for x in shown[1].splitlines() if x.startswith("method"))
    explained = [row[0].strip("`") for row in table(page, "column")]
    assert explained == re.split(r"  +", heading.strip())


def predicted(profile, ranks, tokens, heads, heads_kv, mask, families):
    """Return the planner's pick, and the times of these methods over its time."""
    machine = read_machine(ROOT / "data" / "machines" / f"{profile}.toml")
    sizes = {"nheads": int(heads), "nheads_kv": int(heads_kv), "headdim": 128}
    seqlen = parse_count(tokens)
    work = Workload(seqlen, **sizes, mask=make_mask(mask.strip("`"), seqlen), backward=True)
    best = best_candidate(machine, int(ranks), work)
    others = (
        best if best.method in x else best_candidate(machine, int(ranks), work, methods=x)
        for x in families
    )  # fmt: skip
    layout = best.layout
    plan = f"{best.method} {layout.rows}x{layout.cols}x{layout.heads}"
    if layout.slices not in (None, (1, 1)):
        plan += "*{}x{}".format(*layout.slices)
    return [plan, *(f"{x.seconds / best.seconds:.2f}" for x in others)]


def test_which_method():
    """The planner says what the examples say, and each row of the advice has an example."""
    advice = {row[0]: row[2] for row in table("docs/choosing.md", "row")}
    examples = table("docs/choosing.md", "example")
    assert list(advice) == list(dict.fromkeys(row[0] for row in examples))
    for name, *example in examples:
        plan, *others = predicted(*example[:6], (("attention2d",), RINGS))
        assert [plan, *others] == example[6:], name
        assert f"`{plan.rpartition(' ')[0]}`" in advice[name], name


def test_plans_of_others():
    """The plans that stand beside the names of other packages are plans of eight ranks."""
    plans = [x.strip("`") for *_, x in table("docs/coming_from.md", "there") if x]
    assert len(plans) == 8 and all(parse_plan(x, 8) for x in plans)


COMMON = [
    (*row[:3], *x) for row in table("docs/choosing.md", "GPUs") for x in zip(TOKENS, row[3:])
]


@pytest.mark.parametrize("size", COMMON)
def test_common_sizes(size):
    gpus, heads, heads_kv, tokens, shown = size
    ranks, machine = gpus.split()
    sizes = ranks, tokens, heads, heads_kv
    plan, gain = predicted(PROFILES[machine], *sizes, "causal", (RINGS,))
    assert shown == f"{plan}: {gain}"


SLICED = table("docs/planning.md", "grid")


@pytest.mark.parametrize("row", SLICED, ids=lambda row: " ".join(row[:2]))
def test_what_slices_gain(row):
    """Simulated seconds over those of one slice: forward and backward, for H100 and A100."""
    grid, kv, *shown = row
    layout = Layout(*map(int, grid.split("x")))
    heads, mask = 8 * layout.heads, make_mask("causal", 1 << 17)
    work = Workload(1 << 17, heads, 128, int(kv), mask=mask, backward=True)
    found = []
    for profile in ("h100-64x1", "a100-16x4"):
        machine = read_machine(ROOT / "data" / "machines" / f"{profile}.toml")
        one, *several = (
            predict(machine, "attention2d", replace(layout, slices=(x, x)), work)
            for x in (1, 2, 4, 8)
        )
        for phases in several:
            ratios = (phases[x].total.max() / one[x].total.max() for x in work.phases)
            found.append(", ".join(f"{x:.2f}" for x in ratios))
    assert shown == found


def test_buffers_of_slices():
    """Buffers of a rank over its q, with one and more slices."""
    for kv, *shown in table("docs/planning.md", "KV heads"):
        config = AttentionConfig(1 << 17, 32, 128, int(kv), dtype="bfloat16")
        found = []
        for number in (x for x in (1, 2, 4, 8, 16, 32) if x <= int(kv)):
            layout = Layout(8, 8, slices=(number, number))
            problem = problem_of("attention2d", layout, config, make_mask("causal", 1 << 17))
            held = buffers("attention2d", layout, problem, 27, backward=True)
            found.append(f"{held / (config.seqlen // 64 * config.nbytes('q')):.1f}")
        assert list(filter(None, shown)) == found


def test_committed_results_passed_their_checks():
    found = []

    def visit(name, item):
        found.extend([(path, name)] * (not item.attrs.get("passed", True)))
        count.update([path] * ("passed" in item.attrs))

    count = Counter()
    for path in (ROOT / "data/results").rglob("*.h5"):
        with h5py.File(path) as file:
            file.visititems(visit)
    # Bounds of a ring's gradients in narrow formats prove nothing: docs/wire.md says so.
    assert {x for x, _ in found} <= {ROOT / "data/results/wire/16x1.h5"}, found
    assert len(count) > 25 and count.total() > 1000


@pytest.mark.parametrize("name, arguments, rows", list(marked()), ids=lambda x: str(x)[:30])
def test_table_is_of_its_files(name, arguments, rows):
    """Numbers in tables are from their files: `python tests/docs/tables.py --write`."""
    assert rows and rows == made(name, arguments)
