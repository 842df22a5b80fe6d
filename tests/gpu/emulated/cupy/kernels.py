"""CUDA C++ compiled for the CPU, with cuda.h beside this package."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from . import cuda

HEADER = Path(__file__).parent.parent / "cuda.h"
CACHE = Path(tempfile.gettempdir()) / f"a2d_mpi-emulated-{os.getuid()}"


class RawModule:
    def __init__(self, code, options=()):
        code = code.replace("__restrict__ ", "")
        self._signatures = {
            name: [re.sub(r"\w+$", "", x.strip()).strip() for x in parameters.split(",")]
            for name, parameters in re.findall(r"__global__ void (\w+)\(([^)]*)\)", code)
        }
        wrappers = "".join(map(self._wrapper, self._signatures))
        source = f'#include "{HEADER}"\n{code.replace("extern __shared__ double shared[];", "")}'
        self._library = ctypes.CDLL(str(_compiled(source + wrappers, options)))

    def _wrapper(self, name):
        arguments = ", ".join(f"*({t} *)a[{i}]" for i, t in enumerate(self._signatures[name]))
        return (
            f'extern "C" void launch_{name}(int gx, int gy, int threads, int bytes, void **a) {{\n'
            f"  emulated::launch(gx, gy, threads, bytes, [=] {{ {name}({arguments}); }});\n}}\n"
        )

    def get_function(self, name):
        return Kernel(name, getattr(self._library, f"launch_{name}"), self._signatures[name])


class Kernel:
    max_dynamic_shared_size_bytes = 48 << 10

    def __init__(self, name, launch, types):
        self._name, self._launch, self._types = name, launch, types

    def __call__(self, grid, block, args, shared_mem=0):
        assert shared_mem <= self.max_dynamic_shared_size_bytes <= 227 << 10
        assert len(args) == len(self._types) and block[0] % 32 == 0
        values = [_value(x, kind.endswith("*")) for x, kind in zip(args, self._types, strict=True)]
        for x, kind in zip(args, self._types, strict=True):
            sizes = {"int": 4, "long long": 8, "double": 8}
            assert kind.endswith("*") or x.itemsize == sizes[kind], (x, kind)
        gx, gy = (*grid, 1)[:2]

        def run(_alive=args):
            if self._name == cuda.fault.kernel:
                cuda.fault.status = 700
            pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
            self._launch(gx, gy, block[0], shared_mem, pointers)

        cuda.get_current_stream()._enqueue(run)


def _value(x, pointer):
    """What a parameter points to: an address, or a number of the right size."""
    if pointer:
        assert x._host.flags.c_contiguous
        return np.array([x._host.ctypes.data], np.uintp)
    assert isinstance(x, np.generic), f"a plain {type(x).__name__} leaves its size to CuPy"
    return np.array([x])


def _compiled(source, options):
    text = source + HEADER.read_text() + " ".join(options)
    target = CACHE / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    CACHE.mkdir(exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of ranks that want the same, one compiles it
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                path = Path(folder) / "kernels.cpp"
                path.write_text(source)
                defines = [x for x in options if x.startswith("-D")]
                # longjmp between stacks is what coroutines do, and what fortification forbids.
                command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"]
                command += ["-Wno-unknown-pragmas", *defines, str(path), "-o", f"{folder}/k.so"]
                subprocess.run(command, check=True, timeout=300)
                os.replace(f"{folder}/k.so", target)
    return target
