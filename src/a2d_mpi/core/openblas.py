"""The CPU that OpenBLAS takes this one for.

The OpenBLAS of NumPy's wheels holds few kinds of CPUs, none of AMD's newer ones.  It takes those
that have AVX-512 for a Haswell, without it, or for a SkylakeX.  On Zen 5 the latter's products of
float32 matrices take half to two thirds of the time; on Zen 4, which adds 512 bits in two halves,
they take a tenth more.  OPENBLAS_CORETYPE is read when NumPy is imported.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from itertools import takewhile

# What its kernels for SkylakeX are compiled for.
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}
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


def core_type(cpuinfo: str) -> str | None:
    """Type to name where OpenBLAS may guess a slower one, from the text of /proc/cpuinfo."""
    fields = cpu_fields(cpuinfo)
    family = fields.get("cpu family", "")
    wide = AVX512.issubset(fields.get("flags", "").split())
    if not wide or fields.get("vendor_id") != "AuthenticAMD" or not family.isdecimal():
        return None
    return "SkylakeX" if int(family) >= ZEN_5 else "Haswell"


def name_core_type() -> None:
    """Set OPENBLAS_CORETYPE where that helps, before NumPy is imported; a user's value stands."""
    if "numpy" in sys.modules or "OPENBLAS_CORETYPE" in os.environ:
        return
    if found := core_type(first_cpu()):
        os.environ["OPENBLAS_CORETYPE"] = found
