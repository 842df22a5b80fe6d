"""The fuzzer finds deliberate faults soon, and says how to repeat each case."""

import re
from pathlib import Path

import pytest
from fuzz_cases import MASKS, METHODS, draw
from helpers import drive_each

FUZZ = Path(__file__).with_name("fuzz.py")
FAILED = re.compile(r"^fuzz: FAILED: python jobs/run.py fuzz --case (\d+) 4: (.*)$", re.MULTILINE)
FAULTS = {  # and what is wrong then
    "mask": "areas",
    "merge-off-by-3e-6": "out",
    "partial": "out|d[qkv]",
    "inputs-known-by-identity": "of data set 1|does not repeat",
}


def fuzz(cases):
    """Run lists of options in one process; return exit codes and stdout, and stderr of all."""
    here = f"sys.path.insert(0, {str(FUZZ.parent)!r})"
    done, found = drive_each([(FUZZ, x, []) for x in cases], 4, here, timeout=200, numba=True)
    return found, done.stderr


@pytest.fixture(scope="module")
def searched():
    """Return what a search finds by fault, and stderr."""
    found, stderr = fuzz([["--fault", x, "--first", 0, "--seconds", 30] for x in FAULTS])
    return dict(zip(FAULTS, found)), stderr


@pytest.fixture(scope="module")
def again(searched):
    """Repeat the first found case with and without its fault; return outputs and stderr."""
    seeds = [
        min((int(x) for x, _ in FAILED.findall(y)), default=0) for _, y in searched[0].values()
    ]
    found, stderr = fuzz(
        [
            ["--case", seed, *options]
            for x, seed in zip(FAULTS, seeds)
            for options in (["--fault", x], [])
        ]
    )
    return dict(zip(FAULTS, zip(found[::2], found[1::2]))), stderr


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "what"), FAULTS.items())
def test_faults_are_found(searched, again, fault, what):
    """100 cases find a wrong mask, merges off by 3e-6, a dropped partial and a stale q."""
    (code, stdout), stderr = searched[0][fault], searched[1]
    found = [(int(seed), why) for seed, why in FAILED.findall(stdout)]
    assert code == 1 and found, stdout + stderr
    assert min(found)[0] < 100
    assert all(re.search(rf"\b({what})\b", why) for _, why in found), found
    (code, stdout), (clean, silent) = again[0][fault]
    assert code == 1, stdout + again[1]
    assert FAILED.findall(stdout)[0] == (str(min(found)[0]), min(found)[1])
    assert clean == 0 and "FAILED" not in silent, silent + again[1]


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
