"""Writing programs: a method, a problem and a layout give the programs of each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.compiled import CompiledMask, compile_mask
from a2d_mpi.masks.mask import Mask
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.passes import lowered
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.slices import ATTEND, PUT, TAKE
from a2d_mpi.sharding.distribution import Distribution, distribute


def leaves_open(method: str, layout: Layout, config: AttentionConfig, mask: Mask) -> bool:
    """Return True if neither the method nor the layout nor the mask fixes the distribution."""
    if METHODS[method].distribution or layout.distribution:
        return False
    return mask.default_distribution == "balanced" and config.seqlen == config.seqlen_kv


def default_distribution(
    method: str,
    layout: Layout,
    config: AttentionConfig,
    seen: CompiledMask,
    speed: float | None = None,
) -> tuple[str, str]:
    """Return the default distribution of a method, and the reason for users.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    layout : Layout
    config : AttentionConfig
    seen : CompiledMask
    speed : float, optional
        Speed of the machine, as in `a2d_mpi.sharding.choice.choose`.

    Returns
    -------
    name, why : str
    """
    chosen, mask = METHODS[method], seen.given
    if leaves_open(method, layout, config, mask):
        from a2d_mpi.sharding.choice import choose

        sizes = *chosen.even_tiles(layout), config.dtype_of("q").itemsize
        return choose(seen, *sizes, speed)
    if chosen.distribution:
        return chosen.distribution, f"the distribution of {method}"
    if layout.distribution:
        return layout.distribution, "the planner's pick"
    return mask.default_distribution, f"the default of {type(mask).__name__}"


def problem_of(
    method: str,
    layout: Layout,
    config: AttentionConfig,
    mask: Mask | CompiledMask,
    distribution: str | None = None,
    distribution_kv: str | Distribution | None = None,
) -> Problem:
    """Return the problem of a method on a layout, with the owner of each token.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    layout : Layout
    config : AttentionConfig
    mask : Mask or CompiledMask
        It is compiled here, unless it is already, for several problems of one mask.
    distribution : str, optional
        Distribution of the queries and, in self-attention, of the keys.  Default: see
        `default_distribution`.
    distribution_kv : str or Distribution, optional
        Distribution of the keys in cross-attention: a name, or the shards of all ranks.  Default:
        the distribution of the queries.

    Raises
    ------
    ValueError
        If there is no method or distribution of this name, it does not fit, or as of
        `a2d_mpi.masks.compiled.compile_mask`.
    """
    n, m, chosen = config.seqlen, config.seqlen_kv, METHODS[method]
    seen = compile_mask(mask, n, m)
    name, why = distribution, "asked for"
    if name is None:
        name, why = default_distribution(method, layout, config, seen)
    sizes = *chosen.even_tiles(layout), layout.heads
    keys = queries = distribute(name, n, *sizes, why, seen if n == m else None)
    if isinstance(distribution_kv, Distribution):
        keys = distribution_kv
    elif n != m or distribution_kv not in (None, name):
        keys = distribute(distribution_kv or name, m, *sizes)
    plain = AttentionConfig(**config.arguments)  # without the fields of a subclass
    return Problem(plain, queries, keys, seen)


@dataclass(frozen=True)
class Draft:
    """A program that is not written yet.  Equal drafts give programs with equal steps.

    Attributes
    ----------
    writer : callable
        Function that writes the steps.
    group : Group
    rank : int
        Rank in the group.
    ranks : range
        Rank in the layout of every rank of the group.  Drafts may be equal if these differ.
    overlap : bool
        Whether to compute while messages travel.
    stage : int
        As of a `Program`.
    """

    writer: Callable[[Program], None]
    group: Group
    rank: int
    ranks: range = field(compare=False)
    overlap: bool
    stage: int = ATTEND

    def write(self) -> Program:
        """Write the program: the steps of the method, completed by all passes."""
        program = Program(self.group, self.rank, self.ranks, self.stage)
        self.writer(program)
        return lowered(program, self.overlap)


def write(
    method: str, phase: str, layout: Layout, problem: Problem, rank: int, overlap: bool = True
) -> list[Program]:
    """Write the programs that one rank runs one after the other; of slices, parts of programs.

    The arguments are as in `drafts_of`.
    """
    drafts, slices = drafts_of(method, phase, layout, problem, rank, overlap)
    programs = [x.write() for x in drafts]
    if slices == 1:
        return programs
    from a2d_mpi.schedules.pipeline import pipelined

    return pipelined(programs, slices, layout, overlap)


def drafts_of(
    method: str, phase: str, layout: Layout, problem: Problem, rank: int, overlap: bool = True
) -> tuple[list[Draft], int]:
    """Return the programs of one rank before they are written, and the number of slices.

    The rank runs the program of its context-parallel group.  Without a head axis and slices this
    is all: one draft, whose writer is the method's function.  A first reader stops at the first
    ``return``.  With a head axis, exchanges of heads come before and after it.  Several slices are
    taken and put in the same way: all slices have the same programs.  Ranks have the same program
    if writer, group and rank in the group are equal.  So the U ranks of a position share the
    program of their context-parallel groups.  Ranks of equal Ulysses groups share the exchanges of
    heads.

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
        If there is no method of this name, or the heads do not fit the layout.
    """
    slices, u = (layout.slices or (1, 1))[PHASES.index(phase)], layout.heads
    cp_groups, ulysses_group = _groups(method, layout, problem, slices)
    position, head = divmod(rank, u)
    attend = getattr(METHODS[method], phase)
    ranks = range(head, layout.size, u)
    draft = Draft(attend, cp_groups[head], rank=position, ranks=ranks, overlap=overlap)
    if ulysses_group is None:
        return [draft], slices
    from a2d_mpi.schedules.heads import EXCHANGES

    (take, put), group = EXCHANGES[phase], ulysses_group(position)
    here = {"rank": head, "ranks": range(position * u, (position + 1) * u), "overlap": overlap}
    before, after = (Draft(x, group, **here, stage=y) for x, y in ((take, TAKE), (put, PUT)))
    return [before, draft, after], slices


@lru_cache(maxsize=4)  # the programs of all ranks share the caches of groups
def _groups(
    method: str, layout: Layout, problem: Problem, slices: int
) -> tuple[list[Group], Callable[[int], Group] | None]:
    """Return the context-parallel groups, and a function from a position to its Ulysses group.

    Programs compute the heads of one slice.  Without a head axis and slices there is no function.
    """
    chosen, u = METHODS[method], layout.heads
    whole, shares_kv = problem.cp_group(u), problem.config.nheads_kv < u
    config = whole.config.cp_group(slices)
    cp_groups = [
        Group(
            *chosen.group_shape(layout),
            whole,
            config,
            shares_kv,
            layout.nodes_of_group(head) if chosen.knows_nodes else None,
            chosen.ring and layout.positions > 1,
        )
        for head in range(u)
    ]
    if u == slices == 1:
        return cp_groups, None
    from a2d_mpi.schedules.heads import ulysses_groups

    return cp_groups, ulysses_groups(problem, config, u, shares_kv)
