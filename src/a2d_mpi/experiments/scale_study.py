"""The tables of drivers/scale.py, in Markdown; no MPI import."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from a2d_mpi.experiments.pictures import STYLES
from a2d_mpi.experiments.scale import Entry, family, fits, in_short, power, total
from a2d_mpi.experiments.simulate import read_simulations, seconds
from a2d_mpi.experiments.study import CLOSE

PLACE = ("machine", "network", "slow_rank", "slow_port")
WORKLOAD = ("mask", "nheads", "nheads_kv", "headdim", "dtype", "backward", "seqlen", "ranks")


def scale_study(args: argparse.Namespace) -> int:
    """Print the tables; returns the exit code."""
    names = args.tables.split(",")
    if unknown := [x for x in names if x not in TABLES]:
        raise ValueError(f"--tables: {unknown[0]!r} is none of {', '.join(TABLES)}")
    for path in args.files:
        all_ = read_simulations(path).values()
        entries = [x for x in all_ if np.isfinite(total(x))]
        print(f"# {path}: {len(entries)} simulations, {len(all_) - len(entries)} out of time")
        for name in names:
            TABLES[name](entries)
    return 0


def _model(entries: list[Entry]) -> None:
    """Errors of the model where it knows all, by ranks and by families of plans."""
    known = [x for x in entries if _nothing_is_slow(x) and x["network"] in ("switch", "fat tree")]
    for name, what in (("ranks", lambda x: int(x["ranks"])), ("plans", family)):
        rows = []
        for key, of_key in _groups(known, what):
            off = [100 * (seconds(x, "predicted") / total(x) - 1) for x in of_key]
            rows.append((key, len(off), *(f"{x:.1f}" for x in (
                np.median(np.abs(off)), np.max(np.abs(off)), min(off), max(off)))))  # fmt: skip
        _print((name, "simulations", "median off, %", "worst, %", "from, %", "to, %"), rows)


def _picks(entries: list[Entry]) -> None:
    """The planner's pick of each workload against the fastest that was simulated."""
    rows, close, number = [], defaultdict(int), defaultdict(int)
    for key, found in _workloads(entries):
        found = [x for x in found if fits(x)]
        picked = [x for x in found if x["picked"]]
        if not picked or len(found) < 2:
            continue
        best, ranks = min(found, key=total), int(found[0]["ranks"])
        behind = total(picked[0]) / total(best)
        number[ranks] += 1
        close[ranks] += behind <= CLOSE
        if behind > 1.0005:
            rows.append((*key, _plan(picked[0]), f"{100 * (behind - 1):.1f}", _plan(best)))
    _print((*_NAMES, "pick", "behind, %", "fastest"), rows)
    for ranks, n in sorted(number.items()):
        print(f"{ranks} ranks: {close[ranks]} of {n} picks within {100 * (CLOSE - 1):.0f} %")
    print()


def _winners(entries: list[Entry]) -> None:
    """Milliseconds of the fastest of each family that fits."""
    found = [(key, _fastest(x for x in of_key if fits(x))) for key, of_key in _workloads(entries)]
    _families(_NAMES, [(key, x) for key, x in found if x])


def _networks(entries: list[Entry]) -> None:
    """Likewise by networks, of workloads that were on several."""
    for key, of_key in _groups(entries, lambda x: tuple(x[y] for y in WORKLOAD)):
        rows = []
        for (machine, *network), found in _groups(of_key, lambda x: tuple(x[y] for y in PLACE)):
            network = f"{network[0]}" + "".join(
                f", slow {what} {factor:g}"
                for what, factor in zip(("rank", "port"), network[1:])
                if factor > 1
            )
            rows.append(((machine, network), _fastest(found)))
        if len({network for (_, network), _ in rows}) > 1:
            print(f"{key[-1]} ranks, {in_short(int(key[-2]))} tokens, {key[2]} KV heads\n")
            _families(("machine", "network"), rows)


def _slopes(entries: list[Entry]) -> None:
    """The power of the ranks that fits the times of each family."""
    place = PLACE + WORKLOAD[:-1]
    rows = []
    for key, of_key in _groups(entries, lambda x: (*(x[y] for y in place), family(x))):
        times = {
            int(n): 1e3 * min(map(total, x)) for n, x in _groups(of_key, lambda x: x["ranks"])
        }
        if len(times) > 2:
            listed = ", ".join(f"{n}: {x:.4g}" for n, x in times.items())
            rows.append((key[0], in_short(int(key[-2])), key[-1], listed, f"{power(times):+.2f}"))
    _print(("machine", "tokens", "plan", "ms by ranks", "power"), rows)


def _costs(entries: list[Entry]) -> None:
    """Seconds and memory of simulations, in the median, by ranks and families."""
    rows = defaultdict(dict)
    for (ranks, name), x in _groups(entries, lambda x: (int(x["ranks"]), family(x))):
        took, held = (np.median([y[f"cost {what}"] for y in x]) for what in ("seconds", "memory"))
        rows[ranks][name] = f"{took:.{0 if took > 10 else 1}f} s, {held / 1e6:.0f} MB"
    names = [x for x in STYLES if any(x in row for row in rows.values())]
    _print(("ranks", *names), [(n, *(x.get(y, "") for y in names)) for n, x in rows.items()])


TABLES: dict[str, Callable[[list[Entry]], None]] = {
    "model": _model,
    "picks": _picks,
    "winners": _winners,
    "networks": _networks,
    "slopes": _slopes,
    "costs": _costs,
}
_NAMES = ("machine", "ranks", "KV heads", "tokens")


def _groups(entries: Iterable[Entry], key: Callable[[Entry], object]) -> list[tuple]:
    found = defaultdict(list)
    for x in entries:
        found[key(x)].append(x)
    return sorted(found.items(), key=lambda x: x[0])


def _workloads(entries: list[Entry]) -> list[tuple[tuple, list[Entry]]]:
    """The entries of each workload on one switch on which nothing is slow."""
    usual = [x for x in entries if _nothing_is_slow(x) and x["network"] == "switch"]
    place = ("machine", "ranks", "nheads_kv", "seqlen")
    found = _groups(usual, lambda x: tuple(x[y] for y in place + WORKLOAD))
    return [((*key[:3], in_short(int(key[3]))), x) for key, x in found]


def _nothing_is_slow(x: Entry) -> bool:
    return x["slow_rank"] == x["slow_port"] == 1


def _fastest(entries: Iterable[Entry]) -> dict[str, Entry]:
    found = {name: min(x, key=total) for name, x in _groups(entries, family)}
    return {name: found[name] for name in STYLES if name in found}


def _families(names: Sequence[str], rows: list[tuple[tuple, dict[str, Entry]]]) -> None:
    """A table of milliseconds by families; the least of each row is bold."""
    known = [name for name in STYLES if any(name in x for _, x in rows)]
    lines = []
    for key, found in rows:
        least = min(map(total, found.values()))
        cells = []
        for name in known:
            text = f"{1e3 * total(found[name]):.4g}" if name in found else ""
            cells.append(f"**{text}**" if text and total(found[name]) <= 1.0005 * least else text)
        lines.append((*key, *cells))
    _print((*names, *known), lines)


def _plan(x: Entry) -> str:
    return f"{x['method']} {x['rows']}x{x['cols']}x{x['heads']}@{x['order']}"


def _print(header: Sequence[str], rows: list[tuple]) -> None:
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(map(str, row)) + " |")
    print()
