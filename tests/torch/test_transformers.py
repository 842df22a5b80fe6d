"""A model of Hugging Face transformers over ranks, as a user writes it, against one process.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_all
from refused import message_of
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from a2d_mpi import Attention2D, Causal, Documents, ProcessGrid, TriangleAttention
from a2d_mpi.masks.documents import positions_in
from a2d_mpi.torch import shard, shift_labels, sum_gradients, use_in_transformers

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.multirank]
torch.set_num_threads(1)
SEQLEN, STEPS = 101, 3
ENDS = np.array([0, 40, 41, 90, SEQLEN])
SIZES = {"seqlen": SEQLEN, "nheads": 4, "nheads_kv": 2, "headdim": 8}
CONFIG = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False,
    "tie_word_embeddings": True, "initializer_range": 0.2,
}  # fmt: skip


def new_model(dtype, **options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG | options)).to(dtype).train()


def sequence(ends):
    """Return tokens, positions in documents, and labels of the next tokens."""
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 61, SEQLEN))
    labels = tokens.roll(-1)
    labels[ends[1:] - 1] = -100
    return tokens, torch.from_numpy(positions_in(ends)), labels


def train(model, tokens, positions, labels, count, summed=lambda: None):
    """Return this rank's part of the losses of some steps of AdamW."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=tokens[None], position_ids=positions[None]).logits[0]
        loss = F.cross_entropy(logits.float(), labels, reduction="sum") / count
        loss.backward()
        summed()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(dtype, ends):
    """Return losses and weights of one process with the attention of transformers."""
    model, whole = new_model(dtype), sequence(ends)
    losses = train(model, *whole, int((whole[2] >= 0).sum()))
    return losses, [x.detach().double() for x in model.parameters()]


def spread(comm, plan, dtype, ends, sums=True):
    """Return losses and weights of a training by a plan."""
    model, (tokens, positions, labels) = new_model(dtype), sequence(ends)
    model.set_attn_implementation(use_in_transformers(plan))
    own = shard(plan, tokens if plan.grid.comm.rank == 0 else None)
    positions = positions[plan.tokens]
    targets = shift_labels(plan, own)
    same = torch.equal(targets, labels[plan.tokens])
    assert_all(plan.grid.comm, same, "other labels than those of one process")
    count = int((labels >= 0).sum())
    summed = (lambda: sum_gradients(model, comm)) if sums else (lambda: None)
    losses = train(model, own, positions, targets, count, summed)
    losses = [sum(x) for x in zip(*comm.allgather(losses))]
    return losses, [x.detach().double() for x in model.parameters()]


def distances(found, exact):
    """Return the largest relative distances of a loss and of a parameter."""
    losses = max(abs(x - y) / abs(y) for x, y in zip(found[0], exact[0]))
    weights = max(float((x - y).norm() / y.norm()) for x, y in zip(found[1], exact[1]))
    return losses, weights


@pytest.fixture(scope="module")
def triangle_comm(comm):
    """Return a communicator of three ranks, or of all six."""
    part = comm.Split(comm.rank >= 3 and comm.size != 6, comm.rank)
    yield part
    part.Free()


def plan_of(grid, kind, ends, dtype):
    mask = Causal() if len(ends) == 2 else Documents(ends, causal=True)
    return kind(grid, mask, dtype=dtype, **SIZES)


WHOLE = np.array([0, SEQLEN])
CASES = [(Attention2D, WHOLE), (Attention2D, ENDS), (TriangleAttention, WHOLE)]


@pytest.mark.parametrize("kind, ends", CASES, ids=["grid", "documents", "triangle"])
def test_training(comm, triangle_comm, kind, ends):
    """Three steps of AdamW have the losses and parameters of one process."""
    if kind is TriangleAttention:
        comm = triangle_comm
    rows = 2 if comm.size % 2 == 0 else 1
    grid = ProcessGrid(comm, rows, comm.size // rows)
    plan = plan_of(grid, kind, ends, "float32")
    found = distances(spread(comm, plan, torch.float32, ends), alone(torch.float32, ends))
    assert_all(comm, max(found) <= 1e-5, f"losses and parameters are off by {found}")
    if comm.rank == 0:
        print(f"losses and parameters are off by {found}")
    plan.free()
    grid.free()


def test_training_without_sums_is_wrong(comm):
    grid = ProcessGrid(comm, 2, comm.size // 2)
    plan = plan_of(grid, Attention2D, WHOLE, "float32")
    found = spread(comm, plan, torch.float32, WHOLE, sums=False)
    losses, weights = distances(found, alone(torch.float32, WHOLE))
    assert_all(comm, losses > 1e-4 and weights > 1e-4, f"off by {losses} and {weights} only")
    plan.free()
    grid.free()


def test_bfloat16(comm):
    """Errors against float64 are at most twice those of one process in bfloat16."""
    grid = ProcessGrid(comm, 2, comm.size // 2)
    plan = plan_of(grid, Attention2D, ENDS, "bfloat16")
    exact = alone(torch.float64, ENDS)
    one = distances(alone(torch.bfloat16, ENDS), exact)
    found = distances(spread(comm, plan, torch.bfloat16, ENDS), exact)
    bounds = [2 * x + torch.finfo(torch.bfloat16).eps / 8 for x in one]
    good = all(x <= y for x, y in zip(found, bounds))
    assert_all(comm, good, f"off by {found}, one process by {one}")
    if comm.rank == 0:
        print(f"losses and parameters are off by {found}, of one process by {one}")
    plan.free()
    grid.free()


def test_positions_that_documents_count(comm):
    """A shard that begins with a document may have the positions that a model counts by itself."""
    grid = ProcessGrid(comm, 1, comm.size)
    sizes = SIZES | {"seqlen": 5 * comm.size}
    mask = Documents(5 * np.arange(comm.size + 1), causal=True)
    plan = Attention2D(grid, mask, distribution="contiguous", **sizes)
    model = new_model(torch.float32)
    model.set_attn_implementation(use_in_transformers(plan))
    tokens = torch.arange(5)[None]
    out, same = (model(input_ids=tokens, position_ids=x).logits for x in (None, tokens))
    assert_all(comm, torch.equal(out, same), "another result")
    plan.free()
    grid.free()


def test_refused(comm):
    """A wrong argument on rank 0 is an error on all ranks."""
    grid = ProcessGrid(comm, 2, comm.size // 2)
    plan = plan_of(grid, Attention2D, WHOLE, "float32")
    name = use_in_transformers(plan)
    tokens, positions, _ = sequence(WHOLE)
    given = {"input_ids": tokens[plan.tokens][None], "position_ids": positions[plan.tokens][None]}
    padding = torch.ones_like(given["input_ids"])
    padding[:, -1:] = 0
    twice = {x: y.repeat(2, 1) for x, y in given.items()}
    window = torch.zeros(1, 1, len(plan.tokens), len(plan.tokens))
    cases = [
        ({"attention_dropout": 0.1}, {}, "dropout must be 0 in attention, got 0.1"),
        ({}, {"output_attentions": True}, "a plan does not keep the weights of attention"),
        ({}, {"attention_mask": padding}, "a plan takes no padding mask"),
        ({}, {"attention_mask": window}, "a plan takes no padding mask"),
        ({}, twice, "the batch must be one sequence, got 2"),
        ({"head_dim": 16}, {}, "scales logits by 0.25, but the plan by 0.35"),
        ({}, {"softcap": 30.0}, "has the soft-cap 30.0, but the plan has None"),
        ({}, {"sliding_window": 9}, "the model passes sliding_window"),
        ({}, {"cu_seq_lens_q": ENDS}, "the model passes cu_seq_lens_q"),
        ({}, {"head_mask": ENDS}, "the model passes head_mask"),
    ]
    model = new_model(torch.float32)
    model.set_attn_implementation(name)
    for options, more, text in cases:
        wrong = new_model(torch.float32, **options)
        wrong.set_attn_implementation(name)

        def call(wrong=wrong, more=more):
            return model(**given) if comm.rank else wrong(**given | more)

        said = message_of(comm, call)
        assert_all(comm, text in said and "on rank 0" in said, f"{text!r} not in {said!r}")
    # Positions that each rank counts from 0 are right on rank 0 alone, if at all.
    said = message_of(comm, lambda: model(input_ids=given["input_ids"]))
    assert_all(comm, "position_ids must be given" in said, said)
    # A model that gives no scale means 1 / sqrt(headdim).
    scaled = Attention2D(grid, Causal(), softmax_scale=1, **SIZES)
    attention, module = ALL_ATTENTION_FUNCTIONS[use_in_transformers(scaled)], model.model.layers[0]
    q, k = (torch.ones(1, heads, len(plan.tokens), 8) for heads in (4, 2))
    said = message_of(comm, lambda: attention(module.self_attn, q, k, k))
    assert_all(comm, "scales logits by 0.35" in said and "the plan by 1" in said, said)
    scaled.free()
    # A mask without padding is none; a copy of the model has the plan, too.
    out = copy.deepcopy(model)(**given, attention_mask=torch.ones_like(padding)).logits
    assert_all(comm, torch.equal(out, model(**given).logits), "another result")
    short = Attention2D(grid, Causal(), **SIZES | {"seqlen": 2})
    with pytest.raises(ValueError, match="has none of the 2 tokens"):
        use_in_transformers(short)
    plan.free()
    del plan, out  # whose graph has the plan, too
    with pytest.raises(ValueError, match=f"the plan of {name} was deleted: keep"):
        model(**given)
    grid.free()
