"""The fuzzer finds deliberate faults soon, and says how to repeat each case."""

import re

import pytest
from fuzz_cases import MASKS, METHODS, draw
from helpers import ROOT, drive_each

FUZZ = ROOT / "tests/tools/fuzz.py"
FAILED = re.compile(r"^fuzz: FAILED: python jobs/run.py fuzz --case (\d+) 4: (.*)$", re.MULTILINE)
FAULTS = {  # and what is wrong then
    "mask": "out|d[qkv]",
    "merge-off-by-3e-6": "out",
    "partial": "out|d[qkv]",
    "inputs-known-by-identity": "of data set 1|does not repeat",
}


def fuzz(cases):
    """Run lists of options in one process; return exit code and failures of each, and stderr."""
    here = f"sys.path.insert(0, {str(FUZZ.parent)!r})"
    done, found = drive_each([(FUZZ, x, []) for x in cases], 4, here, timeout=200, numba=True)
    return [(code, sorted(FAILED.findall(x), key=lambda y: int(y[0]))) for code, x in found], done


@pytest.mark.thorough
def test_faults_are_found():
    """100 cases find a wrong mask, merges off by 3e-6, a dropped partial and a stale q."""
    found, done = fuzz([["--fault", x, "--first", 0, "--seconds", 30] for x in FAULTS])
    first = [failed[0] for _, failed in found if failed]
    assert [code for code, _ in found] == [1] * len(FAULTS) == [1] * len(first), done.stderr
    for (seed, _), (_, failed), what in zip(first, found, FAULTS.values()):
        assert int(seed) < 100 and all(re.search(rf"\b({what})\b", x) for _, x in failed), failed
    # The same cases again, with and without the fault.
    cases = [["--case", seed, "--fault", x] for x, (seed, _) in zip(FAULTS, first)]
    again, _ = fuzz(cases + [x[:2] for x in cases])
    assert again == [(1, [x]) for x in first] + [(0, [])] * len(first)


def test_cases_are_what_they_say():
    """All kinds of cases occur, and the same seed draws the same case."""
    cases = [draw(seed, 6) for seed in range(400)]
    assert {x.mask_name for x in cases} == set(MASKS)
    assert {x.method for x in cases} == set(METHODS)
    assert {x.dtype.name for x in cases} == {"float16", "bfloat16", "float32", "float64"}
    assert len({x.shape for x in cases}) == 9
    for case in cases[:50]:
        again = draw(case.seed, 6)
        assert str(again) == str(case) and (again.seen == case.seen).all()
        assert all(x.tobytes() == y.tobytes() for x, y in zip(case.inputs(), again.inputs()))
