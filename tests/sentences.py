"""The sentences of the README and of docs/ that have numbers of committed results.

Each function is of one page. It yields words of the page, with the numbers that the files have.
"""

import csv
import re
from collections.abc import Iterator
from itertools import product

import h5py
import numpy as np
import tables
from tables import (
    BOTH,
    FORMATS,
    FORWARD,
    MACHINES,
    ROOT,
    at_scale,
    benchmark,
    busiest,
    crossover_runs,
    kernel_ranges,
    linear,
    masks,
    named,
    node_aware,
    one,
    picks,
    ratio,
    read,
    replays,
    ring_against_grid,
    shape_of,
    shared_link,
    simulated,
    slopes,
    summaries,
    tiles,
    triangles,
)

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.reference import rounded
from a2d_mpi.core.sizes import Layout
from a2d_mpi.core.wire import FORMATS as WIRE_FORMATS
from a2d_mpi.experiments.gpt_files import read_steps
from a2d_mpi.experiments.simulate import read_simulations, seconds
from a2d_mpi.experiments.summary import summarise
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.planning import cost
from a2d_mpi.planning.planner import candidate
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules import problem_of
from a2d_mpi.schedules.problem import Workload

RESULTS = "data/results"
CLUSTERS = ("64x1", "16x4", "16x1")
PICKS = [f"{RESULTS}/{x}.h5" for x in CLUSTERS]
LENGTHS = {"64K": 1 << 16, "256K": 1 << 18, "1M": 1 << 20, "4M": 1 << 22, "16M": 1 << 24}


NAMES = {
    "readme": "README", "getting_started": "getting-started", "about_masks": "masks",
    "about_linear": "linear",
}  # fmt: skip


def sentences() -> Iterator[tuple[str, str]]:
    """Page, and words of it with numbers of its files."""
    for page in (
        readme, getting_started, choosing, study, scale, partitions, about_masks, gpt,
        about_linear, wire, afd,
    ):  # fmt: skip
        for words in page():
            yield NAMES.get(page.__name__, page.__name__), words


def span(numbers, digits: int = 0) -> str:
    """The least and the largest number, as in `3 to 7`."""
    return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"


def over(x: float) -> float:
    """Per cent by which a ratio is above or below one."""
    return 100 * abs(x - 1)


def model_errors(*stems: str) -> list[float]:
    """Per cent by which the predictions in some files are off."""
    runs = (summarise(x) for y in stems for x in benchmark(f"{RESULTS}/{y}.h5").values())
    return [over(x.predicted / x.seconds) for x in runs if x.predicted > 0]


def triangle_gains() -> list[float]:
    """The best grid with the same head axis over the triangle, in all measured passes."""
    rows = triangles(f"{RESULTS}/partitions")
    return [float(x.split()[0]) for row in rows for x in row[3:5]]


def square_gains(column: int) -> dict[str, str]:
    """The causal ring over the square grid by cluster: column -2 forward, -1 both phases."""
    rows = ring_against_grid(f"{RESULTS}/ratio.h5")
    return {x[0]: x[column].split()[0] for x in rows if x[3] == "causal"}


def equal_at(profile: str) -> tuple[int, float]:
    """Tokens, in hundreds of K, at which a ring of 16 computes as long as it transfers; GB/s."""
    machine = read_machine(ROOT / f"data/machines/{profile}.toml").with_ranks_per_node(1)
    bandwidth, ratios = machine.links(16)[1].bandwidth, []
    lengths = [1 << 18, 1 << 19]
    for tokens in lengths:
        work = Workload(tokens, 8, 128, mask=Causal(), backward=True)
        ring = candidate(machine, "ring", Layout(16, 1), work)
        ratios.append(ring.split["compute"] / (ring.received / bandwidth))
    return round(float(np.interp(1, ratios, lengths)) / 1e5), bandwidth / 1e9


def readme():
    *_, (_, balance, _) = crossover_runs(f"{RESULTS}/crossover")
    yield f"the ring computes up to {balance} times as long as it transfers"
    both = square_gains(-1)
    yield f"the causal square grid is {both['64 x 1']} times as fast as the ring, and on"
    yield f"on 16 nodes {both['16 x 1']} times"
    speeds = [x for row in kernel_ranges(f"{RESULTS}/tiles.h5") if row[1] == "`numba`"
              for cell in row[2:4] for x in cell.split(" to ")]  # fmt: skip
    yield f"`numba` is {min(speeds)} to {max(speeds)} times as fast"
    yield f"{span(triangle_gains(), 1)} times as fast as the best grid with"
    fits = [x[-1].strip("*") for x in slopes(f"{RESULTS}/scale/links.h5")]
    yield f"falls as P^{fits[0]} for the square grid"
    most = {name: x for name, *_, x in at_scale(f"{RESULTS}/scale/scale.h5")}
    machines = (map(float, most[f"1M tokens, {x}"].split(", ")) for x in ("A100", "H100"))
    (a, a_usp, a_ring), (h, h_usp, h_ring) = machines
    yield f"takes {a / a_ring:.2f} (A100) and {h / h_ring:.2f} (H100) of the time"
    yield f"It takes {a / a_usp:.2f} and {h / h_usp:.2f} of the time of USP"
    yield f"On 16 H100 the ratio is one at about {equal_at('h100-64x1')[0]}00K tokens"
    runs = sorted(read_steps(ROOT / RESULTS / "gpt/step.h5"), key=lambda x: x.seconds)
    first, last = runs[0], runs[-1]
    yield f"takes {first.seconds:.1f} s with the planner's pick and {last.seconds:.1f} s"
    yield f"attention alone takes {first.operator:.1f} s and {last.operator:.1f} s"


def getting_started():
    times = (x for _, _, phase, x, _ in tiles(f"{RESULTS}/tiles.h5", 1) if phase == "forward")
    ratios = [np.median(x["numba"]) / np.median(x["numpy"]) for x in times]
    yield f"reduces the time of a forward pass to between {span(ratios, 1).replace('to', 'and')}"


def choosing():
    yield f"{span(triangle_gains(), 1)} times as fast as the best grid with"
    # Of the table of common sizes, which the planner makes.
    page = (ROOT / "docs/choosing.md").read_text()
    few = re.findall(r"^\| \d+ \w100 \| \d+ \| 8 \|.*$", page, re.MULTILINE)
    longer = over(max(float(x) for row in few for x in re.findall(r": (\d\.\d\d) \|", row)))
    yield f"With 8 KV heads the best ring takes at most {longer:.0f} % longer than the fastest"
    rings = {(x[0], x[1], x[2]): float(x[4]) for x in picks(*PICKS)}
    yield f"the planner's picks are {min(rings.values()):.1f} to {max(rings.values()):.0f} times"
    under = {x[1].strip("`"): x for x in list(masks(*mask_files()))[:4]}  # where transfers decide
    times = {x: [float(y.split()[0]) for y in row[2:5]] for x, row in under.items()}
    _, ring, pick = times["causal_document"]
    yield f"{ring / pick:.1f} times as fast as the ring ([masks]"
    grid, ring, pick = times["sliding_window_causal"]
    yield f"{ring / pick:.1f} times as fast as the ring, {grid / pick:.1f} times as fast as a"
    nodes = [float(x.split()[0]) for row in node_aware(f"{RESULTS}/partitions/16x4.h5")
             for x in row[1:]]  # fmt: skip
    yield f"{span(nodes, 1)} times as fast as the plain grid"
    ulysses = [rings["16x1", mask, "16"] for mask in ("causal", "full")]
    yield "{:.1f} and {:.1f} times as fast as the ring".format(*ulysses)
    yield f"{rings['16x1', 'causal', '2']:.1f} times as fast as the plain ring"
    forward = {x: float(y) for x, y in square_gains(-2).items()}
    yield f"{forward['16 x 1']:.1f} times as fast as the ring on 16 nodes, {forward['64 x 1']:.1f}"
    with_heads = rings["64x1", "causal", "16"], rings["16x4", "causal", "16"]
    yield "{:.0f} times as fast as the ring on 64 nodes, {:.1f} times on 16".format(*with_heads)
    yield f"are equal at about {equal_at('h100-64x1')[0]}00K tokens on 16 H100"
    yield f"equal at about {equal_at('a100-4-1nic')[0]}00K"
    grid, usp, loong = rivals("64K", "A100, one NIC", 256, 8)
    yield f"it is the fastest by {over(min(grid, usp) / loong):.0f} % in one simulated case"


def study():
    for kv, words in ((16, "With 16 KV heads"), (2, "With 2 KV heads")):
        shares = [100 * x.parts["compute"] / (x.received / bandwidth(path))
                  for path in PICKS for x in read(path, nheads_kv=kv)
                  if shape_of(x) == f"{x.ranks}x1x1" and x.method == "ring"]  # fmt: skip
        yield f"{words} the ring computes for {span(shares, 1)} % of the time"
    gains = [[float(ratio(*(one(xs, shape, method=x).seconds for x, shape in (
                ("ring", "64x1x1"), ("attention2d", "8x8x1")))))
              for mask, backward in product(("full", "causal"), (False, True))
              if backward or phases == FORWARD
              for xs in [read(PICKS[0], phases, mask=mask, nheads_kv=16, backward=backward)]]
             for phases in (FORWARD, BOTH)]  # fmt: skip
    yield "64 x 1 gave {} and {}".format(*(span(x, 2) for x in gains))
    (h, h_rate), (a, a_rate) = (equal_at(x) for x in ("h100-64x1", "a100-4-1nic"))
    yield f"about {h}00K tokens on 16 H100 with {h_rate:g} GB/s each"
    yield f"about {a}00K on 16 A100 with {a_rate:g} GB/s"
    path = f"{RESULTS}/large.h5"
    moved = {x.config["mask"]: busiest(path, x, ("backward",))
             for x in read(path, ranks=16, method="attention2d")}  # fmt: skip
    yield f"sends up to {over(moved['causal'] / moved['full']):.0f} % less"
    slower = []
    for path in PICKS:
        for mask, kv, backward in product(("causal", "full"), (16, 2), (False, True)):
            phases = BOTH if backward else FORWARD
            xs = [x for x in read(path, phases, mask=mask, nheads_kv=kv, backward=backward)
                  if x.overlap]  # fmt: skip
            best, pick = min(xs, key=lambda x: x.seconds), one(xs)
            slower.append((pick.seconds / best.seconds, pick, best))
    yield f"In {sum(x <= 1.1 for x, *_ in slower)} of all {len(slower)} workloads the pick is"
    worst, pick, best = max(slower, key=lambda x: x[0])
    assert (pick.config["mask"], pick.config["nheads_kv"], pick.phase) == ("causal", 2, "forward")
    yield f"The pick is {named(pick)}, and {named(best)} takes {1 / worst:.2f} of its time"
    plans = read(PICKS[0], mask="causal", nheads_kv=16, backward=True)
    yield f"*64 x 1, {len(plans)} plans."
    times = {x.overlap: x.seconds for x in read(f"{RESULTS}/overlap.h5")}
    yield f"took {times[True]:.1f} s overlapped and {times[False]:.1f} s in turn"
    here = [x[-1] for x in shared_link(f"{RESULTS}/partitions/16x4.h5") if "+" in x[1]]
    there = [x[4] for x in picks(PICKS[1]) if x[1] == "causal"]
    yield f"gave {here[0]} and {here[1]} for ring / pick"
    yield f"this run gave {there[0]} and {there[1]}"
    off = model_errors(*CLUSTERS)
    yield (f"off by {np.median(off):.1f} % in the median of {len(off)} runs, and by "
           f"{max(off):.0f} % at worst")  # fmt: skip


def bandwidth(path: str) -> float:
    """Bytes/s of the links between the nodes of a cluster."""
    machine = read_machine((ROOT / path).with_suffix(".toml"))
    return machine.links(machine.ranks_per_node * 16)[1].bandwidth


def moved_under(mask, method: str, layout: Layout) -> int:
    """Bytes that all ranks receive, forward and backward."""
    problem = problem_of(method, layout, AttentionConfig(layout.size * 240, 12, 32), mask)
    ranks = (cost.traffic(method, layout, problem, rank) for rank in range(layout.size))
    return sum(received for rank in ranks for _, received in rank.values())


def partitions():
    grid, ring = (moved_under(Causal(), *x) / moved_under(Full(), *x) for x in (
        ("attention2d", Layout(2, 3)), ("ring", Layout(4, 1)),
    ))  # fmt: skip
    yield f"a 2 x 3 grid moves {grid:.2f} of the bytes of the formulas"
    yield f"a ring of four moves {ring:.2f}"
    here = [x[-1] for x in shared_link(f"{RESULTS}/partitions/16x4.h5") if "+" in x[1]]
    there = [x[4] for x in picks(PICKS[1]) if x[1] == "causal"]
    yield f"which is {here[0]} times as fast as the ring"
    yield f"which is {here[1]} times as fast"
    yield f"were {there[0]} and {there[1]} times as fast as the ring"
    off = model_errors(*(f"partitions/{x}x1" for x in (6, 10, 12, 15, 24, 28)))
    yield f"times to {np.median(off):.1f} % (median), {max(off):.1f} % at worst"
    yield f"The numbers of that page reach {most_uneven():.3f}"


def mask_rows() -> list[dict]:
    with open(ROOT / RESULTS / "masks.csv") as file:
        numbers = ("uneven", "moved")
        return [x | {y: float(x[y]) for y in numbers} for x in csv.DictReader(file)]


def balanced() -> dict[str, float]:
    """The largest over the mean work of a balanced grid, by mask, at worst."""
    worst = {}
    for x in mask_rows():
        if x["plan"] == "attention2d/balanced":
            mask = x["mask"].split(":")[0]
            worst[mask] = max(worst.get(mask, 0), x["uneven"])
    return worst


def most_uneven() -> float:
    return np.ceil(1e3 * max(balanced().values())) / 1e3


def mask_files() -> list[str]:
    return [f"{RESULTS}/masks/{x}.h5" for x in ("16x1", "16x1-0.1")]


def about_masks():
    rows = mask_rows()
    shards = ("attention2d/contiguous", "attention2d/zigzag")
    [window] = [x["moved"] for x in rows if x["ranks"] == "16" and x["plan"] == shards[0]
                and x["mask"] == "sliding_window_causal"]  # fmt: skip
    yield f"a window of 1024 tokens moves {window:.3f} of the bytes of q"
    uneven = max(x["uneven"] for x in rows if x["plan"] in shards)
    yield f"a rank may have up to {uneven:.1f} times the mean work"
    even = f"{sum(x <= 1.02 for x in balanced().values())} of {len(balanced())}"
    yield f"within {most_uneven():.3f} of the mean, and {even} masks within 1.02"
    rings = [max(x["uneven"] for x in rows if (x["plan"], x["ranks"]) == ("ring/balanced", ranks))
             for ranks in ("16", "64")]  # fmt: skip
    yield "shards reaches {:.2f} on 16 ranks and {:.2f} on 64".format(*rings)
    moved = {}
    for x in rows:
        moved.setdefault((x["ranks"], x["mask"]), {})[x["plan"]] = x["moved"]
    more = (x["attention2d/balanced"] / x[shards[0]] for (_, mask), x in moved.items()
            if "document" in mask)  # fmt: skip
    yield f"moves up to {max(more):.1f} times the bytes of a contiguous one"
    # Of the table of distributions, which is printed and has no file.
    times = re.findall(r"; \**(\d\.\d\d)\**(?= \|)", (ROOT / "docs/masks.md").read_text())
    times = np.array(times, float)
    yield f"In these {len(times)} cases the default takes {times.mean():.2f} of the time"
    yield f"faster in {sum(times < 1)} of them, and takes {over(times.max()):.0f} % longer at"
    worst = max(one(xs).seconds / min(x.seconds for x in xs) for path in mask_files()
                for xs in (read(path, mask=mask) for mask in (
                    "causal", "causal_document", "share_question", "sliding_window_causal",
                )) if any(x.picked for x in xs))  # fmt: skip
    yield f"In all seven rows with a pick it is within {np.ceil(over(worst)):.0f} % of the fastest"
    off = model_errors("masks/16x1", "masks/16x1-0.1")
    yield f"{np.median(off):.0f} % in the median. At worst it is off by {max(off):.0f} %"
    off = model_errors("masks/64x1")
    yield f"off by {np.median(off):.0f} % in the median and {max(off):.0f} % at worst"
    xs = read(f"{RESULTS}/masks/64x1.h5")
    grid, ring = (one(xs, f"{shape}x1", method=method).seconds for shape, method in (
        ("8x8", "attention2d"), ("64x1", "ring"),
    ))  # fmt: skip
    yield f"takes {one(xs).seconds:.2f} s with the pick"
    yield f"takes {grid:.2f} s and the ring {ring:.1f} s"


def gpt():
    runs = sorted(read_steps(ROOT / RESULTS / "gpt/step.h5"), key=lambda x: x.seconds)
    (first, last), sums = (runs[0], runs[-1]), [x.parts["gradients"] for x in runs]
    yield f"takes {ratio(last.seconds, first.seconds)} times as long as the fastest plan"
    yield f"and {ratio(last.operator, first.operator)} times for attention"
    [predicted] = {f"{x.predicted['gradients']:.2f}" for x in runs}
    yield f"the prediction of the sums is {predicted} s for all of them"
    yield f"take {span(sums, 2)} s"
    short = [100 * (1 - sum(x.predicted.values()) / x.seconds) for x in runs]
    yield f"are {span(short)} % shorter than the measured steps"
    with h5py.File(ROOT / RESULTS / "gpt/tiny.h5") as file:
        yield f"The run took {file['seconds/total'][()].sum():.0f} s on two cores"


def about_linear():
    [(_, *times, _)] = linear(f"{RESULTS}/linear/16x1.h5", (16384,))
    lasp, _, exact = np.array(times, float).reshape(3, 2)
    yield "{:.0f} times as long forward and {:.0f} times as long backward".format(*exact / lasp)
    state, rate = 8 * 64 * 64 * 4, 10e6 / 8
    yield f"15 hops of one state: {15 * state / rate:.1f} s for {state / 1e3:.0f} KB each"
    [(_, *times, _)] = linear(f"{RESULTS}/linear/16x1-1gbit.h5", (16384,))
    yield f"{times[0]} s forward and {times[1]} s backward for 16384 tokens"
    yield f"The ring takes {times[2]} s and {times[3]} s"


def wire():
    xs = read(f"{RESULTS}/wire/16x1.h5", method="attention2d")
    moved = {x.config.get("wire", "none"): x.received / 1e6 for x in xs}
    sizes = ", ".join(f"{moved[x]:.2f}" for x in FORMATS[:-1])
    yield f"receives {sizes} and {moved['mxfp4']:.2f} MB, forward and backward"
    shares = (moved[x] / moved["none"] for x in FORMATS[1:])
    yield "This is 1, {:.2f}, {:.2f} and {:.2f} of float32".format(*shares)
    logit, out, lse = largest_of_the_sample(1)
    yield f"The largest |logit| is {logit:.0f}."
    yield f"q is multiplied by {50 / logit:.2f}"
    _, more_out, more_lse = largest_of_the_sample(50 / logit)
    yield f"The largest |out| is {out:.1f} ({more_out:.1f} with logits of 50)"
    yield f"the largest |lse| is {lse:.0f} ({more_lse:.0f})"
    q, k = np.random.default_rng(0).standard_normal((2, 1000, 64))
    sent = [rounded(x[:, None], "mxfp8")[:, 0] for x in (q, k)]
    change = (sent[0] @ sent[1].T - q @ k.T) / 8
    norms = (np.linalg.norm(x, axis=1) for x in (q, k))
    u = WIRE_FORMATS["mxfp8"].error
    bound = np.outer(*norms) / 8 * (2 * u + u**2)
    yield f"d is {bound.mean():.1f} in the mean, and this bound of out exceeds all values"
    assert np.exp(2 * bound.min()) - 1 > 2
    yield f"The real change of a logit is {change.std():.2f} (root mean square)"


def largest_of_the_sample(factor: float) -> tuple[float, float, float]:
    """The largest causal |logit|, |out| and |lse| of the sample input, with q times a factor."""
    with h5py.File(ROOT / "data/minilm_l3_1536.h5") as file:
        q, k, v = (file[x][:].astype(np.float32).swapaxes(0, 1) for x in "qkv")
    logits = factor * q @ k.swapaxes(1, 2) / np.float32(q.shape[2]) ** 0.5
    logits[:, ~np.tri(len(logits[0]), dtype=bool)] = -np.inf
    most = logits.max(axis=2, keepdims=True)
    weights = np.exp(logits - most)
    total = weights.sum(axis=2, keepdims=True)
    out, lse = weights @ v / total, most + np.log(total)
    return abs(logits[logits > -np.inf]).max(), abs(out).max(), abs(lse).max()


def afd():
    rows = {x[0]: x[2].split(" / ")[1] for x in tables.afd(f"{RESULTS}/afd/2-96.h5")}
    assert max(map(int, rows["512"].split(" + "))) <= 12
    yield "both are busy for about nine tenths of a step"


# docs/scale.md


def scale():
    yield from scale_of_methods()
    yield from scale_of_shapes()
    yield from scale_of_networks()
    yield from scale_of_the_model()


def at(tokens: str, machine: str, ranks: int, nheads_kv: int = 32) -> list:
    """Simulations of one workload of `scale.h5`."""
    config = {"machine": MACHINES[machine], "seqlen": LENGTHS[tokens], "nheads_kv": nheads_kv}
    found = simulated(f"{RESULTS}/scale/scale.h5")
    return [x for x in found if x.ranks == ranks and config.items() <= x.config.items()]


def least(xs: list, *methods: str, with_heads: bool | None = None, **config) -> float:
    """The least seconds of some methods; infinite if there is none."""
    return min(
        (x.seconds for x in xs if x.method in methods and config.items() <= x.config.items()
         and with_heads in (None, x.config["heads"] > 1)), default=np.inf,
    )  # fmt: skip


def rivals(*workload) -> tuple[float, float, float]:
    """The least seconds of 2D, USP and LoongTrain."""
    xs = at(*workload)
    return (
        least(xs, "attention2d", "node aware"),
        least(xs, "ring", with_heads=True),
        least(xs, "double ring", with_heads=True),
    )


def scale_of_methods():
    """Of the section "Which method wins"."""
    xs = at("64K", "A100", 256)
    best = min(x.seconds for x in xs)
    ring, grid, aware, gather = (least(xs, method, heads=1, rows=rows) / best for method, rows in (
        ("ring", 256), ("attention2d", 16), ("node aware", 16), ("attention2d", 256),
    ))  # fmt: skip
    yield f"A ring takes {ring:.0f} times as long, 2D {grid:.1f} times, node-aware 2D {aware:.1f}"
    yield f"and an all-gather {gather:.0f} times"
    for machine in ("A100", "H100"):
        times = (f"{1e3 * x:.1f}" for x in rivals("256K", machine, 4096))
        yield "{}, {} and {} ms on ".format(*times) + machine
    inside = [1e3 * least(at("1M", x, 4096), "double ring", order="rcu") for x in ("A100", "H100")]
    yield "LoongTrain takes {:.0f} and {:.0f} ms for 1M tokens".format(*inside)
    spread = max(max(y for y in x if y < np.inf) / min(x)
                 for x in (rivals(tokens, machine, ranks) for machine in MACHINES
                           for tokens, ranks in product(("1M", "4M"), (64, 256, 1024))
                           if (tokens, ranks) != ("1M", 1024)))  # fmt: skip
    yield f"come within {np.ceil(over(spread)):.0f} % of each other"
    # Eight KV heads.
    longer = [over(x[0] / x[1]) for x in (rivals("64K", y, 64, 8) for y in ("A100", "H100"))]
    yield f"USP is the fastest, and 2D takes {span(longer)} % longer"
    gains = [over(min(x[1:]) / x[0]) for x in (rivals("64K", y, 256, 8) for y in ("A100", "H100"))]
    yield "2D is the fastest by {:.0f} % on A100 and by {:.0f} % on H100".format(*gains)
    grid, usp, loong = rivals("64K", "A100, one NIC", 256, 8)
    yield f"With one NIC LoongTrain is the fastest by {over(min(grid, usp) / loong):.0f} %"
    longer = [x[1] / x[0] for x in (rivals("64K", y, 1024, 8) for y in ("A100", "H100"))]
    yield "USP takes {:.1f} times (A100) and {:.1f} times (H100) as long as 2D".format(*longer)
    apart = {machine: [x[0] / x[1] - 1 for x in (rivals(tokens, machine, ranks, 8)
                       for tokens, ranks in product(("256K", "1M", "4M"), (64, 256)))]
             for machine in MACHINES}  # fmt: skip
    a, h = (100 * max(map(abs, apart[x])) for x in ("A100", "H100"))
    yield f"2D and USP are within {a:.0f} % on A100 and {h:.0f} % on H100"
    yield f"2D takes up to {100 * max(apart['A100, one NIC']):.0f} % longer than USP"
    # Without a head axis.
    slower = [least(xs, "attention2d", heads=1) / least(xs, "node aware", heads=1)
              for xs in (at("1M", x, 1024) for x in ("A100", "H100"))]  # fmt: skip
    yield "takes {:.2f} times as long on A100 and {:.2f} times on H100".format(*slower)
    waits = [100 * x.parts["wait"] / x.seconds for x in (
        min(at("64K", y, 64), key=lambda z: z.seconds) for y in MACHINES
    )]  # fmt: skip
    yield f"On 64 ranks the fastest plan waits for {span(waits)} % of its time"


def scale_of_shapes():
    """Of triangles, and of all plans of one workload."""
    xs, gains = simulated(f"{RESULTS}/scale/partitions.h5"), []
    for machine, tokens, ranks in product(MACHINES.values(), ("64K", "1M"), (66, 253)):
        config = {"machine": machine, "seqlen": LENGTHS[tokens], "ranks": ranks}
        gains.append(least(xs, "attention2d", **config) / least(xs, "triangle", **config))
    yield f"The triangle is {span(list(map(over, gains)))} % faster than the grid of as many ranks"
    found = list(read_simulations(ROOT / RESULTS / "scale/all.h5").values())
    yield f"SimGrid replayed all {len(found)} plans"
    ended = [x for x in found if "timeout" not in x]
    assert min(ended, key=lambda x: seconds(x, "simulated"))["picked"]
    best = min(seconds(x, "predicted") for x in found)
    late = (seconds(x, "predicted") / best for x in found if "timeout" in x)
    yield "they take {:.0f} and {:.0f} times as long as the best plan".format(*sorted(late))


def scale_of_networks():
    """How often the fastest plan by the model is the fastest of six on worse networks."""
    cases = {}
    for x in summaries(f"{RESULTS}/scale/networks.h5"):
        machine, *others = (x.config[y] for y in (
            "machine", "seqlen", "network", "slow_rank", "slow_port",
        ))  # fmt: skip
        cases.setdefault((machine, *others), []).append(x)
    slower = {}
    for case, xs in cases.items():
        chosen = min(xs, key=lambda x: x.predicted).seconds
        slower[case] = over(chosen / min(x.seconds for x in xs))
    behind = {case: x for case, x in slower.items() if x > 0.05}
    yield f"in {len(cases) - len(behind)} of {len(cases)} cases"
    (a_case, a), (h_case, h) = sorted(behind.items())
    assert a_case[1:] == h_case[1:] == (LENGTHS["1M"], "switch", 1, 2)
    yield f"USP, which is {a:.0f} % (A100) and {h:.0f} % (H100) slower than 2D with heads"


def scale_of_the_model():
    """How far the earlier model is from SimGrid."""
    xs = [x for x in replays(f"{RESULTS}/scale/scale.h5") if x["network"] == "switch"]
    rings = [x for x in xs if x["method"] == "ring" and x["seqlen"] == LENGTHS["64K"]]
    off = [1 - seconds(x, "predicted") / seconds(x, "simulated") for x in rings]
    yield f"*Rings on many ranks at 64K tokens* were up to {100 * max(off):.0f} % too fast"
    gathers = [x for x in xs if x["method"] == "attention2d" and x["ranks"] == 64
               and x["heads"] == 1 and 1 in (x["rows"], x["cols"])]  # fmt: skip
    off = [1 - seconds(x, "predicted") / seconds(x, "simulated") for x in gathers]
    yield f"of 64 ranks were up to {100 * max(off):.0f} % too fast"
    off = model_errors(*CLUSTERS)
    yield (f"{len(off)} measured runs it was off by {np.median(off):.1f} % in the median and "
           f"{max(off):.0f} % at worst")  # fmt: skip
