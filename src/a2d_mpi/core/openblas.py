"""The CPU that OpenBLAS takes this one for.

The OpenBLAS of NumPy's wheels holds few kinds of CPUs, and takes AMD's Zen 4 and 5 for a Haswell,
without AVX-512.  It reads OPENBLAS_CORETYPE when NumPy is imported.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

# What its kernels for SkylakeX are compiled for.
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}


def core_type(cpuinfo: str) -> str | None:
    """The type to name where OpenBLAS would guess a slower one, from the text of /proc/cpuinfo."""
    fields = dict(re.findall(r"^(vendor_id|flags)\t*: (.*)", cpuinfo, re.MULTILINE))
    wide = AVX512.issubset(fields.get("flags", "").split())
    return "SkylakeX" if wide and fields.get("vendor_id") == "AuthenticAMD" else None


def name_core_type() -> None:
    """Set OPENBLAS_CORETYPE where that helps, before NumPy is imported; a user's value stands."""
    if "numpy" in sys.modules or "OPENBLAS_CORETYPE" in os.environ:
        return
    with suppress(OSError):
        found = core_type(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"))
        if found:
            os.environ["OPENBLAS_CORETYPE"] = found
