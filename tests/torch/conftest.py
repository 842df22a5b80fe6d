"""A grid and models on it, for the files of this folder."""

import pytest
import torch
import transformers

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import ContextParallel

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def grid(comm, request):
    """Return a grid of all ranks, or of three of them and of the rest."""
    part = comm.Split(getattr(request, "param", "all") == "three" and comm.rank >= 3, comm.rank)
    rows = 2 if part.size % 2 == 0 else 1
    grid = ProcessGrid(part, rows, part.size // rows)
    yield grid
    grid.free()
    part.Free()


@pytest.fixture
def parallel(grid):
    """Make a `ContextParallel` on the grid; it is freed after the test."""
    made = []

    def make(model, **options):
        made.append(ContextParallel(grid, model, **options))
        return made[-1]

    yield make
    for x in made:
        x.free()
