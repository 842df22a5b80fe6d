"""Methods, masks and kernels of users, which are added to those of the package by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence

from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.kernels import KERNELS, Entry
from a2d_mpi.kernels.protocol import Kernel
from a2d_mpi.masks.mask import Mask
from a2d_mpi.masks.patterns import PATTERNS
from a2d_mpi.schedules.method import METHODS, Method


def register_method(name: str, method: Method) -> None:
    """Add a user's method to `METHODS`, so that plans, planner and drivers find it.

    Parameters
    ----------
    name : str
        Words of lower-case letters and digits, with a blank between two words.
    method : Method

    Raises
    ------
    ValueError
        If the name is taken or has other characters.
    """
    _check_name("method", name, (*METHODS, "all", "auto"), between=" ")
    METHODS[name] = method


def register_mask(name: str, make: Callable[..., Mask]) -> None:
    """Register a user's mask under a name, which `make_mask` and the drivers then accept.

    Parameters
    ----------
    name : str
        Words of lower-case letters and digits, with an underscore between two words.
    make : callable
        Function that returns the mask.  It is called with the length of the sequence and the
        integers of the text: ``name:3,window=4`` calls ``make(seqlen, 3, window=4)``.

    Raises
    ------
    ValueError
        If the name is taken or has other characters.
    """
    _check_name("mask", name, (*PATTERNS, "all", "file"), between="_")
    PATTERNS[name] = make


def register_kernel(
    name: str,
    make: Callable[..., Kernel],
    dtypes: Sequence[str] = tuple(DTYPES),
    gpu: bool = False,
) -> None:
    """Add a user's kernel to `KERNELS`, so that ``kernel=`` and ``--kernel`` accept its name.

    Parameters
    ----------
    name : str
        Words of lower-case letters and digits, with a hyphen between two words.
    make : callable
        The class of the kernel, or a function that returns a `Kernel`.  The arguments are the
        dtype and the softmax scale, and the keywords `device`, `poll`, `work` and `logit_softcap`.
        A kernel on the host calls the function `poll` about every millisecond.  `work` is a
        `a2d_mpi.devices.workspace.Workspace` of buffers, or None.  A kernel whose parameters
        do not name `logit_softcap` is refused for plans that have one.
    dtypes : sequence of str
        Dtypes of tensors that the kernel computes.
    gpu : bool
        Whether the kernel takes CuPy arrays.  Default: it takes NumPy arrays.

    Raises
    ------
    ValueError
        If the name is taken or has other characters, or a dtype is unknown.
    """
    _check_name("kernel", name, KERNELS, between="-")
    if wrong := [x for x in dtypes if x not in DTYPES]:
        raise ValueError(f"kernel {name!r}: dtypes must be of {', '.join(DTYPES)}, got {wrong}")
    KERNELS[name] = Entry(make, tuple(dtypes), gpu)


def _check_name(kind: str, name: str, taken: Container[str], between: str) -> None:
    """Raise ValueError unless a name is free, and words with one character between them."""
    if name in taken:
        raise ValueError(f"the name {name!r} of a {kind} is taken: choose another name")
    if not re.fullmatch(f"[a-z][a-z0-9]*({between}[a-z0-9]+)*", name):
        raise ValueError(
            f"a {kind}'s name must be words of a-z and 0-9 with {between!r} between them, "
            f"got {name!r}"
        )
