"""Models whose ranks die: with ULFM the others go on.

Needs the extra `torch`, and Open MPI: `bash jobs/test.sh torch`.
"""

from pathlib import Path

import pytest
from killing import hashes, lose, what_was_lost

LOSING = Path(__file__).with_name("losing.py")


@pytest.mark.launches
@pytest.mark.ulfm
@pytest.mark.parametrize("stages", [
    [("sums", [1], 0.02), ("step", [3], 0.1), ("goes_on", [0], 0.1)],
    [("generate", [4], 0.05), ("making", [0, 1], 0.1), ("shrink", [0], 0.1)],
])  # fmt: skip
def test_a_model_goes_on(tmp_path, stages):
    """Gradients and tokens on a smaller grid are those of a new one, with the same weights."""
    done = lose(tmp_path, stages, timeout=200, ranks=5, program=LOSING)
    problem, told = what_was_lost(done, "attention2d", stages, LOSING)
    assert not problem, done.stdout + done.stderr
    left = [5 - sum(len(x) for _, x, _ in stages[: i + 1]) for i in range(len(stages))]
    assert len(told) >= sum(left)
    assert [x for x, _ in hashes(done)] == [
        {4: "2x2x1", 3: "1x3x1", 2: "1x2x1", 1: "1x1x1"}[x] for x in left
    ]
