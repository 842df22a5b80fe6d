"""Node-aware grids: bytes between nodes by independent counts, memory, layouts, and drivers."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers import SAMPLE, drive_each, read_runs
from machines import A100, machine

from a2d_mpi import Causal, Full
from a2d_mpi.attention.executor import mpi_tag
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.layout import Layout
from a2d_mpi.planning.layouts import layouts
from a2d_mpi.planning.machine import Link
from a2d_mpi.planning.memory import most_memory, peak_memory
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.profile import write_machine
from a2d_mpi.planning.workload import Workload
from a2d_mpi.results.tables import plan_text, summarise
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.steps import Receive, Send
from a2d_mpi.schedules.writing import problem_of, write


def on_nodes(layout, ranks_per_node):
    return layout.on_nodes(np.arange(layout.size) // ranks_per_node)


def problem(layout, dtype="float32", seqlen=None):
    work = Workload(seqlen or 20 * layout.size, 12, 16, 4, dtype=dtype, backward=True)
    return problem_of("node aware", layout, work, work.mask, "contiguous")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape, node", [
    ((4, 4, 1), np.arange(16) // 4), ((2, 8, 2), np.arange(32) // 4),
    ((1, 6, 1), (0, 0, 0, 1, 2, 2)), ((3, 4, 1), np.arange(12) // 5),
    ((4, 2, 2), (0, 0, 1, 0, 2, 2, 1, 1, 1, 0, 0, 2, 2, 1, 0, 0)),
])  # fmt: skip
def test_most_memory(shape, node, dtype):
    """The rank with the most memory need not have the most tokens."""
    layout = Layout(*shape).on_nodes(node)
    for seqlen in (97, 1003):
        sizes = problem(layout, dtype, seqlen)
        held = [peak_memory("node aware", layout, sizes, rank, True)
                for rank in range(layout.size)]  # fmt: skip
        assert most_memory("node aware", layout, sizes, True) == max(held)


def test_layouts():
    """Layouts have nodes of several ranks in a row or column, each once."""
    work = Workload(1 << 16, 96, 128, mask=Causal())
    found = list(layouts("node aware", 64, work, 4))
    assert len({(x.rows, x.cols, x.heads, x.nodes) for x in found}) == len(found) > 40
    eight = [x for x in found if (x.rows, x.cols, x.heads) == (8, 8, 1)]
    assert {x.block for x in eight} == {(1, 4), (2, 2), (4, 1)}
    for x in found:
        assert set(Counter(x.nodes).values()) == {4}
        assert x == on_nodes(x, 4)
        grid = np.reshape(x.nodes, (x.rows, x.cols, x.heads))[..., 0]
        lines = [Counter(line) for line in (*grid.tolist(), *grid.T.tolist())]
        assert any(len(line) > 1 and max(line.values()) > 1 for line in lines)
    for ranks_per_node in (1, 5, 64):
        assert not list(layouts("node aware", 64, work, ranks_per_node))
    assert not METHODS["node aware"].suits(Layout(4, 4))
    uneven = Layout(2, 4).on_nodes([0, 0, 0, 1, 1, 1, 2, 2])
    assert not METHODS["node aware"].suits(uneven)
    alike, unlike = np.arange(16) // 4, [0, 0, 0, 1, 1, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    for node, suits in ((alike, True), (unlike, False)):  # of both context-parallel groups
        assert METHODS["node aware"].suits(Layout(2, 4, 2).on_nodes(node)) == suits


def test_seconds_of_uneven_nodes():
    """Uneven nodes take a time between whole nodes and no nodes."""
    slow = replace(A100, between=Link(1e6), inside=Link(1e12), ranks_per_node=4)
    work = Workload(960, 12, 16, mask=Full(), dtype="bfloat16", backward=True)
    nodes = np.arange(8) // 4, [0, 0, 0, 1, 1, 1, 1, 2], np.arange(8)
    layouts = [Layout(1, 8).on_nodes(x) for x in nodes]
    seconds = [
        sum(x.total.max() for x in predict(slow, "node aware", layout, work).values())
        for layout in layouts
    ]
    assert seconds == sorted(seconds) and seconds[0] < 0.9 * seconds[2]


def test_drivers(tmp_path):
    """Names and options have blocks; predictions are for the job's nodes, not the profile's."""
    profile, output = (tmp_path / x for x in ("test.toml", "bench.h5"))
    write_machine(profile, machine(ranks_per_node=2))
    sizes = ["--seqlens", 61, "--nheads", 4, "--headdim", 8, "--backward", "--trials", 2]
    plans = ["--plans", "node_aware:2x2/2x1,attention2d:2x2/2x1", "--profile", profile]
    done, found = drive_each([
        ("bench.py", ["--output", output, *sizes, *plans], []),
        ("attention.py",
         [SAMPLE, "--method", "node_aware", "--rank-block", "1x2", "--seqlen", 99], []),
    ], 4)  # fmt: skip
    assert [code for code, _ in found] == [0, 0], done.stderr
    case = "causal-n61-h4-kv4-d8-float32-backward-overlap"
    found = read_runs(output)
    assert set(found) == {f"{x}-2x2x1-rcu_2x1-{case}" for x in ("node_aware", "attention2d")}
    for name, result in found.items():
        assert (result["config"]["block"], result["config"]["nodes"]) == ("2x1", "0 0 0 0")
        assert result["passed"] and result["predicted"]["forward seconds"] > 0
        method = name.split("-")[0].replace("_", " ")
        assert plan_text(summarise(result).config).startswith(f"{method} 2x2x1@rcu/2x1")
        inside = name.startswith("node") and {"row node", "col node"}
        assert not inside or inside <= result["traffic"]["forward"].keys()


@pytest.mark.parametrize("sizes", [(8,), (3, 5)], ids=str)
@pytest.mark.parametrize("phase", PHASES)
def test_owners_that_share_a_tag(phase, sizes):
    """Tags repeat after 264 owners; both ranks post messages with one tag in the same order."""
    nodes = [node for node, size in enumerate(sizes * 40) for _ in range(size)][:280]
    layout = Layout(1, len(nodes)).on_nodes(nodes)
    work = Workload(2 * len(nodes), 1, 8, mask=Full())
    problem, posted, repeated = problem_of("node aware", layout, work, work.mask), {}, 0
    for rank in range(8):  # of the first nodes
        (program,) = write("node aware", phase, layout, problem, rank)
        for x in program.steps:
            if isinstance(x, Send | Receive) and x.peer < 8:
                kind, sends = program.arrays[x.rows.array].kind, isinstance(x, Send)
                ends = (rank, x.peer) if sends else (x.peer, rank)
                key = *ends, x.channel, mpi_tag(kind, x.tag, x.turn, 0)
                posted.setdefault(key, ([], []))[sends].append((x.tag, x.turn, x.rows.count))
    for received, sent in posted.values():
        assert received == sent
        repeated += len(sent) > 1
    assert repeated
