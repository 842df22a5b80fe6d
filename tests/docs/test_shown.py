"""What pages show is what runs print: the tutorial, plan.py's output, the choice of a method."""

import os
import re
import shlex
from dataclasses import replace

import pytest
from helpers import ROOT, deeper, launch

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import Layout, parse_count
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning.memory import buffers
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.planner import best_candidate
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules import problem_of
from a2d_mpi.schedules.problem import Workload

RINGS = ("ring", "striped ring", "double ring")
TOKENS = ("64K", "256K", "1M")  # columns of the table of common sizes
PROFILES = {"H100": "h100-8", "A100": "a100-16x4"}


def read(page):
    return (ROOT / "docs" / f"{page}.md").read_text()


def blocks(page, language):
    """Return the blocks of a language in a page, and where they end."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(x[1], x.end()) for x in pattern.finditer(read(page))]


def table(page, first):
    """Return the rows of the table whose first column has this heading."""
    rows = re.search(rf"^\| {first} \|.*\n\|[-|]+\n((?:\|.*\n)+)", read(page), re.MULTILINE)[1]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def steady(text):
    """Remove from a text what differs between runs: times, errors, the CPU."""
    text = re.sub(r" *(\d\.\d+e-\d+|\d+\.\d+)", " #", text)
    return re.sub(r" +", " ", re.sub(r"(?<=, float32, ).*", "CPU", text))


def within_bounds(text):
    """Return True if each error in the text is within its bound."""
    pairs = re.findall(r"error (\S+), bound (\S+)$", text, re.MULTILINE)
    return bool(pairs) and all(float(error) <= float(bound) for error, bound in pairs)


def run(command, folder):
    """Return what a command of a page prints."""
    words = shlex.split(command.replace("$A2D", str(ROOT)).replace("\\\n", " "))
    ranks, words = (int(words[2]), words[4:]) if words[0] == "mpiexec" else (0, words[1:])
    done = launch(ranks, *words, timeout=100, cwd=folder)
    return done.stdout


def steps_of_the_tutorial():
    """Return the blocks of Python before the arguments: tutorial.py in parts, and my_mask.py."""
    end = read("tutorial").index("\n## Arguments of a plan\n")
    return [text for text, at in blocks("tutorial", "python") if at < end]


@pytest.mark.launches
def test_tutorial(tmp_path, monkeypatch):
    """A run prints what is shown below its command; the run on a grid prints nothing else."""
    *code, mask = steps_of_the_tutorial()
    (tmp_path / "tutorial.py").write_text("\n".join(code))
    (tmp_path / "my_mask.py").write_text(mask)
    (tmp_path / "numba.py").write_text("raise ImportError")  # which takes as long as all the rest
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # as the first block does
    # The first two blocks make the environment.
    _, _, *commands = blocks("tutorial", "bash")
    ends = [end for _, end in commands[1:]] + [len(read("tutorial"))]
    for (command, begin), end in zip(commands, ends):
        shown = "".join(text for text, at in blocks("tutorial", "text") if begin < at < end)
        printed = run(command, tmp_path)
        assert shown and steady(shown) in steady(printed), command
        if "tutorial.py" in command:
            assert within_bounds(printed)
        if "tutorial.py Attention2D" in command:
            assert steady(printed) == steady(shown) and within_bounds(shown)
    assert len(commands) == 3 and (tmp_path / "later_half.json").exists()


def test_steady_text_keeps_bytes():
    assert steady("1.2e-07  3 pairs") == steady("9.85e-06 3 pairs") != steady("1.2e-07 4 pairs")
    assert within_bounds("out: error 1.0e-07, bound 2.0e-07\n")
    assert not within_bounds("out: error 3.0e-07, bound 2.0e-07\n")


def test_balance_of_the_tutorials_mask():
    code, names = steps_of_the_tutorial()[-1], {}
    exec(code.partition("register_mask(")[0], names)
    config = AttentionConfig(512, 12, 32)
    shards = problem_of("attention2d", Layout(2, 2), config, names["LaterHalf"]()).queries
    assert "contiguous 1.50, 1.00 N; zigzag 1.25, 1.00 N; balanced 1.00, 1.00 N" in shards.why
    assert "1.25 with a zigzag distribution and 1.5 with a contiguous one" in " ".join(
        read("tutorial").split()
    )


def test_output_of_plan():
    """The output of plan.py is shown, and each column is explained in order."""
    (shown, at), *_ = blocks("planning", "text")
    command = [text for text, end in blocks("planning", "bash") if end < at][-1]
    assert run(command, ROOT) == shown
    heading = next(x for x in shown.splitlines() if x.startswith("method"))
    explained = [row[0].strip("`") for row in table("planning", "column")]
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
    advice = {row[0]: row[2] for row in table("choosing", "row")}
    examples = table("choosing", "example")
    assert list(advice) == list(dict.fromkeys(row[0] for row in examples))
    for name, *example in examples:
        plan, *others = predicted(*example[:6], (("attention2d",), RINGS))
        assert [plan, *others] == example[6:], name
        assert f"`{plan.rpartition(' ')[0]}`" in advice[name], name


COMMON = [(*row[:3], *x) for row in table("choosing", "GPUs") for x in zip(TOKENS, row[3:])]
FIRST = ("16 H100", "32", "8")


@pytest.mark.parametrize("size", deeper(COMMON, [x for x in COMMON if x[:3] == FIRST]))
def test_common_sizes(size):
    gpus, heads, heads_kv, tokens, shown = size
    ranks, machine = gpus.split()
    sizes = ranks, tokens, heads, heads_kv
    plan, gain = predicted(PROFILES[machine], *sizes, "causal", (RINGS,))
    assert shown == f"{plan}: {gain}"


SLICED = table("planning", "grid")


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
    for kv, *shown in table("planning", "KV heads"):
        config = AttentionConfig(1 << 17, 32, 128, int(kv), dtype="bfloat16")
        found = []
        for number in (1, 2, 4, 8, 16, 32):
            layout = Layout(8, 8, slices=(number, number))
            problem = problem_of("attention2d", layout, config, make_mask("causal", 1 << 17))
            held = buffers("attention2d", layout, problem, 27, backward=True)
            found.append(f"{held / (config.seqlen // 64 * config.nbytes('q')):.1f}")
        assert shown == found
