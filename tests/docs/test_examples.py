"""Programs of examples/ are short, and run on 4 ranks; examples in docstrings run on one."""

import doctest
import sys

import pytest
from helpers import ROOT, launch

from a2d_mpi import Attention2D, ProcessGrid
from a2d_mpi.schedules.steps import Rows, TokenArray

EXAMPLES = {
    "plan": ("ms, ", 4),
    "own_mask": ("contiguous shards", 4),
    "planner": ("s predicted", 4),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs(name):
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 25
    told, count = EXAMPLES[name]
    printed = launch(4, path).stdout
    assert printed.count(told) == count, printed


@pytest.mark.parametrize("kind", [ProcessGrid, Attention2D, TokenArray, Rows])
def test_docstring(kind):
    names = vars(sys.modules[kind.__module__])
    (example,) = doctest.DocTestFinder(recurse=False).find(kind, kind.__name__, globs=dict(names))
    found = doctest.DocTestRunner().run(example)
    assert found.attempted > 1 and not found.failed
