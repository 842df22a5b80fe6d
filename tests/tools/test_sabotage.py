"""The drivers' check catches some faults; `tests/tools/sabotage.py` tries all."""

import pytest
from sabotage import SABOTAGES, by_check, by_tests

# By sabotage: a check that fails.
SOME = {
    "results-in-two-buffers": "repeat",
    "inputs-changed-before-use": "inputs",
    "inputs-known-by-identity": "dq",
    "last-bit-in-one-call": "repeat",
    "page-returns-rows-of-others": "out",
}


def test_there_are_thirty():
    assert len(SABOTAGES) >= 30 and all(x.says for x in SABOTAGES.values())


@pytest.mark.thorough
def test_the_driver_catches_some():
    """A sample misses a row that is wrong, as its documentation says, and more rows do not."""
    row = "one-row-of-dk"
    runs = [("none", "full"), (row, "sample"), (row, "rows:301"), *((x, "full") for x in SOME)]
    right, missed, told, *caught = by_check(runs)
    assert (right, missed, told) == ([], [], ["dk"])
    assert all(x in found for x, found in zip(SOME.values(), caught)), dict(zip(SOME, caught))


@pytest.mark.thorough
def test_tests_catch_the_others():
    names = [name for name, x in SABOTAGES.items() if not x.by_results]
    assert names and all(map(by_tests, names))
