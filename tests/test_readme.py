"""What the README shows runs as written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import launch

pytestmark = pytest.mark.launches

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_library_example(tmp_path):
    example = tmp_path / "example.py"
    example.write_text(blocks("python")[0])
    done = launch(4, example, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(250, 8, 32)") == 4
    lines = example.read_text().split("import numpy")[1].splitlines()
    assert sum(bool(line) for line in lines) <= 15


def test_choosing_a_plan():
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[1]],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Layout(rows=" in done.stdout


def test_reading_a_result(tmp_path):
    (tmp_path / "results").mkdir()
    done = launch(
        4, ROOT / "drivers" / "attention.py", ROOT / "data" / "minilm_l3_1536.h5", "--backward",
        "--seqlen", "64", "--output", tmp_path / "results" / "local.h5", timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[2]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall("True$", done.stdout, re.MULTILINE)) == 7


def test_both_commands_are_there():
    assert {"bash jobs/local.sh\n", "bash jobs/test.sh\n"} <= set(blocks("bash"))


def test_files_that_it_names_exist():
    names = re.findall(r"\b((?:src|data|drivers|jobs)/[\w/.]+\.\w+)", README)
    assert len(set(names)) > 7
    assert [name for name in names if not (ROOT / name).exists()] == []
