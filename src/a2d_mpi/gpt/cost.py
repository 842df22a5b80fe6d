"""Costs of a training step for a rank: operations, bytes of activations, seconds.  No MPI import.

Attention's part is the planner's (`a2d_mpi.planning`).  Of the rest, products of matrices run at
the rate of the attention kernel's large blocks, and all else costs as many copies of elements as
was measured with NumPy (``drivers/bench_gpt.py train`` says how far off that is).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.planner import Candidate

PARTS = ("attention", "wait", "gradients", "adam", "other")  # of a step's seconds
# What could be copied in the time of other operations.  For an element of a row, in a block: of
# LayerNorms, GELU, residuals, heads cut and joined, forward and backward; and what is computed
# again.  For an element of the logits; and for a parameter.
BLOCK, AGAIN, CROSS_ENTROPY, UPDATE = 290, 90, 12, 18


def product_flops(config: GPTConfig, recompute: bool = False) -> int:
    """Floating-point operations per token of a step's matrix products, without attention."""
    c = config
    qkv_and_proj = 2 * (c.nheads + c.nheads_kv) * c.headdim
    blocks = 2 * c.layers * c.width * (qkv_and_proj + 2 * c.mlp)
    return (3 + recompute) * blocks + 3 * 2 * c.width * c.vocab


def copied_elements(config: GPTConfig, recompute: bool = False) -> int:
    """Elements per token that could be copied in the time of a step's other operations."""
    blocks = config.layers * config.width * (BLOCK + AGAIN * recompute)
    return blocks + CROSS_ENTROPY * config.vocab


def activations(config: GPTConfig, recompute: bool = False) -> int:
    """Largest number of elements per token that a step holds, without attention's buffers.

    All blocks keep elements (`a2d_mpi.gpt.model.Kept`).  The logits and the backward pass of a
    block need more elements for a while: the larger of the two counts.
    """
    c = config
    qkv = (c.nheads + 2 * c.nheads_kv) * c.headdim
    kept = c.width + c.nheads * (c.headdim + 1)  # x, out, lse
    inside = qkv + 4 * c.width + c.mlp  # q, k, v, two LayerNorms, the MLP's hidden layer
    logits = 3 * c.width + c.vocab
    block = 4 * c.width + 6 * c.mlp + inside * recompute
    return c.layers * (kept + inside * (not recompute)) + max(logits, block)


def training_bytes(config: GPTConfig, tokens: int, size: int, recompute: bool = False) -> int:
    """Bytes of a rank with `tokens`, without attention's buffers; an element has `size` bytes.

    Weights, their gradients, Adam's two moments, and activations.
    """
    return size * (4 * config.parameters + tokens * activations(config, recompute))


def cache_bytes(config: GPTConfig, tokens: int, size: int) -> int:
    """Bytes of keys and values of all layers; an element has `size` bytes."""
    return size * tokens * 2 * config.layers * config.nheads_kv * config.headdim


def sum_seconds(machine: Machine, ranks: int, parts: list[int]) -> list[float]:
    """Seconds in which half of the bytes of each sum of gradients (bytes) travel.

    Every rank sends each other one its share, in either half (`a2d_mpi.gpt.gradients`).
    """
    inside, between = machine.links(ranks)
    near = min(ranks, machine.ranks_per_node)
    rate = between.bandwidth * between.nics / near  # of a rank, when all of a node send
    seconds = []
    for nbytes in parts:
        share = nbytes / ranks
        wire = max((near - 1) * share / inside.bandwidth, (ranks - near) * share / rate)
        calls = 2 * ((near - 1) * inside.overhead + (ranks - near) * between.overhead)
        seconds.append(wire + calls + max(inside.latency, between.latency) if ranks > 1 else 0.0)
    return seconds


@dataclass(frozen=True)
class Step:
    """Prediction of a training step on the slowest rank.

    Attributes
    ----------
    seconds : dict of str to float
        By `PARTS`.
    memory : int
        Bytes of a rank: weights, gradients, moments, activations, attention's buffers.
    """

    seconds: dict[str, float]
    memory: int

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def predict_step(
    machine: Machine,
    plan: Candidate,
    config: GPTConfig,
    seqlen: int,
    dtype: str,
    recompute: bool = False,
) -> Step:
    """Predict a step with a plan, which was made for one layer, with backward.

    Gradients are summed while earlier blocks compute.  The prediction leaves out that attention
    and the sums share links meanwhile.

    Raises
    ------
    ValueError
        If the plan has no backward phase, or the machine no kernel for the dtype.
    """
    if "backward" not in plan.phases:
        raise ValueError("a training step needs a plan with a backward phase")
    size, ranks = 2 if dtype.endswith("16") else np.dtype(dtype).itemsize, plan.layout.size
    tokens = -(-seqlen // ranks)
    rate = machine.kernel(dtype, "forward").flops * machine.share
    copy = machine.copy * machine.share / size  # elements/s
    split = plan.split
    attention = config.layers * (sum(split.values()) - split["wait"])
    other = tokens * product_flops(config, recompute) / rate
    other += tokens * copied_elements(config, recompute) / copy
    # Half of it is backward or more; the last sum, of the embeddings, can begin at the end only.
    block = (plan.phases["backward"].total.max() + 0.6 * other / config.layers).item()
    inner = config.of_block
    ends = config.parameters - config.layers * inner
    halves = sum_seconds(machine, ranks, [*[inner * size] * config.layers, ends * size])
    free = begun = 0.0
    for i, half in enumerate(halves):
        begun = block * min(i, config.layers - 1)
        free = max(free, begun) + half
    seconds = {
        "attention": attention,
        "wait": config.layers * split["wait"],
        "gradients": free - begun + sum(halves),
        "adam": UPDATE * config.parameters / copy,
        "other": other,
    }
    return Step(seconds, plan.memory + training_bytes(config, tokens, size, recompute))
