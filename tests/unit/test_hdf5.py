"""HDF5 files that are not whole, or are something else, are refused in one line."""

import os
import socket

import h5py
import numpy as np
import pytest
from helpers import assert_all_refused
from test_results import SHAPES, error_of, make_result, write_input

from a2d_mpi.experiments.hdf5 import extend_file, read_file
from a2d_mpi.experiments.results import (
    add_results,
    inspect_input,
    read_benchmark,
    read_result,
    read_shard,
    write_result,
)
from a2d_mpi.sharding.distribution import Distribution

SHAPE = SHAPES["k"]
WHOLE = Distribution("contiguous", SHAPE[0], 1)
HUGE = (10**12, 2, 4)


BAD = {
    "never written": (
        lambda f: f.create_dataset("k", SHAPE, "f4"),
        "k has 0 of the 928 bytes of its shape (29, 2, 4)",
    ),
    "partly written": (
        lambda f: f.create_dataset("k", SHAPE, "f4", chunks=(8, 2, 4)).write_direct(
            np.ones(SHAPE, "f4"), np.s_[8:], np.s_[8:]
        ),
        "k has 3 of the 4 chunks of its shape (29, 2, 4)",
    ),
    "huge": (lambda f: f.create_dataset("k", HUGE, "f4"), "k has 0 of the 32000000000000 bytes"),
    "huge chunks": (
        lambda f: f.create_dataset("k", HUGE, "f4", chunks=(1, 2, 4)),
        "k has 0 of the 1000000000000 chunks",
    ),
}


@pytest.fixture
def folder(tmp_path):
    """Make a folder with a good input file and a pipe."""
    os.mkfifo(tmp_path / "pipe")
    write_input(tmp_path / "source.h5")
    return tmp_path


def test_refuses_numbers_that_are_missing(folder):
    path = folder / "input.h5"
    for name, (spoil, text) in BAD.items():
        write_input(path, k=None)
        with h5py.File(path, "a") as file:
            spoil(file)
        found = error_of(lambda: inspect_input(path), OSError)
        assert found.startswith(f"cannot read {path} as HDF5: ") and text in found, (name, found)


def test_refuses_what_is_no_file(folder):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
    loop = folder / "loop"
    loop.symlink_to("loop")
    cases = {folder / "pipe": "it is not a regular file", folder / "socket": "it is not a regular",
             "/dev/zero": "it is not a regular file", loop: "Too many levels"}  # fmt: skip
    for path, text in cases.items():
        for read in (inspect_input, read_result, read_benchmark):
            assert text in error_of(lambda path=path, read=read: read(path), OSError)


def test_refuses_sizes_that_cannot_be(folder):
    path = folder / "input.h5"
    with h5py.File(path, "w") as file:
        file.attrs.update({"schema": "a2d_mpi input", "schema_version": 1})
        for name in "qkv":
            zeros = np.zeros((1, 1, 1 << 20), "f4")
            file.create_dataset(name, data=zeros, compression="gzip")
    assert "headdim must be at most 65536" in error_of(lambda: inspect_input(path), ValueError)


def test_a_filter_that_is_missing(folder):
    path = folder / "input.h5"
    write_input(path, k=None)
    with h5py.File(path, "a") as file:
        options = {"chunks": SHAPE, "compression": 999, "allow_unknown_filter": True}
        data = file.create_dataset("k", SHAPE, "f4", **options)
        data.id.write_direct_chunk((0, 0, 0), b"packed by a program that nobody has")
    text = error_of(lambda: read_shard(inspect_input(path), "k", WHOLE, 0, "f4"), OSError)
    assert "filter" in text


def test_result_files_that_lack_something(folder):
    result, bench = folder / "result.h5", folder / "bench.h5"
    for gone in ("timings", "checks", "area"):
        write_result(result, make_result())
        with h5py.File(result, "a") as file:
            del file[gone]
        assert f"{gone} is missing" in error_of(lambda: read_result(result), OSError)
    add_results(bench, {}, {"one": make_result()})
    with h5py.File(bench, "a") as file:
        del file["runs/one"]["config"]
    assert "config is missing" in error_of(lambda: read_benchmark(bench), OSError)


def test_equal_members_are_stored_once(tmp_path):
    """Runs share their origin, also with later runs; replaced runs leave the others alone."""
    path, schema, sent = tmp_path / "runs.h5", ("test", 1), np.arange(64.0)
    # More names than an attribute in the header of a group can hold.
    origin = {"hostnames": [f"node{i}" for i in range(6000)], "mpi_library": "Open MPI\0"}
    for names, number in (("ab", 1), ("bc", 2)):
        runs = {x: {"origin": origin, "sent": sent * number, "number": number} for x in names}
        extend_file(path, schema, {"settings": {"seed": 0}, "runs": runs})
    extend_file(path, schema, {"runs": {"d": {"origin": {**origin, "device": "other"}}}})
    found = read_file(path, schema)
    numbers = {x: y.get("number") for x, y in found["runs"].items()}
    assert numbers == {"a": 1, "b": 2, "c": 2, "d": None}
    assert found["settings"] == {"seed": 0} and len(found["origins"]) == 2
    assert found["runs"]["a"]["origin"] == {**origin, "mpi_library": "Open MPI"}
    assert found["runs"]["d"]["origin"]["device"] == "other"
    for name, number in (("a", 1), ("b", 2), ("c", 2)):
        np.testing.assert_array_equal(found["runs"][name]["sent"], sent * number)
    with h5py.File(path) as file:
        assert file["runs/a/origin"] == file["runs/c/origin"] != file["runs/d/origin"]
        assert file["runs/b/sent"] == file["runs/c/sent"] != file["runs/a/sent"]
        assert (file["runs/a/sent"].chunks, file["runs/a/sent"].compression) == ((64,), "gzip")


def test_drivers_refuse_them_at_once(folder):
    path = folder / "input.h5"
    write_input(path, k=None)
    with h5py.File(path, "a") as file:
        file.create_dataset("k", HUGE, "f4")
    assert_all_refused("attention.py", 2, [
        ([folder / "pipe"], [], f"cannot read {folder / 'pipe'} as HDF5: it is not a regular"),
        ([path], [], "k has 0 of the 32000000000000 bytes of its shape"),
    ])  # fmt: skip
