"""Costs of a training step for a rank: operations, bytes of activations, seconds.  No MPI import.

The planner (`a2d_mpi.planning`) predicts attention.  Other products of matrices are assumed to run
at the rate of the attention kernel's large blocks.  All other operations are converted to copies
of elements, by factors that were measured with NumPy.  ``drivers/bench.py train`` prints the
errors of these predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.planning.candidate import Candidate
from a2d_mpi.planning.machine import Machine

STEP_PARTS = ("attention", "wait", "gradients", "adam", "other")  # parts of a step's seconds
# Elements that could be copied in the time of an operation.  LAYER, per layer and element of a
# row: LayerNorms, GELU, residuals, and cutting and joining heads, forward and backward.  AGAIN:
# likewise, for operations that are recomputed.  CROSS_ENTROPY, per logit.  UPDATE, per parameter.
LAYER, AGAIN, CROSS_ENTROPY, UPDATE = 290, 90, 12, 18


def product_flops(config: GPTConfig, recompute: bool = False) -> int:
    """Return the flops per token of a step's matrix products, without attention."""
    c = config
    qkv_and_proj = 2 * (c.nheads + c.nheads_kv) * c.headdim
    layers = 2 * c.layers * c.width * (qkv_and_proj + 2 * c.mlp)
    return (3 + recompute) * layers + 3 * 2 * c.width * c.vocab


def copied_elements(config: GPTConfig, recompute: bool = False) -> int:
    """Return the elements per token that could be copied in the time of the other operations."""
    layers = config.layers * config.width * (LAYER + AGAIN * recompute)
    return layers + CROSS_ENTROPY * config.vocab


def activations(config: GPTConfig, recompute: bool = False) -> int:
    """Return the most elements per token that a step holds, without attention's buffers.

    Every layer keeps elements (`a2d_mpi.gpt.model.GPT`).  The logits and the backward pass
    of a layer need temporary elements; the larger of the two numbers counts.
    """
    c = config
    qkv = (c.nheads + 2 * c.nheads_kv) * c.headdim
    kept = c.width + c.nheads * (c.headdim + 1)  # x, out, lse
    inside = qkv + 4 * c.width + c.mlp  # q, k, v, two LayerNorms, the MLP's hidden layer
    logits = 3 * c.width + c.vocab
    layer = 4 * c.width + 6 * c.mlp + inside * recompute
    return c.layers * (kept + inside * (not recompute)) + max(logits, layer)


def training_bytes(config: GPTConfig, tokens: int, size: int, recompute: bool = False) -> int:
    """Return the bytes of a rank with `tokens` tokens, without attention's buffers.

    Weights, their gradients, Adam's two moments, and activations count.  An element has `size`
    bytes.
    """
    return size * (4 * config.parameters + tokens * activations(config, recompute))


def cache_bytes(config: GPTConfig, tokens: int, size: int) -> int:
    """Return the bytes of keys and values of all layers; an element has `size` bytes."""
    return size * tokens * 2 * config.layers * config.nheads_kv * config.headdim


def sum_seconds(machine: Machine, ranks: int, buckets: list[int]) -> list[float]:
    """Return the seconds of half of the transfers of each bucket of gradients.

    `buckets` are in bytes.  The sum of a bucket has two halves (`a2d_mpi.gpt.exchange`): in each
    half every rank sends one share of the bucket to each other rank.
    """
    inside, between = machine.links(ranks)
    near = min(ranks, machine.ranks_per_node)
    rate = between.bandwidth * between.nics / near  # of a rank, when all ranks of a node send
    seconds = []
    for nbytes in buckets:
        share = nbytes / ranks
        wire = max((near - 1) * share / inside.bandwidth, (ranks - near) * share / rate)
        calls = 2 * ((near - 1) * inside.overhead + (ranks - near) * between.overhead)
        seconds.append(wire + calls + max(inside.latency, between.latency) if ranks > 1 else 0.0)
    return seconds


@dataclass(frozen=True)
class TrainingStep:
    """Prediction of a training step on the slowest rank.

    Attributes
    ----------
    seconds : dict of str to float
        Seconds by `STEP_PARTS`.
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
) -> TrainingStep:
    """Predict a training step from the planner's prediction of attention in one layer.

    Gradients are summed while earlier layers compute.  Attention and these sums share links
    meanwhile; the prediction neglects that.

    Parameters
    ----------
    machine : Machine
    plan : Candidate
        Prediction of forward and backward in one layer.
    config : GPTConfig
    seqlen : int
        Tokens of a step, on all ranks together.
    dtype : str
    recompute : bool
        `checkpoint` of `a2d_mpi.gpt.model.GPT`.

    Raises
    ------
    ValueError
        If the plan has no backward phase, or the machine no kernel for the dtype.
    """
    if "backward" not in plan.phases:
        raise ValueError("a training step needs a plan with the backward phase")
    size, ranks = 2 if dtype.endswith("16") else np.dtype(dtype).itemsize, plan.layout.size
    tokens = -(-seqlen // ranks)
    rate = machine.kernel(dtype, "forward").flops * machine.share
    copy = machine.copy * machine.share / size  # elements/s
    split = plan.split
    attention = config.layers * (sum(split.values()) - split["wait"])
    other = tokens * product_flops(config, recompute) / rate
    other += tokens * copied_elements(config, recompute) / copy
    # More than half of `other` is the backward pass.  The last sum, of the embeddings, can only
    # begin at the end.
    layer = (plan.phases["backward"].total.max() + 0.6 * other / config.layers).item()
    of_layer = config.of_layer
    of_ends = config.parameters - config.layers * of_layer
    halves = sum_seconds(machine, ranks, [*[of_layer * size] * config.layers, of_ends * size])
    free = begun = 0.0
    for i, half in enumerate(halves):
        begun = layer * min(i, config.layers - 1)
        free = max(free, begun) + half
    seconds = {
        "attention": attention,
        "wait": config.layers * split["wait"],
        "gradients": free - begun + sum(halves),
        "adam": UPDATE * config.parameters / copy,
        "other": other,
    }
    return TrainingStep(seconds, plan.memory + training_bytes(config, tokens, size, recompute))
