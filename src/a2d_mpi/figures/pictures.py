"""Pictures in files, by matplotlib."""

from __future__ import annotations

import os
from collections import defaultdict
from itertools import cycle
from pathlib import Path

from a2d_mpi.core.atomic import check_writable, replacing
from a2d_mpi.experiments.summary import FAMILIES

# Without dates and versions: the same picture is the same file.
_NOTHING = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_BEGINS = {"png": b"\x89PNG", "svg": (b"<?xml", b"<svg"), "pdf": b"%PDF"}
# Of the parts of a phase: colour and hatch.
FILLS = {"compute": ("#0072B2", ""), "merge": ("#009E73", "...."), "wait": ("#E69F00", "////"),
         "other": ("#DDDDDD", "")}  # fmt: skip

# Of each method, alone and with a head axis.  Okabe and Ito: told apart by colour-blind readers
# too; the markers and hatches without colours.
_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#CC79A7", "#F0E442", "#009E73", "#999999")
_MARKERS = "oDsp^<v>*"
_LINES = [line for line in ("-", "--", "-.", ":") for _ in range(2)]
_CYCLE = zip(cycle(_COLOURS), cycle(_MARKERS), cycle(_LINES))
# Methods of a user get the next styles when they are drawn.
STYLES = defaultdict(lambda: next(_CYCLE), zip(FAMILIES, _CYCLE))


def pyplot(**settings: object):
    """matplotlib.pyplot for files, without the user's settings; ValueError if it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("needs matplotlib: pip install -e '.[plot]'") from None
    matplotlib.use("agg")
    matplotlib.rcdefaults()
    matplotlib.rcParams.update({"svg.hashsalt": "a2d_mpi", **settings})
    import matplotlib.pyplot as plt

    return plt


def check_picture(path: Path) -> None:
    """Check before the work that a picture can be written.

    Raises
    ------
    ValueError
        If its name does not end with a known format, or another kind of file has the name.
    OSError
        If the file cannot be written.
    """
    if _format(path) not in _NOTHING:
        raise ValueError(f"{path} must end with .{', .'.join(_NOTHING)}")
    check_writable(path, 0, _check_begin)


def save(figure, path: Path, **options: object) -> None:
    """Write a figure in the format that its file is named after, whole or not at all."""
    kind = _format(path)
    no_formulas(figure)
    with replacing(path) as (target, temporary):
        figure.savefig(temporary, format=kind, metadata=_NOTHING[kind], **options)
        os.replace(temporary, target)


def no_formulas(figure) -> None:
    """Show names with $ as they are; matplotlib's own formulas are the numbers of a log axis."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if "$" in text.get_text() and "mathdefault" not in text.get_text():
            text.set_parse_math(False)


def log_ranks(axes, ranks: list[int]) -> None:
    """An axis of ranks, at powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(x) for x in ranks])
    axes.minorticks_off()
    axes.set_xlim(ranks[0] / 1.15, ranks[-1] * 1.15)
    axes.set_xlabel("ranks")


def plain_ticks(axis) -> None:
    """1, 2, 5, 10, ... rather than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _check_begin(path: Path) -> None:
    """ValueError unless a file begins as pictures do of the format that it is named after."""
    with open(path, "rb") as file:
        begin = file.read(5)
    if not begin.startswith(_BEGINS[_format(path)]):
        raise ValueError(f"it begins with {begin!r}")


def _format(path: Path) -> str:
    return path.suffix[1:].lower()
