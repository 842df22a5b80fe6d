"""The program of drivers/generate.py: text of a model of transformers, by all ranks together."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from mpi4py import MPI
from transformers import TextStreamer

from a2d_mpi.checks.measure import open_device, origin_of
from a2d_mpi.cli.models import Tokenizer, checkpoint_of, open_model, workload_of
from a2d_mpi.cli.run import open_grid, together
from a2d_mpi.cli.survivors import check_survive, surviving
from a2d_mpi.cli.user_files import texts_of
from a2d_mpi.comm.agreement import agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.devices.host import HOST
from a2d_mpi.results.hdf5 import GENERATION_SCHEMA as SCHEMA
from a2d_mpi.results.hdf5 import check_output, write_file
from a2d_mpi.torch import ContextParallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def generate(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Answer the prompts one after the other; return the exit code."""
    check_survive(comm, args.survive)
    device = open_device(comm, args.device)
    torch.set_num_threads(args.threads)
    together(comm, lambda: check_output(args.output, SCHEMA), on=0)
    name = comm.bcast(together(comm, lambda: checkpoint_of(args.model), on=0))
    # Every rank reads all weights, each from its own disk or from a shared one.
    session = together(comm, lambda: Session(args, *open_model(name, seed=args.seed)))
    if device is not HOST:
        torch.cuda.set_device(device.index)
        session.model.to(f"cuda:{device.index}")
    wrong = f"--room must be tokens for each of the {comm.size} ranks, got {args.room}"
    agree(comm, wrong if args.room and len(args.room) != comm.size else None)
    longest = max(map(len, session.prompts))
    sizes = max(comm.size, longest), longest, str(session.model.dtype).removeprefix("torch.")
    grid = open_grid(comm, args, workload_of(session.model, *sizes, backward=False))
    return surviving("generate.py", grid, session.work, args.survive, args.method) or 0


class Session:
    """The answers to the prompts, on all ranks.

    Parameters
    ----------
    args : Namespace
        Options of drivers/generate.py.
    model : PreTrainedModel
    tokenizer : Tokenizer

    Attributes
    ----------
    args, model
        As above.
    prompts : list of list of int
        Tokens of each prompt.
    number : int
        Number of the prompt that is answered now.
    answer : list of int
        Its new tokens that this rank knows to be chosen.
    """

    def __init__(
        self, args: argparse.Namespace, model: PreTrainedModel, tokenizer: Tokenizer
    ) -> None:
        self.args, self.model = args, model
        self.prompts = [tokenizer.encode(x) for x in texts_of(args)]
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        for x in self.prompts:
            if not x:
                raise ValueError("a prompt has no tokens")
            if most and len(x) + args.tokens - 1 > most:  # the last token gets no position
                raise ValueError(
                    f"{len(x)} tokens and {args.tokens} new ones are too many for the model, "
                    f"which has {most} positions"
                )
        self.number, self.answer, self._measured = 0, [], {}
        self._printer = _Printer(tokenizer)

    def work(self, grid: ProcessGrid, comm: MPI.Intracomm) -> int:
        """Answer what is not answered yet; also on a smaller grid after a loss.  Collective."""
        known = comm.allgather((self.number, self.answer))  # some ranks may be a token ahead
        self.number, self.answer = max(known, key=lambda x: (x[0], len(x[1])))
        args = self.args
        room = args.room and [args.room[x] for x in grid.failures.numbers]
        # The tokens of a training sequence, of which there is none.
        sizes = {"seqlen": max(comm.size, *map(len, self.prompts))}
        options = {x: getattr(args, x) for x in ("method", "kernel", "transfers", "threads")}
        cp = ContextParallel(grid, self.model, **sizes, **options)
        try:
            while self.number < len(self.prompts):
                self._answer(cp, comm, room)
                self.number, self.answer = self.number + 1, []
        finally:
            cp.free()
        options = {x: y if isinstance(y, (int, float)) else str(y) for x, y in vars(args).items()}
        tree = origin_of(comm) | {"config": options | grid.layout.attributes}
        if args.output:
            tree["prompts"] = self._measured
            together(comm, lambda: write_file(args.output, SCHEMA, tree), on=0)
        return 0

    def _answer(self, cp: ContextParallel, comm: MPI.Intracomm, room: list[int] | None) -> None:
        """Answer one prompt, or go on with the answer."""
        args, model, printer, first = self.args, self.model, self._printer, comm.rank == 0
        prompt = self.prompts[self.number]
        ids = torch.tensor([prompt + self.answer])
        # Only compares decoded steps with one process, the first time: nothing is computed.
        cache, sent = cp.prefill(ids[:, :1], room=room), _bytes_sent(cp)
        torch.manual_seed(args.seed)
        chances = torch.ones(1, len(model.get_output_embeddings().weight), device=model.device)
        for _ in self.answer:  # rank 0 has drawn so often, and each time as many random numbers
            chances.multinomial(1)
        given = {"do_sample": False}
        if args.temperature:
            given = {"do_sample": True, "temperature": args.temperature}
        try:
            if first:
                header = f"--- prompt {self.number}" if len(self.prompts) > 1 else ""
                printer.go_on(self.number, self.answer, header)
            found = cp.generate(
                ids,
                torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=args.tokens - len(self.answer),
                streamer=printer,  # which only rank 0 calls
                **given,
            )
        finally:
            known = cache.ids[:1, len(prompt) :].ravel().tolist()  # not of a cache without rows
            self.answer = max(self.answer, known, key=len)
        kept = np.array(comm.allgather((cache.nbytes, _bytes_sent(cp) - sent)))
        if first:
            new, seconds = found.shape[1] - ids.shape[1], np.diff(printer.times)
            self._measured[f"{self.number}"] = {
                "tokens": ids.shape[1], "new_tokens": new, "prefill_seconds": float(seconds[0]),
                "tokens_per_second": float((new - 1) / seconds[1:].sum()) if new > 1 else 0.0,
                "token_seconds": seconds[1:], "cache": kept[:, 0], "sent": kept[:, 1] // new,
            }  # fmt: skip
            _report(printer.times, ids.shape[1], new, *kept.T)


class _Printer(TextStreamer):
    """Prints tokens as they come.

    Attributes
    ----------
    times : list of float
        When the prompt and each token came, in seconds.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._number = -1  # of the prompt

    def go_on(self, number: int, known: list[int], header: str) -> None:
        """Begin a prompt, or go on after some tokens.

        If the rank that printed them has died, this one prints them again: the launcher may show
        the output of two ranks in any order.
        """
        if number != self._number:
            self._number, self._taken, self._ended = number, [], False
            if header:
                print(header, flush=True)
        for x in known[len(self._taken) :]:
            super().put(torch.tensor([x]))
            self._taken.append(x)
        self._again, self.times = len(self._taken) - len(known), []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and then a token."""
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            return
        if self._again:  # this rank has printed it before a loss
            self._again -= 1
            return
        self._taken.append(int(value))
        super().put(value)

    def end(self) -> None:
        """Print the rest."""
        if not self._ended:
            super().end()
            self._ended = True


def _bytes_sent(cp: ContextParallel) -> int:
    """Return the bytes that this rank has sent in steps."""
    return sum(sent for sent, _ in cp.decoding_traffic.bytes.values())


def _report(times: list[float], prompt: int, new: int, kept: np.ndarray, sent: np.ndarray) -> None:
    """Print the rates of rank 0, and the bytes of the ranks."""
    first, last = times[1] - times[0], times[-1] - times[1]
    rate = f", then {(new - 1) / last:.1f} tokens/s" if new > 1 else ""
    print(
        f"\n{prompt} tokens of the prompt and the first new one in {first:.2f} s{rate} ({new} in "
        f"all); {kept.max()} bytes of cache and {sent.max() // new} bytes sent for a token, on "
        f"the rank with the most of {len(kept)}",
        flush=True,
    )
