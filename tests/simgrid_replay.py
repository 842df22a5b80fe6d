"""Plans replayed by SimGrid: against formulas, against the model, and against what was measured.

Apart from the default tests, as it needs SimGrid and a compiler (g++, libsimgrid-dev):

    python -m pytest tests/simgrid_replay.py
"""

from dataclasses import replace

import numpy as np
import pytest
from test_model import RESULTS, machine
from test_simulate import PLANS

from a2d_mpi.core.masks import Causal, Full
from a2d_mpi.core.problem import Workload
from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.benchmark import read_benchmark
from a2d_mpi.experiments.simulate import configuration_of
from a2d_mpi.experiments.summary import summarise
from a2d_mpi.planning.machine import Link
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.network import PORTS, Network
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.simgrid import simulate
from a2d_mpi.schedules import distribution_of

LINK = Link(1e6, latency=1e-3, overhead=1e-5)


def work_of(mask=None, seqlen=4096, **others):
    return Workload(seqlen, 4, 8, 4, dtype="float32", mask=mask or Full(), **others)


def of_ring(ranks, seqlen=4096):
    """Seconds of a hop, by hand: keys and values of a shard."""
    return 2 * (seqlen // ranks) * 4 * 8 * 4 / LINK.bandwidth


@pytest.mark.parametrize("method, layout", PLANS)
def test_all_plans_end(method, layout):
    mask = Causal() if distribution_of(method, Causal()) != "contiguous" else Full()
    work = work_of(mask, 96, backward=True)
    found = simulate(machine(LINK), method, layout, work)
    expected = predict(machine(LINK), method, layout, work)
    for phase in work.phases:
        ours, theirs = found.phases[phase], expected[phase]
        for part in ("compute", "merge", "other"):
            np.testing.assert_allclose(getattr(ours, part), getattr(theirs, part))
        # What is sent later queues in the model; here it slows what others wait for (node aware).
        assert 0.97 < ours.total.max() / theirs.total.max() < 1.5
    assert found.messages > 0 and 0 < found.memory < 1 << 30


def test_a_ring_takes_its_hops():
    found = simulate(machine(LINK), "ring", Layout(8, 1), work_of())
    hops = 7 * (of_ring(8) + LINK.latency)
    assert hops < found.total < 1.02 * hops
    assert found.messages == 8 * 7


def test_ranks_share_the_nic_of_their_node():
    one = simulate(machine(LINK, ranks_per_node=4), "attention2d", Layout(4, 2), work_of())
    four = replace(LINK, nics=4)
    other = simulate(machine(four, ranks_per_node=4), "attention2d", Layout(4, 2), work_of())
    waits = [x.phases["forward"].wait.max() for x in (one, other)]
    assert 3 < waits[0] / waits[1] < 4.1


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_oversubscription(factor):
    # Each head group has two ranks, under different switches: all messages cross.
    layout = Layout(2, 1, PORTS, order="rcu")
    work = replace(work_of(seqlen=1 << 12), nheads=PORTS, nheads_kv=PORTS)
    tree = Network("fat tree", factor)
    whole, over = (simulate(machine(LINK), "ring", layout, work, network=x).total
                   for x in (Network(), tree))  # fmt: skip
    hop = 2 * (work.seqlen // 2) * 8 * 4 / LINK.bandwidth
    assert over - whole == pytest.approx((factor - 1) * hop, rel=0.05, abs=1e-3)


def test_slow_ranks_and_ports():
    plan = machine(LINK, start=0.5), "ring", Layout(8, 1), work_of()
    usual = simulate(*plan).total
    slow = np.ones(8)
    slow[3] = 3
    assert simulate(*plan, slow=slow).total == pytest.approx(usual + 1.0, rel=0.01)
    port = simulate(*plan, network=Network(slow_port=2.0)).total
    assert port == pytest.approx(usual + 7 * of_ring(8), rel=0.01)


def test_out_of_time():
    with pytest.raises(TimeoutError, match="more than"):
        simulate(machine(LINK), "ring", Layout(64, 1), work_of(), timeout=1e-3)


def test_coarse():
    """About as exact as it was asked to be; messages of unlike sizes end at other times."""
    layout, work = Layout(1, 32), work_of(Causal(), 1 << 14, backward=True)
    exact = simulate(machine(LINK), "attention2d", layout, work).total
    for share in (1e-3, 1e-2):
        seconds = share * exact
        found = simulate(machine(LINK), "attention2d", layout, work, coarse=seconds).total
        assert 0 < abs(found - exact) < 3 * seconds


@pytest.mark.parametrize("name", ["16x1", "64x1", "16x4"])
def test_measured_runs(name):
    """In the median within 10 % of what the emulated clusters took, and no run beyond 30 %."""
    profile, off = read_machine(RESULTS / f"{name}.toml"), []
    for result in read_benchmark(RESULTS / f"{name}.h5").values():
        what = configuration_of(result)
        plan = profile, what.method, what.layout, what.case.work(what.overlap)
        off.append(simulate(*plan).total / summarise(result).seconds - 1)
    assert np.median(np.abs(off)) < 0.1 and np.abs(off).max() < 0.3
