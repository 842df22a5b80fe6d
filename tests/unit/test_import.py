"""Masks, methods and kernels of a user: the guides' examples, as files outside the repository."""

import re
import shlex

import numpy as np
import pytest
from blocks import assert_kernel
from helpers import ROOT, drive_each
from pages import blocks

from a2d_mpi import Mask, make_mask, register_kernel, register_mask, register_method
from a2d_mpi.devices.host import HOST
from a2d_mpi.kernels import KERNELS, check_kernel, make_kernel
from a2d_mpi.masks.patterns import PATTERNS, split_masks
from a2d_mpi.schedules.method import METHODS, Method

FILES = {"mask": "sinks.py", "method": "gather.py", "kernel": "plain.py"}
GUIDE = "docs/extending.md"
# Commands that the guide does not show.
MORE = """\
python $A2D/drivers/plan.py --import sinks.py --mask sinks:4,window=1024 --nheads 8 \\
    --profile $A2D/data/machines/a100-16x4.toml
python $A2D/drivers/plot.py results gather.h5 phases.svg
mpiexec -n 4 python $A2D/drivers/bench.py --import plain.py --kernel plain --output plain.h5 \\
    --plans attention2d --nheads 4 --nheads-kv 2 --headdim 16 --backward
"""
# Appended to the commands of the guide: what makes them short.
SMALL = {
    "attention.py": ["--seqlen", "70", "--trials", "1", "--warmup", "0"],
    "bench.py": ["--seqlens", "70", "--trials", "1"],
    "plan.py": ["--seqlen", "2K", "--ranks", "4"],
    "plot.py schedule": ["--seqlen", "2K", "--ranks", "4"],
    "plot.py results": [],
}
METHOD = "gather kv"


def example(name):
    """Return the file that the guide tells its reader to save."""
    code = blocks(GUIDE, "python")
    return "\n".join({"method": code[:2], "mask": code[3:4], "kernel": code[4:]}[name])


def commands():
    """Return (ranks, driver, options) of the guide's commands, and of some more."""
    text = "".join(blocks(GUIDE, "bash")) + MORE
    variables = {"$A2D": str(ROOT)}
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if given := re.fullmatch(r"(\w+)=(.*)", words[0]):
            variables[f"${given[1]}"] = given[2].replace("$A2D", str(ROOT))
            continue
        for name, value in variables.items():
            line = line.replace(name, value)
        words = shlex.split(line)
        ranks = int(words[2]) if words[0] == "mpiexec" else 0
        python, driver, *options = words[3 * (ranks > 0) :]
        assert python == "python" and driver.startswith(f"{ROOT}/drivers/")
        driver = driver.rpartition("/")[2]
        if driver == "plot.py":
            driver = f"{driver} {options.pop(0)}"
        yield ranks, driver, options


def test_guides(tmp_path):
    """All commands of the guide run in a fresh folder."""
    for part, name in FILES.items():
        (tmp_path / name).write_text(example(part))
    found = list(commands())
    assert {driver for _, driver, _ in found} == set(SMALL) and len(found) == 9
    of_files = (x for _, driver, x in found if driver != "plot.py results")
    assert all("--import" in options for options in of_files)
    for ranks in (2, 0):  # two instead of four
        cases = [
            (y.split()[0], [*y.split()[1:], *z, *SMALL[y]], [])
            for x, y, z in found
            if bool(x) == bool(ranks)
        ]
        done, each = drive_each(cases, ranks, cwd=tmp_path)
        assert [code for code, _ in each] == [0] * len(cases), done.stdout + done.stderr
        assert "FAILED" not in done.stdout
        assert all("passed" in text for _, text in each) or not ranks
    assert (tmp_path / "gather.png").exists() and (tmp_path / "phases.svg").exists()


@pytest.fixture
def registered():
    """Register the examples of the guide, and remove them afterwards."""
    there = [(x, set(x)) for x in (METHODS, KERNELS, PATTERNS)]
    for part in FILES:
        exec(example(part), {"__name__": "example"})
    yield
    for known, names in there:
        for name in set(known) - names:
            del known[name]


@pytest.mark.usefixtures("registered")
class TestOfOnesOwn:
    """The planner, its model, the simulator and figures take the method of the guide."""

    @pytest.mark.parametrize("kind", ["full", "causal", "one", "two"])
    def test_kernel(self, kind):
        for dtype, shape in (("float32", (3, 70)), ("float64", (60, 5)), ("float64", (0, 3))):
            assert_kernel("plain", dtype, kind, ((4, 2, 7), 40.0, None), shape)

    def test_kernels_are_checked(self):
        with pytest.raises(ValueError, match="kernel 'plain' computes float32, float64, got"):
            check_kernel("plain", np.dtype("f2"))
        with pytest.raises(ValueError, match="kernel 'plain' does not take logit_softcap"):
            make_kernel("plain", HOST, np.dtype("f4"), 1.0, logit_softcap=3.0)

    def test_masks_by_name(self):
        assert isinstance(make_mask("sinks:2,window=4", 9), Mask)
        assert split_masks("sinks:2,window=4,full") == ["sinks:2,window=4", "full"]
        with pytest.raises(
            ValueError, match=r"mask must be sinks\[:sinks,window\], got 'sinks:2'"
        ):
            make_mask("sinks:2", 9)

    @pytest.mark.parametrize("register, given, text", [
        (register_method, ("ring", METHODS["ring"]), "the name 'ring' of a method is taken"),
        (register_method, (METHOD, METHODS["ring"]), "the name 'gather kv' of a method is taken"),
        (register_method, ("auto", METHODS["ring"]), "the name 'auto' of a method is taken"),
        (register_method, ("gather_kv", METHODS["ring"]), "words of a-z and 0-9 with ' ' between"),
        (register_mask, ("causal", print), "the name 'causal' of a mask is taken"),
        (register_mask, ("file", print), "the name 'file' of a mask is taken"),
        (register_mask, ("a:b", print), "words of a-z and 0-9 with '_' between them, got 'a:b'"),
        (register_kernel, ("auto", print), "the name 'auto' of a kernel is taken"),
        (register_kernel, ("plain", print), "the name 'plain' of a kernel is taken"),
        (register_kernel, ("a b", print), "words of a-z and 0-9 with '-' between them, got 'a b'"),
        (register_kernel, ("mine", print, ["int8"]), "dtypes must be of float16, "),
    ])  # fmt: skip
    def test_refused_names(self, register, given, text):
        before = [list(x) for x in (METHODS, KERNELS, PATTERNS)]
        with pytest.raises(ValueError, match=text.replace("()", r"\(\)")):
            register(*given)
        assert before == [list(x) for x in (METHODS, KERNELS, PATTERNS)]
        assert isinstance(METHODS[METHOD], Method)
