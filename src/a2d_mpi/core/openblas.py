"""The CPU that OpenBLAS takes this one for.

The OpenBLAS of NumPy's wheels holds few kinds of CPUs, none of AMD's newer ones.  It takes those
that have AVX-512 for a Haswell, without it, or for a SkylakeX.  On Zen 5 the latter's products of
float32 matrices take half to two thirds of the time; on Zen 4, which adds 512 bits in two halves,
they take a tenth more.  With the OpenBLAS of NumPy 2.5.2 to 2.5.5 (at least) products end the
process on what is taken for a Haswell.  OPENBLAS_CORETYPE is read when NumPy is imported.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile

# What its kernels for SkylakeX are compiled for.
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}
# The first NumPy whose products of float64 overrun the stack with the kernels for Haswell and Zen
# (OpenBLAS's issue 6026): 64 x 512 times 512 x 32 ends with a segmentation fault.
FAULTY = [2, 5, 2]
ZEN_5 = 26  # and newer; Zen 4 is of family 25, with Zen 3, which has no AVX-512


def cpu_fields(cpuinfo: str) -> dict[str, str]:
    """Fields of a processor by name, from its part of /proc/cpuinfo."""
    return dict(re.findall(r"^([a-z_ ]+?)\t*: (.*)", cpuinfo, re.MULTILINE))


def first_cpu() -> str:
    """Read the part of /proc/cpuinfo on the first processor; empty where there is none.

    Many processors' parts would take the kernel long.
    """
    with suppress(OSError), open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        return "".join(takewhile(str.strip, file))
    return ""


def core_type(cpuinfo: str, numpy: str = "") -> str | None:
    """Type to name where OpenBLAS may guess a slower or a faulty one.

    Parameters
    ----------
    cpuinfo : str
        The text of /proc/cpuinfo.
    numpy : str
        NumPy's version.
    """
    fields = cpu_fields(cpuinfo)
    family = fields.get("cpu family", "")
    flags = set(fields.get("flags", "").split())
    wide = flags >= AVX512
    faulty = [int(x) for x in re.findall(r"\d+", numpy)[:3]] >= FAULTY
    if faulty and not wide and "avx2" in flags:
        return "Sandybridge"  # slower, but it ends
    if not wide or fields.get("vendor_id") != "AuthenticAMD" or not family.isdecimal():
        return None
    return "SkylakeX" if int(family) >= ZEN_5 or faulty else "Haswell"


def name_core_type() -> None:
    """Set OPENBLAS_CORETYPE where that helps, before NumPy is imported; a user's value stands."""
    if "numpy" in sys.modules or "OPENBLAS_CORETYPE" in os.environ:
        return
    try:
        numpy = version("numpy")
    except PackageNotFoundError:
        numpy = ""
    if found := core_type(first_cpu(), numpy):
        os.environ["OPENBLAS_CORETYPE"] = found
