"""The type of CPU whose kernels OpenBLAS should use.

The OpenBLAS of NumPy's wheels has kernels for few types of CPU, and for none of AMD's newer ones.
It treats an AMD CPU with AVX-512 as a Haswell, which has no AVX-512, or as a SkylakeX.  On Zen 5
the SkylakeX kernels take half to two thirds of the time of the Haswell kernels (products of
float32 matrices).  On Zen 4, which computes 512 bits in two halves, they take a tenth more time.
In NumPy 2.5.2 to 2.5.5, and perhaps later, the Haswell kernels end the process.  OpenBLAS reads
OPENBLAS_CORETYPE when NumPy is imported.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile

# OpenBLAS compiles its SkylakeX kernels for these instructions.
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}
# The first NumPy in which the kernels for Haswell and Zen overrun the stack in float64 products
# (OpenBLAS's issue 6026).  64 x 512 times 512 x 32 ends with a segmentation fault.
FAULTY = [2, 5, 2]
ZEN_5 = 26  # CPU family of Zen 5; Zen 4 shares family 25 with Zen 3, which has no AVX-512


def cpu_fields(cpuinfo: str) -> dict[str, str]:
    """Return the fields of a processor by name, from its paragraph of /proc/cpuinfo."""
    return dict(re.findall(r"^([a-z_ ]+?)\t*: (.*)", cpuinfo, re.MULTILINE))


def first_cpu() -> str:
    """Read the first processor's paragraph of /proc/cpuinfo; empty if there is no such file.

    The kernel takes long to write the paragraphs of many processors.
    """
    with suppress(OSError), open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        return "".join(takewhile(str.strip, file))
    return ""


def core_type(cpuinfo: str, numpy: str = "") -> str | None:
    """Return the CPU type that OpenBLAS should use; None if its own choice is good.

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
    has_avx512 = flags >= AVX512
    faulty = [int(x) for x in re.findall(r"\d+", numpy)[:3]] >= FAULTY
    if faulty and not has_avx512 and "avx2" in flags:
        return "Sandybridge"  # slower kernels, without the fault
    if not has_avx512 or fields.get("vendor_id") != "AuthenticAMD" or not family.isdecimal():
        return None
    return "SkylakeX" if int(family) >= ZEN_5 or faulty else "Haswell"


def name_core_type() -> None:
    """Set OPENBLAS_CORETYPE if that helps and NumPy is not imported yet; keep a user's value."""
    if "numpy" in sys.modules or "OPENBLAS_CORETYPE" in os.environ:
        return
    try:
        numpy = version("numpy")
    except PackageNotFoundError:
        numpy = ""
    if cpu_type := core_type(first_cpu(), numpy):
        os.environ["OPENBLAS_CORETYPE"] = cpu_type
