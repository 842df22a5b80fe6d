"""Print the cost of each mask's default distribution beside a balanced one.

    python tests/tools/default_distributions.py PROFILE TOKENS [RANKS_PER_NODE]

For grids of 4, 16 and 64 ranks: the default, its largest over its mean work and the bytes that its
busiest rank moves in a forward pass (over the bytes of q), the same of the balanced distribution
(the default before predicted times decided), and the predicted time of a forward and a backward
pass over the time of the balanced one.  The best of three: that of the planner.
"""

import sys

from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.mask_table import partition_cost
from a2d_mpi.masks.patterns import PATTERNS, make_mask
from a2d_mpi.planning.model import predict, slowest_seconds
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules import problem_of
from a2d_mpi.schedules.problem import Workload
from a2d_mpi.sharding.choice import CHOICES


def main(profile: str, tokens: int, ranks_per_node: int | None) -> None:
    """Print a table in Markdown."""
    machine = read_machine(profile)
    if ranks_per_node:
        machine = machine.with_ranks_per_node(ranks_per_node)
    print("| mask | grid | default | work, bytes | balanced: work, bytes | time | best of three |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for name in PATTERNS:
        mask = make_mask(name, tokens)
        work = Workload(tokens, 16, 128, mask=mask, backward=True)
        for side in (2, 4, 8):
            layout = Layout(side, side)
            problem = problem_of("attention2d", layout, work, mask)
            default = problem.queries.name
            names = (default, "balanced")
            if mask.default_distribution == "balanced":
                names = CHOICES
            problems = {x: problem_of("attention2d", layout, work, mask, x) for x in names}
            seconds = {
                x: slowest_seconds(predict(machine, "attention2d", layout, work, x)) for x in names
            }
            cells = [name, f"{side}x{side}", default]
            for x in (default, "balanced"):
                cost = partition_cost("attention2d", layout, problems[x])
                cells.append(f"{cost.uneven:.2f}, {cost.moved:.3f}")
            ratio = seconds[default] / seconds["balanced"]
            worst = max(worst, ratio)
            cells += [f"{ratio:.2f}", f"{min(seconds.values()) / seconds['balanced']:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nat worst {worst:.3f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
