"""The programs of the pages run, and what pages name exists."""

import re

import pytest
from helpers import ROOT, SAMPLE, drive, launch
from pages import blocks, found, read, run, run_code

import a2d_mpi

pytestmark = pytest.mark.thorough
DOCS, START = ROOT / "docs", "docs/tutorial.md"
DRIVERS = [f"drivers/{x.name}" for x in sorted((ROOT / "drivers").glob("*.py"))]


@pytest.mark.parametrize("page, number, ranks, told", [
    ("planning", None, 0, ["Layout(rows="]), ("linear", None, 0, ["{} True\n"]),  # one rank
    ("extending", 3, 0, [" [1 1 0 0 1 1 1 1]]\n", "\n33 visible pairs\n"]),
    ("masks", None, 0, [f"{sum(n * (n + 1) // 2 for n in (100, 300, 600))} visible pairs\n"]),
    ("tutorial", None, 4, ["(256, 8, 32)"]),
    ("merging", None, 4, []),  # tests/ranks/test_merging.py compares it with float64
])  # fmt: skip
def test_code(tmp_path, page, number, ranks, told):
    """The Python of a page runs, and each rank prints what it should."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    code = [x.replace("ranks=64", "ranks=4") for x in blocks(f"docs/{page}.md", "python")]
    (tmp_path / "x.py").write_text("\n".join(code) if number is None else code[number])
    done = launch(ranks, "x.py", "Attention2D", cwd=tmp_path)
    assert [done.stdout.count(x) for x in told] == [max(1, ranks)] * len(told), done.stdout


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


def test_program():
    printed = run_code(blocks("docs/architecture.md", "python")[0])
    assert printed.rstrip() in [x.rstrip() for x in blocks("docs/architecture.md", "text")]


def test_reading_a_result(tmp_path):
    (tmp_path / "results").mkdir()
    drive(
        "attention.py", 4, SAMPLE, "--backward", "--seqlen", "64",
        "--output", tmp_path / "results" / "local.h5",
    )  # fmt: skip
    printed = run_code("\n".join(blocks("docs/benchmarks.md", "python")), tmp_path)
    assert len(re.findall(" 1$", printed, re.MULTILINE)) == 8


def within_bounds(text):
    """Return True if each error in the text is within its bound."""
    pairs = re.findall(r"error (\S+), bound (\S+)$", text, re.MULTILINE)
    return bool(pairs) and all(float(error) <= float(bound) for error, bound in pairs)


def test_tutorial(tmp_path, monkeypatch):
    """Its program is right on one rank and on a grid."""
    end = read(START).index("\n## Arguments of a plan\n")
    code = [x[1] for x in found(START, "python") if x.end() < end]
    (tmp_path / "tutorial.py").write_text("\n".join(code))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # as the first block does
    # The first two blocks make the environment.
    _, _, *commands = blocks(START, "bash")
    printed = [run(x, tmp_path) for x in commands]
    assert within_bounds(printed[0]) and len(commands) == 2
