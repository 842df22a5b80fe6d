r"""Distributed attention, on random tensors or those of a file: checked, then timed.

    mpiexec -n 4 python -m a2d_mpi attention --rows 2 --cols 2 --mask causal --backward
    mpiexec -n 4 python -m a2d_mpi attention data/minilm_l3_1536.h5 \
        --rows 2 --cols 2 --mask causal --backward --check full --output results/run.h5

Exit code 0: all checks passed.  1: a check failed.  2: bad input, or the output cannot be written.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.checks.measure import RESULTS, Measurement, open_device, origin_of, random_inputs
from a2d_mpi.cli.options import (
    CHECK_HELP,
    FAILED_CHECK,
    Parser,
    add_engine,
    add_options,
    aligned,
    checked_rows,
    log,
    path,
    progress,
    slices,
)
from a2d_mpi.cli.run import add_grid, open_grid, together
from a2d_mpi.comm.agreement import agree
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import flops
from a2d_mpi.masks.mask import Mask
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning.workload import Workload
from a2d_mpi.results.hdf5 import RESULT_SCHEMA, check_output, write_file
from a2d_mpi.results.inputs import InputInfo, inspect_input, read_shard
from a2d_mpi.results.origin import sha256

_SWAPPED = (
    "%s has %d tokens of %d heads, because tensors are (tokens, heads, headdim); write "
    "x.swapaxes(0, 1) if the heads come first"
)


def build(parser: Parser) -> Callable:
    """Add the options of this command, and return its body."""
    text = "HDF5 file with q, k, v and optionally dout, see data/README.md; default: random"
    parser.add_argument("input", type=path, nargs="?", help=text)

    group = parser.add_argument_group("problem")
    add_options(group, "mask")
    text = "use only the first tokens: 65536 or 64K; default: all of the file, or 1536 random ones"
    add_options(group, "seqlen", help=text)
    add_options(group, "dtype", "backward", "wire")

    group = add_grid(parser)
    add_options(group, "distribution", "overlap")
    text = (
        "slices of the heads, whose messages travel while others compute; forward and backward: "
        "4 or 2x4; default: chosen from the sizes"
    )
    group.add_argument("--slices", type=slices, metavar="F[xB]", help=text)

    group = parser.add_argument_group("measurement and checks")
    add_options(group, "trials", "warmup")
    add_options(group, "check", help=f"{CHECK_HELP}, none")
    add_options(group, "seed")

    group = parser.add_argument_group("output")
    add_options(group, "output")
    text = "also write out, lse and the gradients"
    group.add_argument("--save-outputs", action="store_true", help=text)
    text = "JSON file for a timeline of all ranks, for Perfetto: one more run, before the trials"
    group.add_argument("--trace", type=path, metavar="FILE", help=text)
    add_engine(parser)
    parser.apart = ("input",)  # nodes may have the file in different places
    return attention


def attention(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Check, time and report one plan; return the exit code."""
    info, config, mask = together(comm, lambda: _validated(args, comm.size))
    # Before a grid is chosen for the mask.
    agree(comm, None, {"an input file": bool(args.input), "dout in the input file": info.has_dout})
    if args.input and comm.rank == 0 and info.config.seqlen < info.config.nheads:
        log.warning(_SWAPPED, info.path, info.config.seqlen, info.config.nheads)
    if args.output:
        saved = RESULTS[: 5 if args.backward else 2] if args.save_outputs else ()
        nbytes = config.seqlen * sum(map(config.nbytes, saved)) + (1 << 20)
        together(comm, lambda: check_output(args.output, RESULT_SCHEMA, nbytes=nbytes), on=0)
    trace = None
    if args.trace:  # few runs are traced
        from a2d_mpi.checks.trace import Trace, check_trace

        together(comm, lambda: check_trace(args.trace), on=0)
        trace = Trace(comm, args.trace)
    device = open_device(comm, args.device)
    phases = {"backward": args.backward, "overlap": args.overlap}
    grid = open_grid(comm, args, Workload(**config.arguments, mask=mask, **phases))
    names = ("kernel", "transfers", "threads", "distribution", "slices")
    options = {name: x for name in names if (x := getattr(args, name)) is not None}
    options |= {**config.arguments, "overlap": args.overlap}
    plan = make_plan(args.method, grid, mask, **options)
    tensors = together(comm, lambda: _read(args, info, plan))
    digests = together(comm, lambda: _digests(args), on=0) if args.output else None
    origin = origin_of(comm, device) | (digests or {})
    checked = args.check != "none"
    if checked:
        _refuse_nan(comm, tensors)
    measured = Measurement(plan, tensors, args.backward, device, checked)
    # The check comes first, because the timed calls must repeat its results bit for bit.  It also
    # calls the plan on other data.
    for _ in range(max(args.warmup, checked)):
        measured.call()
    if checked:
        measured.check(checked_rows(args.check), args.seed)
    if trace:
        with trace.calls(plan, args.method):
            measured.call(dict(measured.tensors))  # the checked results stay
        together(comm, lambda: trace.write(origin), on=0)
    for _ in progress(range(args.trials), comm.rank, desc="trials"):
        measured.trial()
    named = {"mask": args.mask, "input": info.path}
    result = measured.result(args, named, origin)
    try:
        if args.save_outputs:
            result["outputs"] = measured.outputs()
        if args.output:
            together(comm, lambda: write_file(args.output, RESULT_SCHEMA, result), on=0)
    finally:  # print the results even if they cannot be written
        if comm.rank == 0:
            _report(result, measured)
    if comm.rank == 0 and args.output:
        print(f"written to {args.output}", flush=True)
    passed = comm.bcast(result.get("passed"))
    plan.free()
    grid.free()
    return 0 if passed else FAILED_CHECK


def _validated(args: argparse.Namespace, ranks: int) -> tuple[InputInfo, AttentionConfig, Mask]:
    """Check the options that no plan checks; return the input's info, the config and the mask."""
    if args.save_outputs and not args.output:
        raise ValueError("--save-outputs needs --output")
    if args.input:
        info = inspect_input(args.input)
    else:
        info = InputInfo("random", AttentionConfig(args.seqlen or 1536, 8, 64, 2), has_dout=False)
    tokens = info.config.seqlen
    if args.seqlen is None:
        args.seqlen = tokens
    if args.seqlen > tokens:
        raise ValueError(f"{args.input} has {tokens} tokens, but --seqlen is {args.seqlen}")
    wire = None if args.wire == "none" else args.wire
    lengths = {"seqlen": args.seqlen, "seqlen_kv": args.seqlen}
    config = replace(info.config, **lengths, dtype=args.dtype, wire=wire)
    config.check_room(ranks)
    return info, config, make_mask(args.mask, config.seqlen)


def _digests(args: argparse.Namespace) -> dict[str, object]:
    """Return the SHA-256 of the input, and of the files of --import."""
    found: dict[str, object] = {"input_sha256": sha256(args.input)} if args.input else {}
    if imported := getattr(args, "import"):
        found["import_sha256"] = [sha256(x) for x in imported]
    return found


def _read(args: argparse.Namespace, info: InputInfo, plan: AttentionPlan) -> dict[str, np.ndarray]:
    """Read this rank's shard of the inputs, or draw what no file has."""
    names = ["q", "k", "v", "dout"][: 3 + (args.backward and info.has_dout)] if args.input else []
    where = plan.distribution, plan.grid.comm.rank, plan.dtype
    read = {name: read_shard(info, name, *where) for name in names}
    return read | random_inputs(plan, args.backward, args.seed, read)


def _refuse_nan(comm: MPI.Intracomm, tensors: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError on all ranks if a number on any rank is NaN or infinite."""
    bad = {name: int(x.size - np.isfinite(x).sum()) for name, x in tensors.items()}
    wrong = [f"{name} has {n} elements that are NaN or infinite" for name, n in bad.items() if n]
    agree(comm, "; ".join(wrong) + ": nothing can be checked" if wrong else None)


def _report(result: Mapping[str, Any], measured: Measurement) -> None:
    """Print the short tables."""
    c, plan, area = result["config"], measured.plan, result["area"]
    ranks = " x ".join(str(c[x]) for x in ("rows", "cols", "heads") if x != "heads" or c[x] > 1)
    wire = f" ({c['wire']} on the wire)" * (c["wire"] != "none")
    drawn = ", random input" * (c["input"] == "random")
    values = f", headdim_v {c['headdim_v']}" * (c["headdim_v"] != c["headdim"])
    library = " ".join(result["origin"]["mpi_library"].splitlines()[0].split())
    names = Counter(result["origin"]["hostnames"])
    hosts = ", ".join(f"{n} ranks on {x}" for x, n in names.most_common(4))
    hosts += f" and {len(names) - 4} more hosts" * (len(names) > 4)
    print(
        f"{c['method']} on {ranks} ranks, {c['mask']} mask, {c['distribution']} distribution, "
        f"{c['dtype']}{wire}{drawn}, {result['origin']['device']}\n"
        f"seqlen {c['seqlen']}, nheads {c['nheads']}, nheads_kv {c['nheads_kv']}, "
        f"headdim {c['headdim']}{values}; {c['trials']} trial{'s' * (c['trials'] != 1)}; "
        f"tile area max/mean {area.max() / area.mean():.3f}\n"
        f"kernel {c['kernel']}, {c['threads']} thread{'s' * (c['threads'] != 1)} of each rank, "
        f"{library.split(',')[0]}, {hosts}\n"
    )
    rows = [["milliseconds", "min", "median", "max", "over trials and ranks"]]
    for phase, parts in result["timings"].items():
        for part, seconds in parts.items():
            numbers = (f"{1e3 * f(seconds):.2f}" for f in (np.min, np.median, np.max))
            rows.append([f"{phase}/{part}", *numbers, ""])
    print(aligned(rows))
    for phase, parts in result["timings"].items():
        heads = plan.nheads // plan.grid.heads  # heads of a context-parallel group
        backward = phase == "backward"
        work = flops(int(area.sum()), heads, plan.headdim, backward, plan.headdim_v)
        speed = work / np.median(parts["total"].max(axis=1)) / 1e9
        kernels = result["blocks"][phase].items()
        by = ", ".join(f"{x.sum()} blocks by {name}" for name, x in kernels)
        print(f"{phase}: {speed:.1f} GFLOP/s of all ranks, in the time of the slowest; {by}")
    if plan.kernel_why:
        log.info("no faster kernel: %s", plan.kernel_why)
    columns = ("sent", "predicted_sent", "received", "predicted_received")
    rows = [["bytes of one rank", "sent", "predicted", "received", "predicted", "(largest)"]]
    for phase, channels in result["traffic"].items():
        for name, x in channels.items():
            rows.append([f"{phase}/{name}", *(str(x[col].max()) for col in columns), ""])
    if len(rows) > 1:
        print(f"\n{aligned(rows)}")
    # "as given": the error against the tensors before rounding, with a narrow format on the wire.
    rows = [["checked", "error", "bound", "rows", "as given" * bool(wire), ""]]
    for name, x in measured.checks.items():
        given = "" if x.as_given is None else f"{x.as_given:.2e}"
        rows.append([name, f"{x.error:.2e}", f"{x.bound:.2e}", str(x.rows), given, x.verdict])
    print(f"\n{aligned(rows, left=(0, 5))}")
