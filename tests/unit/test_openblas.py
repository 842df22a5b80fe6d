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


@pytest.mark.parametrize(
    "vendor, family, flags, named",
    [
        ("AuthenticAMD", 26, " ".join(sorted(AVX512)), "SkylakeX"),  # Zen 5
        (
            "AuthenticAMD",
            25,
            " ".join(sorted(AVX512)),
            "Haswell",
        ),  # Zen 4: a bit faster
        ("AuthenticAMD", 25, "fpu sse2 avx2 fma", None),  # Zen 3: it would die
        ("AuthenticAMD", 26, "fpu avx512f avx2 fma", None),  # some of it only
        ("AuthenticAMD", "unknown", " ".join(sorted(AVX512)), None),
        ("GenuineIntel", 6, " ".join(sorted(AVX512)), None),  # it knows Intel's
    ],
)
def test_core_type(vendor, family, flags, named):
    assert core_type(cpuinfo(vendor, family, flags)) == named


@pytest.mark.parametrize(
    "vendor, family, flags, named",
    [
        ("AuthenticAMD", 25, " ".join(sorted(AVX512)), "SkylakeX"),
        ("AuthenticAMD", 25, "fpu sse2 avx2 fma", "Sandybridge"),
        ("GenuineIntel", 6, " ".join(sorted(AVX512)), None),
        ("GenuineIntel", 6, "fpu sse2 avx2 fma", "Sandybridge"),
        ("GenuineIntel", 6, "fpu sse2 avx", None),  # what OpenBLAS has for it is older
    ],
)
def test_numpy_that_dies_on_haswell(vendor, family, flags, named):
    for numpy in "2.5.2", "2.5.10", "2.6.0rc1":
        assert core_type(cpuinfo(vendor, family, flags), numpy) == named
    for numpy in "2.4.6", "2.5.1":
        assert core_type(cpuinfo(vendor, family, flags), numpy) != "Sandybridge"


def test_products_do_not_die():
    """Products of the sizes that crashed work with the named CPU type."""
    code = "import a2d_mpi, numpy as np; print((np.ones((64, 512)) @ np.ones((512, 32))).sum())"
    assert launch(0, "-c", code, timeout=60).stdout == f"{64.0 * 512 * 32}\n"


@pytest.mark.parametrize("text", ["", "flags", "vendor_id : \nflags :", "\udcff\n"])
def test_other_systems(text):
    assert core_type(text) is None


@pytest.mark.parametrize(
    "before, user, named",
    [
        ("", None, "SkylakeX"),
        ("", "Haswell", "Haswell"),  # the user's choice stands
        ("import numpy", None, "none"),  # too late
    ],
)
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
    assert launch(0, "-c", code, timeout=60, env=env).stdout == f"{named}\n"


def test_openblas_reads_what_python_sets():
    """NumPy's OpenBLAS takes the type from os.environ; Sandybridge is there on every x86 CPU."""
    code = """
import os
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
import numpy, threadpoolctl
print({x.get("architecture") for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"})
"""
    assert "Sandybridge" in launch(0, "-c", code, timeout=60).stdout
