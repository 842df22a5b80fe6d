"""A grid and models on it, for the files of this folder."""

import string
from contextlib import ExitStack, contextmanager

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import ContextParallel

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@contextmanager
def grid_of(comm, ranks):
    """Give a grid of so many ranks, and one of each so many others."""
    part = comm.Split(comm.rank // ranks, comm.rank)
    rows = 2 if part.size % 2 == 0 else 1
    grid = ProcessGrid(part, rows, part.size // rows)
    yield grid
    grid.free()
    part.Free()


@pytest.fixture(scope="module")
def grid(comm, request):
    """Return a grid of all ranks, or of three of them and of the rest."""
    with grid_of(comm, 3 if getattr(request, "param", "all") == "three" else comm.size) as grid:
        yield grid


@pytest.fixture
def parallel(comm, grid):
    """Make a `ContextParallel` on the grid, or on so many ranks; it is freed after the test."""
    with ExitStack() as stack:

        def make(model, ranks=None, **options):
            on = stack.enter_context(grid_of(comm, ranks)) if ranks else grid
            cp = ContextParallel(on, model, **options)
            stack.callback(cp.free)
            return cp

        yield make


@pytest.fixture
def letters():
    """Return a tokenizer of 53 letters."""
    vocabulary = {x: i for i, x in enumerate(string.ascii_letters + "_")}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
