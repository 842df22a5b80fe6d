"""Exact two-dimensional parallel attention over MPI.

Import this package before NumPy: products of matrices are then faster on AMD's Zen 4 and 5
(`a2d_mpi.core.openblas`).  Names are imported when they are first used.  So `core`, `masks`,
`planning` and other packages that need no MPI also work on machines without MPI.
"""

import ast
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from a2d_mpi.core.openblas import name_core_type

name_core_type()  # OpenBLAS reads the type of the CPU when NumPy is imported

# The public names by module: the imports of the file that type checkers and editors read.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_IMPORTS = [node for node in _STUB.body if isinstance(node, ast.ImportFrom)]
_HOMES = {x.name: node.module for node in _IMPORTS for x in node.names}

__all__ = sorted(_HOMES)

try:
    __version__ = version("a2d_mpi")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'a2d_mpi' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
