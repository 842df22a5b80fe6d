"""The command line of all drivers: help, examples, defaults, progress bars."""

import argparse
import io
import re
import shlex
import sys

import numpy as np
import pytest
from helpers import (
    DRIVERS,
    ROOT,
    SAMPLE,
    drive,
    drive_each,
    launch,
    parser_of,
    parsers_of,
    read_run,
)

import a2d_mpi
from a2d_mpi.__main__ import COMMANDS
from a2d_mpi.cli import options as common

PROGRAMS = sorted(x.name for x in DRIVERS.glob("*.py"))
# A command of a driver, which may go on in the next line.
EXAMPLE = re.compile(r"^ {4}((?:mpiexec -n \d+ )?python -m a2d_mpi (?:.*\\\n)*.*)$", re.MULTILINE)
PARSERS = [(name, x) for name in PROGRAMS for x in parsers_of(f"drivers/{name}")]
# Appended to the examples that run: what makes them short.
SMALL = {
    "attention.py": "--seqlen 70 --trials 1",
    "bench.py attention": "--seqlens=70 --nheads=4 --headdim=8 --trials=1 --plans=ring",
    "bench.py kernels": "--shapes 70x2x8",
    "plan.py rank": "--ranks 4 --seqlen 2K",
    "plot.py results": "",
    "plot.py grid": "",
    "plot.py masks": "--masks causal",
    "plot.py schedule": "--ranks 4 --seqlen 2K --plans ring",
    "plot.py study": "",
    "plot.py scale": "",
}
# These take long, or need PyTorch.  Tests of their own run them.
NOT_RUN = {"calibrate.py", "plan.py simulate", "train.py", "generate.py"}  # fmt: skip


def examples(text):
    """Return (ranks, program, options) of the commands in a help; 0 ranks: without mpiexec."""
    for found in EXAMPLE.findall(text):
        words = shlex.split(found.replace("\\\n", " "), comments=True)
        ranks = int(words[2]) if words[0] == "mpiexec" else 0
        _, _, _, command, *options = words[3 * (ranks > 0) :]
        yield ranks, f"{command}.py", options


@pytest.mark.parametrize("program, parser", PARSERS, ids=[x.prog for _, x in PARSERS])
def test_help(program, parser):
    """The help shows the docstring, its examples parse, and every option has a help text."""
    text = parser.format_help()
    assert parser.description in text
    found = list(examples(text))
    assert found, f"no example of {parser.prog}"
    for _, name, options in found:
        assert name == program
        parser_of(f"drivers/{name}").parse_args(options)  # ValueError: what is wrong with them
    if parser.prog == program:
        assert "Exit code 0" in text and "2: bad input" in " ".join(text.split())
    shown = [x for x in parser._actions if x.help != argparse.SUPPRESS]
    for x in shown:
        assert x.help and (x.nargs == 0 or not x.option_strings or x.metavar or x.choices)
    if "--plans" in parser._option_string_actions and "see the end" in text:
        assert "METHOD[:RxC[xU]][@ORDER][/RxC][*F[xB]]" in text


def first_examples():
    """Return the first example of each program and subcommand."""
    found = {}
    for name, parser in PARSERS:
        if not parser.commands:
            ranks, _, options = next(examples(parser.format_help()))
            found[parser.prog] = ranks, name, options
    return found


def test_every_driver_has_a_short_example():
    assert set(first_examples()) == set(SMALL) | NOT_RUN


@pytest.mark.parametrize("ranks", [0, 4])
def test_examples_run(tmp_path, ranks):
    """Examples run in the repository's root, and write no progress bar to a file."""
    for name in ("data", "drivers"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "results").mkdir()
    found = first_examples()
    names = [x for x in SMALL if found[x][0] == ranks]
    cases = [(found[x][1], [*found[x][2], *SMALL[x].split()], []) for x in names]
    done, each = drive_each(cases, ranks, cwd=tmp_path)
    codes = [code for code, _ in each]
    assert codes == [0] * len(cases), f"{dict(zip(names, codes))} {done.stderr}"
    assert "\r" not in done.stderr


def test_version():
    cases = [(name, ["--version"], []) for name in PROGRAMS]
    done, found = drive_each(cases, 0)
    version = f"of a2d_mpi {a2d_mpi.__version__}\n"
    assert found == [(0, f"{name} {version}") for name in PROGRAMS] and done.stderr == ""


def module(*options, ranks=0, **others):
    """Run ``python -m a2d_mpi`` outside of the repository."""
    return launch(ranks, "-m", "a2d_mpi", *options, **others)


def test_module_lists_its_commands(tmp_path):
    """The list is printed once, and a word that is no command is refused once."""
    assert [f"{x}.py" for x in COMMANDS] == PROGRAMS
    done = module(ranks=3, cwd=tmp_path)
    assert done.stderr == "" and done.stdout.count("usage: python -m a2d_mpi [") == 1
    assert re.findall(r"^  ([a-z]+) {2,}[a-z]", done.stdout, re.MULTILINE) == [*COMMANDS]
    for word, ranks in (("attentoin", 3), ("--output", 0), ("attention.py", 0)):
        done = module(word, "x.h5", ranks=ranks, cwd=tmp_path, code=2)
        assert done.stdout == "" and done.stderr.startswith("python -m a2d_mpi: error: ")
        assert done.stderr.count("\n") == 1 and " COMMAND" in done.stderr


def test_module_without_a_file(tmp_path):
    """Random tensors, the same on all grids; the result names the command, and no input file."""
    outs = []
    for ranks, grid in ((2, ()), (3, ("--cols", 3))):
        options = "--backward", "--seqlen", 65, "--trials", 1, "--save-outputs", "--output", "x.h5"
        done = module("attention", *options, *grid, ranks=ranks, cwd=tmp_path)
        assert "FAILED" not in done.stdout and ", random input" in done.stdout
        found = read_run(tmp_path / "x.h5")
        line = found["origin"]["command_line"]
        assert line.startswith("python -m a2d_mpi attention --backward --seqlen 65 ")
        assert found["passed"] and "input_sha256" not in found["origin"]
        outs.append(found["outputs"]["out"])
    assert np.abs(outs[0] - outs[1]).max() < 1e-5 and np.abs(outs[0]).max() > 1


def test_rank_without_the_input_file():
    sabotage = "sys.argv[1:2] = [] if rank == 1 else sys.argv[1:2]"
    done = drive("attention.py", 2, SAMPLE, sabotage=sabotage, code=2)
    assert "an input file" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["attention", "plan", "--help"])
def test_module_without_mpi(command):
    """The message says how to get an MPI, or which variable names it."""
    code = 0 if command == "--help" else 2
    done = module(command, env={"MPI4PY_LIBMPI": "/none/libmpi.so"}, code=code)
    assert ("MPI4PY_LIBMPI" in done.stderr) == (command == "attention")
    assert done.stderr.count("\n") == (code == 2)


def test_interrupted_program_of_one_process():
    sabotage = "import a2d_mpi.commands.plan as t, signal\n"
    sabotage += "t.rank_plans = lambda _: signal.raise_signal(signal.SIGINT)"
    done = drive("plan.py", 0, *first_examples()["plan.py rank"][2], sabotage=sabotage, code=130)
    assert done.stderr == "plan.py: interrupted\n"


RUN = """
import sys
from mpi4py import MPI
from a2d_mpi.cli.run import Parser, run

class Comm(MPI.Intracomm):
    def Abort(self, code=0):
        print("abort", code, flush=True)  # and it returns: another rank's abort ends the job

def body(comm, args):
    {body}

sys.argv, Parser.body = ["x.py"], staticmethod(body)
run(Comm(MPI.COMM_WORLD), lambda comm: Parser("x.py", "X.", comm))
"""


def test_abort_that_returns():
    body = "raise RuntimeError('a defect')"
    done = launch(0, "-c", RUN.replace("{body}", body), code=70)
    assert done.stdout == "abort 70\n"
    assert done.stderr.count("Traceback") == 1 and "a defect" in done.stderr


@pytest.mark.parametrize("code", [3, 75])
def test_exit_code(code):
    """Any code that a shell knows, also if other ranks have 0."""
    body = f"return {code} if comm.rank else 0"
    launch(2, "-c", RUN.replace("{body}", body), code=code)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind, rank, given, shown", [
    (Terminal, 0, [], "trials: "), (Terminal, 1, [], ""), (Terminal, 0, ["--quiet"], ""),
    (io.StringIO, 0, [], "x.py: trials: 2 of 3 after 00:00, 00:00 left, loss=2\n"),
    (io.StringIO, 1, [], ""), (io.StringIO, 0, ["--quiet"], ""),
])  # fmt: skip
def test_progress(monkeypatch, kind, rank, given, shown):
    """Terminals have a bar, and logs have true lines; other ranks and --quiet have none."""
    monkeypatch.setattr(sys, "stderr", stream := kind())
    monkeypatch.setattr(common, "LINES", 0.0)
    monkeypatch.setattr(common.log, "handlers", [])
    common.Parser("x.py", "X.").parse_args(given)
    bar = common.progress(range(3), rank, desc="trials")
    for i in bar:
        bar.set_postfix(loss=i + 1)
        bar.write("a table")
    assert (shown in stream.getvalue()) if shown else not stream.getvalue()
    assert ("\r" in stream.getvalue()) == (kind is Terminal and bool(shown))


@pytest.mark.parametrize("seconds", [0.5, 40.0])
def test_a_line_of_progress_every_half_minute(monkeypatch, seconds):
    """However often an item says its loss; each line is of the items that are done."""
    now = 1000.0
    monkeypatch.setattr(common.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    monkeypatch.setattr(common.log, "handlers", [])
    common.Parser("x.py", "X.").parse_args([])
    bar = common.progress(range(100), desc="steps")
    for _ in bar:
        now += seconds
        for loss in ("1", "2"):
            bar.set_postfix(loss=loss)
    done = [int(x) for x in re.findall(r"steps: (\d+) of 100 ", stream.getvalue())]
    assert stream.getvalue().count("\n") == len(done)
    assert done == ([59] if seconds == 0.5 else list(range(100)))
