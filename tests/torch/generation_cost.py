"""Seconds of generation over ranks beside one process.

    mpiexec -n 2 python tests/torch/generation_cost.py [PREFILL [CONTEXT ...]]
    python tests/torch/generation_cost.py memory [GB]
    mpiexec -n 4 python -m mpi4py tests/torch/generation_cost.py fits CONTEXT [GB]

A Llama of 8 layers with 8 heads of 64, float32, one thread a rank.  Prints the prefill of a prompt
of PREFILL tokens (16384), and the time of a token after CONTEXT tokens (100 and 32768), in turn
with one process, medians.  The caches of one process are filled with random numbers.

`memory` finds the largest contexts on 1 and 4 ranks whose processes may have GB gigabytes (2) of
data each: RLIMIT_DATA, which counts what a process allocates, but no program text and no memory
that ranks share.  `fits` generates a few tokens after a context in such processes, on one rank by
transformers alone, and fails if they need more.  Nearly all that the model needs is its cache,
3.1 MB a token: 96 layers of 16 KV heads of 256, and 16 hidden elements.  `memory` lets glibc map
each tensor of over 1 MB by itself, as it does with those of over 32 MB, which long contexts have.
In its heap temporary tensors leave holes, which take about as much as the cache on 4 ranks.
"""

import os
import resource
import statistics
import subprocess
import sys
import time

import torch
import transformers
from mpi4py import MPI

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import ContextParallel

TRIALS, TOKENS = 3, 24


class Times:
    """A streamer that notes when tokens come."""

    def __init__(self):
        self.times = []

    def put(self, _):
        self.times.append(time.perf_counter())

    def end(self):
        pass

    @property
    def token(self):
        """Seconds of a token: the prompt and the first tokens are left out."""
        return statistics.median(y - x for x, y in zip(self.times[3:], self.times[4:]))


def llama(**sizes):
    """Return the model, or one of other sizes."""
    torch.manual_seed(0)
    usual = {
        "vocab_size": 256, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 1 << 17,
        "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**usual | sizes)).eval()


def seconds(comm, call, alone):
    """Time a call of all ranks, or of rank 0 alone while the others sleep."""
    comm.Barrier()
    start = time.perf_counter()
    if comm.rank == 0 or not alone:
        call()
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(0.01)
    return comm.bcast(time.perf_counter() - start)


def filled(config, n):
    """Return a cache of one process with n random tokens."""
    cache = transformers.DynamicCache()
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(1, 8, n, 64) for _ in range(2)), layer)
    return cache


def data():
    """Return the bytes that RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        return next(int(x.split()[1]) * 1024 for x in status if x.startswith("VmData"))


def fits(comm, context, limit=2):
    """Generate tokens after a context in processes of so many gigabytes."""
    torch.set_num_threads(1)
    before, heads = data(), {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}
    model = llama(hidden_size=16, intermediate_size=16, num_hidden_layers=96, **heads)
    resource.setrlimit(resource.RLIMIT_DATA, (limit * 10**9, limit * 10**9))
    ids = torch.randint(1, 256, (1, context), generator=torch.Generator().manual_seed(0))
    options, weights = {"max_new_tokens": 4, "return_dict_in_generate": True}, data() - before
    if comm.size == 1:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    else:
        grid = ProcessGrid(comm, 2, comm.size // 2)
        found = ContextParallel(grid, model, seqlen=64, probe=False).generate(ids, **options)
    cache = sum(x.keys.nbytes + x.values.nbytes for x in found.past_key_values.layers)
    sizes = before, weights, cache, data() - before - weights - cache
    most = [max(comm.allgather(x)) // 10**6 for x in sizes]
    if comm.rank == 0:
        print(f"{context} | {comm.size} | {' | '.join(map(str, most))}")


def memory(limit=2):
    """Print the largest contexts that fit, within a twentieth."""
    print("tokens | ranks | MB of a rank: program | weights | cache | else")
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    for ranks in (1, 4):
        low, high, found = 0, 0, ""
        while not high or high - low > low // 20:
            n = (low + high) // 2 if high else 2 * low or 100 * ranks
            command = f"mpiexec -n {ranks} {sys.executable} -m mpi4py {__file__} fits {n} {limit}"
            options = {"capture_output": True, "text": True, "env": environment, "timeout": 600}
            done = subprocess.run(command.split(), **options)
            if done.returncode and "memory" not in done.stderr.lower():
                sys.exit(done.stderr)
            if done.returncode:
                high = n
            else:
                low, found = n, done.stdout
        print(found, end="", flush=True)


def main(comm):
    """Print the table."""
    if sys.argv[1:2] == ["memory"]:
        return memory(*map(int, sys.argv[2:]))
    if sys.argv[1:2] == ["fits"]:
        return fits(comm, *map(int, sys.argv[2:]))
    lengths = [int(x) for x in sys.argv[1:]]
    prefill, contexts = (lengths or [16384])[0], lengths[1:] or [100, 32768]
    torch.set_num_threads(1)
    grid, one, spread = ProcessGrid(comm, 1, comm.size), llama(), llama()
    cp = ContextParallel(grid, spread, seqlen=prefill)
    ids = torch.randint(1, 256, (1, max(prefill, *contexts) + 1))
    comm.Bcast(ids.numpy())
    cp.prefill(ids[:, :200])  # the first call compares steps with one process
    rows = []

    def alone(n):
        with torch.no_grad():
            one(ids[:, :n], use_cache=True, logits_to_keep=1)

    if prefill:
        mine, other = [], []
        for _ in range(TRIALS):
            mine.append(seconds(comm, lambda: cp.prefill(ids[:, : prefill + 1]), False))
            other.append(seconds(comm, lambda: alone(prefill), True))
        rows.append((f"prefill of {prefill} tokens", mine, other))
    for n in contexts:
        mine, other, prompt = [], [], ids[:, : n + 1]
        for _ in range(TRIALS):
            cache, times = cp.prefill(prompt), Times()
            cp.generate(prompt, past_key_values=cache, streamer=times, max_new_tokens=TOKENS)
            mine.append(times.token if comm.rank == 0 else 0)
            del cache
            comm.Barrier()
            if comm.rank == 0:
                cache, times = filled(one.config, n), Times()
                one.generate(
                    prompt, past_key_values=cache, streamer=times, max_new_tokens=TOKENS,
                    attention_mask=torch.ones_like(prompt),
                )  # fmt: skip
                other.append(times.token)
            done = comm.Ibarrier()
            while not done.Test():
                time.sleep(0.01)
        rows.append((f"a token after {n}", mine, other))
    if comm.rank == 0:
        for name, *both in rows:
            a, b = (statistics.median(x) for x in both)
            print(f"{name}: {a:.4f} s on {comm.size} ranks, {b:.4f} s alone, {a / b:.2f}")


if __name__ == "__main__":
    main(MPI.COMM_WORLD)
