"""The benchmark of kernels beside PyTorch's attention."""

import helpers

from a2d_mpi.core.config import PHASES
from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import BENCHMARK_SCHEMA, flat, kernel_speeds


def test_kernels_beside_torch_by_backend(tmp_path):
    """Backends that run are in the file by their names; one that does not run here is named."""
    options = ["--shapes", "40x2x8", "--trials", "2", "--masks", "causal", "--kernels", "numpy"]
    options += ["--output", tmp_path / "torch.h5", "--name", "x", "--torch", "default,cudnn,math"]
    done = helpers.drive("bench.py kernels", 0, *options)
    assert "torch's attention by cudnn does not run: " in done.stdout
    found = read_file(tmp_path / "torch.h5", BENCHMARK_SCHEMA)["figures"]["x"]
    names = {"numpy", "torch", "torch-math"}
    speeds = kernel_speeds(found)
    assert speeds.keys() == {f"40x2x8/causal/{phase}" for phase in PHASES}
    assert all(x.keys() == names for x in speeds.values())
    assert all(len(x) == 2 for x in flat(found).values())
