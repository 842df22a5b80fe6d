"""The program of drivers/train.py llama: train a Llama of transformers, by all ranks together."""

from __future__ import annotations

import argparse
import math
import time
from copy import deepcopy

import numpy as np
import torch
from mpi4py import MPI
from torch.nn.functional import cross_entropy
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.benchmark import check_step
from a2d_mpi.experiments.cli import open_grid, together
from a2d_mpi.experiments.files import Check, attributes_of
from a2d_mpi.experiments.measure import open_device
from a2d_mpi.experiments.options import FAILED_CHECK, progress
from a2d_mpi.experiments.ranks import check_room
from a2d_mpi.experiments.train_gpt import agree_on_text, say_losses, write_training
from a2d_mpi.gpt.exchange import total
from a2d_mpi.gpt.text import VOCAB, Batch, Text
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning.workload import Workload
from a2d_mpi.torch import ContextParallel, GradientHooks


def train_llama(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Train; return the exit code: 1 if the check failed or the loss is no longer finite."""
    text, config = together(comm, lambda: _validated(args))
    agree_on_text(comm, text)
    what = f"{args.seqlen} tokens (--seqlen): matrices of the check in float64"
    check_room(comm, what, 8 * 4 * args.nheads * args.seqlen**2, 1)
    device = open_device(comm, args.device)
    where = "cpu" if device is HOST else f"cuda:{device.index}"
    if device is not HOST:
        torch.cuda.set_device(device.index)
    torch.set_num_threads(args.threads)
    sizes = {x: getattr(args, x) for x in ("seqlen", "dtype", "nheads", "nheads_kv")}
    sizes |= {"headdim": config.head_dim, "mask": Causal(), "backward": True}
    work = together(comm, lambda: Workload(**sizes))
    grid = open_grid(comm, args, work)
    losses, seconds, checks = [], [], {}
    model = _new_model(config, args).to(where)
    names = ("method", "seqlen", "dtype", "threads", "kernel", "transfers")
    cp = ContextParallel(grid, model, **{x: getattr(args, x) for x in names})
    hooks = GradientHooks(model, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    shown = progress(range(args.steps), comm.rank, desc="steps")
    for step in shown:
        batch, start = text.batch(args.seqlen, args.seed, step), time.perf_counter()
        own = cp.shard(batch.tokens, cu_seqlens=batch.cu_seqlens if args.separator else None)
        model.zero_grad()
        term = cp.loss(model(**own.inputs).logits, own)
        term.backward()
        hooks.finish()
        loss = total(comm, term.item())
        if step == 0:
            own = _check(model, config, args, batch, loss) if comm.rank == 0 else None
            checks = comm.bcast(own)
        optimizer.step()
        losses.append(loss)
        seconds.append(time.perf_counter() - start)
        shown.set_postfix(loss=f"{loss:.3f}")
        if not math.isfinite(loss):
            break
    (kernel,) = {x.kernel for x in cp.plans.values()}
    if comm.rank == 0:
        for name, x in checks.items():
            print(f"first step, {name}: error {x.error:.1e} against one process in float64 "
                  f"({x.verdict}, bound {x.bound:.0e})")  # fmt: skip
        parameters = sum(x.numel() for x in model.parameters())
        say_losses(parameters, losses, np.median(seconds), text, args.seqlen)
    if args.output:
        options = {x: str(y) for x, y in vars(args).items() if x not in ("output", "command")}
        others = {**grid.layout.attributes, "kernel": kernel, "torch": torch.__version__}
        write_training(comm, args, device, text, {
            "loss": np.array(losses),
            "seconds": {"total": np.array(seconds)},
            "config": options | others,
            "held_out": {},
            **attributes_of(checks),
        })  # fmt: skip
    hooks.free()
    cp.free()
    grid.free()
    passed = all(x.passed for x in checks.values()) and math.isfinite(losses[-1])
    return 0 if passed else FAILED_CHECK


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


def _check(
    model: torch.nn.Module,
    config: LlamaConfig,
    args: argparse.Namespace,
    batch: Batch,
    loss: float,
) -> dict[str, Check]:
    """Check the first loss and gradients against one process in float64, by relative errors."""
    exact = _new_model(config, args).double()
    ids, positions, targets = (
        torch.from_numpy(x)[None] for x in (batch.tokens, batch.positions, batch.targets)
    )
    logits = exact(input_ids=ids, position_ids=positions).logits[0]  # (seqlen, vocab)
    wanted = cross_entropy(logits[:-1], targets[0, :-1], ignore_index=-1)
    wanted.backward()
    gradient, exact_gradient = (
        np.concatenate([p.grad.double().cpu().numpy().ravel() for p in x.parameters()])
        for x in (model, exact)
    )
    both = (loss, gradient), (wanted.item(), exact_gradient)
    return check_step(*both, args.dtype, args.seqlen)
