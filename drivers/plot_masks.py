"""Draw masks, and who computes what with each of them on a process grid.

    pip install -e '.[plot]'
    python drivers/plot_masks.py data/figures/masks.png --rows 2 --cols 3

For each mask a pair of panels, query by key.  Left: the visible pairs.  Right: the same pairs in
the colour of the rank that computes them, the one in the row of the query's owner and the column
of the key's owner; above it the distribution, and the largest area of a rank over the mean.
Nothing is run; no MPI is needed.  Exit code 2: bad input.
"""

from a2d_mpi.core.config import DISTRIBUTIONS
from a2d_mpi.experiments.options import MASK_HELP, Parser, masks, path, run_serial, whole
from a2d_mpi.figures.mask_plots import LONGEST, RANKS, plot_masks


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("plot_masks.py", __doc__)
    add = parser.add_argument
    add("output", type=path, help="PNG, SVG or PDF file")
    add("--masks", type=masks, default="all", help=f"all, or {MASK_HELP} (default %(default)s)")
    add("--rows", type=whole(1, RANKS), default=2, help="default %(default)s")
    add("--cols", type=whole(1, RANKS), default=3, help="default %(default)s")
    add("--distribution", choices=DISTRIBUTIONS, help="default: the mask's own")
    add("--seqlen", type=whole(1, LONGEST), default=96, help="tokens (default %(default)s)")
    return parser


if __name__ == "__main__":
    run_serial(build_parser, plot_masks)
