"""Files of drivers: no file replaces another kind of file, and jobs keep apart."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import h5py
import numpy as np
import pytest
from helpers import DRIVERS, ROOT, launch, parser_of, parsers_of

from a2d_mpi.core.atomic import check_writable, locked, replacing
from a2d_mpi.experiments.files import INPUT_SCHEMA, inspect_input
from a2d_mpi.experiments.hdf5 import check_output, read_file, write_file
from a2d_mpi.experiments.options import WRITTEN, check_files

PROGRAMS = sorted(x.name for x in DRIVERS.glob("*.py"))
# Options whose help says "file" and whose value names something in a file.
NAMES = {"name", "workload", "run", "seqlen", "seed", "distribution"}
SCHEMA = ("test", 1)


def test_options_that_name_files_are_paths():
    """So `check_files` finds them."""
    found = set()
    for program in PROGRAMS:
        for action in (x for parser in parsers_of(f"drivers/{program}") for x in parser._actions):
            words = f"{action.help} {action.metavar}".lower().replace(",", " ").split()
            names_file = action.nargs != 0 and {"file", "files", "dir"} & {*words}
            if names_file and action.dest not in NAMES:
                value = action.type(str(ROOT / "tests/support/helpers.py"))
                assert isinstance(value[0] if isinstance(value, list) else value, Path)
                found.add(action.dest)
    assert {*WRITTEN, "profile", "folder"} <= found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a folder with inputs of all kinds."""
    monkeypatch.chdir(tmp_path)
    for name in ("text", "p.toml", "b.toml", "c/step-000000004.h5"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("kept")
    Path("own.py").write_text("kept = True")
    Path("b.h5").write_text("kept")
    os.link("p.toml", "link.toml")
    os.symlink("text", "symlink")
    return tmp_path


TRAINING = "train.py llama-tiny text --folder c"
CASES = [
    f"{TRAINING} --profile p.toml --output p.toml",
    f"{TRAINING} --profile p.toml --output link.toml",
    f"{TRAINING} --output ../NAME/text",
    f"{TRAINING} --output symlink",
    "attention.py b.h5 --import own.py --output own.py",
    "bench.py --profile p.toml --output link.toml --resume",
    "plan.py simulate --profile text,p.toml --output p.toml",
    "plot.py schedule p.toml --profile p.toml --ranks 4 --seqlen 4 --nheads 2",
    "attention.py b.h5 --output new.json --trace ../NAME/new.json",
]


@pytest.mark.parametrize("case", CASES)
def test_no_output_is_an_input(folder, case):
    program, *options = case.replace("NAME", folder.name).split()
    args = parser_of(f"drivers/{program}").parse_args(options)
    with pytest.raises(OSError, match=r"it is the (in|out)put"):
        check_files(args)
    for name in ("output", "trace"):
        if hasattr(args, name):
            setattr(args, name, f"other {name}")
    check_files(args)


def test_own_and_empty_files_are_replaced(tmp_path):
    write_file(own := tmp_path / "own.h5", SCHEMA, {})
    (empty := tmp_path / "empty.png").touch()
    check_output(own, SCHEMA)
    check_output(empty, SCHEMA)


HOLD = """
import sys, time
from a2d_mpi.core.atomic import locked, replacing
with locked(sys.argv[1]), replacing(sys.argv[2]) as (_, temporary):
    open(temporary, "w").close()
    print(temporary, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("what", ["file", "folder"])
def test_jobs_keep_apart(tmp_path, what):
    """A second job names the first; a killed job leaves nothing that blocks others."""
    path = tmp_path / "run.h5" if what == "file" else tmp_path
    inside = tmp_path / "run.h5"
    command = [sys.executable, "-c", HOLD, path, inside]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        temporary = job.stdout.readline().strip()
        told = f"cannot write {path}: PID {job.pid} on {socket.gethostname()} is writing it"
        with pytest.raises(OSError) as error, locked(path):
            pass
        assert str(error.value) == told
        with replacing(inside) as (_, mine):
            assert mine != temporary
        assert os.path.exists(temporary)  # not swept
    finally:
        job.send_signal(signal.SIGKILL)
        job.communicate()
    assert len(os.listdir(tmp_path)) == 2  # the lock file, the temporary one
    (other := tmp_path / ".mine.h5.tmp").write_text("kept")
    with locked(path):
        assert not os.path.exists(temporary)
        with pytest.raises(OSError, match=f"PID {os.getpid()} on "), locked(path):
            pass
    assert os.listdir(tmp_path) == [other.name]


def test_without_locks(tmp_path, monkeypatch):
    """On a file system without locks jobs continue, and keep files of other jobs."""
    import errno

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    (left := tmp_path / ".run.h5.12-0a.tmp").touch()
    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path / "run.h5"), locked(tmp_path / "run.h5"):
        check_writable(tmp_path / "run.h5")
    assert os.listdir(tmp_path) == [left.name]


def test_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    import errno

    def pwrite(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    monkeypatch.setattr("os.pwrite", pwrite)
    path = tmp_path / "run.h5"
    with pytest.raises(OSError, match=f"cannot write {path}: No space left"), locked(path):
        pass
    assert os.listdir(tmp_path) == []
    assert not opened or len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize("where", ["dataset", "group"])
def test_numbers_in_another_file(tmp_path, where):
    """An external link is refused, as external storage is; a link inside the file is none."""
    path, other = tmp_path / "in.h5", tmp_path / "other.h5"
    x = np.ones((3, 2, 8), np.float32)
    write_file(other, INPUT_SCHEMA, {"q": x, "group": {"q": x}})
    write_file(path, INPUT_SCHEMA, {"k": x, "v": x, "q": x, "group": {"k": x}})
    name = {"dataset": "q", "group": "group"}[where]
    for links in (h5py.SoftLink("/k"), h5py.ExternalLink(other, f"/{name}")):
        with h5py.File(path, "r+") as file:
            del file[name]
            file[name] = links
        refuses = nullcontext()
        if isinstance(links, h5py.ExternalLink):
            refuses = pytest.raises(OSError, match=f"{name} lies in another file, {other}")
        with refuses:
            read_file(path, INPUT_SCHEMA)
        with refuses if where == "dataset" else nullcontext():
            inspect_input(path)


RUN = """
import sys, time
from mpi4py import MPI
from a2d_mpi.experiments.cli import Parser, run

class Comm(MPI.Intracomm):
    def Abort(self, code=0):
        print("abort", code, flush=True)  # and it returns: another rank's abort ends the job

def body(*_):
    raise RuntimeError("a defect")

sys.argv = ["x.py"]
run(Comm(MPI.COMM_WORLD), lambda comm: Parser("x.py", "X.", comm), body)
"""


def test_abort_that_returns():
    done = launch(0, "-c", RUN, timeout=60, code=70)
    assert done.stdout == "abort 70\n"
    assert done.stderr.count("Traceback") == 1 and "a defect" in done.stderr
