"""Every script parses, and names only drivers, jobs and options that exist."""

import importlib.util
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def below(folder):
    """The shell scripts there, by their paths in the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.sh"))


SCRIPTS = [".ci/run", *below("jobs")]
# A program and the rest of its command.
PROGRAM = re.compile(r"\b((?:drivers|data|jobs)/\w+\.(?:py|sh))([^\n;|&)]*)")
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")


def commands(text):
    """(program, its options) of every command in `text`, comments too."""
    # What jobs/emulate.sh runs is a command of its own.
    text = re.sub(r" --(head)? ", "\n", text.replace("\\\n", " "))
    return [(program, OPTION.findall(rest)) for program, rest in PROGRAM.findall(text)]


def readme_code():
    """The code blocks of README.md."""
    return "\n".join(re.findall(r"^```.*?^```", (ROOT / "README.md").read_text(), re.M | re.S))


@cache
def options(program):
    """The options that a program knows."""
    if program in ("jobs/local.sh", "jobs/gpu_local.sh"):  # pass them on
        program = "drivers/attention.py"
    if program.endswith(".sh"):  # compare them in a test
        return set(re.findall(r"== (--[a-z-]+)", (ROOT / program).read_text()))
    spec = importlib.util.spec_from_file_location(Path(program).stem, ROOT / program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return set(module.build_parser()._option_string_actions)


@pytest.mark.parametrize("script", [*SCRIPTS, *below("tests/cluster")])
def test_syntax(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.mark.parametrize("source", [*SCRIPTS, "README.md"])
def test_programs_and_their_options_exist(source):
    text = readme_code() if source == "README.md" else (ROOT / source).read_text()
    for program, used in commands(text):
        assert (ROOT / program).is_file(), f"{source} runs {program}"
        if used:
            unknown = set(used) - options(program)
            assert not unknown, f"{source}: {program} knows no {', '.join(unknown)}"


def test_what_the_main_job_runs_is_found():
    ((program, used),) = [
        x for x in commands((ROOT / "jobs/local.sh").read_text()) if x[0] == "drivers/attention.py"
    ]
    assert {"--rows", "--backward", "--output"} <= set(used) <= options(program)
