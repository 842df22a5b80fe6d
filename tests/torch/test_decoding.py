"""Partial results of a decoding step merge in one exchange and in two, on more than two ranks.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import sys

import numpy as np
import pytest
from mpi4py import MPI

from a2d_mpi import ProcessGrid


@pytest.mark.parametrize("ranks", [3, 4, 6])
def test_both_ways(ranks):
    from helpers import launch  # which the launched program does not find

    assert launch(ranks, __file__, timeout=200).stdout == "merged\n"


def merged(parts):
    """Return the merged rows in the precision of partial results, (ranks, rows, width + 1)."""
    largest = parts[..., -1].max(0)
    weights = np.exp(parts[..., -1] - np.where(np.isfinite(largest), largest, 0))[..., None]
    total = weights.sum(0)
    return (weights * parts[..., :-1]).sum(0) / np.where(total > 0, total, 1)


def main(comm):
    """Merge random partial results both ways; some ranks see no key, and one row is padding."""
    from a2d_mpi.torch.decoding import Steps

    grid, random = ProcessGrid(comm, 1, comm.size), np.random.default_rng(0)
    steps = Steps(grid)
    for rows in (1, 2, comm.size, 7, 50):  # most do not divide by the number of ranks
        for dtype in (np.float32, np.float64):
            parts = random.standard_normal((comm.size, rows, 9)).astype(dtype)
            parts[..., -1] *= 9
            unseen = random.random((comm.size, rows)) < 0.3
            unseen[:, -1] |= rows > 1
            parts[unseen] = [0] * 8 + [-np.inf]
            exact, bound = merged(parts.astype(np.longdouble)), 8 * np.finfo(dtype).eps
            bound += 2 * np.abs(merged(parts) - exact).max()
            for near in (True, False):
                steps._near = near
                steps.traffic.clear()
                found = steps._merged(parts[comm.rank])
                sent, _ = steps.traffic.messages["decode", "all"]
                assert (sent == comm.size - 1) == near, f"{sent} messages"
                assert len(set(comm.allgather(found.tobytes()))) == 1, "ranks have other bits"
                far = np.abs(found - exact).max()
                assert found.dtype == dtype and far <= bound, f"off by {far}, more than {bound}"
    grid.free()
    if comm.rank == 0:
        print("merged")


if __name__ == "__main__":
    sys.exit(main(MPI.COMM_WORLD))
