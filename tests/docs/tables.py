"""The tables of the README and of docs/, made from committed results.

A comment above a table names a function of this file and the results that the table is made of::

    <!-- crossover(data/results/crossover) -->

``python tests/docs/tables.py`` prints these tables; ``--write`` puts their rows into the pages.
A comment ``<!-- no file: COMMAND -->`` stands above a table of numbers that no file holds.

Cogapp would do the same, but it writes all lines between two marks, and no mark may stand inside
a table: the headings would have to move from the pages to this file.
"""

import re
import sys
from functools import cache
from itertools import product
from pathlib import Path

import h5py
import numpy as np

from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.plan import read_summaries
from a2d_mpi.experiments.results import (
    BENCHMARK_SCHEMA,
    summarise,
)
from a2d_mpi.planning.profile import read_machine

ROOT = Path(__file__).parents[2]
DOCS = sorted(x for x in (ROOT / "docs").glob("*.md") if x.stem != "README")
PAGES = [ROOT / "README.md", *DOCS]
# Indent of a table, function, arguments, rows.
TABLE = re.compile(
    r"^( *)<!-- (\w+)\((.+?)\) -->\n\n *\|.*\n *\|[-|]+\n((?: *\|.*\n)*)", re.MULTILINE
)
RIVALS = ("ring", "attention2d")
SHORT = {"attention2d": "2D", "node aware": "node-aware 2D"}
FORWARD, BOTH = ("forward",), ("forward", "backward")


@cache
def benchmark(path):
    return read_file(ROOT / path, BENCHMARK_SCHEMA)["runs"]


def read(path, phases=BOTH, **config):
    """Summaries of one phase or both of the runs in a benchmark that have this config."""
    return [
        summarise(x, phases)
        for x in benchmark(path).values()
        if set(phases) <= set(x["timings"]) and config.items() <= x["config"].items()
    ]


def busiest(path, x, phases):
    """Bytes of the rank that sends or receives the most in each phase, summed over the phases."""
    total = 0
    for phase in phases:
        moved = benchmark(path)[x.name]["traffic"][phase].values()
        total += max(sum(y[kind] for y in moved).max() for kind in ("sent", "received"))
    return total


def gain(path, slow, fast, phases):
    """Ratio of the seconds of two plans, and in brackets of their bytes."""
    of_bytes = ratio(busiest(path, slow, phases), busiest(path, fast, phases))
    return f"{ratio(slow.seconds, fast.seconds)} ({of_bytes})"


def one(found, shape=None, **config):
    """The one summary with this shape "RxCxU", or picked by the planner, and this config."""
    [summary] = [
        x
        for x in found
        if (x.picked if shape is None else shape_of(x) == shape)
        and config.items() <= x.config.items()
    ]
    return summary


def shape_of(x):
    return "x".join(str(x.config[y]) for y in ("rows", "cols", "heads"))


def named(x):
    """A plan in short, as in tables: `2D 8x4x2@ruc`."""
    order = "" if x.config["order"] == "rcu" else f"@{x.config['order']}"
    shape = shape_of(x).removesuffix("x1") if x.config["heads"] == 1 else shape_of(x)
    slices = x.config["slices"]
    cut = "" if slices == "1x1" else f"*{slices}"
    return f"`{SHORT.get(x.method, x.method)} {shape}{order}{cut}`"


def ratio(x, y):
    return f"{x / y:.2f}"


# docs/study.md


def crossover_runs(folder):
    """Rate, ratio of computing to transfers of the ring, and the four plans, by rate."""
    paths = {}
    for path in (ROOT / folder).glob("*/*.h5"):
        number, unit = re.fullmatch(r"(\d+)([mg])bit", path.parent.name).groups()
        paths[int(number) * {"m": 1, "g": 1000}[unit]] = path
    for rate, path in sorted(paths.items()):
        xs = read(path.relative_to(ROOT))
        ring, grid = one(xs, "16x1x1", method="ring"), one(xs, "4x4x1", method="attention2d")
        usp, pick = one(xs, "4x1x4", method="ring"), one(xs)
        bandwidth = read_machine(path.with_suffix(".toml")).links(16)[1].bandwidth
        balance = ring.parts["compute"] / (ring.received / bandwidth)
        yield f"{rate}", f"{balance:.2g}", (ring, grid, usp, pick)


def crossover(folder):
    """Seconds and deviation of the model by rate, and the gain over the ring."""
    for rate, balance, plans in crossover_runs(folder):
        ring, grid, _, pick = plans
        cells = [f"{x.seconds:.2f} ({100 * (x.predicted / x.seconds - 1):+.0f} %)" for x in plans]
        cells[-1] += f" {named(pick)}"
        gains = (ratio(ring.seconds, x.seconds) for x in (grid, pick))
        yield [rate, balance, *cells, *gains]


def crossover_gains(folder):
    """Seconds by rate, and the gain of the pick over the ring and over USP."""
    for rate, balance, plans in crossover_runs(folder):
        ring, _, usp, pick = plans
        cells = [f"{x.seconds:.1f}" for x in plans]
        cells[-1] += f" {named(pick)}"
        gains = (ratio(x.seconds, pick.seconds) for x in (ring, usp))
        yield [rate, balance, *cells, *gains]


def ring_against_grid(*paths):
    """Time of the ring over time of the square grid, and the ratio of their bytes."""
    for path, nodes, mask in product(paths, (64, 16), ("full", "causal")):
        rate = 1 if "scaling" in path else {64: 2.5, 16: 10}[nodes]
        cells = []
        for phases in (FORWARD, BOTH):
            xs = read(path, phases, mask=mask, ranks=nodes)
            for ring, grid in zip(*([x for x in xs if x.method == y] for y in RIVALS)):
                cells.append(gain(path, ring, grid, phases))
        if cells:
            yield [f"{nodes} x 1", str(ring.config["seqlen"]), f"{rate}", mask, *cells]


def picks(*paths):
    """Times of other plans over the time of the planner's pick, forward and backward."""
    for path, mask, kv in product(paths, ("causal", "full"), (16, 2)):
        xs = [x for x in read(path, mask=mask, nheads_kv=kv) if x.overlap]
        pick = one(xs)
        ring = one(xs, f"{pick.ranks}x1x1", method="ring")
        others = [x for x in xs if x is not pick]
        methods = [x.seconds for x in others if x.method != pick.method]
        others = ring.seconds, min(methods), min(x.seconds for x in others)
        yield [Path(path).stem, mask, f"{kv}", named(pick),
               *(ratio(x, pick.seconds) for x in others)]  # fmt: skip


def tiles(path, model, dtype):
    """Shape, phase and seconds by kernel of the tiles of a CPU."""
    kind = "" if dtype == "float32" else f", {dtype}"
    with h5py.File(ROOT / path) as file:
        for size in ("large", "small"):
            group = file[f"figures/AMD EPYC (family 25, model {model}), {size} tiles{kind}"]
            shapes = sorted(group.keys() - {"origin"}, key=lambda x: int(x.split("x")[0]))
            for shape, mask, phase in product(shapes, ("full", "causal"), BOTH):
                trials = group[f"{shape}/{mask}/{phase}"]
                yield shape, phase, {x: y[()] for x, y in trials.items()}


def kernel_ranges(path):
    """Torch's seconds over ours, by kernel and CPU: large tiles both ways, then small ones."""
    for cpu, kernel, dtype, models in (
        ("Zen 3", "numba", "float32", (1,)), ("Zen 4", "numba", "float32", (17,)),
        ("Zen 3 and 4", "numpy", "float32", (1, 17)), ("Zen 4", "onednn", "bfloat16", (17,)),
    ):  # fmt: skip
        ratios = {}
        for shape, phase, trials in (x for model in models for x in tiles(path, model, dtype)):
            is_small = int(shape.split("x")[0]) < 4096
            over_torch = np.median(trials["torch"] / trials[kernel])
            ratios.setdefault((is_small, phase), []).append(over_torch)
        cells = (ratios[x] for x in product((False, True), BOTH))
        yield [
            f"AMD {cpu}",
            f"`{kernel}`, {dtype}",
            *(f"{min(x):.2f} to {max(x):.2f}" for x in cells),
        ]


def triangles(folder):
    """Time of the best grid over time of the triangle, with the ratio of their bytes."""
    for nodes, rate, grid_shape, shape in (
        (6, 10, "2x3x1", "6x1x1"), (10, 10, "2x5x1", "10x1x1"), (15, 10, "3x5x1", "15x1x1"),
        (28, 5, "4x7x1", "28x1x1"), (12, 10, "2x3x2", "6x1x2"), (24, 5, "2x3x4", "6x1x4"),
    ):  # fmt: skip
        path, cells = f"{folder}/{nodes}x1.h5", []
        for phases in (FORWARD, BOTH):
            xs = read(path, phases)
            grid = one(xs, grid_shape, method="attention2d")
            triangle = one(xs, shape, method="triangle")
            cells.append(gain(path, grid, triangle, phases))
        pick = one(xs)
        assert pick.method == "triangle"
        best = min(x.seconds for x in xs if x.method == "attention2d")
        plans = (x.removesuffix("x1") for x in (grid_shape, shape.replace("x1x1", "x1")))
        yield [f"{nodes}", f"{rate}", " / ".join(x.removesuffix("x1") for x in plans), *cells,
               shape_of(pick), ratio(best, pick.seconds)]  # fmt: skip


# docs/masks.md


def masks(*paths):
    """Seconds of plans under four masks, where transfers decide and where computing does."""
    for path, label in zip(paths, ("transfers", "computing")):
        for mask in ("causal", "causal_document", "share_question", "sliding_window_causal"):
            here = read(path, mask=mask)
            grid = one(here, "4x4x1", method="attention2d")
            ring = one(here, "16x1x1", method="ring")
            picked = gain = ""
            if mask == "causal":
                causal = grid.seconds
            if any(x.picked for x in here):
                pick = one(here)
                plan = f"{SHORT.get(pick.method, pick.method)} {shape_of(pick)}"
                picked = f"{pick.seconds:.2f} (`{plan}`, {pick.config['distribution']})"
                gain = f"{causal / pick.seconds:.1f}" * (mask != "causal")
            times = (f"{x.seconds:.2f}" for x in (grid, ring))
            yield [label, f"`{mask}`", *times, picked, gain]
            label = ""


# docs/study.md, at scale

MACHINES = {
    "A100": "16 nodes of four A100",
    "A100, one NIC": "nodes of four A100, one NIC",
    "H100": "nodes of eight H100",
}
TOKENS = {"64K": 1 << 16, "1M": 1 << 20}


@cache
def summaries(path):
    return read_summaries(ROOT / path)


def simulated(path):
    """Simulations of the plans that fit, and their milliseconds, on one switch."""
    return [x for x in summaries(path) if x.config["network"] == "switch"]


def one_decimal(x, whole=100):
    """A number with one decimal place, and with none from `whole` on."""
    return f"{x:.0f}" if x >= whole else f"{x:.1f}"


def fastest(xs, methods, with_heads=False):
    """Least milliseconds of some methods as text; None: there is none."""
    times = [x.seconds for x in xs if x.method in methods and x.config["heads"] > with_heads]
    return one_decimal(1e3 * min(times)) if times else None


def at_scale(path):
    """Milliseconds of 2D, USP and LoongTrain by tokens, machine and ranks."""
    found = [x for x in simulated(path) if x.config["nheads_kv"] == 32]
    for (length, tokens), (name, machine) in product(TOKENS.items(), MACHINES.items()):
        xs = [x for x in found if x.config["machine"] == machine]
        xs, cells = [x for x in xs if x.config["seqlen"] == tokens], []
        for ranks in (64, 256, 1024, 4096):
            here = [x for x in xs if x.ranks == ranks]
            times = [fastest(here, ("attention2d", "node aware"))]
            times += [fastest(here, (y,), with_heads=True) for y in ("ring", "double ring")]
            cells.append(", ".join(filter(None, times)))
        yield [f"{length} tokens, {name}", *cells]


def slopes(path):
    """Milliseconds of communication alone by ranks, and their power of the ranks."""
    for machine, per_node, methods in (
        ("64 nodes of one H100", "one H100", ("attention2d", "ring")),
        ("16 nodes of four A100", "four A100", ("attention2d", "node aware", "ring")),
    ):
        for method in methods:
            times = {
                x.ranks: 1e3 * x.seconds
                for x in simulated(path)
                if x.method == method and x.config["machine"] == f"{machine}, links alone"
            }
            ranks = sorted(times)
            fit = np.polyfit(np.log(ranks), np.log([times[x] for x in ranks]), 1)[0]
            cells = (times.get(x) for x in (64, 256, 1024, 4096))
            yield [f"{SHORT.get(method, method)}, {per_node} per node",
                   *("" if x is None else one_decimal(x, 1000) for x in cells),
                   f"**{fit:+.2f}**"]  # fmt: skip


# docs/wire.md

FORMATS = ("none", "bfloat16", "mxfp8", "mxfp4")
LOGITS = {"22": "sample", "50": "logits50"}
TENSORS = ("out", "lse", "dq", "dk", "dv")


def short(x):
    """Two digits, small numbers with an exponent: 1.2e-6; all digits of a larger whole number."""
    if x < 1e-3:
        return f"{x:.1e}".replace("e-0", "e-")
    return f"{x:.0f}" if x >= 10 else f"{x:#.2g}"


def wire_checks(folder):
    """Logits (in the first row of each), format, file."""
    for logits, name in LOGITS.items():
        for wire in FORMATS:
            with h5py.File(ROOT / folder / f"{name}-{wire}.h5") as file:
                yield logits * (wire == FORMATS[0]), wire, file


def wire_errors(folder):
    """Bytes and errors against the tensors as given, by logits and format."""
    for logits, wire, file in wire_checks(folder):
        moved = sum(
            x["received"][()].sum() for phase in file["traffic"].values() for x in phase.values()
        )
        if logits:
            whole = moved
        errors = (file[f"checks/{x}"].attrs for x in TENSORS)
        yield [logits, "float32" if wire == "none" else f"`{wire}`",
               "1" if logits else f"{moved / whole:.3f}",
               *(short(x.get("as_given", x["error"])) for x in errors)]  # fmt: skip


# Tables in pages


def made(name, arguments):
    """Return the rows that the files have."""
    return [list(x) for x in globals()[name](*arguments.split(", "))]


def marked():
    """Return function, arguments and rows of each table that a comment marks."""
    for page in PAGES:
        for _, name, arguments, body in TABLE.findall(page.read_text()):
            lines = body.splitlines()
            yield name, arguments, [[x.strip() for x in y.strip()[1:-1].split("|")] for y in lines]


def main():
    """Print the marked tables as the files have them; --write: put the rows into the pages."""

    def replaced(match):
        indent, name, arguments, body = match.groups()
        rows = (" | ".join(x) for x in made(name, arguments))
        lines = [re.sub(r"\|  (?=\|)", "| ", f"{indent}| {x} |\n") for x in rows]
        print(new := match[0].removesuffix(body) + "".join(lines))
        return new

    for page in PAGES:
        text = TABLE.sub(replaced, page.read_text())
        if "--write" in sys.argv:
            page.write_text(text)


if __name__ == "__main__":
    main()
