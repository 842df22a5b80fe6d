"""Models of Hugging Face transformers in `ContextParallel`: equal to one process, or refused.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import assert_all
from test_bad_input import message_of

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import ContextParallel

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.multirank]
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
N, VOCAB = 61, 53
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "attn_pdrop": 0,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
}
LLAMA4 = EXPERTS | {
    "attention_chunk_size": 16, "num_hidden_layers": 4, "intermediate_size_mlp": 48,
    "attn_temperature_tuning": False,
}  # fmt: skip
# Class, config and options of models that are equal to one process.
EQUAL = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 9}),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", LOCAL | {"query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", LOCAL),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", LOCAL | EXPERTS),
    "Llama 4": ("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4),
    "ModernBERT": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {"local_attention": 8, "num_hidden_layers": 3, "global_attn_every_n_layers": 2},
    ),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
}


def build(kind, config, options, dtype=torch.float64):
    """Return a model with the weights of a seed."""
    torch.manual_seed(0)
    config = getattr(transformers, config)(**SIZES | options)
    config._experts_implementation = "eager"  # the others have no float64
    return getattr(transformers, kind)(config).to(dtype).train()


def sequence(n):
    return torch.randint(VOCAB, (1, n), generator=torch.Generator().manual_seed(1))


def step(model, ids, labels, ends):
    """Return the mean loss of one process, each document alone, and the model's gradients."""
    model.zero_grad()
    total, count = 0.0, 0
    for begin, end in zip(ends[:-1], ends[1:]):
        logits = model(input_ids=ids[:, begin:end]).logits[0]
        wanted = labels[0, begin:end]
        if labels is ids:  # of the next token
            logits, wanted = logits[:-1], wanted[1:]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = total + F.cross_entropy(logits, wanted, reduction="sum")
        count += int((wanted >= 0).sum())
    (total / count).backward()
    return total.item() / count, gradients(model)


def gradients(model):
    return [None if x.grad is None else x.grad.double() for x in model.parameters()]


def spread_step(cp, model, ids, labels=None, ends=None):
    """Return the loss and gradients of all ranks."""
    model.zero_grad()
    batch = cp.shard(ids, labels, ends)
    loss = cp.loss(model(**batch.inputs).logits, batch)
    loss.backward()
    cp.sum_gradients()
    return sum(cp.grid.comm.allgather(loss.item())), gradients(model)


def distance(found, exact):
    """Return the relative distance of losses, and the largest one of gradients."""
    far = [abs(found[0] - exact[0]) / abs(exact[0])]
    largest = max(float(y.norm()) for y in exact[1] if y is not None)
    for x, y in zip(found[1], exact[1]):
        if y is not None and float(y.norm()) > 1e-12 * largest:  # otherwise of rounding only
            far.append(1.0 if x is None else float((x - y).norm() / y.norm()))
    return max(far)


@pytest.fixture(scope="module", params=["all", "three"])
def grid(comm, request):
    """Return a grid of all ranks, or of three of them and of the rest."""
    part = comm.Split(request.param == "three" and comm.rank >= 3, comm.rank)
    rows = 2 if part.size % 2 == 0 else 1
    grid = ProcessGrid(part, rows, part.size // rows)
    yield grid
    grid.free()
    part.Free()


@pytest.mark.parametrize("n", [N, N - 1])
@pytest.mark.parametrize("name", EQUAL)
def test_equal_to_one_process(comm, grid, name, n):
    """Loss and all gradients are those of one process in float64."""
    model, ids = build(*EQUAL[name]), sequence(n)
    bidirectional = "Masked" in EQUAL[name][0]
    labels = ids.roll(5) if bidirectional else ids
    exact = step(build(*EQUAL[name]), ids, labels, [0, n])
    cp = ContextParallel(grid, model, seqlen=n)
    found = spread_step(cp, model, ids, labels if bidirectional else None)
    far = distance(found, exact)
    assert_all(comm, far <= 1e-6, f"off by {far}")
    if comm.rank == 0:
        print(f"{name}: off by {far:.1e}")
    cp.free()
