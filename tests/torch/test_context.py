"""Models of Hugging Face transformers in `ContextParallel`: equal to one process, or refused.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import assert_all
from refused import assert_raises, message_of
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from a2d_mpi import Attention2D, Causal, Documents, Full, ProcessGrid
from a2d_mpi.masks.documents import positions_in
from a2d_mpi.torch import ContextParallel, shift_labels, sum_gradients, use_in_transformers

pytestmark = pytest.mark.mpi(min_size=4)
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
N, VOCAB = 61, 53
ENDS = np.array([0, 23, 24, 58, N])  # of documents
OWN = "call the model with **batch.inputs"
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


def assert_near(comm, found, exact, bound=1e-6):
    """Assert that losses and gradients are near; see `distance`."""
    far = distance(found, exact)
    assert_all(comm, far <= bound, f"off by {far}, more than {bound}")


@pytest.fixture(scope="module")
def grid(comm, request):
    """Return a grid of all ranks, or of three of them and of the rest."""
    part = comm.Split(getattr(request, "param", "all") == "three" and comm.rank >= 3, comm.rank)
    rows = 2 if part.size % 2 == 0 else 1
    grid = ProcessGrid(part, rows, part.size // rows)
    yield grid
    grid.free()
    part.Free()


@pytest.fixture
def parallel(grid):
    """Make a `ContextParallel` on the grid; it is freed after the test."""
    made = []

    def make(model, seqlen=N, **options):
        made.append(ContextParallel(grid, model, seqlen=seqlen, **options))
        return made[-1]

    yield make
    for x in made:
        x.free()


# In turn on all ranks, and on three of them and the rest: each model once.
WHERE = [(("all", "three")[i % 2], name) for i, name in enumerate(EQUAL)]


@pytest.mark.parametrize("grid, name", WHERE, indirect=["grid"])
def test_equal_to_one_process(comm, grid, parallel, name):
    """Loss and all gradients are those of one process in float64."""
    n = N if grid.comm.size == comm.size else N - 1  # uneven and even shards
    model, ids = build(*EQUAL[name]), sequence(n)
    bidirectional = "Masked" in EQUAL[name][0]
    labels = ids.roll(5) if bidirectional else ids
    exact = step(build(*EQUAL[name]), ids, labels, [0, n])
    found = spread_step(parallel(model, n), model, ids, labels if bidirectional else None)
    assert_near(comm, found, exact)


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Llama 4", "ModernBERT"])
def test_documents(comm, parallel, name):
    """Each document is computed as if it were alone; plans of the same documents are kept."""
    model, ids = build(*EQUAL[name]), sequence(N)
    labels = ids.roll(5) if "Masked" in EQUAL[name][0] else ids
    cp = parallel(model)
    for ends in (ENDS, np.array([0, 30, N]), ENDS):
        found = spread_step(cp, model, ids, None if labels is ids else labels, ends)
        assert_near(comm, found, step(build(*EQUAL[name]), ids, labels, ends))
    assert_all(comm, len(cp._sets) == 3, "plans were made again")


@pytest.mark.parametrize("name", ["BERT", "Llama 4"])
def test_longest_document(comm, parallel, name):
    """A model needs positions for the longest document only; longer ones are refused."""
    kind, config, options = EQUAL[name]
    options = options | {"max_position_embeddings": 35}
    model, ids = build(kind, config, options), sequence(N)
    labels = ids.roll(5) if "Masked" in kind else ids
    cp = parallel(model, longest=35)
    found = spread_step(cp, model, ids, None if labels is ids else labels, ENDS[:4])
    assert_near(comm, found, step(build(kind, config, options), ids, labels, ENDS[:4]))
    for ends in (None, [0, 36, N], [0, 20]):
        assert_raises(comm, "documents must have at most 35 tokens", cp.shard, ids, None, ends)


def test_padding_and_labels(comm, parallel):
    """Tokens after the last document are padding; labels of -100 do not count."""
    model, ids = build(*EQUAL["Llama"]), sequence(N)
    labels = ids.clone()
    labels[0, 10:20] = -100
    for n in (N, 50):
        one, cp = build(*EQUAL["Llama"]), parallel(model)
        logits = one(input_ids=ids[:, :n]).logits[0]
        loss = F.cross_entropy(logits[:-1], labels[0, 1:n])
        loss.backward()
        found = spread_step(cp, model, ids, labels, np.array([0, n]))
        assert_near(comm, found, (loss.item(), gradients(one)))
        cp.free()


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "gpt-oss"])
def test_bfloat16(comm, parallel, name):
    """Errors against float64 are at most twice those of one process in bfloat16."""
    ids, dtype = sequence(N), torch.bfloat16
    exact = step(build(*EQUAL[name]), ids, ids, ENDS)
    one = distance(step(build(*EQUAL[name], dtype), ids, ids, ENDS), exact)
    model = build(*EQUAL[name], dtype)
    assert_near(comm, spread_step(parallel(model), model, ids, ends=ENDS), exact, 2 * one)


@pytest.mark.parametrize("grid, method, name", [
    ("three", "ring", "Gemma 3"), ("three", "triangle", "Llama"),
], indirect=["grid"])  # fmt: skip
def test_methods(comm, grid, parallel, method, name):
    """Any method will do; the root alone has the sequence."""
    model, ids, part = build(*EQUAL[name]), sequence(N), grid.comm
    exact = step(build(*EQUAL[name]), ids, ids, [0, N])
    cp, root = parallel(model, method=method), part.size - 1
    batch = cp.shard(ids if part.rank == root else None, root=root)
    loss = cp.loss(model(**batch.inputs).logits, batch, averaged_over=part.size) / part.size
    loss.backward()
    cp.sum_gradients()
    assert_near(comm, (sum(part.allgather(loss.item())), gradients(model)), exact)


def test_autocast(comm, parallel):
    """Under autocast the options name the dtype of attention; the probe runs without it."""
    ids = sequence(N)
    exact = step(build(*EQUAL["Llama"]), ids, ids, [0, N])
    model = build(*EQUAL["Llama"], torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cp = parallel(model, dtype="bfloat16", distribution="striped")
        found = spread_step(cp, model, ids)
        one = step(build(*EQUAL["Llama"], torch.float32), ids, ids, [0, N])
    assert_near(comm, found, exact, 2 * distance(one, exact))
    plans = [*cp.plans.values()]
    good = [(x.dtype.name, x.distribution.name) == ("bfloat16", "striped") for x in plans]
    assert_all(comm, all(good), f"{plans}")


def test_compiled(comm, parallel):
    """A compiled model has the same results; plans are left out of its graphs."""
    model, ids = build("LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 1}), sequence(N)
    batch = parallel(model).shard(ids, cu_seqlens=ENDS)
    expected = model(**batch.inputs).logits
    out = torch.compile(model, backend="eager")(**batch.inputs).logits
    assert_all(comm, torch.equal(out, expected), "another result")


def test_two_models(comm, parallel):
    """A batch belongs to one model: another one may have another distribution."""
    models = [build(*EQUAL[x]) for x in ("Llama", "Gemma 3")]
    batches = [parallel(x).shard(sequence(N)) for x in models]
    for model, batch in zip(models, batches):
        model(**batch.inputs)
    assert_raises(comm, OWN, models[0], **batches[1].inputs)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # its name before 6
def test_two_batches_with_checkpoints(comm, parallel):
    """A layer that is computed again in the backward pass has the plans of its own batch."""
    model, ids = build(*EQUAL["Gemma 3"]), sequence(N)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    cp = parallel(model)
    batches = [cp.shard(ids, cu_seqlens=x) for x in (ENDS, None)]
    losses = [cp.loss(model(**x.inputs, use_cache=False).logits, x) for x in batches]
    sum(losses).backward()
    cp.sum_gradients()
    one = [step(build(*EQUAL["Gemma 3"]), ids, ids, x) for x in (ENDS, [0, N])]
    exact = sum(x[0] for x in one), [x + y for x, y in zip(one[0][1], one[1][1])]
    assert_near(comm, (sum(comm.allgather(sum(losses).item())), gradients(model)), exact)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
MIXES = "mixes tokens outside of transformers' attention"
BYPASSES = "does not use transformers' attention functions"
LARGEST = "depends on the largest position"
# Class, config and options of models that are refused, and what the error says.
REFUSED = {
    "Llama 4, temperature": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        LLAMA4 | {"attn_temperature_tuning": True, "floor_scale": 16},
        "model.layers.3.self_attn (q) counts positions by itself"),
    "Qwen3-Next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", LINEAR,
                   f"model.layers.0.linear_attn.out_proj {MIXES}"),
    "LFM2": ("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": ["conv", "full_attention"]},
             f"model.layers.0.conv.out_proj {MIXES}"),
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
    "a class of the sequence": ("LlamaForSequenceClassification", "LlamaConfig", {},
                                "its output has no row for each token"),
    "other dropout": (
        "GPT2LMHeadModel", "GPT2Config", GPT2 | {"attn_pdrop": 0, "resid_pdrop": 0.1},
        "transformer.h.0.attn.resid_dropout is random in training: set its dropout to 0"),
    "dropout": ("GPT2LMHeadModel", "GPT2Config", GPT2, "transformer.h.0.attn has dropout 0.1"),
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
    said = message_of(comm, lambda: parallel(model))
    assert_all(comm, text in said and what[0] in said, f"{text!r} is not in {said!r}")
    assert_all(comm, model.config._attn_implementation == before and model.training, "changed")


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
        assert_raises(comm, told, parallel, build(*EQUAL["Llama"]), seqlen)


def test_calls_that_are_refused(comm, parallel):
    """What a user may do wrong with a model or a batch, on rank 0 or on all."""
    model, ids = build(*EQUAL["Llama"]), sequence(N)
    cp = parallel(model)
    batch = cp.shard(ids)
    given, padding = batch.inputs, torch.ones_like(batch.labels)
    padding[:, -1] = 0
    cases = [
        ({"labels": batch.labels}, "would shift labels on each rank alone"),
        ({"position_ids": given["position_ids"].clone()}, OWN),
        ({"position_ids": None}, OWN),
        ({"attention_mask": padding}, "a plan takes no padding mask"),
        ({"output_attentions": True}, "a plan does not keep the weights"),
    ]
    for wrong, text in cases:
        for ranks in ([0], range(comm.size)):
            more = wrong if comm.rank in ranks else {}
            assert_raises(comm, text, model, **given | more)
    # The Trainer calls a model like this, with the whole sequence.
    assert_raises(comm, OWN, model, input_ids=ids, labels=ids)
    assert_raises(comm, OWN, model.generate, ids, max_new_tokens=1)
    cp._training = False  # as if it had been made of a model that was not training
    assert_raises(comm, "call model.train() before ContextParallel", model, **given)
    model.eval()(**given)
    model.train()
    cp._training = True
    model.set_attn_implementation("sdpa")
    assert_raises(comm, "has got another attention implementation", model, **given)
    model.set_attn_implementation(cp._name)
    assert_raises(comm, "a copy of a model needs", copy.deepcopy(model), **given)
    shards = [
        (lambda: cp.shard(ids.roll(comm.rank)), "ranks disagree on input_ids"),
        (lambda: cp.shard(ids[:, 1:]), "one sequence of 61 tokens, got 60"),
        (lambda: cp.shard(ids.double()), "need integers"),
        (lambda: cp.shard(ids, ids[:, 1:]), "labels must be 61 numbers, got 60"),
        (lambda: cp.shard(ids, None, [0, 70]), "ends at 70, the sequence at 61"),
        (lambda: cp.shard(None, root=0), "input_ids must be one sequence"),
        (lambda: cp.shard(ids, root=9), "root must be a rank, got 9"),
        (lambda: cp.shard(ids, root=comm.rank), "ranks disagree on root"),
    ]
    for call, text in shards:
        assert_raises(comm, text, call)
    with pytest.raises(ValueError, match="logits must be"):
        cp.loss(torch.zeros(1, N, VOCAB), batch)
    ends = [np.array([0, x, N]) for x in range(30, 39)]
    first, *_ = (cp.shard(ids, cu_seqlens=x) for x in ends)  # whose plans are not kept for ever
    assert_raises(comm, f"{OWN} of a new batch", model, **first.inputs)
    model(**given)
    cp.free()
    assert_all(comm, model(input_ids=ids).logits.shape[1] == N, "not the model's own attention")
    assert_raises(comm, "it is no PreTrainedModel", parallel, torch.nn.Linear(2, 2))


HEADS = {"nheads": 4, "nheads_kv": 2, "headdim": 8}


def of_plan(plan, *what, dtype=torch.float32):
    """Return a model whose attention is a plan, and this rank's inputs."""
    model, ids = build(*what, dtype), sequence(plan.seqlen)
    model.set_attn_implementation(use_in_transformers(plan))
    places = positions_in(plan.mask.cu_seqlens if isinstance(plan.mask, Documents) else [0, N])
    return model, {
        "input_ids": ids[:, plan.tokens],
        "position_ids": torch.from_numpy(places[plan.tokens])[None],
    }


@pytest.mark.parametrize("mask", [Causal(), Documents(ENDS, causal=True)], ids=["one", "packed"])
def test_one_plan(comm, grid, mask):
    """The functions of `ContextParallel`, called by hand, come to the same."""
    plan = Attention2D(grid, mask, seqlen=N, dtype="float64", **HEADS)
    model, given = of_plan(plan, *EQUAL["Llama"], dtype=torch.float64)
    ends = ENDS if isinstance(mask, Documents) else [0, N]
    exact = step(build(*EQUAL["Llama"]), *[sequence(N)] * 2, ends)
    labels = shift_labels(plan, given["input_ids"][0])
    loss = F.cross_entropy(model(**given).logits[0], labels, reduction="sum")
    (loss := loss / comm.allreduce(int((labels >= 0).sum()))).backward()
    sum_gradients(model, comm)
    assert_near(comm, (comm.allreduce(loss.item()), gradients(model)), exact)
    plan.free()


def test_positions_that_documents_count(comm):
    """A shard that begins with a document may have the positions that a model counts by itself."""
    grid = ProcessGrid(comm, 1, comm.size)
    mask = Documents(5 * np.arange(comm.size + 1), causal=True)
    plan = Attention2D(grid, mask, distribution="contiguous", seqlen=5 * comm.size, **HEADS)
    model, given = of_plan(plan, *EQUAL["Llama"])
    places = None, torch.arange(5)[None]
    out, same = (model(**given | {"position_ids": x}).logits for x in places)
    assert_all(comm, torch.equal(out, same), "another result")
    plan.free()
    grid.free()


def test_one_plan_refuses(comm, grid):
    """A wrong argument on rank 0 is an error on all ranks."""
    plan = Attention2D(grid, Causal(), seqlen=N, **HEADS)
    model, given = of_plan(plan, *EQUAL["Llama"])
    name = model.config._attn_implementation
    padding = torch.ones_like(given["input_ids"])
    padding[:, -1:] = 0
    cases = [
        ({"attention_dropout": 0.1}, {}, "dropout must be 0 in attention, got 0.1"),
        ({}, {"output_attentions": True}, "a plan does not keep the weights of attention"),
        ({}, {"attention_mask": padding}, "a plan takes no padding mask"),
        ({}, {x: y.repeat(2, 1) for x, y in given.items()}, "must be one sequence, got 2"),
        ({"head_dim": 16}, {}, "scales logits by 0.25, but the plan by 0.35"),
        ({}, {"softcap": 30.0}, "has the soft-cap 30.0, but the plan has None"),
        ({}, {"sliding_window": 9}, "the model passes sliding_window"),
    ]
    for options, more, text in cases:
        wrong = model
        if options and comm.rank == 0:
            wrong = build("LlamaForCausalLM", "LlamaConfig", options, torch.float32)
            wrong.set_attn_implementation(name)
        assert_raises(comm, text, wrong, **given | (more if comm.rank == 0 else {}))
    # Positions that each rank counts from 0 are right on rank 0 alone, if at all.
    assert_raises(comm, "position_ids must be given", model, input_ids=given["input_ids"])
    # A model that gives no scale means 1 / sqrt(headdim).
    scaled = Attention2D(grid, Causal(), softmax_scale=1, seqlen=N, **HEADS)
    attention, layer = ALL_ATTENTION_FUNCTIONS[use_in_transformers(scaled)], model.model.layers[0]
    q, k = (torch.ones(1, heads, len(plan.tokens), 8) for heads in (4, 2))
    told = "scales logits by 0.3535533905932738, but the plan by 1.0"
    assert_raises(comm, told, attention, layer.self_attn, q, k, k)
    scaled.free()
    # A mask without padding is none; a copy of the model has the plan, too.
    out = copy.deepcopy(model)(**given, attention_mask=torch.ones_like(padding)).logits
    assert_all(comm, torch.equal(out, model(**given).logits), "another result")
    short = Attention2D(grid, Causal(), seqlen=2, **HEADS)
    with pytest.raises(ValueError, match="has none of the 2 tokens"):
        use_in_transformers(short)
    plan.free()
    del plan, out  # whose graph has the plan, too
    with pytest.raises(ValueError, match="the plan was deleted: keep"):
        model(**given)


def test_one_plan_on_a_wrong_model(comm, grid):
    """`use_in_transformers` refuses what it can see."""
    sizes = {"seqlen": N, "dtype": "float64", **HEADS}
    cases = [
        (EQUAL["Llama"], Full(), "but the model's hides it"),
        (EQUAL["Llama 4"], Causal(), "but the model's hides it"),
        (EQUAL["BERT"], Causal(), "attends in both directions, but the plan's mask is causal"),
    ]
    for what, mask, text in cases:
        heads = {"nheads_kv": 4 if what is EQUAL["BERT"] else 2}
        plan = Attention2D(grid, mask, **sizes | heads)
        model, given = of_plan(plan, *what, dtype=torch.float64)
        assert_raises(comm, text, model, **given)
    model = build(*EQUAL["Llama"])
    plans = [Attention2D(grid, Causal(), **sizes, distribution=x) for x in ("zigzag", "striped")]
    for layer, plan in zip(model.model.layers, plans):
        layer.self_attn.config = copy.copy(model.config)
        layer.self_attn.config._attn_implementation_internal = use_in_transformers(plan)
    own = torch.from_numpy(plans[0].tokens)[None]
    model.config._attn_implementation_internal = layer.self_attn.config._attn_implementation
    if len({len(x.tokens) for x in plans}) == 1:
        told = "two plans with different distributions"
        assert_raises(comm, told, model, input_ids=own % VOCAB, position_ids=own)
