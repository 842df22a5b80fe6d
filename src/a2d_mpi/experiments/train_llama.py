"""The program of drivers/train.py llama: train a Llama of transformers, by all ranks together."""

from __future__ import annotations

import argparse
import math
import time
from copy import deepcopy

import numpy as np
import torch
from mpi4py import MPI
from threadpoolctl import threadpool_limits
from torch.nn.functional import cross_entropy
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.bench_train import BOUNDS
from a2d_mpi.experiments.cli import check_room, together
from a2d_mpi.experiments.grids import open_grid
from a2d_mpi.experiments.hdf5 import write
from a2d_mpi.experiments.measure import grid_config, open_device, origin_of
from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.experiments.results import TRAINING_SCHEMA, Check
from a2d_mpi.experiments.streams import progress
from a2d_mpi.gpt.gradients import total
from a2d_mpi.gpt.text import VOCAB, Batch, Text
from a2d_mpi.masks.documents import Documents
from a2d_mpi.masks.mask import Causal
from a2d_mpi.schedules.problem import Workload
from a2d_mpi.torch import GradientHooks, use_in_transformers


def train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Train; return the exit code: 1 if the check failed or the loss is no longer finite."""
    text, config = together(comm, lambda: _validated(args))
    agree(comm, None, {"the text": f"a file with SHA-256 {text.sha256}"})  # nodes may differ
    if not args.unchecked:
        nbytes = 8 * 4 * args.nheads * args.seqlen**2
        what = f"{args.seqlen} tokens (--seqlen): matrices of the check in float64 (--unchecked)"
        check_room(comm, what, nbytes, 1)
    device = open_device(comm, args.device)
    where = "cpu" if device is HOST else f"cuda:{device.index}"
    if device is not HOST:
        torch.cuda.set_device(device.index)
    torch.set_num_threads(args.threads)
    sizes = {"seqlen": args.seqlen, "dtype": args.dtype, "nheads": args.nheads,
             "nheads_kv": args.nheads_kv, "headdim": config.head_dim}  # fmt: skip
    work = together(comm, lambda: Workload(**sizes, mask=Causal(), backward=True))
    grid = open_grid(comm, args, work)
    losses, seconds, checks, plan = [], [], {}, None
    with threadpool_limits(args.threads):
        model = _new_model(config, args).to(where)
        hooks = GradientHooks(model, comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
        shown = progress(range(args.steps), comm.rank, desc="steps")
        for step in shown:
            batch, start = text.batch(args.seqlen, args.seed, step), time.perf_counter()
            mask = Documents(batch.cu_seqlens, causal=True) if args.separator else Causal()
            if plan is None or plan.mask != mask:
                plan = _next_plan(plan, grid, mask, args, sizes)
                model.set_attn_implementation(use_in_transformers(plan))
            loss = total(comm, step_loss(model, batch, plan.tokens, hooks))
            if step == 0 and not args.unchecked:
                own = _check(model, config, args, batch, loss) if comm.rank == 0 else None
                checks = comm.bcast(own)
            optimizer.step()
            losses.append(loss)
            seconds.append(time.perf_counter() - start)
            shown.set_postfix(loss=f"{loss:.3f}")
            if not math.isfinite(loss):
                break
    origin = origin_of(comm, device)
    if comm.rank == 0:
        _report(args, model, text, losses, seconds, checks)
    if args.output:
        settings = {**grid_config(grid), "method": args.method, "kernel": plan.kernel,
                    "torch": torch.__version__, **_options(args)}  # fmt: skip
        texts = {"name": args.text.name, "sha256": text.sha256, **text.sizes()}
        tree = {
            **origin,
            "loss": np.array(losses),
            "seconds": {"total": np.array(seconds)},
            "config": settings,
            "text": texts,
            "held_out": {},
            "checks": {name: x.attributes for name, x in checks.items()},
        }
        together(comm, lambda: write(args.output, TRAINING_SCHEMA, tree), on=0)
    hooks.free()
    plan.free()
    grid.free()
    passed = all(x.passed for x in checks.values()) and math.isfinite(losses[-1])
    return 0 if passed else FAILED_CHECK


def step_loss(
    model: torch.nn.Module,
    batch: Batch,
    tokens: np.ndarray,
    hooks: GradientHooks | None = None,
) -> float:
    """Compute these tokens' term of a batch's mean loss, and set the model's gradients.

    `hooks` sum the gradients over ranks.  Without hooks nothing communicates.
    """
    device, count = model.device, max(1, int((batch.targets >= 0).sum()))
    ids, positions, targets = (
        torch.from_numpy(x[tokens]).to(device)
        for x in (batch.tokens, batch.positions, batch.targets)
    )
    model.zero_grad()
    logits = model(input_ids=ids[None], position_ids=positions[None]).logits[0]  # (n, vocab)
    loss = cross_entropy(logits, targets, ignore_index=-1, reduction="sum") / count
    loss.backward()
    if hooks is not None:
        hooks.finish()
    return loss.item()


def _validated(args: argparse.Namespace) -> tuple[Text, LlamaConfig]:
    """Return the text and the sizes of the model; refuse heads that do not divide the width."""
    if args.width % args.nheads or args.width // args.nheads % 2:
        raise ValueError(
            f"--width must be an even multiple of --nheads, got {args.width} and {args.nheads}"
        )
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.width,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.nheads,
        num_key_value_heads=args.nheads_kv,
        head_dim=args.width // args.nheads,
        max_position_embeddings=args.seqlen,
        use_cache=False,
    )
    return Text(args.text, args.separator), config


def _new_model(config: LlamaConfig, args: argparse.Namespace) -> LlamaForCausalLM:
    """Make the model with the weights of the seed, and with a copy of the config.

    Each model needs a copy, because its config names its attention.
    """
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(deepcopy(config)).to(getattr(torch, args.dtype)).train()


def _next_plan(
    plan: AttentionPlan | None,
    grid: ProcessGrid,
    mask: Documents | Causal,
    args: argparse.Namespace,
    sizes: dict[str, object],
) -> AttentionPlan:
    """Make the plan of a mask, and free the plan before it."""
    if plan is not None:
        plan.free()
    options = {x: getattr(args, x) for x in ("threads", "kernel", "transfers")}
    return make_plan(args.method, grid, mask, **sizes, **options)


def _check(
    model: torch.nn.Module,
    config: LlamaConfig,
    args: argparse.Namespace,
    batch: Batch,
    loss: float,
) -> dict[str, Check]:
    """Check the first loss and gradients against one process in float64, by relative errors."""
    exact = _new_model(config, args).double()
    wanted = step_loss(exact, batch, np.arange(args.seqlen))
    off = norm = 0.0
    for x, y in zip(model.parameters(), exact.parameters()):
        off += float((x.grad.double().cpu() - y.grad).square().sum())
        norm += float(y.grad.square().sum())
    errors = {"loss": abs(loss / wanted - 1), "gradients": math.sqrt(off / norm)}
    return {x: Check(error, BOUNDS[args.dtype], args.seqlen) for x, error in errors.items()}


def _options(args: argparse.Namespace) -> dict[str, object]:
    """Return the options of a run that result files have as attributes."""
    names = ("seqlen", "layers", "width", "mlp", "nheads", "nheads_kv", "dtype", "rate", "seed",
             "threads", "device")  # fmt: skip
    return {x: getattr(args, x) for x in names} | {"separator": str(args.separator)}


def _report(
    args: argparse.Namespace,
    model: torch.nn.Module,
    text: Text,
    losses: list[float],
    seconds: list[float],
    checks: dict[str, Check],
) -> None:
    """Print the short table."""
    for name, x in checks.items():
        print(f"first step, {name}: error {x.error:.1e} against one process in float64 "
              f"({x.verdict}, bound {x.bound:.0e})")  # fmt: skip
    parameters = sum(x.numel() for x in model.parameters())
    last = losses[-20:]
    print(f"{parameters} parameters, {len(losses)} steps of {args.seqlen} tokens; "
          f"{args.seqlen / np.median(seconds):.0f} tokens/s\n"
          f"loss {losses[0]:.4f} at first, {np.mean(last):.4f} in the last {len(last)} steps; "
          f"unigram entropy of the text {text.entropy():.4f} nats")  # fmt: skip
