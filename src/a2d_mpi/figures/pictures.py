"""Files, colours, legends and axes of all figures."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill

from a2d_mpi.core.atomic import check_writable, replacing

# Files have no dates and versions, so the same picture is the same file.
_METADATA = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
SETTINGS = {
    "font.size": 7, "legend.fontsize": 7, "axes.titlesize": 7, "legend.title_fontsize": 7,
    "savefig.dpi": 180, "lines.linewidth": 1, "lines.markersize": 4, "hatch.linewidth": 0.4,
    "axes.linewidth": 0.5, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
WIDTH = 16 / 2.54  # inches, of a figure as wide as a page

# Eight colours that colour-blind readers tell apart (Okabe and Ito): ranks and kernels.
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#000000")
# One colour and one marker for each method, in all figures.  Methods of a user are black.
_MORE = cycle("*h8d")
METHOD_STYLES = defaultdict(lambda: ("#000000", next(_MORE)), {
    "attention2d": ("#0072B2", "o"), "ring": ("#D55E00", "s"), "striped ring": ("#CC79A7", "^"),
    "double ring": ("#E69F00", "D"), "triangle": ("#009E73", ">"), "node aware": ("#56B4E9", "p"),
    "all-gather": ("#444444", "v"),
})  # fmt: skip
# Colours and hatches of the parts of a phase.
FILLS = {
    "compute": ("#0072B2", ""), "merge": ("#009E73", "...."), "wait": ("#E69F00", "////"),
    "other": ("#DDDDDD", ""),
}  # fmt: skip


def pyplot(**settings: object):
    """Import matplotlib.pyplot for files, without the user's settings; ValueError if missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("needs matplotlib: pip install -e '.[plot]'") from None
    matplotlib.use("agg")
    matplotlib.rcdefaults()
    # Names with $ are shown as they are: no text is a formula.
    common = {"svg.hashsalt": "a2d_mpi", "text.parse_math": False}
    matplotlib.rcParams.update(common | settings)
    import matplotlib.pyplot as plt

    return plt


def style(family: str) -> dict[str, str]:
    """Return the keywords of `plot` for a method; its marker is full if ranks share the heads."""
    method, _, heads = family.partition(" + ")
    colour, marker = METHOD_STYLES[method]
    return {"color": colour, "marker": marker, "fillstyle": "full" if heads else "none"}


def check_picture(path: Path) -> None:
    """Check before the work that a picture can be written.

    Raises
    ------
    ValueError
        If its name does not end with a known format.
    OSError
        If the file cannot be written.
    """
    if path.suffix not in _METADATA:
        raise ValueError(f"{path} must end with {', '.join(_METADATA)}")
    check_writable(path)


def save(figure, path: Path, **options: object) -> None:
    """Write a whole figure or nothing, in the format that the file is named after."""
    with replacing(path) as (target, temporary):
        metadata = _METADATA[path.suffix]
        figure.savefig(temporary, format=path.suffix[1:], metadata=metadata, **options)
        os.replace(temporary, target)


def workload_title(config: Mapping[str, object], seqlen: object = "") -> str:
    """Describe a workload: its mask, tokens (if given), heads, dtype and phases."""
    c = config
    heads = f"{c['nheads']} heads of {c['headdim']}"
    if c["nheads_kv"] != c["nheads"]:
        heads += f" ({c['nheads_kv']} KV heads)"
    phases = "forward and backward" if c["backward"] else "forward"
    tokens = (f"{seqlen} tokens",) if seqlen else ()
    return ", ".join((str(c["mask"]), *tokens, heads, str(c["dtype"]), phases))


def in_short(tokens: int) -> str:
    """Write a number of tokens as 64K, 1M, ..."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens}"


def nodes_of(machine: str) -> str:
    """Drop the number of nodes from a machine's name, where a figure has the number of ranks."""
    return re.sub(r"^\d+ nodes", "nodes", machine)


def finish(figure, title: str = ""):
    """Put title and legend above, in as many columns as there is room for; returns the figure."""
    handles = {}  # by label: of all panels, each once
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.set_layout_engine("constrained")
    width = round(120 * figure.get_figwidth() / WIDTH)  # letters
    for number in range(6, 0, -1):
        legend = figure.legend(
            handles.values(), handles, title=fill(title, width), loc="outside upper center",
            ncols=number, frameon=False, borderaxespad=0.1,
        )  # fmt: skip
        legend.get_title().set_multialignment("center")
        if number == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return figure
        legend.remove()


def timeline(axes, y: float, spans: Sequence[tuple[str, float, float]], height: float) -> None:
    """Draw spans of time, each with its part, begin and end, at one height."""
    for part, (colour, hatch) in FILLS.items():
        if bars := [(begin, end - begin) for x, begin, end in spans if x == part]:
            axes.broken_barh(bars, (y - height / 2, height), facecolor=colour, hatch=hatch,
                             edgecolor="white", linewidth=0, label=part,
                             zorder=0.5 + (part != "other"))  # fmt: skip


def plain_ticks(axis, subs: Sequence[int] = (1, 2, 5)) -> None:
    """Write 1, 2, 5, 10, ... at an axis rather than powers of ten."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")
