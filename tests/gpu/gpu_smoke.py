"""Whether cuDNN computes attention on this GPU, at the speed of its tensor cores.

    python tests/gpu/gpu_smoke.py                 # in ten seconds, once libraries are in memory
    python tests/gpu/gpu_smoke.py --least 0       # judge no speed, and measure no ceiling

Prints the ceilings of the GPU, which are the rates of a copy and of a bfloat16 product of
matrices, and the speed of full, causal and windowed attention through a plan on one rank.  Exit
code 1, and a sentence, if cuDNN refuses a graph, if another kernel computes a block, or if a speed
is not between --least and 1.1 of the product's.  Without tensor cores it would be about 0.02.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, Full, ProcessGrid, SlidingWindow
from a2d_mpi.checks.measure import random_inputs
from a2d_mpi.comm.gpus import bind_gpu
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import flops
from a2d_mpi.devices.cuda import Cuda
from a2d_mpi.devices.protocol import Array
from a2d_mpi.kernels.cupy import CupyKernel
from a2d_mpi.kernels.graphs import NotSupported, graphs_of

MOST = 1.1  # of the product's rate; a higher speed was not measured right
TRIALS = 5
COPIED = 1 << 30  # bytes; more than any cache


def watch(graphs: Any) -> tuple[set, dict[str, None]]:
    """Watch cuDNN's graphs and the plain kernel, whatever they report about themselves.

    Returns
    -------
    built : set
        The graphs that were asked for and built.
    problems : dict of str to None
        Each refusal of a graph and each phase that the plain kernel computed, once.
    """
    built, problems, get = set(), {}, graphs.get

    def watched(block: Any, backward: bool) -> Any:
        try:
            launch = get(block, backward)
        except NotSupported as error:
            problems[f"cuDNN refused a graph: {error}"] = None
            raise
        built.add((block, backward))
        return launch

    graphs.get = watched
    for phase in PHASES:
        plain = getattr(CupyKernel, phase)

        def compute(*given: Any, phase: str = phase, plain: Any = plain, **more: Any) -> None:
            problems[f"the plain kernel computed blocks, {phase}"] = None
            plain(*given, **more)

        setattr(CupyKernel, phase, compute)
    return built, problems


def ceilings(device: Cuda, q: Array, k: Array) -> dict[str, float]:
    """Measure bytes/s of a copy, read and written, and FLOP/s of a product of matrices."""
    to, source = (device.empty((COPIED,), np.uint8) for _ in range(2))
    a, b = q.reshape(len(q) // 2, -1), k.reshape(-1, len(k) // 2)
    work = {"copy": 2 * COPIED, "product": 2 * a.size * b.shape[1]}
    calls = {
        "copy": lambda: to.data.copy_from_device_async(source.data, COPIED),
        "product": lambda: a @ b,
    }
    return {name: work[name] / _seconds(device, call) for name, call in calls.items()}


def _seconds(device: Cuda, call: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        call()
    start = device.mark()
    for _ in range(repeats):
        call()
    return device.seconds(start, device.mark()) / repeats


def speeds(plan: Attention2D, inputs: dict[str, Array]) -> dict[str, float]:
    """Return FLOP/s of each phase, in the median of some calls."""
    q, k, v, dout = (inputs[x] for x in ("q", "k", "v", "dout"))
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for trial in range(1 + TRIALS):
        out, lse = plan.forward(q, k, v)
        plan.backward(dout, q, k, v, out, lse)
        for phase, times in seconds.items():
            times += [plan.timings[f"{phase}/total"]] * (trial > 0)
    return {
        phase: flops(plan.area(), plan.nheads, plan.headdim, phase == "backward") / np.median(x)
        for phase, x in seconds.items()
    }


def main() -> int:
    """Print the table and what is wrong, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, default=(16384, 16, 128),
                        metavar=("SEQLEN", "NHEADS", "HEADDIM"))  # fmt: skip
    parser.add_argument("--least", type=float, default=0.15, help="of the product's rate")
    args = parser.parse_args()
    seqlen, nheads, headdim = args.shape
    sizes = {"seqlen": seqlen, "nheads": nheads, "headdim": headdim, "dtype": "bfloat16"}
    grid, (device, _) = ProcessGrid(MPI.COMM_SELF, 1, 1), bind_gpu(MPI.COMM_SELF)
    built, problems = watch(graphs_of(device.index))
    print(device.description)
    inputs, ceiling = {}, {}
    for mask in (Full(), Causal(), SlidingWindow(seqlen // 8, 0)):
        plan = Attention2D(grid, mask, **sizes, kernel="cudnn")
        inputs = inputs or {
            name: device.upload(x) for name, x in random_inputs(plan, backward=True).items()
        }
        if args.least and not ceiling:
            ceiling = ceilings(device, inputs["q"], inputs["k"])
            print(f"copy {ceiling['copy'] / 1e12:.2f} TB/s, "
                  f"bfloat16 product {ceiling['product'] / 1e12:.0f} TFLOP/s")  # fmt: skip
        for phase, speed in speeds(plan, inputs).items():
            print(f"{mask}, {phase}: {speed / 1e12:.3g} TFLOP/s", end="")
            if ceiling:
                share = speed / ceiling["product"]
                print(f", {share:.2f} of the product", end="")
                if not args.least <= share <= MOST:
                    problem = f"{phase} of {mask} has {share:.3f} of the product's rate"
                    problems[f"{problem}, and {args.least} to {MOST} was expected"] = None
            print()
        plan.free()
    passed = f"cuDNN computed everything, by {len(built)} graphs"
    print("\n".join(f"FAILED: {x}" for x in problems) or passed)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
