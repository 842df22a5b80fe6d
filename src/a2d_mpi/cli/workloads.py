"""The configurations of a benchmark: workloads, plans, names and predictions; no MPI import."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from itertools import product

import numpy as np

from a2d_mpi.cli.options import (
    OPTIONS,
    BadOption,
    Parser,
    add_options,
    listed,
    mask_text,
    method_name,
    one_of,
    slices,
    whole,
)
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.patterns import make_mask, split_masks
from a2d_mpi.planning.choice import Choice, workload_name
from a2d_mpi.planning.layouts import layouts
from a2d_mpi.planning.machine import KernelModel, Link, Machine
from a2d_mpi.planning.memory import most_memory
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.planner import best_candidates
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import SIZES, Workload
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.slices import slices_of
from a2d_mpi.schedules.writing import problem_of

# Most ranks for which the planner searches.  With h100-8.toml, 1M causal tokens and gradients,
# 1024 ranks take 18 s of CPU time, 4096 ranks 127 s and 0.9 GB (jobs/measure.py planner).
PLANNED = 4096
_SPEC = re.compile(
    r"([a-z0-9 _]+?)(?::(\d+)x(\d+)(?:x(\d+))?)?(?:@([a-z]+))?(?:/(\d+)x(\d+))?(?:\*(.+))?"
)
_AUTO = re.compile(r"auto(?::([1-9]\d?|each))?")


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
    """Add the options of a sweep, see `workloads_of`."""
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


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    """Return all combinations of the sizes in a driver's options, without duplicates.

    Raises
    ------
    ValueError
        If a mask does not fit a sequence.
    """
    heads_kv = args.nheads_kv or [None]  # None: as many KV heads as query heads
    sizes = args.dtypes, args.wire, args.headdim, args.nheads, heads_kv, args.seqlens, args.masks
    names = "dtype", "wire", "headdim", "nheads", "nheads_kv", "seqlen", "text"
    common = {"headdim_v": args.headdim_v, "backward": args.backward}
    works = (make_workload(**dict(zip(names, x)), **common) for x in product(*sizes))
    return list({workload_name(x.attributes): x for x in works}.values())


def make_workload(text: str, seqlen: int, wire: str, **others: object) -> Workload:
    """Make the workload of a driver's options; ValueError if the mask does not fit."""
    wire = None if wire == "none" else wire
    return Workload(
        seqlen=seqlen, mask=make_mask(text, seqlen), mask_text=text, wire=wire, **others
    )


def add_problem(parser: Parser, ranks: int, needs_heads: bool = True) -> None:
    """Add the options of a problem on at most `ranks` ranks of a machine; see `read_problem`."""
    group = parser.add_argument_group("machine")
    add_options(group, "profile", required=True)
    text = f"ranks, at most {ranks}"
    group.add_argument("--ranks", type=whole(1, ranks), metavar="N", required=True, help=text)
    group = parser.add_argument_group("problem")
    add_options(group, "seqlen", required=True)
    add_options(group, "nheads", required=needs_heads)
    add_options(group, "nheads-kv")
    add_options(group, "headdim", help="elements of a head of q and k; default: 128")
    add_options(group, "headdim-v")
    add_options(group, "dtype", default=None, help="storage dtype; default: bfloat16")
    add_options(group, "wire", "mask", "backward", "overlap")


def read_problem(args: argparse.Namespace) -> tuple[Machine, Workload]:
    """Return the machine and the workload of the options of `add_problem`.

    Raises
    ------
    ValueError
        If an option is wrong.
    OSError
        If the profile cannot be read.
    """
    machine = read_machine(args.profile)
    given = {x: getattr(args, x) for x in (*SIZES, "wire", "backward", "overlap")}
    given["headdim"], given["dtype"] = args.headdim or 128, args.dtype or "bfloat16"
    return machine, make_workload(args.mask, **given)


def expected(choice: Choice, machine: Machine | None, distribution: str) -> dict[str, object]:
    """Predict seconds, memory and bytes of a plan.

    Parameters
    ----------
    choice : Choice
        With the nodes on which the ranks of the layout really are.
    machine : Machine or None
        None: no seconds are predicted.
    distribution : str
        Distribution of the plan.

    Returns
    -------
    dict of str to number or str
        ``memory``: peak bytes of a rank.  ``forward seconds``: of the slowest rank; likewise
        ``backward seconds``.  ``machine``: name of the machine.
    """
    method, layout, work = choice.method, choice.layout, choice.work
    problem = problem_of(method, layout, work, work.seen, distribution)
    found: dict[str, object] = {"memory": most_memory(method, layout, problem, work.backward)}
    if machine is not None:
        phases = predict(machine, method, layout, work, distribution)
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
    work: Workload, specs: Sequence[str], ranks: int, machine: Machine | None = None
) -> list[Choice]:
    """Return the plans of one workload, without duplicates.

    Parameters
    ----------
    work : Workload
    specs : sequence of str
        As the option --plans takes them.
    ranks : int
    machine : Machine, optional
        Needed by "auto".

    Raises
    ------
    ValueError
        If a spec is wrong, or does not fit the heads.
    """
    by_name: dict[str, Choice] = {}
    if machine is not None:
        for phase in work.phases:
            machine.kernel(work.dtype, phase)  # raises an error if the profile has none
        machine.links(ranks)
    for spec in specs:
        try:
            chosen = _chosen(spec, ranks, work, machine)
        except ValueError as error:
            raise ValueError(f"--plans {spec!r}: {error}") from None
        for place, (method, layout) in enumerate(chosen):
            picked = place == 0 and _AUTO.fullmatch(spec) is not None
            new = Choice(method, layout, work, picked)
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
