"""`autotune` picks the plan that is the fastest as measured, the same on all ranks."""

import pytest
from helpers import ROOT, assert_all
from mpi4py import MPI
from refused import assert_raises
from threadpoolctl import threadpool_info

from a2d_mpi import Causal, Documents, autotune
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.checks import autotune as module
from a2d_mpi.checks.timing import plan_of
from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi, pytest.mark.grids]

MACHINE = read_machine(ROOT / "data" / "results" / "16x1.toml")


def work(**others):
    others = {"dtype": "float32", "mask": Causal(), "backward": True, **others}
    return Workload(64, 4, 8, 2, **others)


@pytest.fixture
def timed(monkeypatch):
    """Replace the times of plans by invented ones: the last plan is the fastest."""
    calls = []

    def seconds(plan, *others):
        calls.append(plan.method)
        return 9.0 - len(calls)

    monkeypatch.setattr(module, "_seconds", seconds)
    return calls


@pytest.mark.parametrize("mask", [Causal(), Documents([0, 9, 40, 64], causal=True)], ids=repr)
def test_same_on_all_ranks(comm, mask):
    tuned = autotune(comm, work(mask=mask), MACHINE, trials=2)
    texts = comm.allgather(f"{tuned.method} {tuned.grid.layout} {tuned}")
    assert_all(comm, len(set(texts)) == 1, texts)
    seconds = [x.seconds for x in tuned.table]
    assert_all(comm, seconds == sorted(seconds) and seconds[0] > 0, f"{tuned}")
    plan = make_plan(tuned.method, tuned.grid, mask, **work().arguments)
    chosen = tuned.table[0].choice.layout
    assert_all(comm, chosen.distribution in (None, plan.distribution.name), f"{chosen}")
    tuned.grid.free()


@pytest.mark.thorough
def test_without_a_profile(comm, monkeypatch):
    monkeypatch.setattr(module, "CALIBRATION", 0.1)
    tuned = autotune(comm, work(), top=1, trials=1)
    assert_all(comm, len(tuned.table) == 1, f"{tuned}")
    tuned.grid.free()


def test_the_machine_is_measured_with_the_threads_of_the_plans(comm, monkeypatch):
    """With one thread the kernels of plans with two would be predicted to be too slow."""
    used = []

    def recorded(*args):
        used.extend(x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas")
        raise CollectiveError("seen")

    monkeypatch.setattr(module, "_kernels", recorded)
    with pytest.raises(CollectiveError, match="seen"):
        autotune(MPI.COMM_SELF, work(), threads=2)
    assert_all(comm, set(used) == {2}, f"{used}")


def test_the_fastest_is_taken(comm, timed):
    tuned = autotune(comm, work(), MACHINE)
    taken = tuned.method, tuned.table[0].seconds
    assert_all(comm, taken == (timed[-1], 9 - len(timed)), f"{timed} {tuned}")
    tuned.grid.free()


def test_a_plan_that_fails_is_left_out(comm, timed, monkeypatch):
    made = []

    def failing(comm, choice, *args, **options):
        made.append(choice)
        if len(made) == 1:
            raise CollectiveError("the first one fails")
        return plan_of(comm, choice, *args, **options)

    monkeypatch.setattr(module, "plan_of", failing)
    if comm.size == 1:  # there is one plan only
        return
    tuned = autotune(comm, work(), MACHINE)
    assert_all(comm, tuned.table[-1].problem == "the first one fails", f"{tuned}")
    assert_all(comm, "the first one fails" in str(tuned), f"{tuned}")
    tuned.grid.free()


def test_bad_input(comm):
    text = "no plan runs; the first one fails: kernel 'cupy' "
    assert_raises(comm, text, lambda: autotune(comm, work(), MACHINE, kernel="cupy"))
    assert_raises(comm, "top and trials must be", lambda: autotune(comm, work(), MACHINE, top=0))
    if comm.size > 1:
        mine = work(backward=comm.rank == 1)
        assert_raises(comm, "ranks disagree on backward", lambda: autotune(comm, mine, MACHINE))
