"""The part of drivers/generate.py that generates text with a model of transformers."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TextStreamer
from transformers.utils.logging import disable_progress_bar

from a2d_mpi.comm.agreement import agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.cli import grid_shape, together
from a2d_mpi.experiments.measure import open_device
from a2d_mpi.experiments.options import progress
from a2d_mpi.experiments.user_files import texts_of
from a2d_mpi.torch import ContextParallel

BYTES = 256  # the vocabulary of a model without a tokenizer


def generate_text(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Answer the prompts one after the other; return the exit code."""
    for name in ("ffn_ranks", "micro_batches", "survive"):
        unused = f"--{name.replace('_', '-')} is for checkpoints of train.py gpt"
        agree(comm, unused if getattr(args, name) else None)
    device = open_device(comm, args.device)
    torch.set_num_threads(args.threads)
    # Every rank reads all weights, each from its own disk or from a shared one.
    model, tokenizer, prompts = together(comm, lambda: _loaded(args))
    if device is not HOST:
        torch.cuda.set_device(device.index)
        model.to(f"cuda:{device.index}")
    shape = grid_shape(comm.size, args.rows, args.cols, args.head_ranks)
    grid = ProcessGrid(comm, *shape, args.head_ranks)
    # The tokens of a training sequence, of which there is none.
    sizes = {"seqlen": max(comm.size, *(x.shape[1] for x in prompts))}
    options = {x: getattr(args, x) for x in ("method", "kernel", "transfers", "threads")}
    cp = ContextParallel(grid, model, **sizes, **options)
    cp.prefill(prompts[0][:, :1])  # only compares decoded steps with one process
    sampled = {"do_sample": True, "temperature": args.temperature} if args.temperature else {}
    for number, ids in enumerate(prompts):
        if comm.rank == 0 and len(prompts) > 1:
            print(f"--- prompt {number}", flush=True)
        torch.manual_seed(args.seed)
        sent = _bytes_sent(cp)
        with ExitStack() as stack:
            # On other ranks nobody calls it.
            printer = _Printer(tokenizer, cp, stack, comm.rank)
            found = cp.generate(
                ids,
                torch.ones_like(ids),
                room=args.room,
                max_new_tokens=args.tokens,
                streamer=printer,
                return_dict_in_generate=True,
                **({"do_sample": False} | sampled),
            )
        cache = found["cache" if "cache" in found else "past_key_values"]
        kept = comm.allgather((cache.nbytes, _bytes_sent(cp) - sent))
        if comm.rank == 0:
            _report(printer.times, ids.shape[1], *np.array(kept).T)
    cp.free()
    grid.free()
    return 0


class _Printer(TextStreamer):
    """Prints tokens as they come, and shows the layers of the prefill until the first one comes.

    Attributes
    ----------
    times : list of float
        When the prompt and each token came, in seconds.
    """

    def __init__(self, tokenizer: Any, cp: ContextParallel, stack: ExitStack, rank: int) -> None:
        super().__init__(tokenizer, skip_prompt=True)
        bar = progress(None, rank, total=len(cp.layers), desc="prefill", unit="layer")
        self.times, self._bar = [], stack.enter_context(bar)
        for layer in cp.layers:
            handle = layer.register_forward_hook(lambda *_: self._advance(bar))
            stack.callback(handle.remove)

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and then a token."""
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self._bar.close()
        super().put(value)

    def _advance(self, bar: tqdm) -> None:
        bar.update(bar.n < bar.total)


class _Bytes:
    """The tokenizer of models whose tokens are bytes."""

    def decode(self, tokens: Any, **_: Any) -> str:
        return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


def _loaded(args: argparse.Namespace) -> tuple[PreTrainedModel, Any, list[torch.Tensor]]:
    """Return model, tokenizer and the tokens of each prompt, (1, n)."""
    texts, folder = texts_of(args), args.checkpoint
    disable_progress_bar()  # one for each rank
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    if any((folder / x).exists() for x in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        prompts = [tokenizer(x.decode(errors="replace"))["input_ids"] for x in texts]
    else:
        tokenizer, prompts = _Bytes(), [[*x] for x in texts]
        vocabulary = model.get_input_embeddings().num_embeddings
        if vocabulary != BYTES:
            raise ValueError(
                f"{folder} has no tokenizer, so tokens are bytes, and the model must have a "
                f"vocabulary of {BYTES}, got {vocabulary}"
            )
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for x in prompts:
        if not x:
            raise ValueError("a prompt has no tokens")
        if most and len(x) + args.tokens > most:
            raise ValueError(
                f"{len(x)} tokens and {args.tokens} new ones are too many for the model, "
                f"which has {most} positions"
            )
    return model, tokenizer, [torch.tensor([x]) for x in prompts]


def _bytes_sent(cp: ContextParallel) -> int:
    """Return the bytes that this rank has sent in steps."""
    return sum(sent for sent, _ in cp._generator.steps.traffic.bytes.values())


def _report(times: list[float], prompt: int, kept: np.ndarray, sent: np.ndarray) -> None:
    """Print the rates of rank 0, and the bytes of the ranks."""
    first, last, new = times[1] - times[0], times[-1] - times[1], len(times) - 1
    rate = f", then {(new - 1) / last:.1f} tokens/s" if new > 1 else ""
    print(
        f"\n{prompt} tokens of the prompt and the first new one in {first:.2f} s{rate} ({new} in "
        f"all); {kept.max()} bytes of cache and {sent.max() // new} bytes sent for a token, on "
        f"the rank with the most of {len(kept)}",
        flush=True,
    )
