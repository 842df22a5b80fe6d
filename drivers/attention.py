"""Distributed attention on Q, K, V from a file: checked, then timed, and written to HDF5.

    mpiexec -n 4 python drivers/attention.py data/minilm_l3_1536.h5 \
        --rows 2 --cols 2 --mask causal --backward --check full --output results/run.h5

Exit code 0: all checks passed.  1: a check failed.  2: bad input, or the output cannot be written.
"""

from __future__ import annotations

import math
import socket

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from a2d_mpi import Attention2D, DoubleRingAttention, ProcessGrid, RingAttention, cost
from a2d_mpi.atomic import check_writable
from a2d_mpi.backend import DTYPES, HOST
from a2d_mpi.check import check_attention
from a2d_mpi.cli import FAILED_CHECK, Parser, run, together
from a2d_mpi.comm import agree
from a2d_mpi.distribution import DISTRIBUTIONS
from a2d_mpi.machine import read_machine
from a2d_mpi.masks import MASKS
from a2d_mpi.plan import AttentionPlan
from a2d_mpi.results import (
    Check,
    Result,
    inspect_input,
    provenance,
    read_part,
    write_result,
)
from a2d_mpi.schedule import Workload
from a2d_mpi.tiles import KERNELS
from a2d_mpi.transport import TRANSFERS

METHODS = {
    "attention2d": Attention2D,
    "ring": RingAttention,
    "double_ring": DoubleRingAttention,
}
PARTS = ("compute", "merge", "wait", "total")
SAMPLE = 16  # query rows and key rows that --check sample looks at


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser(prog="attention.py", description=__doc__.split("\n\n")[0], comm=comm)
    add = parser.add_argument
    add("input", help="HDF5 file with q, k, v and perhaps dout (see data/README.md)")
    add("--rows", type=int, help="R of the grid; default: as square as the ranks allow")
    add("--cols", type=int, help="C of the grid; default: ranks / rows / heads")
    add("--heads", type=int, default=1, help="U, ranks that share the heads (default %(default)s)")
    add("--order", default="rcu", help="of these axes, from nodes to ranks (default %(default)s)")
    add("--grid", choices=("auto",), help="the fastest grid for the machine of --profile")
    add("--profile", help="TOML file; see data/machines and drivers/calibrate.py")
    add("--method", choices=METHODS, default="attention2d")
    add("--inner", type=int, help="cells of a double ring's inner rings; default: the columns")
    add("--mask", choices=MASKS, default="causal")
    add("--distribution", choices=DISTRIBUTIONS, help="default: what balances the mask")
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", choices=("cpu", "gpu"), default="cpu", help="ranks may share a GPU")
    add("--kernel", choices=KERNELS, default="auto", help="default: the fastest for the device")
    add("--transfers", choices=TRANSFERS, default="auto", help="of GPU arrays: see the README")
    add("--seqlen", type=int, help="use the first tokens of the file only; default: all")
    add("--backward", action="store_true", help="also the gradients")
    add("--no-overlap", action="store_true", help="communicate and compute in turn")
    add("--trials", type=int, default=5, help="timed runs (default %(default)s)")
    add("--warmup", type=int, default=1, help="runs before them (default %(default)s)")
    add(
        "--check",
        choices=("none", "sample", "full"),
        default="sample",
        help=f"against float64: {SAMPLE} or more rows each, or all (default %(default)s)",
    )
    add("--seed", type=int, default=0, help="of the sample, and of dout if the file has none")
    add("--threads", type=int, default=1, help="BLAS threads per rank (default %(default)s)")
    add("--output", help="HDF5 file for timings, traffic and checks")
    add("--save-outputs", action="store_true", help="also write out, lse and the gradients")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the driver; returns the exit code."""
    comm = MPI.COMM_WORLD
    args = together(comm, lambda: build_parser(comm).parse_args(argv))
    # All options: one that differs would send the ranks different ways.  Not the path: nodes may
    # have the file in different places.
    agree(comm, None, {f"--{name}": x for name, x in vars(args).items() if name != "input"})
    info = together(comm, lambda: _validated(args))
    agree(comm, None, {"dout in the input file": info.has_dout})
    if args.output:
        together(comm, lambda: check_writable(args.output, _output_bytes(args, info)), on=0)
    device = _open_device(comm, args.device)
    grid = _grid(comm, args, info)
    plan = METHODS[args.method](
        grid,
        MASKS[args.mask](),
        seqlen=args.seqlen or info.seqlen,
        nheads=info.nheads,
        nheads_kv=info.nheads_kv,
        headdim=info.headdim,
        dtype=args.dtype,
        distribution=args.distribution,
        overlap=not args.no_overlap,
        kernel=args.kernel,
        transfers=args.transfers,
        **({"inner": args.inner} if args.method == "double_ring" else {}),
    )
    tensors = together(comm, lambda: _read(args, info, plan))
    if args.check != "none":
        _refuse_nan(comm, tensors)
    tensors = {name: device.upload(x) for name, x in tensors.items()}

    def on_host() -> dict[str, np.ndarray]:
        return {name: device.download(x) for name, x in tensors.items()}

    with threadpool_limits(args.threads):
        # Checked before it is timed: the timed runs must then repeat the checked one bit for bit.
        for _ in range(max(args.warmup, args.check != "none")):
            _call(plan, tensors, args.backward)
        checked = on_host()
        checks = _check(plan, checked, args)
        timings, traffic = _measure(plan, tensors, args)
        tensors = on_host()
        checks["traffic"] = _traffic_check(plan, traffic, args)
        if args.check != "none":
            checks["repeat"] = _repeat_check(plan, checked, tensors)
    area = plan.grid.comm.gather(plan.area())
    result = _result(args, plan, device, timings, traffic, checks, area, tensors)
    if comm.rank == 0:
        _report(result, plan)
    if args.output:
        together(comm, lambda: write_result(args.output, result), on=0)
        if comm.rank == 0:
            print(f"written to {args.output}", flush=True)
    passed = comm.bcast(comm.rank == 0 and all(c.passed for c in checks.values()))
    plan.free()
    grid.free()
    return 0 if passed else FAILED_CHECK


def _validated(args):
    """Refuse what no plan will see, and look at the input file."""
    for name, least in (("trials", 1), ("warmup", 0), ("threads", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if (args.grid == "auto") != (args.profile is not None):
        raise ValueError("--grid auto and --profile need each other")
    if args.grid and (args.rows, args.cols, args.heads, args.order) != (None, None, 1, "rcu"):
        raise ValueError("--grid auto leaves no choice of --rows, --cols, --heads and --order")
    if args.save_outputs and not args.output:
        raise ValueError("--save-outputs needs --output")
    if args.inner is not None and args.method != "double_ring":
        raise ValueError("--inner needs --method double_ring")
    info = inspect_input(args.input)
    if args.seqlen is not None and not 1 <= args.seqlen <= info.seqlen:
        raise ValueError(
            f"--seqlen must be between 1 and the {info.seqlen} tokens of {args.input}, "
            f"got {args.seqlen}"
        )
    return info


def _open_device(comm: MPI.Intracomm, name: str):
    """The host, or the GPU of this rank."""
    if name == "cpu":
        return HOST
    return together(comm, _import_cuda).bind_gpu(comm)[0]


def _import_cuda():
    try:
        from a2d_mpi import cuda
    except ImportError as error:
        raise ValueError(f"--device gpu: {error}") from None
    return cuda


def _output_bytes(args, info) -> int:
    if not args.save_outputs:
        return 1 << 20
    q = (args.seqlen or info.seqlen) * info.nheads * info.headdim
    kv = q // info.nheads * info.nheads_kv
    return 8 * (2 * q + 2 * kv + q // info.headdim) + (1 << 20)


def _grid(comm: MPI.Intracomm, args, info) -> ProcessGrid:
    """The grid that is asked for; the grid itself refuses misfits."""
    if args.grid == "auto":
        machine = together(comm, lambda: read_machine(args.profile))
        sizes = (args.seqlen or info.seqlen, info.nheads, info.headdim, info.nheads_kv)
        work = Workload(*sizes, MASKS[args.mask](), args.dtype, args.backward, not args.no_overlap)
        return ProcessGrid.auto(comm, machine, work, method=METHODS[args.method].method)
    rows, cols, cells = args.rows, args.cols, comm.size // max(args.heads, 1)
    if rows is None and cols is None:
        rows = next((r for r in range(math.isqrt(cells), 0, -1) if cells % r == 0), 0)
    if rows is None:
        rows = cells // cols if cols > 0 else 0
    if cols is None:
        cols = cells // rows if rows > 0 else 0
    return ProcessGrid(comm, rows, cols, args.heads, args.order)


def _read(args, info, plan: AttentionPlan) -> dict[str, np.ndarray]:
    """My part of the inputs."""
    part = plan.grid.comm.rank
    names = ["q", "k", "v"] + ["dout"] * (args.backward and info.has_dout)
    tensors = {name: read_part(info, name, plan.distribution, part, plan.dtype) for name in names}
    if args.backward and not info.has_dout:
        # One generator per token: the same gradient whatever the ranks, grid and distribution.
        generators = (
            np.random.Generator(np.random.Philox(key=args.seed, counter=[0, 0, 0, token]))
            for token in plan.tokens.tolist()
        )
        dout = [g.standard_normal((info.nheads, info.headdim)) for g in generators]
        tensors["dout"] = np.array(dout).reshape(tensors["q"].shape).astype(plan.dtype)
    return tensors


def _refuse_nan(comm: MPI.Intracomm, tensors: dict[str, np.ndarray]) -> None:
    bad = {name: int(x.size - np.isfinite(x).sum()) for name, x in tensors.items()}
    found = [f"{name} has {n} elements that are NaN or infinite" for name, n in bad.items() if n]
    agree(comm, "; ".join(found) + ": nothing can be checked" if found else None)


def _call(plan: AttentionPlan, tensors: dict[str, np.ndarray], backward: bool) -> None:
    """Run once, adding the results to `tensors`; all ranks start together."""
    comm = plan.grid.comm
    q, k, v = (tensors[name] for name in "qkv")
    comm.Barrier()
    out, lse = plan.forward(q, k, v)
    tensors.update(out=out, lse=lse)
    if backward:
        comm.Barrier()
        gradients = plan.backward(tensors["dout"], q, k, v, out, lse)
        tensors.update(zip(("dq", "dk", "dv"), gradients))


def _measure(plan: AttentionPlan, tensors: dict[str, np.ndarray], args):
    """Run all trials; adds the results to `tensors`.

    Returns the seconds of every trial by "phase/part", and the bytes [sent, received] of one
    call by (phase, communicator).
    """
    phases = ("forward", "backward") if args.backward else ("forward",)
    seconds = {f"{phase}/{part}": [] for phase in phases for part in PARTS}
    plan.traffic.clear()
    silent = plan.grid.comm.rank != 0
    for _ in tqdm(range(args.trials), "trials", disable=silent, leave=False):
        _call(plan, tensors, args.backward)
        for name, so_far in seconds.items():
            so_far.append(plan.timings[name])
    per_call = {
        key: [nbytes // args.trials for nbytes in both] for key, both in plan.traffic.bytes.items()
    }
    return seconds, per_call


def _check(plan: AttentionPlan, tensors: dict[str, np.ndarray], args) -> dict[str, Check]:
    """Check the results against float64."""
    if args.check == "none":
        return {}
    return check_attention(plan, tensors, None if args.check == "full" else SAMPLE, args.seed)


def _traffic_check(plan: AttentionPlan, traffic, args) -> Check:
    """Largest difference, in bytes, between what was counted and its formula."""
    comm, nothing = plan.grid.comm, (0, 0)
    expected = {
        key: both
        for key, both in plan.predicted_traffic().items()
        if args.backward or key[0] == "forward"
    }
    off = [
        abs(a - b)
        for key in {*traffic, *expected}
        for a, b in zip(traffic.get(key, nothing), expected.get(key, nothing))
    ]
    return Check(float(comm.allreduce(max(off, default=0), op=MPI.MAX)), 0.0, comm.size)


def _repeat_check(plan: AttentionPlan, checked, timed) -> Check:
    """Number of results, over all ranks, that differ in any bit from the checked ones."""
    comm = plan.grid.comm
    names = ("out", "lse", "dq", "dk", "dv") if plan.deterministic else ("out", "lse")
    differ = sum(
        not np.array_equal(checked[name].view(np.uint8), timed[name].view(np.uint8))
        for name in names
        if name in timed
    )
    return Check(float(comm.allreduce(differ)), 0.0, comm.size)


def _result(
    args, plan: AttentionPlan, device, timings, traffic, checks, area, tensors
) -> Result | None:
    """Everything on rank 0."""
    comm, grid = plan.grid.comm, plan.grid
    seconds = {name: comm.gather(trials) for name, trials in timings.items()}
    measured = comm.gather(traffic)
    hosts = comm.gather(socket.gethostname())
    outputs = {}
    if args.save_outputs:
        for name in ("out", "lse", "dq", "dk", "dv")[: 5 if args.backward else 2]:
            parts = comm.gather(tensors[name])
            if comm.rank == 0:
                whole = np.empty((plan.seqlen, *parts[0].shape[1:]), parts[0].dtype)
                for rank, part in enumerate(parts):
                    whole[plan.distribution.tokens(rank)] = part
                outputs[name] = whole
    if comm.rank != 0:
        return None
    predicted = [plan.predicted_traffic(rank) for rank in range(comm.size)]
    keys = sorted({key for rank in measured for key in rank})
    return Result(
        config={
            "method": args.method,
            "rows": grid.rows,
            "cols": grid.cols,
            "heads": grid.heads,
            "order": grid.layout.order,
            **({"inner": plan.inner} if args.method == "double_ring" else {}),
            "mask": args.mask,
            "distribution": plan.distribution.name,
            "seqlen": plan.seqlen,
            "nheads": plan.nheads,
            "nheads_kv": plan.nheads_kv,
            "headdim": plan.headdim,
            "dtype": plan.dtype.name,
            "softmax_scale": plan.softmax_scale,
            "overlap": plan.overlap,
            "backward": args.backward,
            "trials": args.trials,
            "warmup": args.warmup,
            "check": args.check,
            "seed": args.seed,
            "threads": args.threads,
            "input": args.input,
            "device": device.name,
            "kernel": args.kernel,
            # How tensors got to MPI: from memory as they are, or copied to the host.
            "transfers": "host" if plan.staged_bytes else "direct",
        },
        timings={name: np.array(ranks).T for name, ranks in seconds.items()},
        traffic={
            f"{phase}/{name}": {
                kind + direction: np.array([rank.get((phase, name), [0, 0])[i] for rank in ranks])
                for kind, ranks in (("", measured), ("predicted_", predicted))
                for i, direction in enumerate(("sent", "received"))
            }
            for phase, name in keys
        },
        area=np.array(area),
        checks=checks,
        outputs=outputs,
        provenance=provenance(MPI.Get_library_version(), hosts, device.description),
    )


def _report(result: Result, plan: AttentionPlan) -> None:
    """Print the short table."""
    c = result.config
    print(
        f"{c['method']} on {c['rows']} x {c['cols']}"
        f"{' x ' + str(c['heads']) if c['heads'] > 1 else ''} ranks, {c['mask']} mask, "
        f"{c['distribution']} distribution, {c['dtype']}, {result.provenance['device']}\n"
        f"seqlen {c['seqlen']}, nheads {c['nheads']}, nheads_kv {c['nheads_kv']}, "
        f"headdim {c['headdim']}; {c['trials']} trials; "
        f"tile area max/mean {result.area.max() / result.area.mean():.3f}\n"
    )
    print("milliseconds        min    median       max   over trials and ranks")
    for name, seconds in result.timings.items():
        low, middle, high = (1e3 * f(seconds) for f in (np.min, np.median, np.max))
        print(f"{name:<17}{low:>8.2f}{middle:>10.2f}{high:>10.2f}")
    for phase in ("forward", "backward"):
        if f"{phase}/total" in result.timings:
            heads = plan.nheads // plan.grid.heads  # of those areas
            work = cost.flops(int(result.area.sum()), heads, plan.headdim, phase[0] == "b")
            slowest = np.median(result.timings[f"{phase}/total"].max(axis=1))
            print(f"{phase}: {work / slowest / 1e9:.1f} GFLOP/s by the slowest rank")
    if result.traffic:
        print("\nbytes of one rank       sent  predicted  received  predicted   (largest)")
        for name, x in result.traffic.items():
            columns = ("sent", "predicted_sent", "received", "predicted_received")
            print(f"{name:<17}" + "".join(f"{int(x[col].max()):>11}" for col in columns))
    print("\nchecked             error     bound      rows")
    for name, check in result.checks.items():
        verdict = "passed" if check.passed else "FAILED"
        print(f"{name:<15}{check.error:>10.2e}{check.bound:>10.2e}{check.rows:>10}   {verdict}")


if __name__ == "__main__":
    run(MPI.COMM_WORLD, "attention.py", main)
