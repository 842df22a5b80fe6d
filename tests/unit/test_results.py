"""Input and result files: every defect is one line, and no file is half-written."""

import fcntl
import os
import platform
import re
import sys
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import h5py
import numpy as np
import pytest
from helpers import ROOT, SAMPLE, execute, launch

import a2d_mpi
from a2d_mpi.core.atomic import check_writable
from a2d_mpi.experiments import origin
from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.origin import provenance
from a2d_mpi.experiments.results import (
    TICKS,
    Check,
    Result,
    inspect_input,
    read_result,
    read_shard,
    write_result,
)
from a2d_mpi.experiments.simulate import SCHEMA as SIMULATIONS
from a2d_mpi.sharding.distribution import FORMULAS, Distribution

SHAPES = {"q": (29, 6, 4), "k": (29, 2, 4), "v": (29, 2, 4), "dout": (29, 6, 4)}


def write_input(path, attributes=None, **changes):
    """Write a small valid input with changed arrays (None: without it) or attributes."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape, "f4") for name, shape in SHAPES.items()}
    with h5py.File(path, "w") as file:
        attributes = {"schema": "a2d_mpi input", "schema_version": 1, **(attributes or {})}
        file.attrs.update({key: x for key, x in attributes.items() if x is not None})
        for name, x in {**arrays, **changes}.items():
            if x is not None:
                file[name] = x
    return arrays


def make_result(nranks=3, **changes):
    rng = np.random.default_rng(0)
    ticks = {x: rng.integers(0, 1 << 22, (2, nranks)) for x in ("compute", "total")}
    timings = {f"forward/{part}": x / TICKS for part, x in ticks.items()}
    kinds = ("sent", "received", "predicted_sent", "predicted_received")
    result = Result(
        provenance=provenance("MPICH 4.3", [f"node{rank}" for rank in range(nranks)]),
        config={"method": "ring", "rows": 1, "overlap": True, "softmax_scale": 0.125},
        area=np.arange(nranks),
        timings=timings,
        traffic={
            key: {kind: np.arange(nranks) * 2**40 for kind in kinds}
            for key in ("forward/row", "forward/col")
        },
        checks={"out": Check(1e-7, 1e-6, 16), "dq": Check(float("inf"), 1e-6, 16)},
        outputs={"out": rng.random((5, 2, 3), "f4"), "lse": np.full((5, 2), -np.inf)},
    )
    return replace(result, **changes)


def error_of(action, kind):
    """Return the one line with which `action` fails."""
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


# Input files.


def test_committed_results_name_no_folder_of_a_machine():
    """Command lines in files of data/ have relative paths."""
    files = [*(ROOT / "data").rglob("*.h5")]
    assert len(files) > 20
    folders = re.compile(rb"/(?:home|root|tmp|work|Users)/")
    assert [x.name for x in files if folders.search(x.read_bytes())] == []
    for path in (ROOT / "data/results/scale").glob("*.h5"):  # packed tables
        for name, column in read_file(path, SIMULATIONS)["runs"].items():
            assert not folders.search(column.tobytes()), (path, name)


def test_the_sample():
    info = inspect_input(SAMPLE)
    config = info.config
    sizes = (config.seqlen, config.nheads, config.nheads_kv, config.headdim, info.has_dout)
    assert sizes == (1536, 12, 12, 32, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attributes": {"schema": "other"}}, "must be 'a2d_mpi input' and 1, got 'other' and 1"),
        ({"attributes": {"schema_version": 2}}, "got 'a2d_mpi input' and 2"),
        ({"attributes": {"schema": None, "schema_version": None}}, "and 1, got neither"),
        ({"q": np.ones(SHAPES["q"], "i4")}, "q must be floating-point numbers, got int32"),
        ({"k": np.ones(SHAPES["k"], "c8")}, "k must be floating-point numbers, got complex64"),
        ({"q": "text"}, "q must be floating-point numbers, got object"),
        ({"v": h5py.Empty("f4")}, r"v must have shape .*, got \(\)"),
        ({"q": np.ones((29, 24), "f4")}, r"q must have shape .*, got \(29, 24\)"),
        ({"q": np.ones((0, 6, 4), "f4")}, "seqlen must be a positive integer, got 0"),
        ({"k": np.ones((28, 2, 4), "f4")}, r"q \(29, 6, 4\), k \(28, 2, 4\), v \(29, 2, 4\)"),
        ({"v": np.ones((29, 3, 4), "f4")}, r"k \(29, 2, 4\), v \(29, 3, 4\)"),
        ({"v": np.ones((29, 2, 5), "f4")}, r"v \(29, 2, 5\)"),
        ({"dout": np.ones((29, 2, 4), "f4")}, r"dout \(29, 2, 4\)"),
        (dict.fromkeys("kv", np.ones((29, 4, 4), "f4")), "nheads_kv"),
    ],
)
def test_refuses_an_input_that_does_not_fit(tmp_path, changes, message):
    path = tmp_path / "input.h5"
    write_input(path, **changes)
    text = error_of(lambda: inspect_input(path), ValueError)
    assert str(path) in text
    assert re.search(message, text)


def test_refuses_a_group_in_place_of_a_dataset(tmp_path):
    path = tmp_path / "input.h5"
    write_input(path, k=None)
    with h5py.File(path, "a") as file:
        file.create_group("k")
    assert "dataset k is missing" in error_of(lambda: inspect_input(path), OSError)
    write_input(path, v=None)
    assert "dataset v is missing" in error_of(lambda: inspect_input(path), OSError)


def test_takes_a_schema_that_c_has_written(tmp_path):
    path = tmp_path / "input.h5"
    write_input(path, attributes={"schema": np.bytes_("a2d_mpi input")})
    assert inspect_input(path).has_dout


def test_refuses_what_is_no_hdf5_file(tmp_path):
    text_file = tmp_path / "text"
    text_file.write_text("q, k, v\n" * 1000)
    reasons = {
        tmp_path / "missing.h5": "No such file or directory",
        tmp_path: "Is a directory",
        text_file / "input.h5": "Not a directory",
        text_file: "file signature not found",
    }
    for path, reason in reasons.items():
        text = error_of(lambda path=path: inspect_input(path), OSError)
        assert text.startswith(f"cannot read {path} as HDF5: ")
        assert reason in text


@pytest.mark.parametrize("keep", [0, 7, 8, 95, 96, 2048, 0.1, 0.5, 0.999, -1])
def test_refuses_a_truncated_input(tmp_path, keep):
    data = SAMPLE.read_bytes()
    length = int(keep * len(data)) if isinstance(keep, float) else keep
    path = tmp_path / "input.h5"
    path.write_bytes(data[:length])
    assert str(path) in error_of(lambda: inspect_input(path), OSError)


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
    text = error_of(lambda: read_shard(info, "k", whole, 0, "f4"), OSError)
    assert text.startswith(f"cannot read {path} as HDF5: ")


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("seqlen", "nshards"), [(29, 1), (29, 4), (17, 5), (3, 7)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_parts(tmp_path, name, seqlen, nshards, dtype):
    path = tmp_path / "input.h5"
    arrays = write_input(path)
    info = inspect_input(path)
    assert info.has_dout
    nshards = {4: 3, 5: 6, 7: 6}.get(nshards, 1) if name == "triangle" else nshards
    d = Distribution(name, seqlen, nshards)
    for tensor, x in arrays.items():
        for part in range(nshards):
            rows = read_shard(info, tensor, d, part, dtype)
            assert rows.dtype == dtype
            assert rows.flags.c_contiguous
            assert np.array_equal(rows, x[d.tokens(part)])


def test_parts_of_the_compressed_sample():
    info = inspect_input(SAMPLE)
    with h5py.File(SAMPLE) as file:
        q = file["q"][()]
    for name in FORMULAS:
        d = Distribution(name, 1000, 3)
        for part in range(3):
            rows = read_shard(info, "q", d, part, "f4")
            assert np.array_equal(rows, q[d.tokens(part)])


def test_a_part_of_more_tokens_than_there_are(tmp_path):
    path = tmp_path / "input.h5"
    write_input(path)
    d = Distribution("zigzag", 30, 2)
    text = error_of(lambda: read_shard(inspect_input(path), "q", d, 0, "f4"), ValueError)
    assert text == f"{path} has 29 tokens, must have 30"


def test_a_part_of_a_file_that_is_gone(tmp_path):
    path = tmp_path / "input.h5"
    write_input(path)
    info = inspect_input(path)
    d = Distribution("zigzag", 29, 2)
    path.unlink()
    assert "No such file" in error_of(lambda: read_shard(info, "q", d, 0, "f4"), OSError)


def test_reading_takes_no_lock(tmp_path):
    path = tmp_path / "input.h5"
    arrays = write_input(path)
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="lock"):  # the test can tell
            h5py.File(path, "r", locking=True)
        q = read_shard(inspect_input(path), "q", Distribution("striped", 29, 1), 0, "f4")
    assert np.array_equal(q, arrays["q"])


# Result files.


@pytest.mark.parametrize("nranks", [1, 3, 6000])
def test_round_trip(tmp_path, nranks):
    path = tmp_path / "result.h5"
    # 6000 host names are more than an attribute of the first HDF5 format holds.
    result = make_result(nranks)
    write_result(path, result)
    found = read_result(path)
    assert os.listdir(tmp_path) == ["result.h5"]
    for name in ("provenance", "config", "checks"):
        assert getattr(found, name) == getattr(result, name)
    assert {type(value) for value in found.config.values()} == {str, int, bool, float}
    np.testing.assert_array_equal(found.area, result.area)
    flat = [{**r.timings, **r.outputs} for r in (found, result)]
    assert flat[0].keys() == flat[1].keys()
    for name, x in flat[1].items():
        assert flat[0][name].dtype == x.dtype
        np.testing.assert_array_equal(flat[0][name], x)
    assert found.traffic.keys() == result.traffic.keys()
    for name, counts in result.traffic.items():
        assert found.traffic[name].keys() == counts.keys()
        for kind, x in counts.items():
            np.testing.assert_array_equal(found.traffic[name][kind], x)


def test_layout(tmp_path):
    path = tmp_path / "result.h5"
    write_result(path, make_result(outputs={}))
    with h5py.File(path) as file:
        assert file.attrs["schema"] == "a2d_mpi result"
        assert file.attrs["schema_version"] == 1
        assert list(file.attrs["hostnames"]) == ["node0", "node1", "node2"]
        assert file["config"].attrs["method"] == "ring"
        assert file["timings/forward/total"].dtype == np.float64
        assert file["traffic/forward/row/predicted_sent"].dtype == np.int64
        assert file["area"].dtype == np.int64
        assert file["checks/out"].attrs["passed"]
        assert not file["checks/dq"].attrs["passed"]
        assert "outputs" not in file


@pytest.mark.parametrize(
    ("error", "bound", "passed"), [(1, 2, True), (2, 2, True), (3, 2, False), (np.nan, 2, False)]
)
def test_check(error, bound, passed):
    assert Check(error, bound, 1).passed is passed


def test_text_that_is_not_utf8_does_not_lose_a_result(tmp_path):
    path = tmp_path / "result.h5"
    write_result(path, make_result(config={"input": os.fsdecode(b"caf\xe9 \xc3\xa9.h5")}))
    assert read_result(path).config == {"input": "caf\\udce9 é.h5"}


def test_reads_only_results(tmp_path):
    text = "must be 'a2d_mpi result' and 1, got 'a2d_mpi input' and 1"
    assert text in error_of(lambda: read_result(SAMPLE), ValueError)
    path = tmp_path / "result.h5"
    write_result(path, make_result())
    assert "must be 'a2d_mpi input' and 1, got" in error_of(
        lambda: inspect_input(path), ValueError
    )
    with h5py.File(path, "a") as file:
        del file["area"]
    assert "area" in error_of(lambda: read_result(path), OSError)
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in error_of(lambda: read_result(path), OSError)


def test_provenance(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["attention.py", "--output", "a b.h5"])
    found = provenance("Open MPI 5", ("n1", "n2"))
    assert found["package_version"] == a2d_mpi.__version__
    assert re.fullmatch(r"[0-9a-f]{40,64}(-dirty)?|unknown", found["git_commit"])
    assert found["command_line"] == "attention.py --output 'a b.h5'"
    assert found["mpi_library"] == "Open MPI 5"
    assert found["python_version"] == platform.python_version()
    assert found["numpy_version"] == np.__version__
    assert re.fullmatch(r"\d+\.\d+.*", found["mpi4py_version"])
    assert re.fullmatch(r"\d+\.\d+.*|none", found["numba_version"])
    assert found["hostnames"] == ["n1", "n2"]
    assert found["device"]
    assert datetime.fromisoformat(found["utc_time"]).utcoffset().total_seconds() == 0


def test_sha256(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    one = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2
    assert origin.sha256(path) == one


def run_git(folder, *args):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return execute("git", "-C", folder, *identity, *args, timeout=60).stdout.strip()


def test_git_commit(tmp_path, monkeypatch):
    source = tmp_path / "package" / "origin.py"
    source.parent.mkdir()
    source.write_text("1\n")
    monkeypatch.setattr(origin, "__file__", str(source))

    def commit():
        return provenance("", [])["git_commit"]

    assert commit() == "unknown"
    run_git(tmp_path, "init")
    run_git(tmp_path, "commit", "--allow-empty", "-m", "first")
    assert commit() == "unknown"  # the repository does not know the package
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-m", "second")
    run_git(tmp_path, "tag", "-a", "v1", "-m", "tag")
    head = run_git(tmp_path, "rev-parse", "HEAD")
    assert commit() == head
    source.write_text("2\n")
    assert commit() == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown"


# Results that cannot be written.


def write_some_result(path):
    write_result(path, make_result())


@pytest.mark.parametrize("action", [check_writable, write_some_result])
def test_refuses_a_path_that_cannot_be_written(tmp_path, action):
    file = tmp_path / "file"
    file.write_text("precious")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reasons = {
        tmp_path / "missing" / "result.h5": "No such file or directory",
        tmp_path: "it is not a regular file",
        pipe: "it is not a regular file",
        file / "result.h5": "Not a directory",
        tmp_path / ("x" * 300): "File name too long",
    }
    if sys.platform == "linux":
        reasons[Path("/proc/result.h5")] = ""  # refused also to root, in various words
    for path, reason in reasons.items():
        text = error_of(lambda path=path: action(path), OSError)
        assert text.startswith(f"cannot write {path}: ")
        assert reason in text
    assert file.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


@pytest.fixture
def not_root():
    """Become the user nobody for a while, because root may write everywhere."""
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(65534)
    yield
    os.seteuid(uid)


@pytest.mark.parametrize("action", [check_writable, write_some_result])
def test_refuses_what_is_read_only(not_root, action):
    with tempfile.TemporaryDirectory() as folder:  # tmp_path would be root's
        path = Path(folder, "result.h5")
        path.touch(0o444)
        assert "Permission denied" in error_of(lambda: action(path), OSError)
        path.chmod(0o644)
        os.chmod(folder, 0o555)
        assert "Permission denied" in error_of(lambda: action(path), OSError)
        os.chmod(folder, 0o755)
        assert os.listdir(folder) == ["result.h5"]
        assert path.read_bytes() == b""


def test_check_writable_leaves_no_trace(tmp_path):
    path = tmp_path / "result.h5"
    check_writable(path, 1000)
    assert os.listdir(tmp_path) == []
    path.write_text("precious")
    before = path.stat()
    check_writable(path, 1000)
    assert os.listdir(tmp_path) == ["result.h5"]
    assert (path.read_text(), path.stat().st_mtime_ns) == ("precious", before.st_mtime_ns)


def test_check_writable_finds_too_little_room(tmp_path):
    text = error_of(lambda: check_writable(tmp_path / "result.h5", 1 << 60), OSError)
    assert re.search(f"needs {1 << 60} bytes|File too large", text)
    assert os.listdir(tmp_path) == []


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "scratch").mkdir()
    link = tmp_path / "result.h5"
    link.symlink_to("scratch/real.h5")
    write_result(link, make_result())
    assert link.is_symlink()
    assert read_result(tmp_path / "scratch" / "real.h5").config["method"] == "ring"


def test_a_result_that_hdf5_cannot_hold_replaces_nothing(tmp_path):
    path = tmp_path / "result.h5"
    write_result(path, make_result())
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_result(path, make_result(outputs={"out": np.array([object()])}))
    assert os.listdir(tmp_path) == ["result.h5"]
    assert path.read_bytes() == before


FULL_DISK = """
import resource, sys
from test_results import make_result
from a2d_mpi.core.atomic import check_writable
from a2d_mpi.experiments.results import write_result

path, size = sys.argv[1], int(sys.argv[2])
for limit in sorted({*range(0, 4096, 256), *range(0, size, size // 50), size - 1}):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for action in (lambda: check_writable(path, size), lambda: write_result(path, make_result())):
        try:
            action()
        except OSError as error:
            assert str(error) == f"cannot write {path}: File too large", str(error)
        else:
            raise AssertionError(f"{limit} bytes were enough for {size}")
print("no crash", flush=True)
"""


def test_full_disk(tmp_path):
    """A limit on the size of files acts as a full disk does, at whatever byte it fills up.

    In a process of its own: HDF5 that cannot close a file may crash when the interpreter exits.
    """
    path = tmp_path / "result.h5"
    write_result(path, make_result())
    before = path.read_bytes()
    command = "-c", FULL_DISK, path, len(before)
    run = launch(0, *command, timeout=120, cwd=Path(__file__).parent)
    assert (run.stdout, run.stderr) == ("no crash\n", "")
    assert os.listdir(tmp_path) == ["result.h5"]
    assert path.read_bytes() == before


def test_text_with_a_nul(tmp_path):
    """HDF5 cannot hold the NUL at the end of Open MPI's version, so it is removed."""
    result = make_result()
    result.provenance["mpi_library"] = "Open MPI v5\0"
    write_result(tmp_path / "result.h5", result)
    assert read_result(tmp_path / "result.h5").provenance["mpi_library"] == "Open MPI v5"
