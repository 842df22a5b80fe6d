"""The tables of the README and of docs/, made from committed results.

A comment above a table names a function of this file and the results that the table is made of::

    <!-- large(data/results/large.h5) -->

``python tests/tables.py`` prints these tables, and ``--write`` puts their rows into the pages.
A comment ``<!-- no file: COMMAND -->`` stands above a table of numbers that no file holds.
"""

import re
import sys
from functools import cache
from itertools import product
from pathlib import Path

import h5py
import numpy as np

from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import TRAINING_SCHEMA, read_benchmark
from a2d_mpi.experiments.simulate import read_simulations, read_summaries, seconds
from a2d_mpi.experiments.summary import read_steps, summarise
from a2d_mpi.planning.profile import read_machine

ROOT = Path(__file__).parents[1]
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
    return read_benchmark(ROOT / path)


def read(path, phases=BOTH, **config):
    """Summaries of one phase or both of the runs in a benchmark that have this config."""
    return [
        summarise(x, phases)
        for x in benchmark(path).values()
        if (x.config["backward"] or phases == FORWARD) and config.items() <= x.config.items()
    ]


def busiest(path, x, phases):
    """Bytes of the rank that sends or receives the most in each phase, summed over the phases."""
    total = 0
    for phase in phases:
        traffic = benchmark(path)[x.name].traffic.items()
        moved = [y for key, y in traffic if key.split("/")[0] == phase]
        total += max(sum(y[kind] for y in moved).max() for kind in ("sent", "received"))
    return total


def gain(path, slow, fast, phases, moved=busiest):
    """Ratio of the seconds of two plans, and in brackets of their bytes."""
    of_bytes = ratio(moved(path, slow, phases), moved(path, fast, phases))
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
    return f"`{SHORT.get(x.method, x.method)} {shape}{order}`"


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
    """Seconds by rate, and in brackets the gain over the ring."""
    for rate, balance, (ring, *plans) in crossover_runs(folder):
        cells = [f"{x.seconds:.1f} ({ratio(ring.seconds, x.seconds)})" for x in plans]
        cells[-1] += f" {named(plans[-1])}"
        yield [rate, balance, f"{ring.seconds:.1f}", *cells]


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


def shared_link(path):
    """Time of the ring over time of each plan, on nodes of four ranks."""
    for kv, phases in product((16, 2), (FORWARD, BOTH)):
        xs = read(path, phases, nheads_kv=kv)
        ring, pick = one(xs, "64x1x1", method="ring").seconds, one(xs)
        plans = [one(xs, "8x8x1", method=x) for x in ("attention2d", "node aware")]
        gains = [ratio(ring, x.seconds) for x in (*plans, pick)]
        gains[-1] += f" ({named(pick)})" * (phases == FORWARD)
        yield [f"{kv}", " + ".join(phases), *gains]


def large(path):
    """Seconds of the ring and of the square grid with large messages."""
    for nodes, mask, phases in product((16, 64), ("causal", "full"), (FORWARD, BOTH)):
        xs = read(path, phases, mask=mask, ranks=nodes)
        for ring, grid in zip(*([x for x in xs if x.method == y] for y in RIVALS)):
            times = (f"{x.seconds:.2f} s" for x in (ring, grid))
            moved = (busiest(path, x, phases) for x in (ring, grid))
            ratios = ratio(ring.seconds, grid.seconds), ratio(*moved)
            yield [f"{nodes} x 1", mask, " + ".join(phases), *times, *ratios]


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


def kernels(path, model):
    """Median GFLOP/s of kernels, and the median over trials of torch's seconds over ours."""
    for shape, mask, phase, trials, gflop in tiles(path, model):
        speeds = (f"{gflop / np.median(trials[x]):.3g}" for x in ("torch", "numpy", "numba"))
        ratios = (f"{over_torch(trials, x):.2f}" for x in ("numpy", "numba", "general"))
        yield [", ".join(shape.split("x")), mask, phase, *speeds, *ratios]


def tiles(path, model):
    """Shape, mask, phase, seconds by kernel, GFLOP: large tiles of a CPU, then small ones."""
    with h5py.File(ROOT / path) as file:
        for size in ("large", "small"):
            group = file[f"figures/AMD EPYC (family 25, model {model}), {size} tiles"]
            shapes = sorted(group.keys() - {"origin"}, key=lambda x: int(x.split("x")[0]))
            for shape, mask, phase in product(shapes, ("full", "causal"), BOTH):
                name = f"{shape}/{mask}/{phase}"
                trials = {x: y[()] for x, y in group[name].items()}
                yield shape, mask, phase, trials, 1e3 * group.attrs[f"tflop/{name}"]


def over_torch(trials, name):
    return np.median(trials["torch"] / trials[name])


def kernel_ranges(path):
    """Ranges of `kernels`, by kernel and CPU: large tiles forward and backward, then small."""
    for cpu, kernel, models in (
        ("Zen 3", "numba", (1,)), ("Zen 4", "numba", (17,)), ("Zen 3 and 4", "numpy", (1, 17)),
    ):  # fmt: skip
        ratios = {}
        for shape, _, phase, trials, _ in (x for model in models for x in tiles(path, model)):
            is_small = int(shape.split("x")[0]) < 4096
            ratios.setdefault((is_small, phase), []).append(over_torch(trials, kernel))
        cells = (ratios[x] for x in product((False, True), BOTH))
        yield [f"AMD {cpu}", f"`{kernel}`", *(f"{min(x):.2f} to {max(x):.2f}" for x in cells)]


# docs/partitions.md


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


def node_aware(path):
    """Time of the plain grid over time of the node-aware grid, and the busiest nodes' bytes."""
    for kv in (16, 2):
        cells = []
        for phases in (FORWARD, BOTH):
            xs = read(path, phases, nheads_kv=kv)
            plans = (one(xs, "8x8x1", method=x) for x in ("attention2d", "node aware"))
            cells.append(gain(path, *plans, phases, busiest_node))
        yield [f"{kv}", *cells]


def busiest_node(path, x, phases):
    """Bytes that the busiest of 16 nodes receives from other nodes, each with half of a row."""
    result = benchmark(path)[x.name]
    nodes = np.array(result.config["nodes"].split(), int)
    received = np.zeros(len(nodes))
    for key, moved in result.traffic.items():
        phase, channel = key.split("/")
        if phase in phases and not channel.endswith("node"):
            # In the plain grid three of the seven others of a row are on the rank's own node.
            is_mixed = channel == "row" and x.method == "attention2d"
            received += moved["received"] * (4 / 7 if is_mixed else 1)
    return np.bincount(nodes, received).max()


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


# docs/scale.md

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
    """Simulations of the plans that fit, and their milliseconds, on one switch without faults."""
    return [
        x for x in summaries(path) if x.config["network"] == "switch"
        and x.config["slow_rank"] == x.config["slow_port"] == 1
    ]  # fmt: skip


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


def triangles_at_scale(path):
    """Milliseconds of triangles and grids by machine and tokens; bold: the fastest."""
    found = simulated(path)
    for (name, machine), (length, tokens) in product(MACHINES.items(), TOKENS.items()):
        xs = [x for x in found if x.config["machine"] == machine]
        xs, cells = [x for x in xs if x.config["seqlen"] == tokens], []
        for plans in (
            (("triangle", 66), ("attention2d", 66)), (("triangle", 253), ("attention2d", 253)),
            (("attention2d", 256),),
        ):  # fmt: skip
            times = [x.seconds for y in plans for x in xs if (x.method, x.ranks) == y]
            texts = [one_decimal(1e3 * x) for x in times]
            if len(plans) > 1:
                texts[int(np.argmin(times))] = f"**{texts[int(np.argmin(times))]}**"
            cells.append(", ".join(texts))
        comma = "," * (len(cells) > 0)
        yield [f"{name}{comma} {length}", *cells]


NETWORKS = {
    "one switch, fat tree": ("switch", 1, 1, ""),
    "fat tree, oversubscribed 2 : 1": ("fat tree:2", 1, 1, ""),
    "fat tree, oversubscribed 4 : 1": ("fat tree:4", 1, 1, ""),
    "dragonfly": ("dragonfly", 1, 1, ""),
    "the first rank at half speed": ("switch", 2, 1, ""),
    "the first NIC at half speed": ("switch", 1, 2, ""),
    "latency x 10": ("switch", 1, 1, ", latency x 10"),
}


def networks(path):
    """Milliseconds of six plans on 256 A100 by tokens and network."""
    found = summaries(path)
    plans = (("attention2d", True), ("node aware", False), ("attention2d", False),
             ("ring", True), ("double ring", False), ("ring", False))  # fmt: skip
    for (length, tokens), (label, of) in product(TOKENS.items(), NETWORKS.items()):
        network, slow_rank, slow_port, latency = of
        here = {
            "seqlen": tokens, "network": network, "slow_rank": slow_rank, "slow_port": slow_port,
            "machine": MACHINES["A100"] + latency,
        }  # fmt: skip
        xs = [x for x in found if here.items() <= x.config.items()]
        cells = [[x for x in xs if (x.method, x.config["heads"] > 1) == y] for y in plans]
        prefix = f"{length} tokens: " * (label == next(iter(NETWORKS)))
        yield [prefix + label, *(one_decimal(1e3 * x.seconds) for [x] in cells)]


def picks_at_scale(path):
    """How many picks are the fastest plan, and by how much the others are slower, by ranks."""
    workloads = {}
    for x in simulated(path):
        workload = (x.config["machine"], x.workload.split("-backward")[0])
        workloads.setdefault((x.ranks, workload), []).append(x)
    for ranks in (64, 256, 1024):
        slower = []
        for (here, _), xs in workloads.items():
            picked = [x.seconds for x in xs if x.picked]
            if here == ranks and picked:
                slower.append(min(picked) / min(x.seconds for x in xs) - 1)
        behind = sorted(100 * x for x in slower if x > 5e-4)
        text = f"{len(slower) - len(behind)} of {len(slower)}"
        text = text if behind else f"**{text}**"
        others = " and ".join(f"{x:.1f}" for x in behind)
        yield [f"{ranks}", text, f"{others} % slower" * bool(behind)]


@cache
def replays(path):
    """All simulations that ended in time, also of plans that do not fit, without faults."""
    return [
        x for x in read_simulations(ROOT / path).values()
        if "timeout" not in x and x["slow_rank"] == x["slow_port"] == 1
    ]  # fmt: skip


def simulator_errors(path):
    """How far the model of that time is off SimGrid, by ranks."""
    found = [x for x in replays(path) if x["network"] in ("switch", "fat tree")]
    for ranks in (64, 256, 1024, 4096):
        times = [[seconds(x, y) for y in ("predicted", "simulated")]
                 for x in found if x["ranks"] == ranks]  # fmt: skip
        off = [100 * abs(x / y - 1) for x, y in times]
        yield [f"{ranks}", f"{len(off)}", f"{np.median(off):.1f} %", f"{max(off):.1f} %"]


def simulation_costs(*paths):
    """Median seconds and memory of SimGrid's process, by ranks and plans."""
    found = [x for path in paths for x in replays(path)]
    for ranks in (64, 256, 1024, 4096):
        cells = []
        for method, with_heads, is_gather in (
            ("attention2d", False, False), ("attention2d", True, False), ("ring", True, None),
            ("ring", False, None), ("attention2d", False, True),
        ):  # fmt: skip
            xs = [x for x in found if (x["ranks"], x["method"]) == (ranks, method)]
            xs = [x for x in xs if (x["heads"] > 1) == with_heads]
            if is_gather is not None:
                xs = [x for x in xs if (1 in (x["rows"], x["cols"])) == is_gather]
            costs = [[x[f"cost {y}"] for y in ("seconds", "memory")] for x in xs]
            if xs:
                spent, memory = np.median(costs, axis=0)
                cells.append(f"{one_decimal(spent, 10)} s, {memory / 1e6:.0f} MB")
            else:
                cells.append("not tried")
        yield [f"{ranks}", *cells]


# docs/gpt.md


def training_steps(path):
    """Seconds of a training step by part, and in brackets what was predicted."""
    for run in sorted(read_steps(ROOT / path), key=lambda x: x.seconds):
        parts, predicted = run.parts, run.predicted
        pairs = [(run.seconds, sum(predicted.values()))]
        pairs += [(parts[x], predicted[x]) for x in parts]
        pairs += [(run.operator, run["predicted/operator"])]
        name = run.plan + " (pick)" * bool(run["picked"])
        yield [name, *(f"{x:.2f} ({y:.2f})" for x, y in pairs)]


def training_memory(path):
    """MB of the rank that holds the most, by ranks."""
    runs = {(x["ranks"], x["recompute"]): x for x in read_steps(ROOT / path)}
    for label, name, recompute in (
        ("activations", "activations", False),
        ("activations, `--recompute`", "activations", True),
        ("buffers of attention", "buffers", False),
    ):
        most = (runs[x, recompute][name].max() / 1e6 for x in (1, 2, 4, 8))
        yield [label, *(f"{x:.1f}" if x else "0" for x in most)]


def training_run(path):
    """Documents, entropies and losses of a run."""
    run = read_file(ROOT / path, TRAINING_SCHEMA)
    both = run["text"], run["held_out"]
    yield ["documents, bytes", *(f"{x['documents']}, {x['bytes']}" for x in both)]
    yield ["unigram entropy", *(f"{x['unigram_entropy']:.3f}" for x in both)]
    mean = f"{run['loss'][-50:].mean():.3f} (mean of the last 50 steps)"
    yield ["loss", mean, f"{run['held_out']['loss']:.3f}"]


def training_traffic(path):
    """MB that the busiest rank received in a step, by phase and communicator."""
    with h5py.File(ROOT / path) as file:
        steps = len(file["seconds/wait"])
        names = [f"{x}/{y}" for x in BOTH for y in ("row", "col")] + ["gradients/all"]
        received = (file[f"traffic/{x}/received"][()].max() / steps for x in names)
        yield [f"{x / 1e6:.2f}" for x in received]


def decoding(path):
    """Milliseconds of a decoding step / of attention's CPU time, by context and ranks."""
    with h5py.File(ROOT / path) as file:
        runs = [file[f"runs/{x}"] for x in (1, 2, 4)]
        for context in ("1024", "4096", "16384", "65536"):
            cells = []
            for run in runs:
                seconds = run[f"{context}/seconds"][()]  # (trials, ranks, parts)
                step = 1e3 * np.median(seconds[..., :3].sum(axis=2).max(axis=1))
                cpu = 1e3 * np.median(seconds[..., 3].mean(axis=1))
                cells.append(f"{step:.1f} / {cpu:.1f}")
            yield [context, *cells]
        for label, name in (("bytes sent", "sent_bytes"), ("messages", "sent_messages")):
            yield [label, *(f"{run['1024'].attrs[name]}" for run in runs)]


# docs/afd.md


def afd(path):
    """Milliseconds of a step / shares of waiting, and attention's CPU time, by context."""
    with h5py.File(ROOT / path) as file:
        runs = file["runs"]
        names = sorted(runs, key=lambda x: ("+" in x, x))
        for context in sorted(runs[names[0]], key=int):
            cells, cpus = [], []
            for name in names:
                run = runs[name][context]
                seconds = run["seconds"][()]  # (trials, ranks, parts)
                step = seconds[..., :3].sum(axis=2)
                shares = np.median(seconds[..., 4] / step, axis=0)
                first = run.attrs["attention_ranks"]
                kinds = [x for x in (shares[:first], shares[first:]) if len(x)]
                waits = " + ".join(f"{100 * x.mean():.0f}" for x in kinds)
                cells.append(f"{1e3 * np.median(step.max(axis=1)):.0f} / {waits}")
                cpus.append(f"{digits(1e3 * np.median(seconds[:, :first, 3].mean(axis=1)))}")
            yield [context, *cells, *(cpus if len(names) > 2 else [])]
        if len(names) > 2:
            for label, key in (("bytes sent", "sent_bytes"), ("messages", "sent_messages")):
                yield [label, *(f"{runs[x]['1024'].attrs[key]}" for x in names), "", "", ""]


def digits(x):
    """Two digits, or all of a larger whole number."""
    return f"{x:.0f}" if x >= 10 else f"{x:#.2g}"


# docs/linear.md


def linear(path, lengths=(2048, 4096, 8192, 16384)):
    """Seconds forward and backward of three plans by tokens, and MB sent."""
    with h5py.File(ROOT / path) as file:
        for tokens in lengths:
            times, sent = [], []
            for plan in (x for x in ("lasp2", "lasp", "attention2d") if x in file["runs"]):
                run = file[f"runs/{plan}/{tokens}"]
                times += np.median(run["seconds"][()].max(axis=1), axis=0).tolist()
                sent.append(run["sent"][()].sum(axis=1).max() / 1e6)
            moved = [f"{x:.2f}" if x < 1 else f"{x:.1f}" for x in sent]
            yield [f"{tokens}", *(f"{x:.2f}" for x in times), ", ".join(moved)]


# docs/wire.md

FORMATS = ("none", "bfloat16", "mxfp8", "mxfp4")
LOGITS = {"22": "sample", "50": "logits50"}
TENSORS = ("out", "lse", "dq", "dk", "dv")


def short(x):
    """Two digits, small numbers with an exponent: 1.2e-6."""
    if x < 1e-3:
        return f"{x:.1e}".replace("e-0", "e-")
    return digits(x)


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


def wire_bounds(folder):
    """Errors by the rounding of partial results, and their bounds, by logits and format."""
    for logits, wire, file in wire_checks(folder):
        if wire == "none":
            first = logits
            continue
        checks = (file[f"checks/{x}"].attrs for x in TENSORS)
        errors = (f"{short(x['error'])} of {short(x['bound'])}" for x in checks)
        yield [first, f"`{wire}`", *errors]
        first = ""


def wire_seconds(path):
    """Seconds of a phase by plan and format, and the gain over float32."""
    for label, method in (("attention2d 4x4", "attention2d"), ("ring of 16", "ring")):
        for phase in BOTH:
            xs = read(path, (phase,), method=method)
            seconds = {x.config.get("wire", "none"): x.seconds for x in xs}
            first, *others = (seconds[x] for x in FORMATS)
            gains = (f"{x:.2f} ({first / x:.2f})" for x in others)
            yield [label, phase, f"{first:.2f}", *gains]
            label = ""


# Tables in pages


def cells(line):
    return [x.strip() for x in line.strip()[1:-1].split("|")]


def made(function, arguments):
    """The rows that the files have."""
    return [list(x) for x in globals()[function](*arguments.split(", "))]


def marked():
    """Page, function, arguments and rows of each table that a comment marks."""
    for page in PAGES:
        for _, function, arguments, body in TABLE.findall(page.read_text()):
            yield page, function, arguments, list(map(cells, body.splitlines()))


def main():
    """Print the marked tables as the files have them; --write: put the rows into the pages."""

    def replaced(match):
        indent, function, arguments, body = match.groups()
        rows = (" | ".join(x) for x in made(function, arguments))
        lines = [re.sub(r"\|  (?=\|)", "| ", f"{indent}| {x} |") for x in rows]
        print(match[0].removesuffix(body), *lines, "", sep="\n")
        return match[0].removesuffix(body) + "\n".join([*lines, ""])

    for page in PAGES:
        text = TABLE.sub(replaced, page.read_text())
        if "--write" in sys.argv:
            page.write_text(text)


if __name__ == "__main__":
    main()
