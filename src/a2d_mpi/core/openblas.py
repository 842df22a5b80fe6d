"""The CPU that OpenBLAS takes this one for.

The OpenBLAS of NumPy's wheels holds few kinds of CPUs, and takes AMD's Zen 4 and 5 for a Haswell,
without AVX-512.  It reads OPENBLAS_CORETYPE when NumPy is imported.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from itertools import takewhile

# What its kernels for SkylakeX are compiled for.
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}


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
    """Type to name where OpenBLAS would guess a slower one, from the text of /proc/cpuinfo."""
    fields = cpu_fields(cpuinfo)
    wide = AVX512.issubset(fields.get("flags", "").split())
    return "SkylakeX" if wide and fields.get("vendor_id") == "AuthenticAMD" else None


def name_core_type() -> None:
    """Set OPENBLAS_CORETYPE where that helps, before NumPy is imported; a user's value stands."""
    if "numpy" in sys.modules or "OPENBLAS_CORETYPE" in os.environ:
        return
    if found := core_type(first_cpu()):
        os.environ["OPENBLAS_CORETYPE"] = found
