"""Properties that the model in seconds has on every machine; nothing is timed here."""

import re
from dataclasses import replace

import helpers
import memory
import numpy as np
import pytest
from helpers import DEEPER, deeper, drive, parser_of, read_runs, runs_on
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import FAST, KERNEL, MACHINES, RESULTS, SLOW, machine, plan_of
from mpi4py import MPI

from a2d_mpi.checks import autotune
from a2d_mpi.commands import calibrate
from a2d_mpi.core.layout import Layout
from a2d_mpi.core.sizes import flops
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.planning import cost
from a2d_mpi.planning.calibration import Sample, fit_kernel, fit_link, fit_steps, steadiness
from a2d_mpi.planning.machine import KernelModel, Link
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.planner import best_candidate
from a2d_mpi.planning.profile import parse_size, read_machine, to_toml, write_machine
from a2d_mpi.planning.simulator import PARTS
from a2d_mpi.planning.workload import Workload
from a2d_mpi.results.tables import summarise
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.writing import problem_of

PROFILES = sorted(MACHINES.glob("*.toml"))


CAUSAL = Causal()


def work(seqlen=960, nheads=12, nheads_kv=4, mask=CAUSAL, **others):
    common = {"dtype": "float32", "mask": mask, "backward": True}
    return Workload(seqlen, nheads, 16, nheads_kv, **common, **others)


def total(machine, method, layout, work):
    return sum(phase.total.max() for phase in predict(machine, method, layout, work).values())


layouts = st.builds(
    Layout, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2]),
    st.permutations("rcu").map("".join),
)  # fmt: skip
methods = st.sampled_from(list(METHODS))


@given(layouts, methods, st.sampled_from([Full(), Causal()]), st.integers(1, 500), st.booleans())
@settings(max_examples=15)
def test_no_shorter_than_its_parts(layout, method, mask, seqlen, overlap):
    """A phase takes at least its computing and the bytes through each link."""
    assume(runs_on(method, layout, mask))
    here = machine(Link(1e6), Link(1e6))
    job = work(seqlen, mask=mask, overlap=overlap)
    sizes = problem_of(method, layout, job, job.mask)
    area = mask.area(np.arange(seqlen), np.arange(seqlen))
    for phase, found in predict(here, method, layout, job).items():
        assert np.all(found.compute >= 0) and np.all(found.wait >= 0)
        parts = sum(getattr(found, part) for part in PARTS)
        assert np.allclose(parts, found.total)
        work_all = flops(area, job.nheads, 16, phase == "backward")
        assert found.compute.sum() * KERNEL.flops >= 0.999 * work_all
        assert found.total.max() >= work_all / layout.size / KERNEL.flops
        for rank in range(layout.size):
            moved = cost.traffic(method, layout, sizes, rank)
            inwards = sum(both[1] for key, both in moved.items() if key[0] == phase)
            # Parts differ by a few tokens, and with them what is sent and received.
            assert found.total.max() >= 0.9 * inwards / 1e6 - 1e-4 * layout.size


@given(layouts, methods, st.booleans())
@settings(max_examples=6)
def test_a_faster_link_never_hurts(layout, method, overlap):
    assume(runs_on(method, layout, CAUSAL))
    job = work(overlap=overlap)
    times = [
        total(machine(replace(SLOW, bandwidth=b), ranks_per_node=2), method, layout, job)
        for b in (1e5, 1e6, 1e7, 1e9)
    ]
    # Not exactly: a rank that is early may take bandwidth from a rank that all others wait for.
    assert all(a >= b * 0.99 for a, b in zip(times, times[1:]))
    hidden = [
        total(machine(replace(SLOW, hidden=x)), method, layout, job) for x in (0.0, 0.5, 1.0)
    ]
    assert all(a >= b * 0.99 for a, b in zip(hidden, hidden[1:]))


@pytest.mark.parametrize("method", METHODS)
def test_overlap_saves_time(method):
    here, layout = machine(Link(3e7)), Layout(3, 2)
    together, apart = (total(here, method, layout, work(overlap=x)) for x in (True, False))
    compute = sum(x.compute.max() for x in predict(here, method, layout, work()).values())
    assert compute < together < apart


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(2, 1)], ids=["1x2", "2x1"])
def test_two_ranks_hide_all_but_the_ends(layout):
    """Computing that takes 1.5 times as long as transfers hides them, in four slices."""
    layout = replace(layout, slices=(4, 4))
    job = Workload(8192, 8, 64, mask=CAUSAL, dtype="float32", backward=True)
    for phase in job.phases:
        compute = flops(8192 * 8193 // 4, 8, 64, phase == "backward") / KERNEL.flops
        problem = problem_of("attention2d", layout, job, job.mask)
        moved = cost.traffic("attention2d", layout, problem, 0)
        inwards = sum(both[1] for key, both in moved.items() if key[0] == phase)
        here = machine(Link(1.5 * inwards / compute))
        found = predict(here, "attention2d", layout, job)[phase]
        assert compute < found.total.max() < 1.06 * compute


def test_limits():
    """Predictions are exact in cases with a known answer."""
    job = Workload(640, 4, 16, mask=Full(), dtype="float32")
    size = 160 * 4 * 16 * 4  # bytes of q of a rank
    # No link to speak of: the ring is P - 1 times k and v, the grid what cost.py says.
    slow = machine(Link(1e3), Link(1e3))
    ring = predict(slow, "ring", Layout(4, 1), job)["forward"].total.max()
    assert ring == pytest.approx(3 * 2 * size / 1e3, rel=1e-3)
    # In turn nothing has to be hidden.
    slow_cores = machine(Link(1e3, hidden=0.0), Link(1e3, hidden=0.0))
    in_turn = predict(slow_cores, "ring", Layout(4, 1), replace(job, overlap=False))["forward"]
    assert in_turn.total.max() == pytest.approx(ring, rel=1e-3)
    grid = predict(slow, "attention2d", Layout(2, 2), job)["forward"].total.max()
    assert grid == pytest.approx((size + 2 * size + size * 17 / 16) / 1e3, rel=1e-3)
    # Links without limit: computing alone.
    fast = machine(Link(1e15), Link(1e15))
    work = flops(640 * 640 // 4, 4, 16)
    for method in (x for x in METHODS if runs_on(x, Layout(2, 2), job.mask)):
        found = predict(fast, method, Layout(2, 2), job)["forward"]
        assert found.total.max() == pytest.approx(work / 1e11 + 4e-5, rel=0.3)
    # Two ranks on one core take twice as long.
    shared = replace(fast, ranks_per_node=4, cores_per_node=2)
    for x in (0, 1):
        layout = Layout(4, 1)
        one, two = (predict(m, "ring", layout, job)["forward"].compute for m in (fast, shared))
        assert two[x] == pytest.approx(2 * one[x])


def test_nics_are_shared():
    job = Workload(1600, 4, 16, mask=Full(), dtype="float32")
    inside = Link(1e12)
    one, four = (machine(Link(1e6, nics=n), inside, ranks_per_node=4) for n in (1, 4))
    # A ring crosses each node's border once: more NICs do not help.  Of a grid all ranks do.
    ring = [total(m, "ring", Layout(16, 1), job) for m in (one, four)]
    assert ring[0] == pytest.approx(ring[1])
    grid = [total(m, "attention2d", Layout(4, 4), job) for m in (one, four)]
    assert grid[0] == pytest.approx(4 * grid[1], rel=0.01)
    # A double ring uses them: LoongTrain's point.
    assert total(four, "double ring", Layout(4, 4), job) < 0.5 * ring[1]
    # The order of the ranks decides what crosses: k, v inside the nodes, or q and out.
    orders = [
        total(one, "attention2d", Layout(4, 4, 1, order), replace(job, nheads_kv=1))
        for order in ("rcu", "cru")
    ]
    assert orders[0] < orders[1]


@pytest.mark.parametrize("number", deeper([1, 10], [1]))
def test_memory_is_what_processes_grow_by(number):
    predicted, measured = memory.one(helpers.launch, number)
    assert predicted == pytest.approx(measured, rel=memory.TOLERANCE), memory.CASES[number]


@pytest.mark.parametrize("backward", [False, True])
def test_fit_finds_the_kernel(backward):
    true = KernelModel(9e10, call=5e-5, head=3e-5, pair=1e-9, query=3e-9, cut=4e-7)
    samples = []
    for n, m, heads in ((16, 16, (2, 2, 64)), (64, 64, (4, 1, 32)), (64, 1024, (2, 2, 64)),
                        (1024, 64, (2, 2, 64)), (256, 1024, (2, 1, 128)), (1024, 256, (4, 4, 64)),
                        (1024, 1024, (1, 1, 128)), (1536, 1536, (2, 2, 32))):  # fmt: skip
        heads = (*heads, heads[-1])
        for area, cut in ((n * m, 0), (n * m // 2, n)):
            seconds = float(true.seconds(np.array([area, n, m, cut]), heads, backward))
            samples.append(Sample((area, n, m, cut), heads, seconds))
    found, worst = fit_kernel(samples, backward)
    assert worst < 0.02
    assert found.flops == pytest.approx(true.flops, rel=0.05)


def test_fit_of_a_link():
    seconds = [2e-4 + 2e-5 + n / 5e6 for n in (8, 1 << 16, 1 << 18)]
    link = fit_link((8, 1 << 16, 1 << 18), seconds, (32, seconds[0] + 31 * 2e-5))
    assert (link.bandwidth, link.overhead) == pytest.approx((5e6, 1e-5), rel=0.01)
    assert link.latency == pytest.approx(2e-4, rel=0.02)


@pytest.mark.parametrize("what, method, layout, forward, backward", [
    ("step", "ring", Layout(5, 1), 5, 5), ("step", "double ring", Layout(2, 2), 4, 4),
    # My queries against three chunks of keys, the two halves of the others against all; chunks
    # that are too short to be cut.
    ("step", "attention2d", Layout(3, 2), 5, 5), ("step", "attention2d", Layout(3, 2, 2), 4, 4),
    ("hop_overhead", "ring", Layout(5, 1), 4, 4 + 4),
    # Of the outer hops only the last is waited for at once.
    ("hop_overhead", "double ring", Layout(2, 3), 2 * 2, 2 * 2 + 2 * 2 + 1),
    ("hop_overhead", "attention2d", Layout(3, 2), 0, 0),
])  # fmt: skip
def test_kernel_calls_and_hops_are_counted(what, method, layout, forward, backward):
    """Each adds its time; four ranks share two cores of a node."""
    here = machine(Link(1e15), Link(1e15), ranks_per_node=4, cores_per_node=2)
    seqlen = 3 * 2 * (256 if what == "step" and forward == 5 else 10)
    for with_backward, number in ((False, forward), (True, forward + backward)):
        job = replace(work(seqlen), backward=with_backward)
        longer = total(replace(here, **{what: 10.0}), method, layout, job)
        taken = longer - total(here, method, layout, job)
        assert taken == pytest.approx(number * 2 * 10, rel=1e-3)


@pytest.mark.parametrize(
    ("step", "hop_overhead"), [(0.0, 0.0), (3e-4, 0.0), (0.0, 0.02), (0.02, 0.03)]
)
def test_fit_finds_what_steps_and_hops_take(step, hop_overhead):
    """The fit also finds partly hidden latencies, and ranks that share cores."""
    here = machine(Link(1e6, latency=4e-4), ranks_per_node=2, cores_per_node=1)
    tiny, layout = Workload(16, 2, 16, dtype="float32"), Layout(8, 1)
    there = replace(here, step=step, hop_overhead=hop_overhead)
    seconds = [total(there, method, layout, tiny) for method in ("attention2d", "ring")]
    measured = dict(zip(("step", "hop_overhead"), zip(("attention2d", "ring"), seconds)))
    found = fit_steps(here, 8, tiny, measured)
    again = [total(found, method, layout, tiny) for method in ("attention2d", "ring")]
    assert again == pytest.approx(seconds, rel=0.005)
    assert found.step == pytest.approx(step, rel=0.01, abs=1e-6)
    assert found.hop_overhead == pytest.approx(hop_overhead, rel=0.01, abs=1e-6)


def test_a_profile_is_read_as_written(tmp_path):
    whole = machine(
        replace(SLOW, nics=2), ranks_per_node=4, cores_per_node=2.5, memory=10**9, start=0.25,
        step=0.125, hop_overhead=0.0625, copy=1e9, merge=2e9, reserved=5,
        computed_by="float32: \"new\"",
    )  # fmt: skip
    path = tmp_path / "here.toml"
    write_machine(path, whole, "measured\nsomewhere")
    assert read_machine(path) == whole
    assert path.read_text().startswith("# measured\n# somewhere\nname = ")
    with pytest.raises(OSError, match="cannot write"):
        write_machine(tmp_path / "none" / "here.toml", whole)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name)
def test_profiles_of_the_package(path):
    found = read_machine(path)
    assert found.memory and {"bfloat16", "float16"} <= set(found.kernels)


@pytest.mark.parametrize("old, new, message", [
    ("ranks_per_node = 4", "ranks_per_nodes = 4", "unknown ranks_per_nodes"),
    ("ranks_per_node = 4", "ranks_per_node = 0", "ranks_per_node must be from 1"),
    ("ranks_per_node = 4", "ranks_per_node = 4.5", "ranks_per_node must be a whole number"),
    ('name = "', "name = 3 # ", "name must be text"),
    ("[link.inside]", "[link.outside]", "unknown outside"),
    ("bandwidth =", "# bandwidth =", "link.inside..* argument: 'bandwidth'"),
    ("bandwidth =", "bandwith =", "unknown link.inside.bandwith; known are bandwidth, latency"),
    ("hidden = 1.0", "hidden = 2.0", "link.inside.hidden must be from 0 to 1, got 2.0"),
    ("hidden = 1.0", "hidden = nan", "hidden must be from 0 to 1, got nan"),
    ("flops = 220e12", "flops = 0", "kernel.bfloat16.forward.flops must be from 1 "),
    ("bfloat16.backward]", "bfloat16.backwards]", "must have the tables forward and backward"),
    ('memory = "40GB"', 'memory = "40 boxes"', "memory: '40 boxes' is not a size"),
    ("[link.inside]", "[link.inside", "TOML profile"),
    ("bandwidth = 85e9", 'bandwidth = "85e9"', "link.inside.bandwidth must be a number, got '85"),
    ("latency = 4e-6", "latency = 1979-05-27", "latency must be a number, got datetime.date"),
    ("copy = 0.6e12", "copy = 1e-9", "copy must be from 1 to 1e.18, got 1e-09"),
])  # fmt: skip
def test_bad_profiles(tmp_path, old, new, message):
    """Of a good profile in which `new` stands for `old`."""
    text = (MACHINES / "a100-16x4.toml").read_text()
    assert old in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as error:
        read_machine(path)
    assert "bad.toml" in str(error.value) and str(error.value).isprintable()


def test_links_that_are_needed(tmp_path):
    """A profile needs only the links that its ranks use."""
    job, path = work(), tmp_path / "here.toml"
    enough = {(None, None): 1, (FAST, None): 4, (None, SLOW): 0}
    for (inside, between), most in enough.items():
        write_machine(path, machine(between, inside, ranks_per_node=4))
        here = read_machine(path)
        assert (here.inside, here.between) == (inside, between)
        for ranks in (1, 4, 5):
            if ranks <= max(most, 1):
                whole = machine(SLOW, FAST, ranks_per_node=4)
                layout = Layout(ranks, 1)
                assert total(here, "ring", layout, job) == total(whole, "ring", layout, job)
                continue
            missing = "inside" if inside is None else "between"
            with pytest.raises(ValueError, match=f"test has no link.{missing}, which {ranks} r"):
                predict(here, "ring", Layout(ranks, 1), job)
    spread = machine(SLOW, None)
    assert total(spread, "ring", Layout(8, 1), job) == total(machine(), "ring", Layout(8, 1), job)


@pytest.mark.parametrize("cluster, step, median, worst", [
    ("16x1", 4, 0.05, 0.22), *(pytest.param(*x, marks=DEEPER) for x in (
        ("16x1", 1, 0.05, 0.22), ("16x4", 1, 0.05, 0.22), ("64x1", 4, 0.1, 0.22),
        ("masks/16x1", 1, 0.15, 0.45),
    )),
])  # fmt: skip
def test_the_study_is_predicted(cluster, step, median, worst):
    """The calibrated profiles predict a sample of the committed seconds."""
    here, off = read_machine(RESULTS / f"{cluster}.toml"), []
    for result in list(read_runs(RESULTS / f"{cluster}.h5").values())[::step]:
        method, layout, job = plan_of(result["config"])
        distribution = result["config"]["distribution"]
        problem = problem_of(method, layout, job, job.mask, distribution)
        received = sum(
            x["received"].sum() for phase in job.phases for x in result["traffic"][phase].values()
        )
        moved = cost.moves(method, layout, problem, None, job.phases)
        if received != sum(x.nbytes for x in moved if not x.sent):
            continue  # measured when whole shards travelled, whatever the mask hides
        phases = predict(here, method, layout, job, distribution).values()
        off.append(sum(x.total.max() for x in phases) / summarise(result).seconds - 1)
    assert len(off) >= 15 // step
    typical, most = np.median(np.abs(off)), np.max(np.abs(off))
    assert typical < median and most < worst


def test_sizes():
    assert parse_size("80GB") == 80 * 10**9 and parse_size("1GiB") == 1 << 30
    assert parse_size(5) == 5 and parse_size("4e9") == 4 * 10**9 and parse_size("1.5kB".upper())
    for bad in ("", "GB", "-1", "1PB", "1e999", "nan"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(bad)


def test_calibrate(tmp_path):
    """calibrate.py writes a profile that can be read."""
    path = tmp_path / "here.toml"
    name = 'a "\\ # \N{GREEK SMALL LETTER PI}'
    options = ["--seconds", "1", "--dtypes", "bfloat16", "--name", name]
    drive("calibrate.py", 2, "--output", path, *options)
    found = read_machine(path)
    assert re.fullmatch(r"bfloat16: \w+; openblas [\d.]+ \(\w+\); 1 thread", found.computed_by)
    assert found.name == name
    assert found.ranks_per_node == 2 and set(found.kernels) == {"bfloat16"}
    assert found.inside and found.between is None
    assert "# link.between was not measured" in path.read_text()
    assert to_toml(found) in path.read_text()


def test_steadiness():
    """The median call counts, without the worst tenth of its rounds."""
    calm = np.ones((20, 5))
    assert steadiness(calm) == "times of equal kernel calls differ by 0 % (20 rounds)"
    once, busy = calm.copy(), calm.copy()
    once[7] = 9.0
    once[:, 0] = np.arange(1, 21)
    assert steadiness(once) == steadiness(calm)
    busy[15:] = 1.5
    told = "DISTURBED by other work: times of equal kernel calls differ by 50 % (20 rounds)"
    assert steadiness(busy) == told
    assert "DISTURBED" not in steadiness(calm[:1])


def test_a_disturbed_machine(tmp_path, monkeypatch, capsys):
    """The profile and the output report a disturbed machine; one rank measures no link."""
    told = "DISTURBED by other work: of this"
    monkeypatch.setattr(autotune, "steadiness", lambda _: told)
    path = tmp_path / "here.toml"
    args = parser_of("drivers/calibrate.py").parse_args(["--output", f"{path}", "--seconds=0.1"])
    assert calibrate.calibrate(MPI.COMM_SELF, args) == 0
    told = f"float32: {told}\n"
    assert f"\n# {told}" in path.read_text() and told in capsys.readouterr().out
    found = read_machine(path)
    assert found.inside is None and found.between is None
    # A profile by default is one for workloads, and for plans, by default.
    for work in (Workload(64, 2, 16), Workload(64, 2, 16, dtype="float32")):
        assert best_candidate(found, 1, work).seconds > 0
    text = (
        r"kernels for \['bfloat16', 'float32'\], but not for float64: take another dtype, or mea"
    )
    with pytest.raises(ValueError, match=text):
        best_candidate(found, 1, Workload(64, 2, 16, dtype="float64"))
