"""The fuzzer finds deliberate faults soon, and says how to see each again."""

import re
from pathlib import Path

import pytest
from fuzz_cases import MASKS, METHODS, draw
from helpers import launch

FUZZ = Path(__file__).with_name("fuzz.py")
FAILED = re.compile(r"^fuzz: FAILED: bash jobs/fuzz.sh --case (\d+) 4: (.*)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("fault", "what"), [("mask", "areas"), ("merge", "out"), ("partial", "out|d[qkv]")]
)
def test_faults_are_found(fault, what):
    """A mask off by one, a merge off by 3e-6, a dropped partial: within 100 configurations."""
    done = launch(4, FUZZ, "--fault", fault, "--first", 0, "--seconds", 30, timeout=100)
    found = [(int(seed), why) for seed, why in FAILED.findall(done.stdout)]
    assert done.returncode == 1 and found, done.stdout + done.stderr
    assert min(found)[0] < 100
    assert all(re.search(rf"\b({what})\b", why) for _, why in found), found
    seed = min(found)[0]
    again = launch(4, FUZZ, "--fault", fault, "--case", seed, timeout=100)
    assert again.returncode == 1 and FAILED.findall(again.stdout)[0] == (str(seed), min(found)[1])
    if fault == "mask":
        done = launch(4, FUZZ, "--case", seed, timeout=100)
        assert done.returncode == 0 and "FAILED" not in done.stdout


def test_cases_are_what_they_say():
    """All kinds of everything occur, and the same seed draws the same."""
    cases = [draw(seed, 6) for seed in range(400)]
    assert {x.mask_name for x in cases} == set(MASKS)
    assert {x.method for x in cases} == set(METHODS)
    assert {x.dtype.name for x in cases} == {"float16", "bfloat16", "float32", "float64"}
    assert len({x.shape for x in cases}) == 9
    for case in cases[:50]:
        again = draw(case.seed, 6)
        assert str(again) == str(case) and (again.seen == case.seen).all()
        assert all(x.tobytes() == y.tobytes() for x, y in zip(case.inputs(), again.inputs()))
