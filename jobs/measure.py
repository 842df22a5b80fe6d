"""Measure numbers that the pages cite; medians, in turn.

    python jobs/measure.py planner                           CPU seconds of the planner
    mpiexec -n 4 python jobs/measure.py documents [TOKENS]   making plans of packed documents
    mpiexec -n 4 python jobs/measure.py hybrid [TOKENS]      a training step of a small Qwen3-Next
    python jobs/measure.py calls OUTPUT SEQLEN,NHEADS,HEADDIM TRIALS METHOD:RxCxU[:BLOCK]...
    python jobs/measure.py --compare FOLDER

`calls` and `--compare` are of `python jobs/run.py speed`: they know the public interface only,
because they run on another commit, too.
"""

import json
import statistics
import sys
import time
from collections import Counter
from functools import wraps
from itertools import product
from pathlib import Path

import numpy as np
from mpi4py import MPI

from a2d_mpi import (
    Attention2D,
    Causal,
    Documents,
    Full,
    NodeAwareAttention,
    ProcessGrid,
    RingAttention,
    SlidingWindow,
)

COMM, TRIALS = MPI.COMM_WORLD, 9
METHODS = {"attention2d": Attention2D, "node_aware": NodeAwareAttention, "ring": RingAttention}


def say(*words):
    """Print a line on rank 0."""
    if COMM.rank == 0:
        print(*words, flush=True)


def squarest_grid():
    """Return a grid of two rows, or of one."""
    rows = 2 if COMM.size % 2 == 0 else 1
    return ProcessGrid(COMM, rows, COMM.size // rows)


def slowest(call, clock=time.perf_counter):
    """Return the seconds of a call on the slowest rank."""
    COMM.Barrier()
    start = clock()
    call()
    return COMM.allreduce(clock() - start, MPI.MAX)


def in_turn(ways, trials=TRIALS, clock=time.perf_counter):
    """Return the median seconds of each call; each is first as often as last."""
    seconds = {name: [] for name in ways}
    for trial in range(trials + 1):  # the first one warms up
        for name in sorted(ways, reverse=trial % 2 == 1):
            seconds[name].append(slowest(ways[name], clock))
    return {name: statistics.median(x[1:]) for name, x in seconds.items()}


def planner():
    """Print CPU seconds by machine, ranks and workload."""
    from a2d_mpi.planning.planner import candidates
    from a2d_mpi.planning.profile import read_machine
    from a2d_mpi.planning.workload import Workload

    folder = Path(__file__).parents[1] / "data" / "machines"
    cases = product((64, 1024), ("h100-8", "a100-16x4"), (64, 1024), (Causal(), Full()), (32, 8))
    for ranks, name, tokens, mask, nheads_kv in cases:
        machine = read_machine(folder / f"{name}.toml")
        work = Workload(tokens << 10, 32, 128, nheads_kv, mask=mask, backward=True)
        start = time.process_time()
        found = candidates(machine, ranks, work)
        seconds, kind = time.process_time() - start, type(mask).__name__
        plan = f"{found[0].method} {found[0].layout.shape}"
        say(f"{name}, {ranks} ranks, {tokens}K tokens, {kind}, {nheads_kv} KV heads: "
            f"{seconds:.1f} s, {len(found)} plans, {plan}")  # fmt: skip


def documents(seqlen=1 << 17):
    """Print milliseconds of CPU time of a rank, for documents that are new in every trial."""
    grid, rng = squarest_grid(), np.random.default_rng(0)
    sizes = {"seqlen": seqlen, "nheads": 8, "headdim": 64, "dtype": "bfloat16"}
    first = Attention2D(grid, Causal(), **sizes)

    def mask(mean, inside):
        ends = np.cumsum(1 + (mean * rng.lognormal(-0.5, size=3 * seqlen // mean)).astype(int))
        return Documents([0, *ends[ends < seqlen], seqlen], inside=inside)

    ways = {
        "60 documents": lambda: Attention2D(grid, mask(4096, Causal()), **sizes),
        "500 documents": lambda: Attention2D(grid, mask(512, Causal()), **sizes),
        "windows inside": lambda: Attention2D(grid, mask(4096, SlidingWindow(1023)), **sizes),
        "60, zigzag": lambda: Attention2D(
            grid, mask(4096, Causal()), distribution="zigzag", **sizes
        ),
        "60, with_mask": lambda: first.with_mask(mask(4096, Causal())),
    }
    for name, x in in_turn(ways, clock=time.process_time).items():
        say(f"{name}: {1e3 * x:.1f} ms")


def hybrid(seqlen=1 << 14):
    """Print parts of a training step of 8 layers, 2 of which attend: seconds, and MB of a rank."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    from transformers.models.qwen3_next import modeling_qwen3_next as file

    from a2d_mpi.comm.channel import Channel, Traffic
    from a2d_mpi.torch import ContextParallel
    from a2d_mpi.torch.gradients import Gradients

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rule, heads, width, seconds, sent = file.torch_chunk_gated_delta_rule, 2, 64, Counter(), {}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=8, num_attention_heads=heads,
        num_key_value_heads=1, head_dim=width, linear_num_key_heads=1,
        linear_num_value_heads=heads, linear_key_head_dim=width, linear_value_head_dim=width,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, max_position_embeddings=seqlen,
    ))  # fmt: skip

    def timed(owner, name, part=None):
        function = getattr(owner, name)

        @wraps(function)
        def call(self, *args):
            start = time.perf_counter()
            found = function(self, *args)
            seconds[part or f"{self.phase} {self.name}"] += time.perf_counter() - start
            return found

        setattr(owner, name, call)

    def count(self, phase, name, direction, nbytes, messages):
        key = f"{phase} {name}"
        sent[key] = sent.get(key, 0) + nbytes * (direction == 0)

    def piece(n, more):
        """Compute a piece of one layer, with gradients; `more` columns of values are added."""
        q, k = (torch.randn(1, n, 1, width, requires_grad=True) for _ in range(2))
        v = torch.randn(1, n, heads, width + more, requires_grad=True)
        g, beta = -torch.rand(1, n, heads), torch.rand(1, n, heads)
        state = torch.zeros(1, heads, width, width + more)
        rule(q, k, v, g, beta, initial_state=state)[0].sum().backward()

    n, found = seqlen // (2 * COMM.size), []  # of zigzag's two pieces
    ways = {"a piece of a layer": lambda: piece(n, 0), "a wider one": lambda: piece(n, width)}
    for name, x in in_turn(ways, trials=3).items():
        say(f"{name:<20} {x:8.3f} s")
    cp = ContextParallel(squarest_grid(), model) if COMM.size > 1 else None
    if cp:
        timed(Channel, "wait")
        timed(Gradients, "add", "all gradients")
        Traffic.count = count
    for n in (seqlen // 16, seqlen, seqlen):  # the first one warms up
        seconds.clear(), sent.clear(), model.zero_grad(), COMM.Barrier()
        start, ids = time.perf_counter(), torch.randint(256, (1, n))
        loss = model(input_ids=ids, labels=ids).loss
        seconds["all forward"] += time.perf_counter() - start
        loss.backward()
        seconds["all"] += time.perf_counter() - start
        found.append(dict(seconds))
    say("waiting, or all: seconds of the slowest rank in two steps, MB sent by the busiest one")
    for name in sorted(seconds):
        first, second = (COMM.allreduce(x.get(name, 0), MPI.MAX) for x in found[1:])
        nbytes = COMM.allreduce(sent.get(name, 0), MPI.MAX)
        say(f"{name:<20} {first:8.3f} {second:8.3f} {nbytes / 1e6:8.2f}")
    if cp:
        cp.free()


def calls(output, sizes, trials, *plans):
    """Write the median seconds of the calls of plans."""
    found = {}
    sizes = dict(zip(("seqlen", "nheads", "headdim"), map(int, sizes.split(","))))
    for name in plans:
        method, shape, *block = name.split(":")
        rows, cols, heads = map(int, shape.split("x"))
        block = tuple(map(int, block[0].split("x"))) if block else (1, 1)
        grid = ProcessGrid(COMM, rows, cols, heads=heads, block=block)
        plan = METHODS[method](grid, Causal(), **sizes)
        shape = len(plan.tokens), sizes["nheads"], sizes["headdim"]
        rng = np.random.default_rng(COMM.rank)
        q, k, v, dout = (rng.standard_normal(shape, np.float32) for _ in range(4))
        out, lse = plan.forward(q, k, v)
        given = dout, q, k, v, out, lse
        ways = {
            "forward": lambda plan=plan, given=given: plan.forward(*given[1:4]),
            "backward": lambda plan=plan, given=given: plan.backward(*given),
        }
        found |= {f"{name} {phase}": x for phase, x in in_turn(ways, int(trials)).items()}
        plan.free()
        grid.free()
    if COMM.rank == 0:
        Path(output).write_text(json.dumps(found))


def compare(folder):
    """Print medians of then.*.json and now.*.json, and their ratio."""
    seconds = {}
    for path in sorted(Path(folder).glob("*.json")):
        for name, x in json.loads(path.read_text()).items():
            seconds.setdefault(name, {}).setdefault(path.name.split(".")[0], []).append(x)
    for name, trees in seconds.items():
        then, now = (sorted(trees[x]) for x in ("then", "now"))
        ratio = statistics.median(now) / statistics.median(then)
        say(f"{name:<28} then {then[0]:.4g} to {then[-1]:.4g} s, "
            f"now {now[0]:.4g} to {now[-1]:.4g} s: {ratio - 1:+.1%}")  # fmt: skip


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    if kind == "--compare":
        compare(*words)
    elif kind == "calls":
        calls(*words)
    else:
        measures = {"planner": planner, "documents": documents, "hybrid": hybrid}
        measures[kind](*map(int, words))
