"""Timelines of all ranks: the format, every message and its bytes."""

import json

import numpy as np
import pytest
from cases import PLANS
from dense import problem_for, results_of
from helpers import assert_all

from a2d_mpi import Attention2D, Causal
from a2d_mpi.checks.trace import Trace

SIZES = {"seqlen": 61, "nheads": 12, "nheads_kv": 2, "headdim": 8}


def slices(events, category=None):
    """Return complete events of one category, or of all."""
    return [x for x in events if x["ph"] == "X" and category in (None, x["cat"])]


def wrong(events, ranks):
    """Describe what viewers would not draw, and arrows whose two ends do not fit."""
    bad = [x for x in events if x["ph"] not in "XMsf" or x["ts"] < 0 or x.get("dur", 0) < 0]
    if {x["pid"] for x in slices(events)} != set(range(ranks)):
        bad.append("ranks are missing")
    begins, ends = ({x["id"]: x for x in events if x["ph"] == ph} for ph in "sf")
    bad += ["an arrow has one end only"] * (begins.keys() != ends.keys())
    bad += ["arrows share an id"] * (2 * len(begins) != sum(x["ph"] in "sf" for x in events))
    for x, y in ((x, ends[key]) for key, x in begins.items() if key in ends):
        # A channel may have other names on the two ranks.
        if x["name"] != y["name"] or x["args"] | {"channel": ""} != y["args"] | {"channel": ""}:
            bad.append(f"the ends of an arrow differ: {x}, {y}")
        if (x["pid"], y["pid"]) != (x["args"]["from"], x["args"]["to"]):
            bad.append(f"an arrow of other ranks: {x}")
    return bad


def flow_bytes(events, rank):
    """Return bytes [sent, received] of a rank's arrows, by phase and channel."""
    found = {}
    for x in events:
        if x["ph"] in "sf" and x["pid"] == rank:
            key = x["args"].get("phase"), x["args"].get("channel")
            found.setdefault(key, [0, 0])["sf".index(x["ph"])] += x["args"]["bytes"]
    return found


def traced(comm, plan, path, device=(np.asarray, np.asarray)):
    """Return results with and without a trace, and its events on rank 0."""
    given = problem_for(plan)
    before = results_of(plan, given, None, *device)
    plan.traffic.clear()
    trace = Trace(comm, path)
    with trace.calls(plan, "plan"):
        after = results_of(plan, given, None, *device)
    if comm.rank == 0:
        trace.write({"hostnames": ["here"]})
        assert json.loads(path.read_text())["otherData"] == {"hostnames": ["here"]}
    same = all(before[name].tobytes() == after[name].tobytes() for name in before)
    return same, json.loads(path.read_text())["traceEvents"] if comm.rank == 0 else None


@pytest.mark.mpi
@pytest.mark.multirank
@pytest.mark.grids
@pytest.mark.parametrize("name", PLANS)
def test_measured(comm, grid_of, tmp_path, name):
    """The trace has every message with its bytes and every kernel call with its pairs."""
    kind, shape, nodes = PLANS[name]
    plan = kind(grid_of(*shape, order="ucr", nodes=nodes), Causal(), **SIZES)
    same, events = traced(comm, plan, tmp_path / "a.json")
    counted, pairs = comm.gather(dict(plan.traffic.bytes)), comm.gather(2 * plan.area())
    bad = [] if same else ["other bits"]
    if events:
        bad += wrong(events, comm.size)
        for rank in range(comm.size):
            if flow_bytes(events, rank) != counted[rank]:
                bad.append(f"rank {rank}: {flow_bytes(events, rank)}, {counted[rank]}")
            mine = [x for x in slices(events, "compute") if x["pid"] == rank]
            if sum(x["args"].get("pairs", 0) for x in mine) != pairs[rank]:
                bad.append(f"rank {rank}: other pairs than {pairs[rank]}")
        names = {x["name"] for x in slices(events, "total")}
        bad += [f"calls {names}"] * (names != {"plan forward", "plan backward"})
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
@pytest.mark.grids
@pytest.mark.one_mpi
@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
def test_on_a_gpu(comm, grid_of, cupy, tmp_path):
    """A GPU gives the same trace."""
    from a2d_mpi.comm.gpus import bind_gpu

    bind_gpu(comm)
    grid = grid_of(1, comm.size)
    plan = Attention2D(grid, Causal(), **SIZES)
    same, events = traced(comm, plan, tmp_path / "a.json", (cupy.asarray, cupy.asnumpy))
    counted = comm.gather(dict(plan.traffic.bytes))
    bad = [] if events is None else wrong(events, comm.size)
    if events:
        found = [flow_bytes(events, rank) for rank in range(comm.size)]
        bad += [] if found == counted else [f"{found}, {counted}"]
    assert_all(comm, same and not bad, f"{same}, {bad}")
