"""The CPU that OpenBLAS is told: only where it guesses wrong, and never against the user."""

import pytest
from helpers import launch

from a2d_mpi.core.openblas import AVX512, core_type


def cpuinfo(vendor, family, flags):
    one = (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\n"
        f"model name\t: AMD EPYC 9B45\nflags\t\t: {flags}\n"
    )
    return one + "bugs\t\t: avx512f\n\n" + one.replace(": 0", ": 1")


ALL, ZEN3 = " ".join(sorted(AVX512)), "fpu sse2 avx2 fma"


@pytest.mark.parametrize("vendor, family, flags, named, of_newer_numpy", [
    ("AuthenticAMD", 26, ALL, "SkylakeX", "SkylakeX"),  # Zen 5
    ("AuthenticAMD", 25, ALL, "Haswell", "SkylakeX"),  # Zen 4: a bit faster, where it does not die
    ("AuthenticAMD", 25, ZEN3, None, "Sandybridge"),  # Zen 3 would die of SkylakeX
    ("AuthenticAMD", 26, "fpu avx512f avx2 fma", None, "Sandybridge"),  # some of it only
    ("AuthenticAMD", "unknown", ALL, None, None),
    ("GenuineIntel", 6, ALL, None, None),  # it knows Intel's
    ("GenuineIntel", 6, ZEN3, None, "Sandybridge"),
    ("GenuineIntel", 6, "fpu sse2 avx", None, None),  # what OpenBLAS has for it is older
])  # fmt: skip
def test_core_type(vendor, family, flags, named, of_newer_numpy):
    """NumPy from 2.5.2 on dies on Haswell."""
    text = cpuinfo(vendor, family, flags)
    assert core_type(text) == named
    for numpy in "2.5.2", "2.5.10", "2.6.0rc1":
        assert core_type(text, numpy) == of_newer_numpy
    for numpy in "2.4.6", "2.5.1":
        assert core_type(text, numpy) != "Sandybridge"


def test_products_do_not_die():
    """Products of the sizes that crashed work with the named CPU type."""
    code = "import a2d_mpi, numpy as np; print((np.ones((64, 512)) @ np.ones((512, 32))).sum())"
    assert launch(0, "-c", code).stdout == f"{64.0 * 512 * 32}\n"


@pytest.mark.parametrize("text", ["", "flags", "vendor_id : \nflags :", "\udcff\n"])
def test_other_systems(text):
    assert core_type(text) is None


@pytest.mark.parametrize("before, user, named", [
    ("", None, "SkylakeX"), ("", "Haswell", "Haswell"),  # the user's choice stands
    ("import numpy", None, "none"),  # too late
])  # fmt: skip
def test_it_is_named_in_time(monkeypatch, before, user, named):
    """The type is set early enough, with the /proc/cpuinfo of a Zen 5."""
    code = f"""
import builtins, io, os
{before}
text, real = {cpuinfo("AuthenticAMD", 26, " ".join(sorted(AVX512)))!r}, open
builtins.open = lambda x, *y, **z: io.StringIO(text) if x == "/proc/cpuinfo" else real(x, *y, **z)
import a2d_mpi
print(os.environ.get("OPENBLAS_CORETYPE", "none"))
"""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    env = {"OPENBLAS_CORETYPE": user} if user else {}
    assert launch(0, "-c", code, env=env).stdout == f"{named}\n"


def test_openblas_reads_what_python_sets():
    """NumPy's OpenBLAS takes the type from os.environ; Sandybridge is there on every x86 CPU."""
    code = """
import os
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
import numpy, threadpoolctl
print({x.get("architecture") for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"})
"""
    assert "Sandybridge" in launch(0, "-c", code).stdout
