"""Models of Hugging Face transformers in `ContextParallel`: equal to one process, or refused.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import numpy as np
import pytest
import torch
import transformers
from helpers import assert_all
from refused import assert_raises, message_of

from a2d_mpi.torch import masks
from a2d_mpi.torch.masks import Masks

pytestmark = pytest.mark.mpi(min_size=2)
N, VOCAB = 61, 53
ENDS = np.array([0, 23, 24, 58, N])  # of documents
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0}
BERT = {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}
LLAMA4 = EXPERTS | {
    "attention_chunk_size": 16, "num_hidden_layers": 4, "intermediate_size_mlp": 48,
    "attn_temperature_tuning": False,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 32,
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
    "ModernBERT": ("ModernBertForMaskedLM", "ModernBertConfig", {
        "local_attention": 8, "num_hidden_layers": 3, "global_attn_every_n_layers": 2}),
    "BERT": ("BertForMaskedLM", "BertConfig", BERT),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {"attn_pdrop": 0}),
    "Phi-3, longrope of a short sequence": ("Phi3ForCausalLM", "Phi3Config", {
        "rope_parameters": LONGROPE | {"original_max_position_embeddings": 128},
        "original_max_position_embeddings": 128}),
}  # fmt: skip


def build(kind, config, options, dtype=torch.float64):
    """Return a model with the weights of a seed."""
    torch.manual_seed(0)
    fixed = ("head_dim",) * (config == "FalconConfig")  # it follows from other numbers
    sizes = {x: y for x, y in SIZES.items() if x not in fixed}
    config = getattr(transformers, config)(**sizes | options)
    config._experts_implementation = "eager"  # the others have no float64
    return getattr(transformers, kind)(config).to(dtype).train()


def sequence(n=N, rows=1):
    return torch.randint(3, VOCAB, (rows, n), generator=torch.Generator().manual_seed(1))


def batch_of(name, n=N, ends=None):
    """Return the arguments of a call with one sequence, or with documents."""
    ids = sequence(n)
    given = {"input_ids": ids, "labels": ids.roll(5) if "Masked" in EQUAL[name][0] else ids}
    if ends is not None:
        positions = torch.cat([torch.arange(x) for x in np.diff(ends)])[None]
        given |= {"position_ids": positions, "labels": given["labels"].clone()}
        if "Masked" in EQUAL[name][0]:
            given["cu_seq_lens_q"] = torch.from_numpy(ends)
        else:
            given["labels"][positions == 0] = -100
    return given


def loss_of(model, given):
    return model(**given).loss


def step(model, *batches, way=loss_of):
    """Return the sum of the losses of batches, and the model's gradients."""
    model.zero_grad()
    loss = sum(way(model, x) for x in batches)
    loss.backward()
    return loss.item(), [None if x.grad is None else x.grad.double() for x in model.parameters()]


def alone(name, ends, dtype=torch.float64, **options):
    """Return the step of one process that computes each document alone."""
    given, shifted = batch_of(name, ends[-1]), "Masked" not in EQUAL[name][0]
    count = {"num_items_in_batch": int(ends[-1]) - shifted * (len(ends) - 1)}
    parts = [{x: y[:, a:b] for x, y in given.items()} for a, b in zip(ends, ends[1:])]
    kind, config, more = EQUAL[name]
    one = build(kind, config, more | options, dtype)
    return step(one, *(x | count for x in parts if x["labels"].shape[1] > shifted))


def distance(found, exact):
    """Return the relative distance of losses, and the largest one of gradients."""
    far = [abs(found[0] - exact[0]) / abs(exact[0])]
    largest = max(float(y.norm()) for y in exact[1] if y is not None)
    for x, y in zip(found[1], exact[1], strict=True):
        if y is not None and float(y.norm()) > 1e-12 * largest:  # otherwise of rounding only
            far.append(1.0 if x is None else float((x - y).norm() / y.norm()))
    return max(far)


def assert_near(comm, found, exact, bound=1e-6):
    """Assert that losses and gradients are near; see `distance`."""
    far = distance(found, exact)
    assert_all(comm, far <= bound, f"off by {far}, more than {bound}")


# In turn on all ranks, and on three of them and the rest: each model once.
WHERE = [(("all", "three")[i % 2], name) for i, name in enumerate(EQUAL)]


@pytest.mark.parametrize("grid, name", WHERE, indirect=["grid"])
def test_equal_to_one_process(comm, grid, parallel, name):
    """Loss and all gradients are those of one process in float64."""
    given = batch_of(name, N if grid.comm.size == comm.size else N - 1)  # uneven and even shards
    model, one = build(*EQUAL[name]), build(*EQUAL[name])
    assert_near(comm, step(parallel(model).model, given), step(one, given))


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Llama 4", "ModernBERT"])
def test_documents(comm, parallel, name):
    """Each document is computed as if it were alone; plans of the same documents are kept."""
    cp = parallel(build(*EQUAL[name]))
    for ends in (ENDS, np.array([0, 30, N]), ENDS):
        assert_near(comm, step(cp.model, batch_of(name, N, ends)), alone(name, ends))
    assert_all(comm, len(cp._sets) == 2, f"plans were made again: {len(cp._sets)}")


@pytest.mark.parametrize("grid", ["three"], indirect=True)
def test_longest_document(comm, grid, parallel):
    """A model needs positions for the longest document only; longer ones are refused."""
    kind, config, options = EQUAL["GPT-2"]
    few = {"max_position_embeddings": 35}
    model = parallel(build(kind, config, options | few)).model
    for _ in range(2):
        given = batch_of("GPT-2", ENDS[3], ENDS[:4])
        assert_near(comm, step(model, given), alone("GPT-2", ENDS[:4], **few))
        assert_raises(grid.comm, "index out of range", model, **batch_of("GPT-2", 36))


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "gpt-oss"])
def test_bfloat16(comm, parallel, name):
    """Errors against float64 are at most twice those of one process in bfloat16."""
    exact, kind = alone(name, ENDS), torch.bfloat16
    model = parallel(build(*EQUAL[name], kind)).model
    bound = 2 * distance(alone(name, ENDS, kind), exact)
    assert_near(comm, step(model, batch_of(name, N, ENDS)), exact, bound)


@pytest.mark.parametrize("grid, method, name", [
    ("three", "ring", "Gemma 3"), ("three", "triangle", "Llama"),
], indirect=["grid"])  # fmt: skip
def test_methods(comm, grid, parallel, method, name):
    given, one = batch_of(name), build(*EQUAL[name])
    model = parallel(build(*EQUAL[name]), method=method).model
    assert_near(comm, step(model, given), step(one, given))


def test_autocast(comm, parallel):
    """Attention has autocast's dtype; the trials run without it."""
    given, dtype = batch_of("Llama"), torch.float32
    exact = step(build(*EQUAL["Llama"]), given)
    cp = parallel(build(*EQUAL["Llama"], dtype), distribution="striped")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = step(cp.model, given)
        bound = 2 * distance(step(build(*EQUAL["Llama"], dtype), given), exact)
    assert_near(comm, found, exact, bound)
    plans = {(x.dtype.name, x.distribution.name) for x in cp.plans.values()}
    assert_all(comm, plans == {("bfloat16", "striped")}, f"{plans}")
    step(cp.model, given)
    assert_all(comm, {x.dtype.name for x in cp.plans.values()} == {"float32"}, "of autocast")


def test_two_models(comm, parallel):
    """Each model has its own plans, here of other distributions."""
    names = "Llama", "Gemma 3"
    models = [parallel(build(*EQUAL[x])).model for x in names]
    losses = [loss_of(x, batch_of(y)) for x, y in zip(models, names)]
    sum(losses).backward()
    for x, name, loss in zip(models, names, losses):
        found = loss.item(), [y.grad for y in x.parameters()]
        assert_near(comm, found, step(build(*EQUAL[name]), batch_of(name)))


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
BYPASSES = "does not use transformers' attention functions"
LARGEST = "depends on the largest position"
# Class, config and options of models that are refused, and what the error says.
REFUSED = {
    "Llama 4, temperature": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        LLAMA4 | {"attn_temperature_tuning": True, "floor_scale": 16},
        "model.layers.3.self_attn (q) counts positions by itself"),
    "dynamic RoPE": ("LlamaForCausalLM", "LlamaConfig",
                     {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}, LARGEST),
    "longrope": (
        "Phi3ForCausalLM", "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}, LARGEST),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {}, BYPASSES),
    "GPT-Neo": (
        "GPTNeoForCausalLM", "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        BYPASSES),
    "RoBERTa": (
        "RobertaForMaskedLM", "RobertaConfig", BERT,
        "roberta.embeddings.position_embeddings does not count positions 0, 1, 2, ..."),
    "BART": ("BartForConditionalGeneration", "BartConfig", {"d_model": 32},
             "an encoder with a decoder has two sequences"),
    "layerdrop": ("OPTForCausalLM", "OPTConfig",
                  {"layerdrop": 0.1, "ffn_dim": 48, "word_embed_proj_dim": 32},
                  "layerdrop must be 0, got 0.1"),
    "too long": ("GPT2LMHeadModel", "GPT2Config",
                 GPT2 | {"attn_pdrop": 0, "max_position_embeddings": 32},
                 "IndexError: index out of range"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(comm, parallel, name):
    """A model that plans cannot compute is refused, and keeps its own attention."""
    *what, text = REFUSED[name]
    model = build(*what)
    before = model.config._attn_implementation
    said = message_of(comm, lambda: parallel(model, seqlen=N))
    assert_all(comm, text in said and what[0] in said, f"{text!r} is not in {said!r}")
    assert_all(comm, model.config._attn_implementation == before and model.training, "changed")


def test_refused_when_a_document_is_longer(comm, parallel):
    """The trials are repeated for longer documents than before."""
    model = parallel(build(*REFUSED["dynamic RoPE"][:3])).model
    model(sequence(32))
    assert_raises(comm, LARGEST, model, sequence(33))


def test_the_probe_compares_with_the_models_own_attention(comm, parallel, monkeypatch):
    """It finds an attention that does not do what its arguments say."""
    from transformers.models.llama import modeling_llama

    real = modeling_llama.eager_attention_forward

    def biased(module, query, key, value, mask, **others):
        return real(module, query, key, value, mask - torch.arange(mask.shape[-1]) / 9, **others)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
    model = build(*EQUAL["Llama"])
    same = "model.layers.0 is not the same over ranks"
    assert_raises(comm, same, parallel, model)
    parallel(model, probe=False)


def test_the_probe_finds_other_weights(comm, parallel):
    model = build(*EQUAL["Llama"])
    if comm.rank == 1:
        model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.1)
    same = "model.layers.1 is not the same over ranks"
    assert_raises(comm, same, parallel, model)


def test_masks_of_no_plan(comm, parallel, monkeypatch):
    """A mask that is far from any plan's, or differs in one token of a long sequence."""
    from transformers.models.llama import modeling_llama

    real = modeling_llama.create_causal_mask
    shown = [lambda b, h, q, k: (q - k) % 3 != 2, lambda b, h, q, k: ~((q > 4000) & (k == 0))]
    for seqlen, extra in zip((N, 5000), shown):
        monkeypatch.setattr(
            modeling_llama,
            "create_causal_mask",
            lambda extra=extra, **others: real(**others, and_mask_function=extra),
        )
        told = "model.layers.0.self_attn has a mask that is no window"
        assert_raises(comm, told, parallel, build(*EQUAL["Llama"]), seqlen=seqlen)


def test_no_model_of_transformers(comm, parallel):
    told = "make ContextParallel of the model first, and then what wraps it"
    assert_raises(comm, told, parallel, torch.nn.Linear(2, 2))


def test_errors_of_mask_functions(monkeypatch):
    """A function of fewer tokens shows no plan's mask; an error of our own stays one."""
    shown = torch.ones(5, dtype=torch.bool)
    assert Masks(9, []).number_of(lambda b, h, q, k: shown[q]) == 0
    monkeypatch.setattr(masks, "mask_of", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        Masks(9, []).number_of(lambda b, h, q, k: q >= k)
