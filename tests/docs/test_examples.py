"""The programs of examples/ are short, and run on 4 ranks."""

import pytest
from helpers import ROOT, launch

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
    printed = launch(4, path, timeout=100).stdout
    assert printed.count(told) == count, printed
