"""Pictures in files, by matplotlib."""

from __future__ import annotations

import os
from pathlib import Path

from a2d_mpi.core.atomic import check_writable, replacing

# Without dates and versions: the same picture is the same file.
_NOTHING = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
# Of the parts of a phase: colour and hatch.
FILLS = {"compute": ("#0072B2", ""), "merge": ("#009E73", "...."), "wait": ("#E69F00", "////"),
         "other": ("#DDDDDD", "")}  # fmt: skip


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
        If its name does not end with a known format.
    OSError
        If the file cannot be written.
    """
    if _format(path) not in _NOTHING:
        raise ValueError(f"{path} must end with .{', .'.join(_NOTHING)}")
    check_writable(path)


def save(figure, path: Path, **options: object) -> None:
    """Write a figure in the format that its file is named after, whole or not at all."""
    kind = _format(path)
    with replacing(path) as (target, temporary):
        figure.savefig(temporary, format=kind, metadata=_NOTHING[kind], **options)
        os.replace(temporary, target)


def _format(path: Path) -> str:
    return path.suffix[1:].lower()
