"""Figures for GPUs: kernels against PyTorch's, ranks that share a GPU against one, MPI's rate.

    mpiexec -n 1 python drivers/bench_gpu.py kernel     # pip install torch, to compare with
    mpiexec -n 4 python drivers/bench_gpu.py split
    mpiexec -n 4 python drivers/bench_gpu.py transfers

kernel: calls of the library, merge and all, on one rank, and the fastest backend of torch's
scaled_dot_product_attention, in turn.  split: the same problem on one rank alone and on the grid
of all ranks, in turn.  transfers: each rank sends to the next and receives from the one before.
Medians over the trials, by the slowest rank.  Exit code 1 if a result is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, ProcessGrid
from a2d_mpi.comm.gpus import TRANSFERS, bind_gpu, gpu_aware
from a2d_mpi.core.masks import MASKS
from a2d_mpi.core.sizes import flops
from a2d_mpi.experiments.check import check_attention
from a2d_mpi.experiments.cli import FAILED_CHECK, Parser, arguments, run, together
from a2d_mpi.experiments.options import TRIALS, whole

MEBI = 1 << 20


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser(prog="bench_gpu.py", description=__doc__.split("\n\n")[0], comm=comm)
    add = parser.add_argument
    add("what", choices=("kernel", "split", "transfers"))
    add("--seqlen", type=whole(1), default=16384)
    add("--nheads", type=whole(1), default=16)
    add("--nheads-kv", type=whole(1), help="default: nheads")
    add("--headdim", type=whole(1), default=128)
    add("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    add("--kernel", default="auto", help="of a2d_mpi.kernels.KERNELS (default %(default)s)")
    add("--transfers", choices=TRANSFERS, default="auto")
    add("--trials", type=TRIALS, default=10)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    comm = MPI.COMM_WORLD
    args = arguments(comm, build_parser, argv)
    together(comm, _import_cuda)
    device, sharing = bind_gpu(comm)
    if comm.rank == 0:
        aware, why = gpu_aware(args.transfers)
        how = f"{'device' if aware else 'host'} transfers ({why})"
        print(f"{device.description}, {comm.size} ranks, {sharing} a GPU, {how}", flush=True)
    return {"kernel": kernel, "split": split, "transfers": transfers}[args.what](
        comm, args, device
    )


def kernel(comm: MPI.Intracomm, args, device) -> int:
    """TFLOP/s of the library on one rank, and of torch."""
    try:
        import torch
    except ImportError:
        torch = None
        print("torch is not installed: nothing to compare with")
    wrong = False
    for mask in ("full", "causal"):
        with _Problem(MPI.COMM_SELF, 1, 1, mask, args, device) as problem:
            calls = {f"{phase} ours": getattr(problem, phase) for phase in ("forward", "backward")}
            if torch is not None:
                calls |= _torch_calls(torch, problem, mask == "causal")
            seconds = _in_turn(calls, args.trials, device, comm)
            wrong |= not problem.passes()
        for phase in ("forward", "backward"):
            work = flops(problem.area, args.nheads, args.headdim, phase == "backward") / 1e12
            ours = work / seconds.pop(f"{phase} ours")
            theirs = {n: work / s for n, s in seconds.items() if n.startswith(phase)}
            line = f"{mask:<7} {phase:<8} {ours:6.0f} TFLOP/s"
            if theirs:
                best = max(theirs, key=theirs.get)
                line += f"   torch {theirs[best]:6.0f} ({best.split()[-1]})"
                line += f"   ours/torch {ours / theirs[best]:.3f}"
            print(line, flush=True)
    return FAILED_CHECK if wrong else 0


def split(comm: MPI.Intracomm, args, device) -> int:
    """Time of all ranks together over the time of one rank alone, causal."""
    rows = max(r for r in range(1, comm.size + 1) if comm.size % r == 0 and r * r <= comm.size)
    with (
        _Problem(comm, rows, comm.size // rows, "causal", args, device) as together_,
        _Problem(MPI.COMM_SELF, 1, 1, "causal", args, device) as alone,
    ):
        calls: dict[str, Callable] = {}
        for phase in ("forward", "backward"):
            calls[f"{phase} together"] = getattr(together_, phase)
            calls[f"{phase} alone"] = getattr(alone, phase) if comm.rank == 0 else lambda: None
        seconds = _in_turn(calls, args.trials, device, comm)
        right = together_.passes()
        staged = comm.allreduce(together_.plan.staged_bytes)
    if comm.rank == 0:
        for phase in ("forward", "backward"):
            one, all_ = seconds[f"{phase} alone"], seconds[f"{phase} together"]
            print(
                f"{phase:<8} 1 rank {1e3 * one:8.2f} ms   {comm.size} ranks {1e3 * all_:8.2f} ms"
                f"   ratio {all_ / one:.2f}"
            )
        print(f"copied through the host: {staged} bytes")
    return 0 if right else FAILED_CHECK


def transfers(comm: MPI.Intracomm, args, device) -> int:
    """GB/s that each rank receives from the one before it."""
    from a2d_mpi.comm.transport import DeviceTransport

    transport = DeviceTransport(device, staged=not gpu_aware(args.transfers)[0])
    wrong = False
    for size in (MEBI, 16 * MEBI, 128 * MEBI):
        mine = device.upload(np.full(size, comm.rank + 1, np.uint8))
        theirs = device.empty((size,), np.uint8)

        def shift(mine=mine, theirs=theirs):
            messages = transport.receive(comm, theirs, (comm.rank - 1) % comm.size, 0)
            messages += transport.send(comm, mine, (comm.rank + 1) % comm.size, 0)
            transport.wait(messages)

        seconds = _in_turn({"shift": shift}, args.trials, device, comm)["shift"]
        wrong |= not (device.download(theirs) == (comm.rank - 1) % comm.size + 1).all()
        if comm.rank == 0:
            print(f"{size // MEBI:4} MiB   {size / seconds / 1e9:6.1f} GB/s per rank", flush=True)
    staged = comm.allreduce(transport.staged_bytes)
    if comm.rank == 0:
        print(f"copied through the host: {staged} bytes")
    return FAILED_CHECK if comm.allreduce(wrong) else 0


class _Problem:
    """A plan with inputs on the device, and its calls."""

    def __init__(self, comm, rows, cols, mask, args, device) -> None:
        self.grid, self.device = ProcessGrid(comm, rows, cols), device
        self.plan = Attention2D(
            self.grid,
            MASKS[mask](),
            seqlen=args.seqlen,
            nheads=args.nheads,
            nheads_kv=args.nheads_kv,
            headdim=args.headdim,
            dtype=args.dtype,
            kernel=args.kernel,
            transfers=args.transfers,
        )
        rng, n = np.random.default_rng(comm.rank), len(self.plan.tokens)
        heads = {"q": args.nheads, "k": self.plan.nheads_kv, "v": self.plan.nheads_kv}
        heads["dout"] = args.nheads
        tensors = {
            name: rng.standard_normal((n, h, args.headdim), np.float32).astype(self.plan.dtype)
            for name, h in heads.items()
        }
        self.tensors = {name: device.upload(x) for name, x in tensors.items()}
        self.area = comm.allreduce(self.plan.area())

    def __enter__(self) -> _Problem:
        return self

    def __exit__(self, *_) -> None:
        self.plan.free()
        self.grid.free()

    def forward(self) -> None:
        t = self.tensors
        t["out"], t["lse"] = self.plan.forward(t["q"], t["k"], t["v"])

    def backward(self) -> None:
        t = self.tensors
        inputs = (t[name] for name in ("dout", "q", "k", "v", "out", "lse"))
        t["dq"], t["dk"], t["dv"] = self.plan.backward(*inputs)

    def passes(self) -> bool:
        """Whether a sample agrees with float64."""
        host = {name: self.device.download(x) for name, x in self.tensors.items()}
        checks = check_attention(self.plan, host, rows=8)
        for name, check in checks.items():
            if not check.passed and self.grid.comm.rank == 0:
                print(f"{name} is off by {check.error:.2e}, allowed are {check.bound:.2e}")
        return all(check.passed for check in checks.values())


def _in_turn(calls, trials, device, comm) -> dict[str, float]:
    """Median seconds of each call by the slowest rank; the first two trials warm up."""
    seconds = {name: [] for name in calls}
    for _ in range(trials + 2):
        for name, call in calls.items():
            device.download(device.empty((1,), np.uint8))  # all that is queued is done
            comm.Barrier()
            start = time.perf_counter()
            call()
            device.seconds(*(device.mark() for _ in range(2)))
            mine = time.perf_counter() - start
            seconds[name].append(comm.allreduce(mine, op=MPI.MAX))
    return {name: float(np.median(x[2:])) for name, x in seconds.items()}


def _torch_calls(torch, problem: _Problem, causal: bool) -> dict[str, Callable]:
    """Calls of torch on the same tensors, by phase and backend, where the backend takes them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = getattr(torch, problem.plan.dtype.name)

    def tensor(name):
        bits = torch.from_dlpack(problem.tensors[name].view(np.int16))
        # (batch, heads, tokens, headdim), contiguous: its fastest layout.
        return bits.view(dtype).transpose(0, 1)[None].contiguous()

    q, k, v = (tensor(name).requires_grad_() for name in "qkv")
    dout, calls = tensor("dout"), {}
    shared = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):

        def forward(name=name):
            with sdpa_kernel(getattr(SDPBackend, name)):
                sdpa = torch.nn.functional.scaled_dot_product_attention
                return sdpa(q, k, v, is_causal=causal, **shared)

        try:
            out = forward()
        except RuntimeError:
            continue

        def timed_forward(forward=forward):
            with torch.no_grad():
                forward()
            torch.cuda.synchronize()

        def timed_backward(out=out):
            for x in (q, k, v):
                x.grad = None
            out.backward(dout, retain_graph=True)
            torch.cuda.synchronize()

        short = name.split("_")[0]
        calls |= {f"forward {short}": timed_forward, f"backward {short}": timed_backward}
    return calls


def _import_cuda():
    try:
        import a2d_mpi.devices.cuda  # noqa: F401
    except ImportError as error:
        raise ValueError(str(error)) from None


if __name__ == "__main__":
    run(MPI.COMM_WORLD, "bench_gpu.py", main)
