"""Work and traffic of partitions under many masks, counted in their schedules, without a run."""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.atomic import check_writable, read_regular, write_whole
from a2d_mpi.core.config import DISTRIBUTIONS, AttentionConfig
from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.options import method_name, one_of
from a2d_mpi.experiments.streams import progress
from a2d_mpi.masks.patterns import make_mask, usage
from a2d_mpi.planning import cost
from a2d_mpi.schedules import METHODS, problem_of
from a2d_mpi.schedules.problem import Problem


class PartitionCost(NamedTuple):
    """Work and traffic of one way to compute a mask on a grid.

    Attributes
    ----------
    grid : str
        Rows x columns.
    uneven : float
        Visible pairs of the rank with the most, divided by the mean over the ranks.
    moved : float
        Bytes that the busiest rank sends or receives in a forward pass (the larger of the two),
        divided by the bytes of q.
    """

    grid: str
    uneven: float
    moved: float


Table = dict[tuple[int, int, str, str], PartitionCost]  # by ranks, tokens, mask and plan


def partition_cost(method: str, layout: Layout, problem: Problem) -> PartitionCost:
    """Count the visible pairs and the bytes of every rank."""
    most, areas = np.zeros((2, layout.size)), np.zeros(layout.size)
    for rank in range(layout.size):
        for move in cost.moves(method, layout, problem, rank, ("forward",)):
            most[int(move.sent), rank] += move.nbytes
        areas[rank] = cost.pairs(method, layout, problem, rank)
    all_of_q = problem.config.seqlen * problem.config.nbytes("q")
    grid = f"{layout.rows}x{layout.cols}"
    return PartitionCost(
        grid, float(areas.max() / max(areas.mean(), 1)), float(most.max() / all_of_q)
    )


def best_of(plan: str, text: str, seqlen: int, ranks: int) -> PartitionCost:
    """Find the grid whose busiest rank moves the fewest bytes, among all shapes of a method.

    `plan` is METHOD or METHOD/DISTRIBUTION, `text` is a mask.
    """
    method, _, distribution = plan.partition("/")
    mask, candidates = make_mask(text, seqlen), []
    config = AttentionConfig(seqlen, 16, 128, dtype="bfloat16")
    for rows in (x for x in range(1, ranks + 1) if ranks % x == 0):
        layout = Layout(rows, ranks // rows)
        if METHODS[method].suits(layout):
            problem = problem_of(method, layout, config, mask, distribution or None)
            candidates.append(partition_cost(method, layout, problem))
    return min(candidates, key=lambda x: (x.moved, x.uneven))


def plan_text(text: str) -> str:
    """Parse an option that is METHOD or METHOD/DISTRIBUTION."""
    method, slash, name = text.partition("/")
    if slash:
        one_of(DISTRIBUTIONS)(name)
    return method_name(method) + slash + name


def print_table(args: argparse.Namespace) -> Table:
    """Print the table of the given masks, and add it to the output file; return all of the file.

    Without an output file, return the table.
    """
    costs = read_table(args.output) if args.output and args.output.exists() else {}
    if args.output:
        check_writable(args.output)
    print(f"{args.ranks} ranks, {args.seqlen} tokens, forward: bytes of the busiest rank / bytes")
    print("of q; in parentheses: visible pairs of the busiest rank / mean, and the grid")
    print(" | ".join(["mask", *args.plans]), flush=True)
    bar = progress([x for mask in args.masks for x in _seeded(mask, args.seeds)], desc="masks")
    for text in bar:
        cells = [text]
        for plan in args.plans:
            key = args.ranks, args.seqlen, text, plan
            if key not in costs:
                costs[key] = best_of(plan, text, args.seqlen, args.ranks)
            best = costs[key]
            cells.append(f"{best.moved:.4f} ({best.uneven:.3f}, {best.grid})")
        bar.write(" | ".join(cells))
        if args.output:
            _write_table(args.output, costs)
    return costs


def _seeded(text: str, seeds: list[int]) -> list[str]:
    """Return the texts of a mask with each of the seeds, if the mask has random numbers."""
    if ":" in text or "seed=" not in usage(text):
        return [text]
    return [f"{text}:seed={seed}" for seed in seeds]


_COLUMNS = ("ranks", "seqlen", "mask", "plan", *PartitionCost._fields)


def read_table(path: Path) -> Table:
    """Read a table that `print_table` wrote.

    Raises
    ------
    ValueError
        If the file is no such table.
    """
    try:
        rows = csv.reader(read_regular(path).decode().splitlines(), strict=True)
        if tuple(next(rows, ())) != _COLUMNS:
            raise ValueError(f"its first line must be {','.join(_COLUMNS)}")
        return {
            (int(ranks), int(seqlen), mask, plan): PartitionCost(grid, float(uneven), float(moved))
            for ranks, seqlen, mask, plan, grid, uneven, moved in rows
        }
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is not a table of masks: {error}") from error


def _write_table(path: Path, table: Table) -> None:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(_COLUMNS)
    rows.writerows(
        (*key, x.grid, f"{x.uneven:.4f}", f"{x.moved:.5f}") for key, x in sorted(table.items())
    )
    write_whole(path, text.getvalue().encode())
