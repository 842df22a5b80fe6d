"""A few kills of `faults.py`; tests/system/test_killed.py has faults at chosen moments."""

import faults
import pytest


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["bench", "train"])
def test_killed_at_any_moment(name):
    """What is finished stays, and a job that is started again comes to the same bits."""
    assert faults.main(["kills", "--jobs", "1", "--only", name]) == 0
