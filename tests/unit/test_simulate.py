"""What the simulator gets: programs of all ranks, links and routes of networks; its files."""

import re
from dataclasses import replace

import numpy as np
import pytest
from helpers import parser_of
from machines import machine, slowest_seconds

from a2d_mpi.commands import plan as job
from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning import cost
from a2d_mpi.planning.machine import Link
from a2d_mpi.planning.model import Phase, predict
from a2d_mpi.planning.network import PORTS, SWITCH, Cables, Network, parse_network
from a2d_mpi.planning.profile import write_machine
from a2d_mpi.planning.simulator import POST, WAIT
from a2d_mpi.planning.survey import survey_of
from a2d_mpi.planning.workload import Workload
from a2d_mpi.results.tables import print_study
from a2d_mpi.schedules.writing import problem_of

# At once, with heads, rank by rank, on uneven nodes.
PLANS = [
    ("attention2d", Layout(2, 3)),
    ("attention2d", Layout(1, 4, 2)),
    ("ring", Layout(5, 1)),
    ("double ring", Layout(2, 2, 2)),
    ("triangle", Layout(6, 1)),
    ("node aware", Layout(2, 3, nodes=(0, 0, 0, 0, 1, 1))),
]


@pytest.mark.parametrize("method, layout", PLANS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_programs_send_what_schedules_send(method, layout, phase):
    """Both sides post a message, and its sender and its receiver wait for it."""
    mask = Causal()
    work = Workload(96, 4, 8, 2, dtype="float32", mask=mask, backward=True)
    problem = problem_of(method, layout, work, mask)
    programs, sent, *_ = survey_of(machine(), method, layout, work, problem, phase)
    moved = np.zeros((layout.size, layout.size), np.int64)
    for move in cost.moves(method, layout, problem, None, (phase,)):
        np.add.at(moved, (move.rank, move.peer), move.nbytes * move.sent)
    found = np.zeros_like(moved)
    np.add.at(found, (sent.source, sent.to), sent.nbytes)
    np.testing.assert_array_equal(found, moved)
    assert sent.nbytes.min() >= 0
    numbers = range(len(sent.nbytes))
    sides = sorted(x for m in numbers for x in ((m, sent.source[m]), (m, sent.to[m])))
    for kind in (POST, WAIT):
        assert sides == sorted(
            (m, rank)
            for rank in range(layout.size)
            for done, _, of_messages in programs.of_rank(rank)
            if done == kind
            for m in of_messages
        )


def cables(kind, ranks, per_node=1, nics=1, oversubscription=1.0):
    between, inside = Link(1e6, nics=nics), Link(1e9)
    ours = machine(between, inside, ranks_per_node=per_node)
    return Cables(Network(kind, oversubscription), ours, ranks)


def loads(found, source, to):
    """Return the load of every link, relative to one port."""
    routes = found.routes(source, to)
    used = np.bincount(routes[routes >= 0], minlength=len(found.bandwidth))
    return used / found.bandwidth * 1e6


@pytest.mark.parametrize("per_node, nics", [(1, 1), (4, 1), (4, 4), (4, 2), (2, 8)])
def test_nodes_share_their_nics(per_node, nics):
    ranks = np.arange(4 * per_node)
    found = cables("switch", len(ranks), per_node, nics)
    shift = loads(found, ranks, (ranks + per_node) % len(ranks))
    np.testing.assert_allclose(shift.max(), per_node / nics)
    if per_node > 1:  # inside, nothing of the NICs is used
        inside = loads(found, ranks, ranks ^ 1)
        assert inside.max() == 1e-3
        assert found.routes(ranks, ranks ^ 1).min() >= -1


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_fat_tree(factor):
    ranks = np.arange(4 * PORTS)
    found = cables("fat tree", len(ranks), oversubscription=factor)
    for away in (PORTS, 2 * PORTS + 5):
        shift = loads(found, ranks, (ranks + away) % len(ranks))
        assert shift.max() == factor  # no two on one cable but for the oversubscription
    same_leaf = loads(found, ranks, ranks ^ 1)
    assert same_leaf.max() == 1
    if factor > 1:
        return
    # Static routes: those to every second spine only meet there.
    here = ranks[:PORTS]
    assert loads(found, here, PORTS * (1 + here % 2) + 2 * (here // 2)).max() == 2


def test_dragonfly():
    ranks = np.arange(144)  # groups of 18 ports
    found = cables("dragonfly", len(ranks))
    inside = ranks // 18 * 18 + (ranks + 1) % 18
    assert loads(found, ranks, inside).max() == 1
    assert loads(found, ranks, (ranks + 18) % len(ranks)).max() == 2  # by a third group


@pytest.mark.parametrize("name", ["switch", "fat tree", "fat tree:2", "dragonfly"])
def test_names_of_networks(name):
    assert parse_network(name.replace(" ", "_")).name == name


@pytest.mark.parametrize("name", ["", "torus", "fat tree:0.5", "switch:2", "fat tree:x"])
def test_no_such_network(name):
    with pytest.raises(ValueError, match="network"):
        parse_network(name)


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_oversubscription_takes_longer(factor):
    """Each Ulysses group has two ranks, under different leaf switches: all messages cross."""
    layout, tree = Layout(2, 1, PORTS), Network("fat tree", factor)
    work = Workload(4096, PORTS, 8, dtype="float32")
    plan = machine(Link(1e6, latency=1e-3, overhead=1e-5)), "ring", layout, work
    whole, over = (slowest_seconds(predict(*plan, network=x)) for x in (SWITCH, tree))
    hop = 2 * (work.seqlen // 2) * 8 * 4 / 1e6  # keys and values of a shard and a head
    assert over - whole == pytest.approx((factor - 1) * hop, rel=0.05, abs=1e-3)


@pytest.fixture
def fake(monkeypatch):
    """Replace the simulator by one that takes twice as long on a network; count its runs."""
    ran = []

    def run(machine, method, layout, work, network=SWITCH):
        ran.append((method, layout.size, network.name))
        times = 1 if network == SWITCH else 2
        return {
            name: Phase(*(times * x for x in vars(phase).values()))
            for name, phase in predict(machine, method, layout, work).items()
        }

    monkeypatch.setattr(job, "predict", run)
    return ran


@pytest.fixture
def simulated(fake, tmp_path):
    """Run the driver on a small workload, and return its file."""
    profile, output = tmp_path / "here.toml", tmp_path / "out.h5"
    write_machine(profile, machine(ranks_per_node=2))
    common = ["--output", output, "--profile", profile, "--nheads", 4, "--headdim", 8,
              "--dtypes", "float32"]  # fmt: skip

    def run(*options):
        args = [str(x) for x in (*common, *options)]
        assert job.simulate_all(parser_of("drivers/plan.py").parse_args(["simulate", *args])) == 0
        return output

    return run


def test_driver(fake, simulated, capsys):
    options = ["--ranks", "4,6", "--seqlens", 96, "--plans", "ring", "--networks",
               "switch,fat tree:2"]  # fmt: skip
    output = simulated(*options)
    assert len(fake) == 6  # on a switch once, on a network and on a switch
    with pytest.raises(ValueError, match="--resume"):
        simulated(*options)
    simulated(*options, "--resume")
    assert len(fake) == 6
    found = job.read_simulations(output)
    assert {(x["ranks"], x["network"]) for x in found.values()} == {
        (ranks, name) for ranks in (4, 6) for name in ("switch", "fat tree:2")
    }
    for x in found.values():
        times = 1 if x["network"] == "switch" else 2
        assert job.seconds(x, "simulated") == times * job.seconds(x, "predicted") > 0
    assert "simulated" in capsys.readouterr().out


def test_a_slash_in_the_name_of_a_machine(simulated, tmp_path):
    write_machine(tmp_path / "here.toml", replace(machine(), name="a/b"))
    output = simulated("--ranks", 4, "--seqlens", 96, "--plans", "ring")
    assert [x["machine"] for x in job.read_simulations(output).values()] == ["a/b"]


def test_what_is_done_is_kept(simulated, tmp_path):
    """If a later plan fails, the file has the earlier simulations."""
    with pytest.raises(ValueError, match="does not have 6 ranks"):
        simulated("--seqlens", 96, "--plans", "ring:4x1", "--ranks", "4,6")
    found = job.read_simulations(tmp_path / "out.h5")
    assert [x["ranks"] for x in found.values()] == [4]


def test_tables(fake, simulated, capsys):
    """Where a network takes twice as long the model is off by half; all picks are right."""
    options = ["--seqlens", "96,192", "--ranks", "4,6,8", "--resume", "--plans"]
    for more in (["ring,attention2d"], ["ring", "--networks", "fat tree:2"], ["auto:each"]):
        output = simulated(*options, *more)
    picked = [x for x in job.read_simulations(output).values() if x["picked"]]
    assert len(picked) == 6 < len(fake)  # of each workload one, were it there before or not
    capsys.readouterr()
    assert print_study([output], job.read_summaries) == 0
    text = capsys.readouterr().out
    assert "model: off by 0.0 % (median), 50.0 % (worst of " in text
    assert "picks within 10 % of the fastest: 6 of 6" in text
    assert re.search(r"-n192-.*-fat tree:2-test, 8 ranks\n.*\n  ring 8x1x1@rcu +forward +\d", text)


def test_plans_of_one_workload_are_one_group(simulated):
    """The planner chose a distribution for one plan, and its name has one part more."""
    mask = "full_document:0,30,96"
    options = ["--masks", mask, "--seqlens", 96, "--ranks", 4, "--plans", "attention2d:2x2,auto"]
    found = job.read_summaries(output := simulated(*options))
    assert len({x.count("-") for x in job.read_simulations(output)}) == len(found) == 2
    (workload,) = {x.config["workload"] for x in found}
    assert workload == f"{mask}-n96-h4-kv4-d8-float32-forward-switch-test"


def test_links_alone():
    whole = machine(Link(1e6, latency=1e-3), start=1e-3)
    alone = whole.links_alone()
    assert alone.links(4) == whole.links(4) and alone.start == 0
    work = Workload(96, 4, 8, dtype="float32", mask=Causal(), backward=True)
    phases = (predict(x, "ring", Layout(4, 1), work).values() for x in (alone, whole))
    for ours, theirs in zip(*phases):
        assert (ours.compute + ours.merge + ours.other).max() < 1e-12 < theirs.compute.max()
        assert ours.total.max() < theirs.total.max()
