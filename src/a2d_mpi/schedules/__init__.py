"""Methods of distributed attention: each one writes the program of a rank, as data.

Read `steps` first, for the vocabulary, and then `attention2d`.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from itertools import chain
from typing import NamedTuple

from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.check import check_visible
from a2d_mpi.masks.mask import Full, Mask
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.passes import lowered
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program, StepLimit
from a2d_mpi.schedules.slices import pipelined, renamed, sharing, with_shared_keys
from a2d_mpi.sharding.distribution import distribute


class Methods(UserDict):
    """Methods by name.  The module of a method is imported when the method is first used."""

    def __getitem__(self, name: str) -> Method:
        """Return a method."""
        if isinstance(where := self.data[name], str):
            module, constant = where.split(":")
            imported = import_module(f"a2d_mpi.schedules.{module}")
            self.data[name] = getattr(imported, constant)
        return self.data[name]


METHODS: Methods = Methods(
    {
        "attention2d": "attention2d:METHOD",
        "ring": "ring:RING",
        "striped ring": "ring:STRIPED_RING",
        "double ring": "ring:DOUBLE_RING",
        "triangle": "triangle:METHOD",
        "node aware": "attention2d:NODE_AWARE",
    }
)


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
        If the name is taken or has other characters, or `method` is no `Method`.
    """
    if name in (*METHODS, "all", "auto"):
        raise ValueError(f"the name {name!r} of a method is taken: choose another name")
    if not re.fullmatch("[a-z0-9]+( [a-z0-9]+)*", name):
        raise ValueError(f"a method's name must consist of words of a-z and 0-9, got {name!r}")
    if not isinstance(method, Method):
        raise ValueError(f"method {name!r} must be a Method, got {method!r}")
    METHODS[name] = method


def leaves_open(method: str, layout: Layout, config: AttentionConfig, mask: Mask) -> bool:
    """Return True if neither the method nor the layout nor the mask fixes the distribution."""
    if _lookup(method).distribution or layout.distribution:
        return False
    return mask.default_distribution == "balanced" and config.seqlen == config.seqlen_kv


def default_distribution(
    method: str,
    layout: Layout,
    config: AttentionConfig,
    mask: Mask,
    speed: float | None = None,
) -> tuple[str, str]:
    """Return the default distribution of a method, and the reason for users.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    layout : Layout
    config : AttentionConfig
    mask : Mask
    speed : float, optional
        Speed of the machine, as in `a2d_mpi.sharding.choice.choose`.

    Returns
    -------
    name, why : str
    """
    chosen = _lookup(method)
    if leaves_open(method, layout, config, mask):
        from a2d_mpi.sharding.choice import choose

        sizes = *chosen.tiles(layout), config.dtype_of("q").itemsize
        return choose(mask, config.seqlen, *sizes, speed)
    if chosen.distribution:
        return chosen.distribution, f"the distribution of {method}"
    if layout.distribution:
        return layout.distribution, "the planner's pick"
    return mask.default_distribution, f"the default of {type(mask).__name__}"


def problem_of(
    method: str,
    layout: Layout,
    config: AttentionConfig,
    mask: Mask,
    distribution: str | None = None,
    distribution_kv: str | None = None,
) -> Problem:
    """Return the problem of a method on a layout, with the owner of each token.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    layout : Layout
    config : AttentionConfig
    mask : Mask
    distribution : str, optional
        Distribution of the queries and, in self-attention, of the keys.  Default: see
        `default_distribution`.
    distribution_kv : str, optional
        Distribution of the keys in cross-attention.  Default: the distribution of the queries.

    Raises
    ------
    ValueError
        If there is no method or distribution of this name, it does not fit, or the mask's
        `visible` returns invalid intervals.
    """
    n, m = config.seqlen, config.seqlen_kv
    chosen, keys, aligned = _lookup(method), None, mask.aligned(n, m)
    check_visible(aligned, n, m)
    name, why = distribution, "asked for"
    if name is None:
        name, why = default_distribution(method, layout, config, mask)
    sizes = *chosen.tiles(layout), layout.heads
    shards = distribute(name, mask if n == m else Full(), n, *sizes, why)
    if n != m or distribution_kv not in (None, name):
        keys = distribute(distribution_kv or name, Full(), m, *sizes)
    plain = AttentionConfig(**config.arguments)  # the config may be a `Workload`
    return Problem(plain, shards, aligned, keys)


def _lookup(method: str) -> Method:
    if method not in METHODS:
        raise ValueError(f"method must be one of {tuple(METHODS)}, got {method!r}")
    return METHODS[method]


class Draft(NamedTuple):
    """A program that is not written yet.  Equal drafts give equal programs.

    Attributes
    ----------
    writer : callable
        Function that writes the steps.
    group : Group
    rank : int
        Rank in the group.
    overlap : bool
        Whether to compute while messages travel.
    stride, offset : int
        The rank p of the group is the rank ``p stride + offset`` of the layout.
    first, last : bool
        Whether its slice is the first, and the last, of those that share KV heads.
    """

    writer: Callable[[Program], None]
    group: Group
    rank: int
    overlap: bool = True
    stride: int = 1
    offset: int = 0
    first: bool = True
    last: bool = True

    @property
    def anywhere(self) -> Draft:
        """Draft without the place in the layout: equal for all ranks with the same program."""
        return self._replace(stride=1, offset=0)

    def write(self, steps: int | None = None) -> Program:
        """Write the program, or its first `steps` steps and the waits for their messages."""
        program = Program(self.rank, self.group, self.stride, self.offset, steps)
        program.first, program.last = self.first, self.last
        with suppress(StepLimit):
            self.writer(program)
        return with_shared_keys(lowered(program, self.overlap))


def write(
    method: str,
    phase: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    overlap: bool = True,
) -> list[Program]:
    """Write the programs that one rank runs one after the other; of slices, parts of programs.

    The arguments are as in `drafts_of`.
    """
    drafts = drafts_of(method, phase, layout, problem, rank, overlap)
    written = {x: x.write() for x in set(chain.from_iterable(drafts))}
    if len(drafts) == 1:
        for number, x in enumerate(drafts[0]):
            written[x].number = number
        return [written[x] for x in drafts[0]]
    shared = sharing(problem.config.cp_group(layout.heads), len(drafts))
    programs = [
        [renamed(written[x], k, i, i // shared, layout) for k, x in enumerate(of_slice)]
        for i, of_slice in enumerate(drafts)
    ]
    return pipelined(programs, layout, overlap)


def drafts_of(
    method: str,
    phase: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    overlap: bool = True,
) -> list[list[Draft]]:
    """Return the programs of one rank, slice by slice, before they are written.

    The rank runs the program of its context-parallel group.  With a head axis, exchanges of heads
    come before and after it.  Several slices are taken and put in the same way.  Ranks have the
    same program if writer, group and rank in the group are equal.  So the U ranks of a position
    share the program of their context-parallel groups.  Ranks of equal Ulysses groups share the
    exchanges of heads.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    phase : {"forward", "backward"}
    layout : Layout
    problem : Problem
        The problem of all ranks of the layout, with all heads.
    rank : int
        Rank in the layout.
    overlap : bool
        Whether to compute while messages travel.

    Raises
    ------
    ValueError
        If there is no method of this name, or the problem does not fit the layout.
    """
    slices = (layout.slices or (1, 1))[PHASES.index(phase)]
    groups, u = _groups(method, layout, problem, slices), layout.heads
    position, head = divmod(rank, u)
    write_phase = getattr(_lookup(method), phase)
    attention = Draft(write_phase, groups.inside[head], position, overlap, u, head)
    if u == slices == 1:
        return [[attention]]
    from a2d_mpi.schedules import heads

    ulysses, drafts = (groups.ulysses(position), head, overlap, 1, position * u), []
    for i in range(slices):
        first, last = i % groups.sharing == 0, (i + 1) % groups.sharing == 0
        before, after = (Draft(x, *ulysses) for x in heads.exchanges(phase, first, last))
        drafts.append([before, attention._replace(first=first, last=last), after])
    return drafts


class _Groups:
    """All context-parallel groups and Ulysses groups of a layout, for a slice of their heads."""

    def __init__(self, method: str, layout: Layout, problem: Problem, slices: int) -> None:
        if problem.queries.nshards != layout.size:
            raise ValueError(
                f"need a shard for each of {layout.size} ranks, got {problem.queries.nshards}"
            )
        chosen, u, config = _lookup(method), layout.heads, problem.config
        rows, cols = chosen.shape(layout)
        group, self._shares_kv = problem.cp_group(u), config.nheads_kv < u
        self.sharing = sharing(group.config, slices)
        nodes = [layout.nodes_of_group(x) if chosen.knows_nodes else None for x in range(u)]
        self._config = group.config.cp_group(slices)
        self.inside = [
            Group(
                rows,
                cols,
                group,
                self._config,
                shares_kv=self._shares_kv,
                nodes=_renamed(x),
                ring=chosen.is_ring(layout),
            )
            for x in nodes
        ]
        self._heads, self._problem = u, problem
        self._ulysses: dict[int, Group] = {}

    def ulysses(self, position: int) -> Group:
        """Return the Ulysses group of a position; its tokens are numbered from 0."""
        if position not in self._ulysses:
            u = self._heads
            members = range(position * u, (position + 1) * u)
            self._ulysses[position] = Group(
                1, u, self._problem.of(members), self._config, self._shares_kv
            )
        return self._ulysses[position]


_groups = lru_cache(maxsize=4)(_Groups)  # the programs of all ranks share the caches of groups


def _renamed(nodes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the nodes numbered from 0 in the same order, so that equal divisions are equal."""
    if nodes is None:
        return None
    names = {x: i for i, x in enumerate(sorted(set(nodes)))}
    return tuple(names[x] for x in nodes)
