"""Checks of the arguments of plans and their calls; each raises ValueError with the numbers."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.config import OF_KEYS, AttentionConfig
from a2d_mpi.core.sizes import check_memory
from a2d_mpi.devices import device_of
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.masks.mask import Mask
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program, held_bytes


def check_grid(grid: ProcessGrid) -> None:
    """Raise ValueError on this rank if `grid` is no `ProcessGrid`."""
    if not isinstance(grid, ProcessGrid):
        raise ValueError(f"grid must be a ProcessGrid, got {type(grid).__name__}")


def check_problem(
    method: str, mask: Mask, config: AttentionConfig, named: tuple[str | None, str | None]
) -> None:
    """Check that mask, sizes and named distributions fit the method.

    Parameters
    ----------
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    mask : Mask
    config : AttentionConfig
    named : (str or None, str or None)
        Distributions of the queries and of the keys that the user asked for.

    Raises
    ------
    ValueError
        If they do not fit.
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask such as Causal(), got {reprlib.repr(mask)}")
    rules = METHODS[method]
    if not rules.takes(mask):
        raise ValueError(
            f"a {method} needs a causal mask, got {type(mask).__name__}: a {method} computes no "
            "pair of a query and a later key"
        )
    if rules.causal and config.seqlen_kv != config.seqlen:
        raise ValueError(
            f"a {method} needs as many keys as queries, got {config.seqlen} queries and "
            f"{config.seqlen_kv} keys"
        )
    for name in named:
        if rules.distribution and name not in (None, rules.distribution):
            raise ValueError(f"a {method} needs the {rules.distribution} distribution, got {name}")


def check_room(programs: Iterable[Program], problem: Problem, grid: ProcessGrid) -> None:
    """Refuse a plan whose forward pass does not fit in the memory of the node.

    Parameters
    ----------
    programs : iterable of Program
        The programs of this rank's forward pass.
    problem : Problem
    grid : ProcessGrid

    Raises
    ------
    ValueError
        If the ranks of this node need more than one of `a2d_mpi.core.sizes.memory_limits`.
    """
    config, rank = problem.config, grid.comm.rank
    own = problem.queries.counts[rank], problem.keys.counts[rank]
    tensors = sum(own[x in OF_KEYS] * config.nbytes(x) for x in ("q", "k", "v", "out", "lse"))
    what = f"{config.seqlen} tokens on {grid.layout.shape} ranks: tensors and buffers of one rank"
    check_memory(what, tensors + held_bytes(x.buffers for x in programs), grid.sharing)


def check_tensors(
    arrays: Mapping[str, Array], lengths: tuple[int, int], config: AttentionConfig
) -> Device:
    """Check the shapes, dtypes and device of the tensors of a call; return their device.

    Parameters
    ----------
    arrays : mapping of str to arrays
        The caller's shards by tensor name, and the sink.
    lengths : (int, int)
        n, m: tokens of this rank's shards of queries and of keys.
    config : AttentionConfig

    Raises
    ------
    ValueError
        If a shape, a dtype or a device is wrong.
    """
    devices = []
    for name, tensor in arrays.items():
        if name == "sink":
            of, shape, dtype = "plan", (config.nheads,), config.compute_dtype
        else:
            of, shape = "shard", (lengths[name in OF_KEYS], *config.shape(name))
            dtype = config.dtype_of(name)
        devices.append(device_of(tensor, name))
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} has shape {tensor.shape} and dtype {tensor.dtype}, "
                f"but this {of} needs {shape} and {dtype}"
            )
        if not devices[0].owns(tensor):
            raise ValueError(f"{name} is not on the current device")
    return devices[0]
