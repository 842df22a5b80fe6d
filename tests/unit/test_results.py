"""Input and result files: every defect is one line, and no file is half-written."""

import fcntl
import os
import platform
import re
import sys
from datetime import datetime
from functools import partial

import h5py
import ml_dtypes
import numpy as np
import pytest
from helpers import SAMPLE, execute

import a2d_mpi
from a2d_mpi.checks.check import Check, attributes_of
from a2d_mpi.checks.measure import TIMED_PARTS
from a2d_mpi.core.atomic import check_writable
from a2d_mpi.results import origin
from a2d_mpi.results.hdf5 import (
    BENCHMARK_SCHEMA,
    check_output,
    create,
    extend_file,
    flat,
    read_file,
    write_file,
)
from a2d_mpi.results.inputs import inspect_input, read_shard
from a2d_mpi.results.origin import provenance
from a2d_mpi.results.tables import read_measured
from a2d_mpi.sharding.distribution import FORMULAS, Distribution

SHAPES = {"q": (29, 6, 4), "k": (29, 2, 4), "v": (29, 2, 4), "dout": (29, 6, 4)}
SHAPE = SHAPES["k"]
WHOLE = Distribution("contiguous", 29, 1)


def write_input(path, attributes=(), **changes):
    """Write a small valid input with changed arrays and attributes.

    None: without it; a function of the file and the name writes what it likes.
    """
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape, "f4") for name, shape in SHAPES.items()}
    with h5py.File(path, "w") as file:
        given = {"schema": "a2d_mpi input", "schema_version": 1, **dict(attributes)}
        file.attrs.update({key: x for key, x in given.items() if x is not None})
        for name, x in {**arrays, **changes}.items():
            if callable(x):
                x(file, name)
            elif x is not None:
                file[name] = x
    return arrays


SCHEMA = ("test", 1)
BFLOAT16 = (15, 7, 8, 0, 7)  # sign bit; first bit and width of the exponent and of the mantissa


def make_result(nranks=3):
    """What `Measurement.result` returns, with outputs."""
    rng = np.random.default_rng(0)
    kinds = ("sent", "received", "predicted_sent", "predicted_received")
    origin = provenance("MPICH 4.3", [f"node{rank}" for rank in range(nranks)])
    checks = {"out": Check(1e-7, 1e-6, 16), "dq": Check(float("inf"), 1e-6, 16)}
    traffic = {x: {y: np.arange(nranks) * 2**40 for y in kinds} for x in ("row", "col")}
    return {
        "utc_time": origin.pop("utc_time"),
        "origin": origin,
        "config": {"name": "a", "method": "ring", "rows": 1, "overlap": True, "x": 0.5},
        "area": np.arange(nranks),
        "timings": {"forward": {x: rng.random((2, nranks)) for x in TIMED_PARTS}},
        "traffic": {"forward": traffic},
        **attributes_of(checks),
        "outputs": {"out": rng.random((5, 2, 3), "f4"), "lse": np.full((5, 2), -np.inf)},
    }


def error_of(action, *given):
    """Return the one line with which a file is refused."""
    with pytest.raises((OSError, ValueError)) as caught:
        action(*given)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def packed_by_nobody(file, name):
    options = {"chunks": SHAPE, "compression": 999, "allow_unknown_filter": True}
    data = file.create_dataset(name, SHAPE, "f4", **options)
    data.id.write_direct_chunk((0, 0, 0), b"packed by a program that nobody has")


def ones(*shape, dtype="f4"):
    return np.ones(shape, dtype)


def zeros_of_a_megabyte(file, name):
    file.create_dataset(name, data=np.zeros((1, 1, 1 << 20), "f4"), compression="gzip")


# What is written in place of a good input, and what is said of it.
BAD = [
    ({"attributes": {"schema": "other"}}, "must be 'a2d_mpi input' and 1, got 'other' and 1"),
    ({"attributes": {"schema_version": 2}}, "got 'a2d_mpi input' and 2"),
    ({"attributes": {"schema": None, "schema_version": None}}, "and 1, got neither"),
    ({"q": ones(29, 6, 4, dtype="i4")}, "q must be floating-point numbers, got int32"),
    ({"k": ones(29, 2, 4, dtype="c8")}, "k must be floating-point numbers, got complex64"),
    ({"q": "text"}, "q must be floating-point numbers, got object"),
    ({"v": h5py.Empty("f4")}, "v must have shape .*, got \\(\\)"),
    ({"q": ones(29, 24)}, "q must have shape .*, got \\(29, 24\\)"),
    ({"q": ones(0, 6, 4)}, "seqlen must be a positive integer, got 0"),
    ({"k": ones(28, 2, 4)}, "q \\(29, 6, 4\\), k \\(28, 2, 4\\), v \\(29, 2, 4\\)"),
    ({"v": ones(29, 3, 4)}, "k \\(29, 2, 4\\), v \\(29, 3, 4\\)"),
    ({"v": ones(29, 2, 5)}, "v \\(29, 2, 5\\)"),
    ({"dout": ones(29, 2, 4)}, "dout \\(29, 2, 4\\)"),
    (dict.fromkeys("kv", ones(29, 4, 4)), "nheads_kv"),
    (dict.fromkeys("qkv", zeros_of_a_megabyte), "headdim must be at most 65536"),
    ({"k": lambda file, name: file.create_group(name)}, "dataset k is missing"),
    ({"v": None}, "dataset v is missing"),
    ({"k": packed_by_nobody}, "filter|plugin"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_bad_inputs(tmp_path, changes, message):
    path = tmp_path / "input.h5"
    write_input(path, **changes)
    text = error_of(lambda: read_shard(inspect_input(path), "k", WHOLE, 0, "f4"))
    assert str(path) in text and re.search(message, text)


@pytest.mark.parametrize("keep", [0, 8, 2048, -1])
def test_truncated_input(tmp_path, keep):
    (path := tmp_path / "input.h5").write_bytes(SAMPLE.read_bytes()[:keep])
    assert str(path) in error_of(inspect_input, path)


def test_damaged_numbers_are_found_when_they_are_read(tmp_path):
    data = bytearray(SAMPLE.read_bytes())
    with h5py.File(SAMPLE) as file:
        start = file["k"].id.get_chunk_info(0).byte_offset
    data[start + 100 : start + 200] = bytes(100)
    path = tmp_path / "input.h5"
    path.write_bytes(data)
    info = inspect_input(path)
    whole = Distribution("contiguous", info.config.seqlen, 1)
    assert read_shard(info, "q", whole, 0, "f4").shape == (1536, 12, 32)
    text = error_of(read_shard, info, "k", whole, 0, "f4")
    assert text.startswith(f"cannot read {path} as HDF5: ")


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seqlen, nshards", [(29, 1), (29, 4), (17, 5), (3, 7)])
def test_shards(tmp_path, name, seqlen, nshards):
    """Also from a schema that C has written, and from the compressed sample."""
    nshards = {4: 3, 5: 6, 7: 6}.get(nshards, 1) if name == "triangle" else nshards
    path, d = tmp_path / "input.h5", Distribution(name, seqlen, nshards)
    arrays = write_input(path, {"schema": np.bytes_("a2d_mpi input")})
    with h5py.File(SAMPLE) as file:
        sample = {"q": file["q"][()]}
    assert inspect_input(path).has_dout and not inspect_input(SAMPLE).has_dout
    for info, tensors in ((inspect_input(path), arrays), (inspect_input(SAMPLE), sample)):
        for tensor, x in tensors.items():
            for part in range(nshards):
                for dtype in ("f4", "f8"):
                    rows = read_shard(info, tensor, d, part, dtype)
                    assert rows.dtype == dtype and rows.flags.c_contiguous
                    assert np.array_equal(rows, x[d.tokens(part)].astype("f4"))


def test_reading(tmp_path):
    """Reading takes no lock; a part of a file that is gone is refused."""
    path = tmp_path / "input.h5"
    arrays = write_input(path)
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="lock"):  # the test can tell
            h5py.File(path, "r", locking=True)
        q = read_shard(inspect_input(path), "q", WHOLE, 0, "f4")
    assert np.array_equal(q, arrays["q"])
    read = partial(read_shard, inspect_input(path), "q")
    path.unlink()
    assert "No such file" in error_of(read, WHOLE, 0, "f4")


# Result files.


@pytest.mark.parametrize("nranks", [1, 3, 6000])
def test_round_trip(tmp_path, nranks):
    """Also of 6000 host names, more than an attribute of the first HDF5 format holds."""
    path, result = tmp_path / "result.h5", make_result(nranks)
    write_file(path, SCHEMA, result)
    found = read_file(path, SCHEMA)
    assert os.listdir(tmp_path) == ["result.h5"]
    assert found.keys() == result.keys()
    for name in ("utc_time", "origin", "config", "checks", "passed"):
        assert found[name] == result[name]
    assert {type(value) for value in found["config"].values()} == {str, int, float}
    one, other = flat(found), flat(result)
    assert one.keys() == other.keys() and {"area", "timings/forward/total"} < one.keys()
    assert all(one[x].dtype == y.dtype and np.array_equal(one[x], y) for x, y in other.items())


def test_arrays_describe_themselves(tmp_path):
    """They have units, and names and scales of dimensions; flags are integers."""
    path, of = tmp_path / "runs.h5", {"seconds": "s", "bytes": "byte"}
    runs = {f"{n} ranks": make_result(n) for n in (3, 4)}
    extend_file(path, BENCHMARK_SCHEMA, {"runs": runs})
    extend_file(path, BENCHMARK_SCHEMA, {"runs": {"again": make_result(3)}})
    with h5py.File(path) as file:
        for name, n in [("3 ranks", 3), ("4 ranks", 4), ("again", 3)]:
            run = file["runs"][name]
            for x, unit, labels in (
                ("timings/forward/wait", of["seconds"], ["trial", "rank"]),
                ("traffic/forward/col/sent", of["bytes"], ["rank"]),
                ("area", "1", ["rank"]),
                ("outputs/out", "1", ["token", "head", "element_v"]),
                ("outputs/lse", "1", ["token", "head"]),
            ):
                assert run[x].attrs["units"] == unit
                assert [dim.label for dim in run[x].dims] == labels
                around = run["outputs"] if x.startswith("outputs") else run
                for dim, length in zip(run[x].dims, run[x].shape):
                    assert dim[0] == around[dim.label] and dim[0].is_scale
                    assert np.array_equal(dim[0], np.arange(length))
            assert run["rank"].shape == (n,) and run["trial"].shape == (2,)
            found = [run[x].dtype for x in ("timings/forward/wait", "area")]
            assert found == [np.float64, np.int64]
            assert run["checks/out"].attrs["passed"] and not run["checks/dq"].attrs["passed"]
            assert run["config"].attrs["overlap"].dtype.kind == "i"
    found = read_file(path, BENCHMARK_SCHEMA)["runs"]  # without the scales
    assert [flat(x).keys() for x in found.values()] == [flat(runs["3 ranks"]).keys()] * 3


@pytest.mark.parametrize("way", ["now", "before"])
def test_bfloat16(tmp_path, way):
    """Two bytes a number, the bits of bfloat16; earlier files have float32, and read alike."""
    x = np.array([1.0, -2.5, 3.0e38, 1e-39, np.inf, 0.1], ml_dtypes.bfloat16)
    with h5py.File(path := tmp_path / "x.h5", "w") as file:
        file.attrs.update({"schema": "test", "schema_version": 1})
        if way == "now":
            create(file, "x", x.shape, x.dtype)[...] = x.astype("f4")
            kind = file["x"].id.get_type()
            assert (kind.get_size(), kind.get_fields(), kind.get_ebias()) == (2, BFLOAT16, 127)
        else:
            file["x"] = x.astype("f4")
    assert (x.tobytes() in path.read_bytes()) == (way == "now")
    assert np.array_equal(read_file(path, ("test", 1))["x"], x.astype("f4"))


def test_text_that_hdf5_cannot_hold(tmp_path):
    """Names that are not UTF-8 lose no result."""
    path = tmp_path / "result.h5"
    write_file(path, SCHEMA, {"config": {"input": os.fsdecode(b"caf\xe9 \xc3\xa9.h5")}})
    assert read_file(path, SCHEMA) == {"config": {"input": "caf\\udce9 é.h5"}}


def test_reads_only_whole_results(tmp_path):
    assert "must be 'a2d_mpi benchmark' and 2, got 'a2d_mpi input' and 1" in error_of(
        read_measured, SAMPLE
    )
    path = tmp_path / "bench.h5"
    for gone in ("timings", "checks", "config"):
        write_file(path, BENCHMARK_SCHEMA, {"runs": {"one": make_result()}})
        with h5py.File(path, "a") as file:
            del file["runs/one"][gone]
        text = error_of(read_measured, path)
        assert text == f"cannot read {path} as HDF5: {gone} is missing"
    assert "must be 'a2d_mpi input' and 1, got" in error_of(inspect_input, path)
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in error_of(read_measured, path)


def test_runs_are_added_and_replaced(tmp_path):
    """Also with more host names than an attribute in the header of a group can hold."""
    path, schema, sent = tmp_path / "runs.h5", ("test", 1), np.arange(64.0)
    origin = {"hostnames": [f"node{i}" for i in range(6000)], "mpi_library": "Open MPI\0"}
    for names, number in (("ab", 1), ("bc", 2)):
        runs = {x: {"origin": origin, "sent": sent * number, "number": number} for x in names}
        extend_file(path, schema, {"settings": {"seed": 0}, "runs": runs})
    found = read_file(path, schema)
    assert found["settings"] == {"seed": 0}
    for name, number in (("a", 1), ("b", 2), ("c", 2)):
        run = found["runs"][name]
        assert run["number"] == number and np.array_equal(run["sent"], sent * number)
        assert run["origin"] == {**origin, "mpi_library": "Open MPI"}
    with h5py.File(path) as file:
        assert (file["runs/a/sent"].chunks, file["runs/a/sent"].compression) == ((64,), "gzip")


def test_provenance(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["attention.py", "--output", "a b.h5"])
    found = provenance("Open MPI 5", ("n1", "n2"))
    known = {
        "package_version": a2d_mpi.__version__, "mpi_library": "Open MPI 5",
        "command_line": "attention.py --output 'a b.h5'", "hostnames": ["n1", "n2"],
        "python_version": platform.python_version(), "numpy_version": np.__version__,
    }  # fmt: skip
    assert known == {x: found[x] for x in known} and found["device"]
    assert re.fullmatch(r"[0-9a-f]{40,64}(-dirty)?|unknown", found["git_commit"])
    assert re.fullmatch(r"\d+\.\d+.*", found["mpi4py_version"])
    assert re.fullmatch(r"\d+\.\d+.*|none", found["numba_version"])
    assert datetime.fromisoformat(found["utc_time"]).utcoffset().total_seconds() == 0
    (path := tmp_path / "x").write_bytes(b"abc")
    one = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2
    assert origin.sha256(path) == one


def test_git_commit(tmp_path, monkeypatch):
    source = tmp_path / "package" / "origin.py"
    source.parent.mkdir()
    source.write_text("1\n")
    monkeypatch.setattr(origin, "__file__", str(source))

    def git(*args):
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        return execute("git", "-C", tmp_path, *identity, *args).stdout.strip()

    def commit():
        return provenance("", [])["git_commit"]

    assert commit() == "unknown"
    git("init")
    assert commit() == "unknown"  # the repository does not know the package
    git("add", ".")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert commit() == head
    source.write_text("2\n")
    assert commit() == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown"


# Results that cannot be written.


def write_some_result(path):
    write_file(path, SCHEMA, make_result())


def test_check_writable_leaves_no_trace(tmp_path):
    path = tmp_path / "result.h5"
    check_writable(path, 1000)
    text = error_of(check_writable, path, 1 << 60)
    assert re.search(f"needs {1 << 60} bytes|File too large", text)
    assert os.listdir(tmp_path) == []
    path.write_text("precious")
    before = path.stat()
    check_writable(path, 1000)
    assert os.listdir(tmp_path) == ["result.h5"]
    assert (path.read_text(), path.stat().st_mtime_ns) == ("precious", before.st_mtime_ns)


def test_own_and_empty_files_are_replaced(tmp_path):
    write_some_result(tmp_path / "own.h5")
    (empty := tmp_path / "empty.png").touch()
    check_output(tmp_path / "own.h5", SCHEMA)
    check_output(empty, SCHEMA)
    assert "another kind of file" in error_of(check_output, SAMPLE, SCHEMA)


def test_what_a_file_lacks(tmp_path):
    """It is an error of the file, also after the file was read."""
    write_some_result(path := tmp_path / "result.h5")
    told = f"cannot read {path} as HDF5: none is missing"
    assert error_of(lambda: read_file(path, SCHEMA)["none"]) == told


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "scratch").mkdir()
    link = tmp_path / "result.h5"
    link.symlink_to("scratch/real.h5")
    write_some_result(link)
    assert link.is_symlink()
    assert read_file(tmp_path / "scratch" / "real.h5", SCHEMA)["config"]["method"] == "ring"


def test_a_result_that_cannot_be_written_replaces_nothing(tmp_path):
    """Of numbers that HDF5 cannot hold; tests/system/test_driver.py has a full disk."""
    path = tmp_path / "result.h5"
    write_some_result(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_file(path, SCHEMA, {"outputs": {"out": np.array([object()])}})
    assert os.listdir(tmp_path) == ["result.h5"] and path.read_bytes() == before
