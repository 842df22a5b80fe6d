"""Timelines of all ranks: the format, every message and its bytes."""

import json
from copy import deepcopy

import numpy as np
import pytest
from cases import PLANS
from dense import problem_for, results_of
from helpers import SAMPLE, assert_all, drive

from a2d_mpi import Attention2D, Causal
from a2d_mpi.experiments.trace import Trace

SIZES = {"seqlen": 61, "nheads": 12, "nheads_kv": 2, "headdim": 8}


def slices(events, category=None):
    """Return complete events of one category, or of all."""
    return [x for x in events if x["ph"] == "X" and category in (None, x["cat"])]


def wrong(events, ranks):
    """Describe what is wrong with the events of a trace."""
    bad = []
    for x in events:
        ints = [x.get(name) for name in ("pid", "tid")]
        if x.get("ph") not in ("X", "M", "s", "f") or not all(type(y) is int for y in ints):
            bad.append(f"ph, pid or tid: {x}")
        elif not (isinstance(x.get("ts"), int | float) and x["ts"] >= 0 and "name" in x):
            bad.append(f"ts or name: {x}")
        elif x["ph"] == "X" and not x.get("dur", -1) >= 0:
            bad.append(f"dur: {x}")
    if bad:
        return bad
    if {x["pid"] for x in slices(events)} != set(range(ranks)):
        bad.append("ranks are missing")
    threads = {}
    for x in events:
        threads.setdefault(x["tid"], set()).add(x["pid"])
    bad += [f"thread {tid} of ranks {x}" for tid, x in threads.items() if len(x) > 1]
    for tid in threads:
        mine = [x for x in slices(events) if x["tid"] == tid]
        # In nanoseconds, so that sums are exact.
        spans = [(round(1e3 * x["ts"]), round(1e3 * x["dur"])) for x in mine]
        begin, length = np.array(spans, int).reshape(-1, 2).T
        inside = (begin[:, None] < begin) & (begin < (begin + length)[:, None])
        if (inside & ((begin + length)[:, None] < begin + length)).any():
            bad.append(f"thread {tid}: spans overlap")
    return bad + wrong_flows(events)


def wrong_flows(events):
    """Describe arrows without one begin and one end inside a slice."""
    begins, ends = ([x for x in events if x["ph"] == ph] for ph in "sf")
    bad = []
    for what, these in (("begins", begins), ("ends", ends)):
        if len({x["id"] for x in these}) != len(these):
            bad.append(f"an arrow {what} twice")
    if {x["id"] for x in begins} != {x["id"] for x in ends}:
        bad.append("an arrow has one end only")
    other = {x["id"]: x for x in ends}
    for x in begins:
        y = other.get(x["id"], x)
        same = x["name"] == y["name"] and x["cat"] == y["cat"]
        # A channel may have other names on the two ranks.
        if not same or x["args"] | {"channel": ""} != y["args"] | {"channel": ""}:
            bad.append(f"the ends of arrow {x['id']} differ: {x}, {y}")
        if (x["pid"], y["pid"]) != (x["args"]["from"], x["args"]["to"]):
            bad.append(f"arrow {x['id']} is of other ranks")
    for x in begins + ends:
        around = [y for y in slices(events) if y["tid"] == x["tid"]
                  and y["ts"] - 0.002 <= x["ts"] <= y["ts"] + y["dur"] + 0.002]  # fmt: skip
        if not around:
            bad.append(f"no slice around {x}")
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


def test_driver(tmp_path):
    """The checks of this file pass a trace of the driver, and find wrong ones."""
    path = tmp_path / "a.json"
    options = ["--seqlen", 61, "--trials", 1, "--rows", 2, "--cols", 2, "--trace", path]
    drive("attention.py", 4, SAMPLE, "--backward", *options)
    events = json.loads(path.read_text())["traceEvents"]
    calls = [x["name"] for x in slices(events, "total") if x["pid"] == 3]
    assert calls == ["attention2d forward", "attention2d backward"]
    assert wrong(events, 4) == []
    begins, ends = ([i for i, x in enumerate(events) if x["ph"] == y] for y in "sf")
    waits = [i for i, x in enumerate(events) if x.get("cat") == "wait"]
    call = next(i for i, x in enumerate(events) if x.get("cat") == "compute")
    for name, change in {
        "no end": lambda x: x.pop(ends[0]),
        "two ends": lambda x: x.append(x[ends[0]]),
        "other bytes": lambda x: x[begins[0]]["args"].update(bytes=1),
        "other rank": lambda x: x[begins[0]].update(pid=x[begins[0]]["args"]["to"]),
        "no time": lambda x: x[waits[0]].pop("ts"),
        "negative": lambda x: x[waits[0]].update(dur=-1.0),
        "overlap": lambda x: x.append({**x[call], "ts": x[call]["ts"] + 0.01}),
        "no rank": lambda x: x.__setitem__(slice(None), [y for y in x if y["pid"]]),
    }.items():
        change(copy := deepcopy(events))
        assert wrong(copy, 4), name
    assert flow_bytes(copy, 0) != flow_bytes(events, 0)
