"""The simulator against times by hand, also with its loops compiled."""

import numpy as np
import pytest
from helpers import deeper
from machines import machine

from a2d_mpi.planning import simulator
from a2d_mpi.planning.machine import Link
from a2d_mpi.planning.network import Cables, Network
from a2d_mpi.planning.simulator import PARTS, POST, WAIT, Messages, Operations, simulate

MB = 10**6


# Compiling takes half a minute.
@pytest.fixture(params=deeper(["plain", "compiled"], ["plain"]), autouse=True)
def _both(request, monkeypatch):
    if request.param == "compiled":
        pytest.importorskip("numba")
        monkeypatch.setattr(simulator, "MANY", 0)


def columns_of(programs):
    """Return operations of all ranks as columns."""
    flat = [x for program in programs for x in program]
    kinds = {"post": POST, "wait": WAIT}
    numbers = [x[1] if x[0] in kinds else [] for x in flat]
    return Operations(
        np.cumsum([0, *map(len, programs)]),
        np.array([kinds[x[0]] if x[0] in kinds else PARTS.index(x[1]) for x in flat], np.int64),
        np.array([x[2] if len(x) > 2 else 0.0 for x in flat]),
        np.cumsum([0, *map(len, numbers)]),
        np.array([m for x in numbers for m in x], np.int64),
    )


def ended(programs, messages, per_node=1, **link):
    """Return the end of each rank, at 1 MB/s between nodes and 1000 inside, and all spans."""
    there = machine(Link(MB, **link), Link(1000 * MB), ranks_per_node=per_node)
    size, spans = len(programs), [[] for _ in programs]
    columns = Messages(*np.array([(*x, 1) for x in messages], np.int64).T)
    cables, place = Cables(Network(), there, size), np.arange(size)
    parts = simulate(columns_of(programs), columns, cables, place, spans)
    found = sum(parts.values())
    spans = [[x[:3] for x in mine] for mine in spans]  # without the messages
    for rank, x in enumerate(spans):
        assert [end for *_, end in x[-1:]] == pytest.approx([found[rank]] * bool(x))
        for part in PARTS:
            seconds = sum(end - begin for name, begin, end in x if name == part)
            assert seconds == pytest.approx(parts[part][rank])
    return found.tolist(), spans


def exchange(size, messages, late=None):
    """Return programs that post all messages, some of them later, and wait in turn."""
    programs = []
    for rank in range(size):
        mine = [m for m, x in enumerate(messages) if rank in x[:2]]
        program = []
        for m in sorted(mine, key=lambda m: (late or {}).get(m, 0)):
            if m in (late or {}):
                program.append(("spend", "compute", late[m]))
            program.append(("post", [m]))
        programs.append(program + [("wait", [m], 0.0) for m in mine])
    return programs


@pytest.mark.parametrize("messages, seconds", [
    ([(0, 1, MB), (0, 2, 2 * MB)], [3, 2, 3]),  # the sender's link
    ([(1, 0, MB), (2, 0, 2 * MB)], [3, 2, 3]),  # the receiver's
    ([(0, 1, MB), (1, 0, MB)], [1, 1]),  # both ways at once
    # Max-min: three share the link of rank 2, which leaves two thirds of rank 3's to the last.
    ([(0, 2, MB), (1, 2, MB), (3, 2, MB), (3, 4, 2 * MB)], [3, 3, 3, 3, 3]),
])  # fmt: skip
def test_messages_share_links(messages, seconds):
    size = len(seconds)
    assert ended(exchange(size, messages), messages)[0] == pytest.approx(seconds, rel=2e-3)


@pytest.mark.parametrize("nics, seconds", [(1, 2), (2, 1), (4, 0.5)])
def test_ranks_share_the_nics_of_their_node(nics, seconds):
    """Messages inside a node do not use its NICs."""
    messages = [(0, 2, MB), (1, 3, MB), (0, 1, MB)]
    found, _ = ended(exchange(4, messages), messages, per_node=2, nics=nics)
    assert found == pytest.approx([seconds] * 4, rel=2e-3)
    inside = [(0, 1, MB)]
    assert ended(exchange(2, inside), inside, per_node=2)[0] == pytest.approx([1e-3] * 2)


def test_a_third_joins_late():
    """At 1 s the first message has 2 MB left; both run at half speed until 3 s."""
    messages = [(0, 1, 3 * MB), (0, 2, MB)]
    programs = exchange(3, messages, late={1: 1.0})
    assert ended(programs, messages)[0] == pytest.approx([4, 4, 3], rel=2e-3)


def test_messages_of_two_ranks_are_in_order():
    messages = [(0, 1, MB), (0, 1, MB)]
    programs = [
        [("post", [0, 1]), ("wait", [0, 1], 0.0)],
        [("post", [0, 1]), ("wait", [0], 0.0), ("spend", "compute", 1.0), ("wait", [1], 0.0)],
    ]
    assert ended(programs, messages)[0] == pytest.approx([2, 2])


def test_latency():
    """Latency is added at the end of each message, after both sides have posted it."""
    messages = [(0, 1, MB), (1, 0, MB)]
    programs = [
        [("spend", "other", 0.5), ("post", [0]), ("wait", [0], 0.0), ("post", [1]),
         ("wait", [1], 0.0)],
        [("post", [0]), ("wait", [0], 0.0), ("post", [1]), ("wait", [1], 0.0)],
    ]  # fmt: skip
    assert ended(programs, messages, latency=0.25)[0] == pytest.approx([3.0, 3.0])


@pytest.mark.parametrize("busy, seconds", [(0.0, 1.0), (0.8, 1.2), (2.0, 2.4)])
def test_the_core_works_for_what_arrives(busy, seconds):
    """A message of 1 s takes 0.4 s of the core, hidden in the rank's wait."""
    messages = [(0, 1, MB)]
    receiver = [("post", [0]), ("spend", "compute", busy), ("wait", [0], 0.4)]
    programs = [[("post", [0]), ("wait", [0], 0.0)], receiver]
    found, spans = ended(programs, messages)
    assert found == pytest.approx([1.0, seconds])
    assert spans[1][-1] == ("wait", busy, pytest.approx(seconds))


def test_earlier_waiting_is_worked_in():
    messages = [(0, 1, MB), (0, 1, MB)]
    programs = [
        [("post", [0, 1]), ("wait", [0, 1], 0.0)],
        [("post", [0, 1]), ("wait", [0], 0.0), ("spend", "merge", 3.0), ("wait", [1], 1.5)],
    ]
    assert ended(programs, messages)[0] == pytest.approx([2.0, 4.5])


def test_ranks_that_wait_for_ever():
    messages = [(0, 1, MB)]
    with pytest.raises(ValueError, match=r"1 of 2 ranks wait forever: rank 1 .* 0 to 1"):
        ended([[], [("post", [0]), ("wait", [0], 0.0)]], messages)
