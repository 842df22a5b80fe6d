"""The programs of `drivers/bench.py` train and decode: steps of models of transformers.

The files::

    /settings      attributes: options that all runs share
    /runs/<name>   attributes: of train plan, sizes, parts; of decode ranks, context, sent_bytes
        seconds    of train (trials, ranks, parts), see `PARTS`; of decode (trials,), of a token
        sent       of train (ranks,), bytes of a step's attention
        alone      of decode (trials,), seconds of a token by one process
        origin     attributes: provenance
        checks     for each check the attributes error, bound, rows and passed
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch
from mpi4py import MPI

from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.sizes import squarest
from a2d_mpi.devices.protocol import Device
from a2d_mpi.experiments import bench_parts, results
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.files import Check
from a2d_mpi.experiments.measure import open_device, origin_of
from a2d_mpi.experiments.models import checkpoint_of, open_model
from a2d_mpi.experiments.options import progress
from a2d_mpi.experiments.ranks import check_room
from a2d_mpi.experiments.sweep import plans_for
from a2d_mpi.experiments.text import Text
from a2d_mpi.experiments.train import PARTS, Trainer, check_rooms
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning.planner import duration
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Choice
from a2d_mpi.torch import ContextParallel
from a2d_mpi.torch.decoding import GATHERED

# Errors of logits, relative to the largest logit.  `generate` returns them in float32.
BOUNDS = {"float32": 1e-4, "float64": 1e-7}
WARMUP = 2  # tokens that are not timed
IDLE = {}, (), {}  # run of a rank that has no part in it
DRAWN = 1 << 16  # random tokens; longer sequences repeat them
# Options of drivers/train.py.  A rate of 0 keeps the weights, so that each step repeats the first.
FIXED = {"rate": 0, "accumulate": 1, "warmup": 1, "steps": 1, "clip": 1, "check": "first",
         "folder": None, "output": None, "separator": b"", "validate": 0}  # fmt: skip
# Options that may differ when a file is resumed.
FREE = {"command", "output", "resume", "profile", "plans", "seqlens", "contexts", "ranks",
        "import", "quiet"}  # fmt: skip


def bench_train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure training steps by the plans that a file lacks; return the exit code."""
    device, blocks = open_device(comm, args.device), []
    done, write = _file(comm, args, results.STEPS_SCHEMA)

    def plans(trainer: Trainer) -> list[Choice]:
        machine = read_machine(args.profile) if args.profile else None
        work = replace(trainer.workload(), mask=Causal(), mask_text="causal", backward=True)
        found = plans_for(work, args.plans, comm.size, machine)
        return [x for x in found if x.name not in done]

    for seqlen in args.seqlens:
        trainer = together(comm, lambda x=seqlen: _trainer(args, device, x))
        check_rooms(comm, trainer)
        blocks.append(comm.bcast(together(comm, lambda x=trainer: plans(x), on=0)))
    runs = (x for block in blocks if block for x in _training_runs(comm, args, device, block))
    return bench_parts.measured(comm, ("plan", "tokens", "step", *PARTS, "error"), runs, write)


def _file(comm: MPI.Intracomm, args: argparse.Namespace, schema: tuple) -> tuple[set, Callable]:
    """Return the names of the runs in the output that passed, and what writes more runs."""
    torch.set_num_threads(args.threads)
    settings = {x: str(y) for x, y in vars(args).items() if x not in FREE}
    given, tree = (args.output, schema, args.resume, settings), {"settings": settings}
    earlier = comm.bcast(together(comm, lambda: results.done_before(*given), on=0))
    done = {name for name, passed in earlier.items() if passed}  # others are made again
    args.model = comm.bcast(together(comm, lambda: checkpoint_of(args.model), on=0))
    return done, lambda x: results.extend_file(args.output, schema, tree | {"runs": x})


def _trainer(
    args: argparse.Namespace, device: Device, seqlen: int, method: str = "attention2d"
) -> Trainer:
    """Make a training whose steps all have the same random tokens.  Local."""
    wide = args.dtype.replace("bfloat16", "float32")  # autocast computes in bfloat16
    model, tokenizer = open_model(args.model, wide, args.seed)
    text = Text([_tokens(model, args.seed, min(seqlen, DRAWN)).numpy()], separated=False)
    text.batch = lambda *_: text.at(0, seqlen)
    given = argparse.Namespace(**vars(args) | FIXED, seqlen=seqlen, method=method)
    return Trainer(given, device, model.train(), tokenizer, text, None, "")


def _tokens(model: torch.nn.Module, seed: int, *shape: int) -> torch.Tensor:
    rng, most = np.random.default_rng([seed, 1]), model.get_input_embeddings().num_embeddings
    return torch.from_numpy(rng.integers(most, size=shape))


def _training_runs(
    comm: MPI.Intracomm, args: argparse.Namespace, device: Device, block: list[Choice]
) -> Iterator[bench_parts.Run]:
    """Check a first step by each plan, time others in turn, and yield the runs."""
    trainers, grids = {}, {c: ProcessGrid.from_layout(comm, c.layout) for c in block}
    for c, grid in grids.items():
        trainers[c] = _trainer(args, device, c.work.seqlen, c.method)
        trainers[c].begin(comm, grid)
        trainers[c].step()  # compared with one process
    for c in progress([*bench_parts.turns(block, args.trials)], comm.rank, desc="steps"):
        comm.Barrier()
        trainers[c].step()
    for c, x in trainers.items():
        checks = x.checks | {"repeat": Check(len(set(x.state.losses)) - 1.0, 0.0, comm.size)}
        own = x.state.seconds[1:], sum(x.sent.values())
        seconds, sent = map(np.array, zip(*(comm.gather(own) or [own])))
        run = {"origin": origin_of(comm, device), "parts": list(PARTS), **c.attributes}
        run |= {"seconds": seconds.swapaxes(0, 1), "sent": sent}
        step, *parts = results.step_seconds(run).values()
        row = [f"{c.method} {c.layout.shape}" + " (picked)" * c.picked, f"{c.work.seqlen}"]
        row += [duration(step), *(f"{duration(y)} ({100 * y / step:.0f} %)" for y in parts)]
        yield c.name, run, [*row, f"{max(y.error for y in checks.values()):.1e}"], checks
        x.free()
        grids[c].free()


def bench_decode(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure the decoded tokens that a file lacks, by ranks and context; return the exit code."""
    numbers = args.ranks or [1 << i for i in range(comm.size.bit_length())]
    if max(numbers) > comm.size:
        raise CollectiveError(f"--ranks must be at most {comm.size}, got {max(numbers)}")
    done, write = _file(comm, args, results.DECODING_SCHEMA)
    model, _ = together(comm, lambda: open_model(args.model, args.dtype, args.seed))
    config, n = model.config.get_text_config(), args.requests * max(args.contexts)
    row = 24 * config.num_hidden_layers * config.hidden_size + config.vocab_size
    check_room(comm, f"{n} tokens (--requests, --contexts) of one process", 8 * n * row, 1)

    def runs() -> Iterator[bench_parts.Run]:
        for ranks, context in product(numbers, args.contexts):
            if (name := f"{ranks}-{context}") not in done:
                part = comm.Split(int(comm.rank < ranks))
                yield name, *(_decoded(part, args, model, context) if comm.rank < ranks else IDLE)
                part.Free()

    columns = ("ranks", "context", "token", "alone", "tokens/s", "sent bytes", "error")
    return bench_parts.measured(comm, columns, runs(), write)


def _decoded(
    comm: MPI.Intracomm, args: argparse.Namespace, model: torch.nn.Module, context: int
) -> tuple[dict, Sequence[str], dict[str, Check]]:
    """Generate tokens by these ranks and by one process; what rank 0 returns counts."""
    ids, n = _tokens(model, args.seed, args.requests, context), args.trials + WARMUP
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": n, "min_new_tokens": n}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    options["attention_mask"] = mask = torch.ones_like(ids)
    grid, times, of_one = ProcessGrid(comm, *squarest(comm.size)), [], []
    cp = ContextParallel(grid, deepcopy(model), seqlen=context, threads=args.threads)
    cache = cp.prefill(ids, mask)
    cp.decoding_traffic.clear()
    found = cp.generate(ids, past_key_values=cache, streamer=_clock(times), **options)
    sent, formula = sum(x for x, _ in cp.decoding_traffic.bytes.values()), _sent(cp, args.requests)
    checks = {"traffic": Check(float(comm.allreduce(abs(sent - n * formula))), 0.0, comm.size)}
    run = {"origin": origin_of(comm), "ranks": comm.size, "context": context}

    def alone() -> None:
        """Compare with one process in float64, and time one process."""
        wide, tokens = open_model(args.model, "float64", args.seed)[0], found.sequences[:, :-1]
        with torch.no_grad():
            exact = wide(tokens, logits_to_keep=n).logits.flatten(0, 1)  # (B n, V)
        logits = torch.stack(found.logits, 1).flatten(0, 1)
        checks["logits"] = bench_parts.within(BOUNDS[args.dtype], logits.numpy(), exact.numpy())
        model.generate(ids, streamer=_clock(of_one), **options)

    together(comm, alone, on=0)
    grid.free()
    if comm.rank != 0:
        return IDLE
    seconds, by_one = (np.diff(x)[WARMUP:] for x in (times, of_one))
    token, one = (float(np.median(x)) for x in (seconds, by_one))
    row = f"{comm.size}", f"{context}", duration(token), duration(one)
    row = *row, f"{args.requests / token:.3g}", f"{formula}", f"{checks['logits'].error:.1e}"
    return run | {"sent_bytes": formula, "seconds": seconds, "alone": by_one}, row, checks


def _clock(times: list[float]) -> SimpleNamespace:
    """Return a streamer of `generate` that notes when tokens come."""
    return SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)


def _sent(cp: ContextParallel, rows: int) -> int:
    """Return the bytes that this rank sends in a step with any context.

    P ranks merge out and lse of rows of H heads of D elements, in L layers.  In two exchanges a
    rank sends L (P - 1) ceil(rows H / P) (2 D + 1) elements, and in one exchange
    L (P - 1) rows H (D + 1).  Rank 0 sends two integers for each row.
    """
    ranks, nbytes = cp.grid.comm.size, 16 * rows * (cp.grid.comm.rank == 0)
    near = len(set(cp.grid.layout.nodes or range(ranks))) == 1
    for kind in cp.layers.values():
        heads, size = rows * kind.nheads, max(4, np.dtype(kind.dtype).itemsize)
        whole, share = heads * (kind.headdim_v + 1), -(-heads // ranks)
        in_one = ranks == 2 or (near and ranks * whole * size <= GATHERED)
        nbytes += size * (whole if in_one else share * (2 * kind.headdim_v + 1))
    return (ranks - 1) * nbytes
