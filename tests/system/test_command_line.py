"""The command line of all drivers: help, examples, defaults, progress bars."""

import argparse
import io
import re
import shlex
import sys

import pytest
from helpers import DRIVERS, ROOT, drive, drive_each, parser_of, parsers_of

import a2d_mpi
from a2d_mpi.experiments import options as common

PROGRAMS = sorted(x.name for x in DRIVERS.glob("*.py"))
# A command of a driver, which may go on in the next line.
EXAMPLE = re.compile(r"^ {4}((?:mpiexec -n \d+ )?python drivers/(?:.*\\\n)*.*)$", re.MULTILINE)
PARSERS = [(name, x) for name in PROGRAMS for x in parsers_of(f"drivers/{name}")]
# Appended to the examples that run: what makes them short.
SMALL = {
    "attention.py": "--seqlen 70 --trials 1",
    "bench.py attention": "--seqlens=70 --nheads=4 --headdim=8 --trials=1 --plans=ring",
    "bench.py linear": "--seqlens 70 --headdim 8 --trials 1",
    "bench.py kernels": "--shapes 70x2x8",
    "plan.py rank": "--ranks 4 --seqlen 2K",
    "plot.py results": "--what scaling --format svg",
    "plot.py grid": "",
    "plot.py masks": "--masks causal",
    "plot.py schedule": "--ranks 4 --seqlen 2K --plans ring",
    "plot.py study": "",
    "plot.py scale": "",
}
# These take long, or need SimGrid or PyTorch.  Tests of their own run them.
NOT_RUN = {"calibrate.py", "plan.py simulate", "train.py", "generate.py", "bench.py train",
           "bench.py decode"}  # fmt: skip


def examples(text):
    """Return (ranks, program, options) of the commands in a help; 0 ranks: without mpiexec."""
    for found in EXAMPLE.findall(text):
        words = shlex.split(found.replace("\\\n", " "), comments=True)
        ranks = int(words[2]) if words[0] == "mpiexec" else 0
        _, driver, *options = words[3 * (ranks > 0) :]
        yield ranks, driver.removeprefix("drivers/"), options


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


def test_interrupted_program_of_one_process():
    sabotage = "import a2d_mpi.experiments.plan as t, signal\n"
    sabotage += "t.rank = lambda _: signal.raise_signal(signal.SIGINT)"
    done = drive("plan.py", 0, *first_examples()["plan.py rank"][2], sabotage=sabotage, code=130)
    assert done.stderr == "plan.py: interrupted\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind, rank, given, shown", [
    (Terminal, 0, [], "trials: "), (Terminal, 1, [], ""), (Terminal, 0, ["--quiet"], ""),
    (io.StringIO, 0, [], "x.py: trials: 2 of 3 after 00:00, "), (io.StringIO, 1, [], ""),
    (io.StringIO, 0, ["--quiet"], ""),
])  # fmt: skip
def test_progress(monkeypatch, kind, rank, given, shown):
    """Terminals have a bar, and logs have lines; other ranks and --quiet have none."""
    monkeypatch.setattr(sys, "stderr", stream := kind())
    monkeypatch.setattr(common, "LINES", 0.0)
    monkeypatch.setattr(common.log, "handlers", [])
    common.Parser("x.py", "X.").parse_args(given)
    assert list(common.progress(range(3), rank, desc="trials")) == [0, 1, 2]
    assert (shown in stream.getvalue()) if shown else not stream.getvalue()
    assert ("\r" in stream.getvalue()) == (kind is Terminal and bool(shown))
