"""A few kills of `faults.py`; tests/system/test_killed.py has faults at chosen moments."""

import faults
import pytest


@pytest.mark.thorough
def test_killed_at_any_moment():
    """What is finished stays, and a job that is started again comes to the same bits."""
    assert faults.main(["kills", "--jobs", "1", "--only", "bench"]) == 0
