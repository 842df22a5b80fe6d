"""oneDNN's products of bfloat16 matrices with float32 results, called by ctypes."""

from __future__ import annotations

import ctypes
import os
import site
import sys
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

NAME = "libdnnl.so.3"
AVX512_BF16 = 0x80  # the bit of the instruction set that has products of bfloat16
# Constants of dnnl_types.h
_BFLOAT16, _FLOAT32, _CPU, _IN_ORDER = 2, 3, 1, 1
_SRC, _WEIGHTS, _DST = 1, 33, 17


class _Argument(Structure):
    _fields_ = [("which", c_int), ("memory", c_void_p)]


class Library(NamedTuple):
    """oneDNN, its version, its instruction set (0 if not of x86), and its engine."""

    calls: ctypes.CDLL
    version: str
    isa: int
    engine: c_void_p


def _places() -> list[str]:
    """Return where the library may lie; wheels and conda put it into lib of an environment."""
    if given := os.environ.get("A2D_MPI_ONEDNN"):
        return [given]
    found = (Path(x, "lib", NAME) for x in (sys.prefix, sys.base_prefix, site.getuserbase()))
    return [*map(str, filter(Path.exists, found)), NAME]  # the loader searches the system


@lru_cache
def open_library() -> Library:
    """Load the first oneDNN 3 that is found.

    Raises
    ------
    ImportError
        If there is none; the message says how to get one.
    """
    problems = []
    for place in _places():
        try:
            calls = ctypes.CDLL(place)
            calls.dnnl_version.restype = POINTER(c_int * 3)  # it begins so
            text = ".".join(map(str, calls.dnnl_version().contents))
            if text.startswith("3."):
                _call(calls, "engine_create", byref(engine := c_void_p()), _CPU, c_size_t(0))
                return Library(calls, text, calls.dnnl_get_effective_cpu_isa(), engine)
            problems.append(f"{place} is oneDNN {text}, not 3")
        except (OSError, AttributeError, ValueError) as error:
            problems.append(str(error))
    how = "pip install a2d_mpi[onednn], or a site's oneDNN: A2D_MPI_ONEDNN=FILE"
    raise ImportError(f"kernel 'onednn' needs {how} ({'; '.join(problems)})")


def check_products() -> None:
    """Raise ValueError if oneDNN has no fast products of bfloat16 for this CPU."""
    library = open_library()
    if not library.isa & AVX512_BF16:
        why = f"instruction set {library.isa:#x}; ONEDNN_MAX_CPU_ISA may limit it"
        raise ValueError(f"oneDNN {library.version} has no bfloat16 products for this CPU ({why})")


class Product:
    """The product of matrices of one shape, on addresses; threads must not share an object.

    Parameters
    ----------
    equation : str
        ``"mn = mk nk"``: letters of the result and of the factors, each (rows, columns) of a
        C-contiguous matrix.  The result is float32.  With ``+=`` the product is added to it.
    sizes : dict of str to int
        The size of each letter.
    """

    def __init__(self, equation: str, sizes: dict[str, int]) -> None:
        self._calls, _, _, engine = open_library()
        self._made: list[tuple[str, c_void_p]] = []
        out, sign, a, b = equation.split()
        (m, n), (k,) = out, set(a) - set(out)
        forms, memories = [], []
        for matrix, axes, kind in (
            (a, m + k, _BFLOAT16),
            (b, k + n, _BFLOAT16),
            (out, out, _FLOAT32),
        ):
            shape = (sizes[x] for x in axes)
            strides = (1 if x == matrix[1] else sizes[matrix[1]] for x in axes)
            given = 2, (c_int64 * 2)(*shape), kind, (c_int64 * 2)(*strides)
            forms.append(self._make("memory_desc", "memory_desc_create_with_strides", *given))
            memories.append(self._make("memory", "memory_create", forms[-1], engine, None).value)
        options = self._make("primitive_attr", "primitive_attr_create")
        if sign == "+=":
            after = self._make("post_ops", "post_ops_create")
            _call(self._calls, "post_ops_append_sum", after, c_float(1), 0, 0)
            _call(self._calls, "primitive_attr_set_post_ops", options, after)
        given = engine, *forms[:2], None, forms[2], options
        plan = self._make("primitive_desc", "matmul_primitive_desc_create", *given)
        self._memories = memories
        self._arguments = (_Argument * 3)(*zip((_SRC, _WEIGHTS, _DST), memories))
        self._primitive = self._make("primitive", "primitive_create", plan)
        self._stream = self._make("stream", "stream_create", engine, _IN_ORDER)
        self._put = self._calls.dnnl_memory_set_data_handle
        self._put.argtypes = [c_void_p, c_void_p]

    def __call__(self, a: int, b: int, out: int) -> None:
        """Multiply the matrices at addresses a and b."""
        put, memories = self._put, self._memories
        put(memories[0], a)
        put(memories[1], b)
        put(memories[2], out)
        calls, stream = self._calls, self._stream
        status = calls.dnnl_primitive_execute(self._primitive, stream, 3, self._arguments)
        if status or calls.dnnl_stream_wait(stream):
            raise RuntimeError(f"oneDNN's product failed: status {status}")

    def __del__(self) -> None:
        for kind, made in reversed(self._made):
            getattr(self._calls, f"dnnl_{kind}_destroy")(made)

    def _make(self, kind: str, create: str, *given: object) -> c_void_p:
        _call(self._calls, create, byref(made := c_void_p()), *given)
        self._made.append((kind, made))
        return made


def _call(calls: ctypes.CDLL, name: str, *given: object) -> None:
    if status := getattr(calls, f"dnnl_{name}")(*given):
        raise ValueError(f"oneDNN's dnnl_{name} failed: status {status}")
