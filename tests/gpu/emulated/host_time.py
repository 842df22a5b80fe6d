"""Host time and launches of the kernel calls of a pass on a GPU, with nothing launched.

    python tests/gpu/emulated/host_time.py
    PYTHONPATH=TREE/src python tests/gpu/emulated/host_time.py --emulated TREE/tests/emulated

Prints the launches and the least microseconds of a pass with the kernel of cuDNN, after the first
one, for the calls of rank 0.  CuPy is the emulated one, but what is launched is counted and
forgotten: its own time, some 5 us a launch on a GPU, comes on top.  cuDNN is a stand-in.
Measured: the 12 CUDA and 7 cuDNN launches of a causal backward pass on a 2x2 grid take 0.57 ms.
"""

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
)
parser.add_argument("--emulated", type=Path, default=Path(__file__).parent)
parser.add_argument("--mask", default="causal")
parser.add_argument("--grid", default="2x2")
parser.add_argument("--seqlen", type=int, default=16384)
parser.add_argument("--heads", default="8,8")
parser.add_argument("--passes", type=int, default=200)
args = parser.parse_args()
sys.path.insert(0, str(args.emulated))

import cupy  # noqa: E402
import numpy as np  # noqa: E402

queued = []
cupy.cuda.Stream._enqueue = lambda self, action: queued.append(1)
cupy.kernels.Kernel.__call__ = lambda self, grid, block, args, shared_mem=0: queued.append(1)
graph = SimpleNamespace(execute=lambda pack, workspace, handle: queued.append(2))
sys.modules["cudnn"] = SimpleNamespace(
    __version__="1.22.0",
    backend_version=lambda: 92800,
    cudnnGraphNotSupportedError=ValueError,
    create_handle=lambda: 1,
    set_stream=lambda handle, stream: None,
    destroy_handle=lambda handle: None,
)

from a2d_mpi.core.config import AttentionConfig  # noqa: E402
from a2d_mpi.core.dtypes import DTYPES  # noqa: E402
from a2d_mpi.core.sizes import Layout  # noqa: E402
from a2d_mpi.devices.cuda import Cuda  # noqa: E402
from a2d_mpi.kernels.cudnn import CudnnKernel  # noqa: E402
from a2d_mpi.kernels.cupy import CupyKernel  # noqa: E402
from a2d_mpi.kernels.graphs import Graphs  # noqa: E402
from a2d_mpi.masks.patterns import make_mask  # noqa: E402
from a2d_mpi.schedules import problem_of, write  # noqa: E402
from a2d_mpi.schedules.steps import Attend, Differentiate  # noqa: E402

Graphs._build = lambda self, block, backward, gradients: (graph, 1 << 20)


def calls(phase):
    """Arguments of the kernel, of each call."""
    layout, mask = Layout(*map(int, args.grid.split("x"))), make_mask(args.mask, args.seqlen)
    nheads, nheads_kv = map(int, args.heads.split(","))
    config = AttentionConfig(args.seqlen, nheads, 16, nheads_kv=nheads_kv, dtype="bfloat16")
    problem = problem_of("attention2d", layout, config, mask)
    for program in write("attention2d", phase, layout, problem, 0):
        for step in program.steps:
            if not isinstance(step, Attend | Differentiate):
                continue
            queries, keys = program.tokens(step.queries), np.sort(program.tokens(step.keys))
            intervals = program.mask.intervals(queries, keys)
            q, k = (len(queries), nheads, 16), (len(keys), nheads_kv, 16)
            tensor, wide = DTYPES["bfloat16"], np.float32
            if phase == "forward":
                like = [(q, tensor), (k, tensor), (k, tensor), None, (q, wide), (q[:2], wide)]
            else:
                like = [(q, tensor), (q, tensor), (k, tensor), (k, tensor), (q[:2], wide)]
                like += [(q[:2], wide), None, (q, wide), (k, wide), (k, wide)]
            yield [cupy.empty(*x) if x else intervals for x in like]


kernel = CudnnKernel(CupyKernel(Cuda.current(), DTYPES["bfloat16"], 0.3), graphs=Graphs())
for phase in ("forward", "backward"):
    found = list(calls(phase))
    call = getattr(kernel, phase)
    for x in found:  # graphs and buffers are made
        call(*x)
    queued.clear()
    seconds = []
    for _ in range(args.passes):
        start = time.perf_counter()
        for x in found:
            call(*x)
        seconds.append(time.perf_counter() - start)
    print(
        f"{phase}: {len(found)} calls, {queued.count(1) / args.passes:.0f} CUDA and "
        f"{queued.count(2) / args.passes:.0f} cuDNN launches, {min(seconds) * 1e6:.0f} us"
    )
