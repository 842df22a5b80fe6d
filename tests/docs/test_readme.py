"""The README and the pages of docs/ name only what exists."""

import ast
import pkgutil
import re
import shlex
import subprocess

import pytest
from helpers import ROOT, deeper, launch, module_of, options_of, parser_of
from pages import blocks, read

DOCS, START = ROOT / "docs", "docs/tutorial.md"
PAGES = ["README.md", "data/README.md", *(f"docs/{x.name}" for x in sorted(DOCS.glob("*.md")))]
DRIVERS = [f"drivers/{x.name}" for x in sorted((ROOT / "drivers").glob("*.py"))]
PROGRAMS = [*DRIVERS, "data/make_sample.py", "data/make_text.py"]
# Where variables and options of jobs stand.
JOBS, SOURCES = (
    "".join(x.read_text() for x in (ROOT / folder).rglob("*.*") if x.suffix in endings)
    for folder, endings in (("jobs", (".sh", ".py")), ("src", (".py",)))
)
PROGRAM = re.compile(r"(drivers|data|jobs|tests)/[\w/]+\.(py|sh)")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")

page = pytest.mark.parametrize("page", deeper(PAGES, ["README.md"]))


def prose(name):
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", read(name), flags=re.MULTILINE | re.DOTALL)


def commands(name):
    """Return (program, arguments) of every command in the blocks of a page."""
    for line in "".join(blocks(name, "bash")).replace("\\\n", " ").splitlines():
        # What jobs/emulate.sh runs is a command of its own.
        for text in re.split(r" --(?:head)? ", line):
            words = shlex.split(text, comments=True)
            for i, word in enumerate(words):
                if PROGRAM.fullmatch(word):
                    yield word, words[i + 1 :]
                    break


@page
def test_commands(page):
    for text in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for code in blocks(page, "python"):
        ast.parse(code, page)
    for program, arguments in commands(page):
        assert (ROOT / program).is_file(), f"{page} runs {program}"
        if program == "jobs/local.sh":  # passes them on
            program, arguments = "drivers/attention.py", ["input", *arguments]
        if program == "jobs/run.py":
            job, *arguments = arguments
            assert list(module_of(program).JOBS[job](*arguments))  # an error if they are wrong
        if program in PROGRAMS:
            parser_of(program).parse_args(arguments)  # ValueError: what is wrong with them


@page
def test_links(page):
    for path, heading in LINK.findall(prose(page)):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {path}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in titles]
            assert heading in anchors, f"{page} links to #{heading} of {path or page}"


@page
def test_names(page):
    text = read(page)
    files = re.findall(r"\b((?:src|data|docs|drivers|jobs|tests)/[\w/.-]+\.\w+)", text)
    made = {"data/minilm_l3_65536.h5"}
    assert [x for x in files if not ((ROOT / x).exists() or x in made)] == []
    for name in re.findall(r"`(a2d_mpi(?:\.\w+)+)", text):
        if name.startswith("a2d_mpi.torch"):  # which tests/torch/test_page.py can import
            continue
        pkgutil.resolve_name(name)  # an error if there is none
    options = set().union(*map(options_of, PROGRAMS))
    options |= set(re.findall(r"--[a-z][\w-]*", JOBS))
    assert set(re.findall(r"(?<=`)--[a-z][\w-]*", text)) <= options
    used = set(re.findall(r"\b(?:A2D_MPI|EMULATE)_[A-Z_]+", text))
    assert used <= set(re.findall(r"\b[A-Z]\w+", SOURCES + JOBS))


@pytest.mark.launches
def test_library_example(tmp_path):
    example = tmp_path / "example.py"
    example.write_text(blocks("README.md", "python")[0])
    done = launch(4, example)
    assert done.stdout.count("(250, 8, 32)") == 4
    lines = example.read_text().split("import numpy")[1].splitlines()
    assert sum(bool(line) for line in lines) <= 15
