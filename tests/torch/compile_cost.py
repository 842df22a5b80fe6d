"""What checkpointing and compiling cost: seconds and memory of a training step.

    mpiexec -n 4 python tests/torch/compile_cost.py [TOKENS [TRIALS [BACKEND [NAME ...]]]]

A Llama of 2 layers under `ContextParallel`: all kept, all computed again, all but attention
computed again, and compiled (by "inductor", or another backend; "none": not compiled), in turn, in
one run.  NAME: only these ways.  Medians of the slowest rank.  Memory: the most that a rank's
process grows in a step beyond what it had before, by the kernel's counter.  Needs the extra
`torch`, Linux, and for "inductor" a C++ compiler.
"""

import ctypes
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from mpi4py import MPI
from transformers import LlamaConfig, LlamaForCausalLM

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import ContextParallel, keep_attention

SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 20,
    "use_cache": False,
}  # fmt: skip
M_MMAP_THRESHOLD = -3  # of mallopt in glibc
CHECKPOINTS = {
    "kept": None,
    "checkpointed": {"use_reentrant": False},
    "keep_attention": {"use_reentrant": False, "context_fn": keep_attention},
}


def resident(name: str) -> int:
    """Return bytes of this process: "VmRSS", or the most since the last reset, "VmHWM"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(x.split()[1]) for x in lines if x.startswith(name))


def ways_of(
    grid: ProcessGrid, seqlen: int, backend: str, names: list[str]
) -> dict[str, tuple[ContextParallel, torch.nn.Module]]:
    """Return a `ContextParallel` and a model to call for each way."""
    ways = {}
    for name, options in CHECKPOINTS.items():
        for compiled in (False, True) if backend != "none" else (False,):
            way = f"{name}, compiled" if compiled else name
            if names and way not in names:
                continue
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**SIZES))
            if options:
                model.gradient_checkpointing_enable(options)
            cp = ContextParallel(grid, model, seqlen=seqlen)
            called = torch.compile(model, backend=backend) if compiled else model
            ways[way] = cp, called
    return ways


def step(cp: ContextParallel, called: torch.nn.Module, ids: torch.Tensor) -> None:
    """Compute gradients."""
    cp.model.zero_grad()
    called(input_ids=ids, labels=ids).loss.backward()


def main(seqlen: int = 8192, trials: int = 5, backend: str = "inductor", *names: str) -> None:
    """Print a line for each way."""
    comm = MPI.COMM_WORLD
    ctypes.CDLL(None).mallopt(
        M_MMAP_THRESHOLD, 1 << 16
    )  # tensors that are freed leave the process
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = 2 if comm.size % 2 == 0 else 1
    ways = ways_of(ProcessGrid(comm, rows, comm.size // rows), seqlen, backend, [*names])
    ids = torch.randint(256, (1, seqlen), generator=torch.Generator().manual_seed(0))
    first, seconds, grown = {}, {x: [] for x in ways}, {x: [] for x in ways}
    for name, way in ways.items():
        start = time.perf_counter()
        step(*way, ids)
        first[name] = comm.allreduce(time.perf_counter() - start, MPI.MAX)
    for trial in range(trials):
        for name in sorted(ways, reverse=trial % 2 == 1):
            ways[name][0].model.zero_grad()
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            before = resident("VmRSS")
            comm.Barrier()
            start = time.perf_counter()
            step(*ways[name], ids)
            seconds[name].append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
            grown[name].append(comm.allreduce(resident("VmHWM") - before, MPI.MAX))
    if comm.rank == 0:
        print(f"{seqlen} tokens, {comm.size} ranks, {trials} trials in turn, {backend}")
        for name in ways:
            print(f"{name}: {statistics.median(seconds[name]):.2f} s (the first {first[name]:.1f} "
                  f"s), {statistics.median(grown[name]) / 2**20:.0f} MiB")  # fmt: skip


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*map(int, given[:2]), *given[2:])
