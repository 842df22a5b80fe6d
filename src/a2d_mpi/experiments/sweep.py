"""The configurations of a benchmark: workloads, plans, names and predictions; no MPI import."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.experiments.options import (
    OPTIONS,
    BadOption,
    Parser,
    add_options,
    listed,
    mask_text,
    method_name,
    one_of,
    slices,
)
from a2d_mpi.masks.patterns import make_mask, split_masks
from a2d_mpi.planning import cost
from a2d_mpi.planning.layouts import layouts
from a2d_mpi.planning.machine import KernelModel, Link, Machine
from a2d_mpi.planning.memory import most_memory
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.planner import best_candidates
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.slices import slices_of
from a2d_mpi.schedules.writing import problem_of

# Most ranks for which the planner searches.  With h100-8.toml, 1M causal tokens and gradients,
# 1024 ranks take 18 s of CPU time, 4096 ranks 127 s and 0.9 GB (jobs/measure.py planner).
PLANNED = 4096
mask_of = lru_cache(maxsize=32)(make_mask)  # masks keep what they have computed
SIZES = ("seqlen", "nheads", "nheads_kv", "headdim", "headdim_v", "dtype")
_SPEC = re.compile(
    r"([a-z0-9 _]+?)(?::(\d+)x(\d+)(?:x(\d+))?)?(?:@([a-z]+))?(?:/(\d+)x(\d+))?(?:\*(.+))?"
)
_AUTO = re.compile(r"auto(?::([1-9]\d?|each))?")


@dataclass(frozen=True, kw_only=True)
class Case(AttentionConfig):
    """A workload: a config with the text of a mask, with or without a backward phase."""

    mask: str
    backward: bool

    @property
    def name(self) -> str:
        """Name in files and messages; no two cases have the same name."""
        passes = "backward" if self.backward else "forward"
        values = f"x{self.headdim_v}" * (self.headdim_v != self.headdim)
        return (
            f"{self.mask}-n{self.seqlen}-h{self.nheads}-kv{self.nheads_kv}-d{self.headdim}{values}"
            f"-{self.dtype}{f'-{self.wire}' if self.wire else ''}-{passes}"
        )

    def work(self, overlap: bool = True) -> Workload:
        """Return the workload in the form that the planner takes.

        Raises
        ------
        ValueError
            If there is no such mask, or it does not fit the sequence.
        """
        mask = mask_of(self.mask, self.seqlen)
        return Workload(**self.arguments, mask=mask, backward=self.backward, overlap=overlap)


def _plans(text: str) -> list[str]:
    """Parse plans with commas between them; the rest of this docstring is shown by --help.

    A plan is METHOD[:RxC[xU]][@ORDER][/RxC][*F[xB]]:

      METHOD  one of the methods below, or with underscores
      RxC     rows and columns of the grid; default: as square as the ranks allow
      U       ranks that share the heads; default: 1
      ORDER   the axes r (rows), c (columns) and u (ranks that share the heads) from the slowest to
              the fastest; default: rcu.  Ranks along the last axis are neighbours, usually on a
              node
      /RxC    rows and columns of a block of the grid whose ranks are neighbours; default: 1x1
      *F[xB]  slices of the heads, forward and backward; default: the plan's choice

    For example "ring", "attention2d:2x2", "ring:2x1x2" (2 ranks share the heads), "double
    ring:2x2" (2 outer steps over inner rings of 2), "node aware:4x4/2x2", "attention2d:4x4*2x4".

    "all" is every layout that the planner knows.  "auto" is the fastest plan by the planner,
    "auto:5" its five fastest plans, "auto:each" its fastest plan of each method; these need
    --profile.
    """
    if not (names := [x.strip() for x in text.split(",") if x.strip()]):
        raise BadOption(f"must name a plan, got {text[:40]!r}")
    return names


def add_plans(parser: Parser, group: argparse._ArgumentGroup, **changes: object) -> None:
    """Add the option --plans to a group, and its explanation to the end of the help."""
    grammar = inspect.getdoc(_plans).partition("\n\n")[2]
    parser.epilog = f"{grammar}\n\nMethods: {', '.join(METHODS)}."
    usual = {"type": _plans, "metavar": "PLAN,...", "help": "see the end of this help"}
    group.add_argument("--plans", **{**usual, **changes})


def _masks(text: str) -> list[str]:
    """Parse texts of masks with commas between them; "all": one mask of each name."""
    texts = [mask_text(x) for x in split_masks(text)]
    if not texts:
        raise BadOption(f"must name a mask, got {text[:40]!r}")
    return texts


def add_list(to: argparse._ActionsContainer, name: str, option: str, **changes: object) -> None:
    """Add an option that takes several values of one of `OPTIONS`, with commas between them."""
    usual = dict(OPTIONS[option])
    if choices := usual.pop("choices", None):
        usual |= {"type": one_of(choices), "metavar": option.upper()}
        usual["help"] += f"; from {', '.join(choices)}"
    kind = listed(usual["type"])
    if option == "mask":  # its arguments have commas, too
        kind, usual["help"] = _masks, f"all, or {usual['help']}"
    usual |= {"type": kind, "metavar": f"{usual['metavar']},..."}
    to.add_argument(f"--{name}", **{**usual, **changes})


def add_workloads(parser: Parser) -> None:
    """Add the options of a sweep, see `cases_of`."""
    group = parser.add_argument_group("workloads (every combination is run)")
    add_list(group, "seqlens", "seqlen", default="2048")
    add_list(group, "nheads", "nheads", default="8")
    add_list(group, "nheads-kv", "nheads-kv")
    add_list(group, "headdim", "headdim", default="64")
    add_options(group, "headdim-v")
    add_list(group, "masks", "mask")
    add_list(group, "dtypes", "dtype")
    add_options(group, "backward")
    add_list(group, "wire", "wire")


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return all combinations of the sizes in a driver's options, without duplicates."""
    heads_kv = args.nheads_kv or [None]  # None: as many KV heads as query heads
    wires = [None if x == "none" else x for x in args.wire]
    names = "dtype", "wire", "headdim", "nheads", "nheads_kv", "seqlen", "mask"
    sizes = args.dtypes, wires, args.headdim, args.nheads, heads_kv, args.seqlens, args.masks
    common = {"headdim_v": args.headdim_v, "backward": args.backward}
    cases = (Case(**dict(zip(names, x)), **common) for x in product(*sizes))
    return list(dict.fromkeys(cases))


@dataclass(frozen=True)
class Configuration:
    """One plan for one workload: one entry of a benchmark file.

    Attributes
    ----------
    case : Case
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    layout : Layout
    overlap : bool
    picked : bool
        Whether the planner chose it ("auto").
    """

    case: Case
    method: str
    layout: Layout
    overlap: bool = True
    picked: bool = False

    @property
    def name(self) -> str:
        """Name of the entry; the shape in it says the number of ranks."""
        method, shape = self.method.replace(" ", "_"), self.layout.shape
        overlap = "overlap" if self.overlap else "in_turn"
        order = self.layout.numbering.replace("/", "_")  # a slash would make a subgroup
        order += f"-{self.layout.distribution}" if self.layout.distribution else ""
        order += f"_slices{self.layout.sliced}" if self.layout.slices else ""
        return f"{method}-{shape}-{order}-{self.case.name}-{overlap}"

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes of the plan and its workload in files."""
        case, layout = self.case, self.layout
        return {
            **{x: getattr(case, x) for x in SIZES},
            **layout.attributes,
            "method": self.method,
            "mask": case.mask,
            "backward": case.backward,
            "overlap": self.overlap,
            "slices": layout.sliced,
            "wire": case.wire or "none",
            "picked": self.picked,
        }

    def expected(
        self, machine: Machine | None, layout: Layout, distribution: str
    ) -> dict[str, object]:
        """Predict seconds, memory and bytes.

        Parameters
        ----------
        machine : Machine or None
            None: no seconds are predicted.
        layout : Layout
            Layout of the plan, with the nodes on which its ranks really are.
        distribution : str
            Distribution of the plan.

        Returns
        -------
        dict of str to number or str
            ``memory``: peak bytes of a rank.  ``forward lower bound``: least bytes of a rank in
            balanced attention without a head axis.  ``forward seconds``: of the slowest rank.
            Likewise ``backward ...``.  ``machine``: name of the machine.
        """
        work = self.case.work(self.overlap)
        problem = problem_of(self.method, layout, work, work.mask, distribution)
        found: dict[str, object] = {
            "memory": most_memory(self.method, layout, problem, work.backward)
        }
        tokens = np.arange(work.seqlen)
        area = work.mask.area(tokens, tokens) / layout.size
        for phase in work.phases:
            found[f"{phase} lower bound"] = cost.lower_bound(
                problem, area, work.seqlen / layout.size, phase == "backward"
            )
        if machine is not None:
            phases = predict(machine, self.method, layout, work, distribution)
            found |= {f"{phase} seconds": float(x.total.max()) for phase, x in phases.items()}
            found["machine"] = machine.name
        return found


def parse_plan(spec: str, ranks: int) -> tuple[str, Layout]:
    """Parse ``METHOD[:RxC[xU]][@order][/RxC][*F[xB]]``; return the method and its layout.

    The default shape is the squarest shape of the method.

    Raises
    ------
    ValueError
        If there is no such method, or the method has no such shape on this number of ranks.
    """
    match = _SPEC.fullmatch(spec.strip())
    if not match:
        raise ValueError("must be METHOD[:RxC[xU]][@order][/RxC][*F[xB]], all or auto")
    name, rows, cols, heads, order, height, width, cut = match.groups()
    method, heads = method_name(name), int(heads or 1)
    group = ranks // max(1, heads)
    shapes = [(x, group // x) for x in range(1, group + 1) if group % x == 0]
    rules = METHODS[method]  # if it knows nodes, these decide, and any shape may suit
    if group > 1 and not rules.knows_nodes:
        shapes = [x for x in shapes if rules.suits(Layout(*x))]
    if rows is None:
        # If the method has no shape, the default is refused below.
        rows, cols = min(shapes, key=lambda x: (abs(x[0] - x[1]), x), default=(ranks, 1))
    block = int(height or 1), int(width or 1)
    number = None if cut is None else slices(cut)
    layout = Layout(int(rows), int(cols), heads, order or "rcu", block, slices=number)
    if layout.size != ranks:
        raise ValueError(f"{layout.shape} does not have {ranks} ranks")
    if (layout.rows, layout.cols) not in shapes:
        others = " or ".join(f"{r}x{c}x{heads}" for r, c in shapes)
        others = f"must be {others}" if others else f"is impossible on {ranks} ranks"
        raise ValueError(f"a {method} {others}")
    return method, layout


def plans_for(
    case: Case,
    specs: Sequence[str],
    ranks: int,
    overlaps: Sequence[bool] = (True,),
    machine: Machine | None = None,
) -> list[Configuration]:
    """Return the configurations of one workload, without duplicates.

    Parameters
    ----------
    case : Case
    specs : sequence of str
        As the option --plans takes them.
    ranks : int
    overlaps : sequence of bool
        Values of `overlap`; each gives its own configurations.
    machine : Machine, optional
        Needed by "auto".

    Raises
    ------
    ValueError
        If a spec is wrong, or does not fit the heads.
    """
    by_name: dict[str, Configuration] = {}
    for overlap in overlaps:
        work = case.work(overlap)
        if machine is not None:
            for phase in work.phases:
                machine.kernel(case.dtype, phase)  # raises an error if the profile has none
            machine.links(ranks)
        for spec in specs:
            try:
                chosen = _chosen(spec, ranks, work, machine)
            except ValueError as error:
                raise ValueError(f"--plans {spec!r}: {error}") from None
            for place, (method, layout) in enumerate(chosen):
                picked = place == 0 and _AUTO.fullmatch(spec) is not None
                new = Configuration(case, method, layout, overlap, picked)
                check_ends(method, layout, work)
                if picked or new.name not in by_name:
                    by_name[new.name] = new
    return list(by_name.values())


def check_ends(method: str, layout: Layout, work: Workload) -> None:
    """Refuse a user's method whose ranks would wait for ever; the package's own are tested.

    Raises
    ------
    ValueError
        If ranks wait for messages that nobody sends.
    """
    if METHODS[method].forward.__module__.startswith("a2d_mpi."):
        return
    link, kernels = Link(1e9), dict.fromkeys(PHASES, KernelModel(1e9))  # of any machine
    machine = Machine("any", link, link, {work.dtype: kernels})
    try:
        predict(machine, method, layout, work)
    except ValueError as error:
        raise ValueError(f"method {method!r}: {error}") from error


def _chosen(
    spec: str, ranks: int, work: Workload, machine: Machine | None
) -> list[tuple[str, Layout]]:
    """Return the methods and layouts of one of the plans that `plans_for` takes."""
    if best := _AUTO.fullmatch(spec):
        if machine is None:
            raise ValueError("auto needs --profile")
        if ranks > PLANNED:
            raise ValueError(f"auto plans at most {PLANNED} ranks, got {ranks}")
        number = None if best[1] == "each" else int(best[1] or 1)
        found = best_candidates(machine, ranks, work, number, methods=tuple(METHODS))
        return [(x.method, x.layout) for x in found]
    if spec == "all":
        node = ranks if machine is None else machine.ranks_per_node
        return [(x, y) for x in METHODS for y in layouts(x, ranks, work, node)]
    method, layout = parse_plan(spec, ranks)
    slices_of(layout.slices, work, layout)  # raises an error if they do not divide the heads
    if machine is not None and METHODS[method].knows_nodes:
        layout = layout.on_nodes(np.arange(ranks) // machine.ranks_per_node)
    return [(method, layout)]
