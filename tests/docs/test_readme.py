"""The README and the pages of docs/ name only what exists, and what they show runs."""

import ast
import pkgutil
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, SAMPLE, drive, launch, module_of, options_of, parser_of

import a2d_mpi
from a2d_mpi import Causal
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.origin import provenance
from a2d_mpi.masks.patterns import PATTERNS
from a2d_mpi.planning import cost
from a2d_mpi.planning.simulator import PARTS
from a2d_mpi.schedules import problem_of

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

page = pytest.mark.parametrize("page", PAGES)


def read(name):
    return (ROOT / name).read_text()


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", read(name), re.MULTILINE | re.DOTALL)


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


def run(code, cwd=ROOT):
    """Run the Python of a page in a process of its own; return its output."""
    return launch(0, "-c", code, timeout=60, cwd=cwd).stdout


@page
def test_commands(page):
    for text in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
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
def test_python_can_be_read(page):
    for code in blocks(page, "python"):
        ast.parse(code, page)


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
        if name.startswith("a2d_mpi.torch"):  # which test_llama.py can import
            continue
        pkgutil.resolve_name(name)  # an error if there is none
    options = set().union(*map(options_of, PROGRAMS))
    options |= set(re.findall(r"--[a-z][\w-]*", JOBS))
    assert set(re.findall(r"(?<=`)--[a-z][\w-]*", text)) <= options
    used = set(re.findall(r"\b(?:A2D_MPI|EMULATE)_[A-Z_]+", text))
    assert used <= set(re.findall(r"\b[A-Z]\w+", SOURCES + JOBS))


def test_both_commands_are_there():
    assert {"bash jobs/local.sh\n", "bash jobs/test.sh\n"} <= set(blocks("README.md", "bash"))
    assert "`bash jobs/test.sh all`" in read("README.md")
    for command in ("bash jobs/local.sh", "bash jobs/test.sh all"):
        assert f"\n{command} || status=1" in read(".ci/run")


def test_every_page_is_listed():
    pages = {x.stem for x in DOCS.glob("*.md")} - {"README"}
    assert pages == {Path(path).stem for path, _ in LINK.findall(read("docs/README.md"))}
    listed = set(re.findall(r"^   ([\w-]+)$", read("docs/index.rst"), re.MULTILINE))
    assert listed == pages | {x.stem for x in DOCS.glob("*.rst")} - {"index"}


def test_reference_has_all_public_names_and_drivers():
    names = re.findall(r"auto(?:class|function):: ([\w.]+)$", read("docs/api.rst"), re.MULTILINE)
    assert set(a2d_mpi.__all__) == {x for x in names if "." not in x}
    shown = re.findall(r"driver-help:: (\w+)$", read("docs/drivers.rst"), re.MULTILINE)
    assert {f"drivers/{x}.py" for x in shown} == set(DRIVERS)


def test_reports_name_tests_that_exist():
    text = read("docs/never_silently_wrong.md")
    rows = re.findall(r"^\| \[.+ \d+\]\((\S+)\) .* `(\S+)::(\w+)` \|$", text, re.MULTILINE)
    assert f" {len(rows)} public reports" in text and len({x[0] for x in rows}) == len(rows)
    for link, file, name in rows:
        assert re.fullmatch(r"https://github\.com/[\w-]+/[\w.-]+/(pull|issues)/\d+", link)
        texts = [x.read_text() for x in (ROOT / "tests").rglob(file)]
        assert [x for x in texts if re.search(rf"^def {name}\(", x, re.M)], (file, name)


def test_glossary():
    """Each term is there once, and the code or another page uses it."""
    page, _, glossary = read("docs/architecture.md").partition("\n## Glossary\n")
    rows = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)
    terms = [x for row in rows for x in re.sub(r" \(.*?\)", "", row).split(", ")]
    terms.remove("term")
    assert sorted(terms) == sorted(set(terms)) and len(terms) > 25
    others = page + "".join(read(x) for x in PAGES if x != "docs/architecture.md")
    used = " ".join((SOURCES + others).replace("_", " ").replace("#", " ").split()).lower()
    assert [x for x in terms if x.replace("_", " ").lower() not in used] == []


def test_page_of_results_has_all_names():
    """Attributes of the root, parts and communicators of result files."""
    traffic = read("tests/support/traffic.json")
    names = set(re.findall(r'"(?:forward|backward)/([\w ]+)"', traffic)) | {*PARTS, "total"}
    names |= provenance("none", ["host"]).keys()
    assert [x for x in sorted(names) if f"`{x}`" not in read("docs/benchmarks.md")] == []


@pytest.mark.launches
def test_library_example(tmp_path):
    example = tmp_path / "example.py"
    example.write_text(blocks("README.md", "python")[0])
    done = launch(4, example, timeout=60)
    assert done.stdout.count("(250, 8, 32)") == 4
    lines = example.read_text().split("import numpy")[1].splitlines()
    assert sum(bool(line) for line in lines) <= 15


@pytest.mark.launches
def test_arguments_of_the_tutorial(tmp_path):
    """Its blocks run, the first ones too; that of a mask is a file of its own."""
    code = [x for x in blocks(START, "python") if "register_mask(" not in x]
    (tmp_path / "tutorial.py").write_text("\n".join(code))
    done = launch(4, tmp_path / "tutorial.py", "Attention2D", timeout=60)
    assert done.stdout.count("(256, 8, 32)") == 4


# Two continuations of a prefix are two answers to a shared question.  Prints the largest
# differences of out, dq, dk and dv, relative to the largest values.
WHOLE = """
from a2d_mpi import SharedQuestion

whole = Attention2D(grid, SharedQuestion([0, 600, 800, 1000]), seqlen=1000, **heads)
given = [x[whole.tokens] for x in (Q, K, V)]
results = whole.forward(*given)
gradients = whole.backward(DOUT[whole.tokens], *given, *results)


def gathered(shards):  # all rows of a tensor, on all ranks
    everyone = [x for shards in comm.allgather(shards) for x in shards]
    order = np.argsort(np.concatenate([tokens for tokens, _ in everyone]))
    return np.concatenate([x for _, x in everyone])[order]


merged |= {"dk": [(prefix, dk)], "dv": [(prefix, dv)]}
for (name, shards), x in zip(merged.items(), (results[0], *gradients)):
    exact = gathered([(whole.tokens, x)])
    rows = gathered(shards)
    error = np.abs(rows - exact[: len(rows)]).max() / np.abs(exact).max()
    if comm.rank == 0:
        print(f"{error:.1e}")
"""


@pytest.mark.launches
def test_merging(tmp_path):
    """Two continuations of a prefix equal one sequence in which both see the prefix."""
    (tmp_path / "example.py").write_text("\n".join([*blocks("docs/merging.md", "python"), WHOLE]))
    done = launch(4, tmp_path / "example.py", timeout=60)
    assert all(float(x) < 1e-6 for x in done.stdout.split()) and len(done.stdout.split()) == 4


def test_planning():
    assert "Layout(rows=" in run("\n".join(blocks("docs/planning.md", "python")))


def test_numbers_that_are_shown():
    """Shown bytes equal the code's."""
    given = "attention2d", Layout(2, 2)
    problem = problem_of(*given, AttentionConfig(1536, 12, 32), Causal())
    ranks = [cost.traffic(*given, problem, rank) for rank in range(4)]
    most = {"/".join(key): np.max([x[key] for x in ranks], axis=0).tolist() for key in ranks[0]}
    shown = re.findall(r"^(\w+/\w+) +(\d+) +(\d+) +(\d+) +(\d+)$", read(START), re.MULTILINE)
    assert {name: [*map(int, x)] for name, *x in shown} == {
        name: [sent, sent, received, received] for name, (sent, received) in most.items()
    }


def test_program():
    printed = run(blocks("docs/architecture.md", "python")[0])
    assert printed.rstrip() in [x.rstrip() for x in blocks("docs/architecture.md", "text")]


def test_linear():
    assert run(blocks("docs/models.md", "python")[1]) == "{} True\n"  # one rank


def test_masks(tmp_path):
    printed = run("\n".join(blocks("docs/masks.md", "python")), tmp_path)
    assert printed == f"{sum(n * (n + 1) // 2 for n in (100, 300, 600))} visible pairs\n"
    assert (tmp_path / "masks.h5").exists()
    named = re.findall(r"^\| `(\w+)` \|", read("docs/masks.md"), re.MULTILINE)
    assert named[: len(PATTERNS)] == list(PATTERNS)


def test_adding_a_mask():
    printed = run(blocks("docs/extending.md", "python")[3])
    assert " [1 1 0 0 1 1 1 1]]\n" in printed and printed.endswith("\n33 visible pairs\n"), printed


@pytest.mark.launches
def test_reading_a_result(tmp_path):
    (tmp_path / "results").mkdir()
    drive(
        "attention.py", 4, SAMPLE, "--backward", "--seqlen", "64",
        "--output", tmp_path / "results" / "local.h5",
    )  # fmt: skip
    printed = run("\n".join(blocks("docs/benchmarks.md", "python")), tmp_path)
    assert len(re.findall("True$", printed, re.MULTILINE)) == 8
