"""Calls of a model in `ContextParallel`: equal to the same calls on one process, or refused.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import copy
import gc
import pickle
import threading
from functools import partial
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import assert_all
from mpi4py import MPI
from refused import assert_raises, message_of
from test_context import (
    BERT,
    EQUAL,
    EXPERTS,
    GPT2,
    VOCAB,
    assert_near,
    build,
    loss_of,
    sequence,
    step,
)
from torch.utils.checkpoint import checkpoint

from a2d_mpi.torch import ContextParallel
from a2d_mpi.torch.whole import Rows

pytestmark = pytest.mark.mpi(min_size=2)
ON = pytest.mark.parametrize("grid", ["all", "three"], indirect=True)
KINDS = EQUAL | {
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS | {
        "output_router_logits": True, "router_aux_loss_coef": 0.3}),
    "BertModel": ("BertModel", "BertConfig", BERT),
    "Bert of tokens": ("BertForTokenClassification", "BertConfig", BERT),
    "Bert of sequences": ("BertForSequenceClassification", "BertConfig", BERT),
    "Llama of sequences": ("LlamaForSequenceClassification", "LlamaConfig", {}),
    "dropout": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {"attn_pdrop": 0, "resid_pdrop": 0.3}),
    "tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "many experts": ("MixtralForCausalLM", "MixtralConfig", {
        "num_local_experts": 16, "num_experts_per_tok": 1, "output_router_logits": True}),
}  # fmt: skip
IDS, B, N = sequence(40, 3), 3, 40
BOTH, BEHIND = torch.ones_like(IDS), torch.ones_like(IDS)  # the sides of padding
BOTH[0, 30:] = BOTH[1, :5] = BEHIND[1, 20:] = 0
LABELS = IDS.masked_fill(BOTH == 0, -100)
LABELS[1, 5] = -100  # the first token of a row that is padded on the left
SOME = LABELS.masked_fill(torch.arange(N) % 5 > 0, -100)
ENDS = torch.tensor([0, 1, 41, 43, 100], dtype=torch.int32)
PLACES = torch.cat([torch.arange(x) for x in ENDS.diff()])[None]
LONG = sequence(100)
PADDED = {"input_ids": IDS, "attention_mask": BOTH, "labels": LABELS}
PACKED = {
    "input_ids": LONG, "position_ids": PLACES, "labels": LONG.masked_fill(PLACES == 0, -100),
}  # fmt: skip
BOUNDS = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 57, "max_length_k": 57}
EMBEDDED = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(2)).double()
TWO = {"input_ids": IDS, "labels": IDS}
CLASSES = torch.tensor([0, 1, 1])
# A model and the arguments of a call.
CASES = {
    "a batch": ("Llama", TWO),
    "padding": ("Llama", PADDED),
    "given number of labels": ("Qwen3", PADDED | {"num_items_in_batch": 77}),
    "number of labels as a tensor": ("Llama", TWO | {"num_items_in_batch": torch.tensor(77)}),
    "documents": ("GPT-2", PACKED),
    "documents and their bounds": ("Gemma 3", PACKED | BOUNDS),
    "embeddings": ("Llama", {"inputs_embeds": EMBEDDED, "labels": IDS[:2, :30]}),
    "token types": ("GPT-2", TWO | {"token_type_ids": IDS.flip(1)}),
    "shifted labels": ("Llama", TWO | {"shift_labels": IDS.roll(1, 1)}),
    "hidden states": ("Llama", PADDED | {"output_hidden_states": True}),
    "a tuple": ("Llama", TWO | {"return_dict": False}),
    "the last logits": ("Llama", {"input_ids": IDS, "logits_to_keep": 3}),
    "some logits": ("Llama", {"input_ids": IDS, "logits_to_keep": torch.tensor([2, 39])}),
    "two tokens": ("Llama", {"input_ids": IDS[:1, :2], "labels": IDS[:1, :2]}),
    "one token": ("Llama", {"input_ids": IDS[:1, :1]}),
    "rows of one token": ("gpt-oss", {"input_ids": IDS[:, :1]}),
    "balance loss": ("Mixtral", TWO),
    "balance loss and padding": ("Mixtral", PADDED),
    "embeddings of a text": ("BertModel", {"input_ids": IDS, "attention_mask": BEHIND}),
    "masked tokens": ("BERT", PADDED | {"labels": SOME}),
    "masked tokens and windows": ("ModernBERT", PADDED | {"labels": SOME}),
    "classes of tokens": (
        "Bert of tokens", PADDED | {"labels": (IDS % 2).masked_fill(BOTH == 0, -100)}),
    "classes of texts": (
        "Bert of sequences", {"input_ids": IDS, "attention_mask": BEHIND, "labels": CLASSES % 2}),
    "classes by a causal model": (
        "Llama of sequences",
        {"input_ids": IDS * BOTH, "attention_mask": BOTH, "labels": CLASSES}),
}  # fmt: skip


def flat(output):
    """Return the tensors of an output."""
    if isinstance(output, torch.Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output
    return [y for x in items if x is not None for y in flat(x)]


def results(model, given):
    """Return the loss of a call, and all gradients and outputs, without padding."""
    given = {
        name: x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in given.items()
    }
    kept = given.get("attention_mask", BOTH.new_ones(0)).bool()
    outputs = flat(model(**given))
    for i, x in enumerate(outputs):
        for rows in (kept, kept.flatten()):
            if x.shape[: rows.dim()] == rows.shape:
                outputs[i] = x[rows]
    is_loss = outputs[0].dim() == 0
    loss = outputs[0] if is_loss else sum(x.double().tanh().square().mean() for x in outputs)
    loss.backward()
    grads = [x.grad for x in (*model.parameters(), *given.values()) if hasattr(x, "grad")]
    return loss.item(), grads + [x.detach() for x in outputs]


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(comm, parallel, name):
    """Loss, outputs and all gradients are those of the same call on one process in float64."""
    kind, given = CASES[name]
    model, one = build(*KINDS[kind]), build(*KINDS[kind])
    one.config.use_cache = False  # or transformers takes documents for one
    found, exact = results(parallel(model).model, given), results(one, given)
    shapes = [[y.shape for y in x[1] if y is not None] for x in (found, exact)]
    assert_all(comm, shapes[0] == shapes[1], f"{shapes}")
    assert_near(comm, found, exact)


def in_a_thread(call):
    """Return what a call returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def only(given):
    return {x: y for x, y in given.items() if x != "labels"}


def hooked(model, given):
    """Call a model with hooks of accelerate, which replace `forward`, too."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    add_hook_to_module(model.model, ModelHook())
    logits = model(**only(given)).logits
    remove_hook_from_module(model.model)
    return logits


def embedded(model, given):
    embeddings = model.model.embed_tokens(given["input_ids"])
    return model(inputs_embeds=embeddings, attention_mask=given["attention_mask"]).logits


# Ways to compute the logits of a batch.
WAYS = {
    "call": lambda model, given: model(**only(given)).logits,
    "forward": lambda model, given: model.forward(**only(given)).logits,
    "model in the model": lambda model, given: model.lm_head(model.model(**only(given))[0]),
    "positional": lambda model, given: model(given["input_ids"], given["attention_mask"])[0],
    "embeddings": embedded,
    "thread": lambda model, given: in_a_thread(lambda: model(**only(given)).logits),
    "functional": lambda model, given: (
        torch.func.functional_call(model, dict(model.named_parameters()), (), only(given)).logits
    ),
    "checkpoint": lambda model, given: checkpoint(
        lambda: model(**only(given)).logits, use_reentrant=False
    ),
    "accelerate": hooked,
}


def own_loss(logits, labels):
    """Return a loss of whole logits that a user writes."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_call(comm, parallel, way):
    """A loss of the user's own of two batches of other lengths, with one backward pass."""
    short = {x: y[:2, :27] for x, y in PADDED.items()}

    def call(model, given):
        return own_loss(WAYS[way](model, given), given["labels"])

    model, one = build(*EQUAL["Llama"]), build(*EQUAL["Llama"])
    found = step(parallel(model).model, PADDED, short, way=call)
    assert_near(comm, found, step(one, PADDED, short, way=call))


def accumulated(model, cp):
    """Call a model several times before an optimizer steps, with a penalty by itself."""
    (0.1 * sum(x.square().sum() for x in model.parameters())).backward()
    loss_of(model, PADDED).backward()
    (0.1 * sum(x.square().sum() for x in model.parameters())).backward()
    return loss_of(model, TWO)


def distilled(model, cp):
    """Compare with another model."""
    with torch.no_grad():
        target = build(*EQUAL["Qwen3"])(IDS).logits.softmax(-1)
    return -(target * model(IDS).logits.log_softmax(-1)).sum(-1).mean()


def own_rows(model, cp):
    """Make a loss of this rank's logits."""
    targets = F.pad(LABELS[:, 1:], (0, 1), value=-100).flatten()
    logits = model(IDS, BOTH).logits
    if cp is None:
        return F.cross_entropy(logits.flatten(0, 1), targets)
    part = F.cross_entropy(logits.own, targets[cp.rows], reduction="sum")
    return cp.total(part) / (targets != -100).sum()


@pytest.mark.parametrize("loss", [accumulated, distilled, own_rows])
@ON
def test_losses(comm, grid, parallel, loss):
    """What all ranks compute alike after the model is right, and what they make of own rows."""
    model, one = build(*EQUAL["Llama"]), build(*EQUAL["Llama"])
    cp = parallel(model)
    found = step(model, None, way=lambda model, _: loss(model, cp))
    assert_near(comm, found, step(one, None, way=lambda model, _: loss(model, None)))
    bits = [crc32(x.numpy()) for x in found[1] if x is not None]
    assert_all(comm, len({*grid.comm.allgather((*bits,))}) == 1, "ranks differ")


@pytest.mark.parametrize("name, layers", [("Llama", 0), ("Mixtral", 2)])
def test_logits_are_gathered_when_they_are_read(comm, parallel, monkeypatch, name, layers):
    """A step that takes the loss, or own rows, gathers routes only; all is gathered once."""
    calls, real = [], Rows.joined
    monkeypatch.setattr(Rows, "joined", lambda *x: calls.append(0) or real(*x))
    model = build(*KINDS[name])
    cp = parallel(model)
    output = model(**TWO)
    output.loss.backward()
    own, text = output.logits.detach().own, repr(output.logits)
    good = len(calls) == layers and text == "Whole((3, 40, 53), torch.float64)"
    assert_all(comm, good, f"{calls} {text}")
    logits, places = torch.from_numpy(output.logits.detach().numpy()), cp.rows.tolist()
    same = [torch.equal(logits.flatten(0, 1)[places], own), torch.equal(output.logits, logits)]
    copies = [copy.deepcopy(output.logits), pickle.loads(pickle.dumps(output.logits.detach()))]
    same += [torch.equal(x, logits) for x in copies] + [output.logits.tolist() == logits.tolist()]
    every = sorted(x for y in comm.allgather(places) for x in y)
    assert_all(comm, every == [*range(IDS.numel())], "places of rows")
    assert_all(comm, all(same) and len(calls) <= layers + 2, f"{same} {len(calls)}")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(comm, parallel, mode):
    """Between steps of training, with other lengths than theirs."""
    model, one = parallel(build(*EQUAL["Gemma 3"])).model, build(*EQUAL["Gemma 3"])
    for n in (40, 21, 8, 33):
        given = {"input_ids": IDS[:, :n], "labels": IDS[:, :n]}
        assert_near(comm, step(model, given), step(one, given))
        with mode():
            found, exact = (x.eval()(**given) for x in (model, one))
        near = torch.allclose(found.logits, exact.logits)
        near &= abs(found.loss.item() / exact.loss.item() - 1) < 1e-6
        assert_all(comm, near, f"evaluation of {n}")
        model.train(), one.train()


@pytest.mark.filterwarnings("ignore")  # of reentrant checkpoints
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Gemma 3", "Mixtral", "BERT"])
def test_layers_that_are_computed_again(comm, parallel, name, reentrant):
    """Each layer has the plans of its own batch, after the forward pass of another one."""
    model, one = build(*KINDS[name]), build(*KINDS[name])
    for x in (model, one):  # a reentrant checkpoint loses the gradient of the balance loss
        x.gradient_checkpointing_enable({"use_reentrant": reentrant})
    batches = TWO, {x: y[1:, :23].contiguous() for x, y in TWO.items()}
    found = step(parallel(model).model, *batches)
    assert_near(comm, found, step(one, *batches))


def test_adapters(comm, parallel):
    """LoRA of PEFT, made before or after, and merged at the end."""
    from peft import LoraConfig, get_peft_model

    def tuned():
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = build(*EQUAL["Llama"])
        return model, get_peft_model(model, config).train()

    exact = step(tuned()[1], PADDED)
    before, wrapped = tuned()
    assert_near(comm, step(parallel(wrapped).model and wrapped, PADDED), exact)
    before = build(*EQUAL["Llama"])
    cp = parallel(before)
    after = get_peft_model(before, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    after.load_state_dict(tuned()[1].state_dict())
    assert_near(comm, step(after.double().train(), PADDED), step(tuned()[1].train(), PADDED))
    cp.free()
    merged = after.merge_and_unload()(IDS).logits
    assert_all(comm, torch.allclose(merged, tuned()[1](IDS).logits, atol=1e-6), "merged")


def test_dropout(comm, parallel):
    """Ranks draw different numbers, the same ones when a layer is computed again."""
    model, shown = build(*KINDS["dropout"]), []
    cp, found = parallel(model), []
    handle = model.transformer.h[0].mlp.dropout.register_forward_hook(
        lambda module, given, out: shown.append(out[0, :10] == 0)
    )
    model(IDS)
    handle.remove()
    different = {x.numpy().tobytes() for x in comm.allgather(shown[-1])}
    assert_all(comm, len(different) == comm.size and shown[-1].any(), f"{len(different)}")
    for how in (None, {"use_reentrant": False}):
        if how:
            model.gradient_checkpointing_enable(how)
        torch.manual_seed(7)
        found.append(step(model, TWO))
        same = {x.numpy().tobytes() for x in comm.allgather(torch.get_rng_state())}
        assert_all(comm, len(same) == 1, "another random state afterwards")
    assert_near(comm, *found)
    assert_all(comm, step(model, TWO)[0] != found[0][0], "no other numbers")
    one = build(*KINDS["dropout"]).eval()
    assert_near(comm, step(cp.model.eval(), TWO), step(one, TWO))


def test_dropout_of_attention_is_refused_in_training(comm, parallel):
    kind, config, options = KINDS["dropout"]
    model = parallel(build(kind, config, options | {"attn_pdrop": 0.1})).model
    assert_raises(comm, "dropout must be 0 in attention, got 0.1", model, IDS)
    one = build(kind, config, options).eval()
    assert_near(comm, step(model.eval(), TWO), step(one, TWO))


HOLES = BOTH.clone()
HOLES[0, 3] = 0
# Arguments that are wrong on all ranks, and what the error says.
WRONG = {
    "an argument that ranks cannot share": (
        TWO | {"foo": torch.ones(3)}, "ranks cannot share the argument foo: it must have a row"),
    "no tokens": ({"labels": IDS}, "give one of input_ids and inputs_embeds, got 0"),
    "two kinds of tokens": (
        {"input_ids": IDS[:2, :30], "inputs_embeds": EMBEDDED}, "inputs_embeds, got 2"),
    "one row": ({"input_ids": IDS[0]}, "input_ids must be tokens of a batch, (B, N, ...)"),
    "no row": ({"input_ids": IDS[:0]}, "input_ids must be tokens of a batch"),
    "a cache": (
        {"input_ids": IDS, "past_key_values": transformers.DynamicCache()}, "call model.generate"),
    "use_cache": ({"input_ids": IDS, "use_cache": True}, "call model.generate"),
    "labels of some logits": (TWO | {"logits_to_keep": 2}, "labels or logits_to_keep, not both"),
    "a first token after padding": (
        PADDED | {"labels": IDS.masked_fill(BOTH == 0, -100)},
        "padding would predict labels[1, 5]: it must be -100"),
    "labels of padding": (PADDED | {"labels": IDS}, "padding would predict labels[0, 31]"),
    "other labels": (TWO | {"labels": IDS[:, 1:]}, "labels must have shape (3, 40)"),
    "labels in floats": (TWO | {"labels": IDS.double()}, "labels must be integers"),
    "holes": (TWO | {"attention_mask": HOLES}, "must be 1 for consecutive tokens of a row"),
    "an empty row": (TWO | {"attention_mask": BOTH * 0}, "row 0 of attention_mask has no token"),
    "a mask of four dimensions": (
        TWO | {"attention_mask": BOTH[:, None, None]}, "attention_mask must be integers"),
    "documents and padding": (
        PACKED | {"attention_mask": torch.ones_like(LONG)}, "take no attention_mask"),
    "other bounds": (
        PACKED | BOUNDS | {"cu_seq_lens_q": ENDS[1:]}, "other documents than position_ids"),
    "bounds behind the end": (
        PACKED | {"cu_seq_lens_q": ENDS * 2}, "cu_seq_lens_q[0, 4] must be 0 to 100, got 200"),
    "weights of attention": (TWO | {"output_attentions": True}, "output_attentions must be false"),
    "a token behind the vocabulary": (
        {"input_ids": IDS + VOCAB}, f"must be 0 to {VOCAB - 1}, got"),
    "a label behind the vocabulary": (TWO | {"labels": IDS + VOCAB}, "labels["),
    "not causal": (TWO | {"is_causal": False}, "asks for Full() in this call, but its plan has"),
    "a window": (TWO | {"sliding_window": 3}, "passes sliding_window=3, but its mask has none"),
    "too many tokens": (
        {"input_ids": sequence(81, 3)}, "the batch has 243 tokens, but seqlen is 200"),
    "too large token types": (
        TWO | {"token_type_ids": IDS + 10}, "token_type_ids[", "BERT"),
    "a pooler of padding": (
        {"input_ids": IDS, "attention_mask": BOTH}, "the pooler would take padding", "BertModel"),
    "documents of an encoder": (PACKED, "give cu_seq_lens_q, too", "BERT"),
    "an encoder that is causal": (TWO | {"is_causal": True}, "is_causal=True", "ModernBERT"),
}  # fmt: skip
# Arguments of one rank, where the others pass TWO or PADDED.
OTHER = {
    "tokens": (TWO, {"input_ids": IDS.roll(1)}, "ranks disagree on input_ids"),
    "labels": (TWO, {"labels": IDS.roll(1)}, "ranks disagree on labels"),
    "padding": (PADDED, {"attention_mask": BEHIND}, ""),
    "number": (TWO, {"num_items_in_batch": 3}, "ranks disagree on num_items_in_batch"),
    "dtype": (TWO, {"input_ids": IDS.int()}, "ranks disagree on input_ids"),
    "length": ({"input_ids": IDS}, {"input_ids": IDS[:, 1:]}, "ranks disagree on input_ids"),
    "no labels": ({"input_ids": IDS}, {"labels": IDS}, "ranks disagree on labels"),
    "no classes": (
        {"input_ids": IDS}, {"labels": IDS % 2}, "ranks disagree on the model", "Bert of tokens"),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(grid):
    """Return a `ContextParallel` of each name, which is kept for all tests of this file."""
    kept = {}

    def model_of(name):
        if name not in kept:
            kept[name] = ContextParallel(grid, build(*KINDS[name]), seqlen=200, longest=64)
        return kept[name].model

    yield model_of
    for x in kept.values():
        x.free()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(comm, models, name):
    """An error of all ranks, which says what is wrong, also if one rank alone passes it."""
    given, text, *kind = WRONG[name]
    model = models(*kind or ["Llama"])
    said = message_of(comm, lambda: model(**given), ValueError)
    assert_all(comm, text in said, f"{text!r} is not in {said!r}")
    for wrong in [0, comm.size - 1]:
        mine = given if comm.rank == wrong else {"input_ids": IDS}
        message_of(comm, lambda mine=mine: model(**mine), (ValueError, RuntimeError))


@pytest.mark.parametrize("name", OTHER)
def test_arguments_of_one_rank(comm, models, name):
    given, other, text, *kind = OTHER[name]
    model = models(*kind or ["Llama"])
    for wrong in [0, comm.size - 1]:
        mine = given | (other if comm.rank == wrong else {})
        assert_raises(comm, text, model, **mine)
    for switch in (torch.set_grad_enabled, model.train):
        switch(comm.rank == 0)
        assert_raises(comm, "ranks disagree on", model, **given)
        switch(True)


def test_after_errors(comm, models):
    """A model is as before, after all that was refused."""
    assert_near(comm, step(models("Llama"), PADDED), step(build(*EQUAL["Llama"]), PADDED))


def test_gradients_that_are_refused(comm, parallel):
    """`torch.autograd.grad` of parameters would be of own tokens; there are no second ones."""
    model, one = parallel(build(*EQUAL["Llama"])).model, build(*EQUAL["Llama"])
    told = "backward reached no parameter: torch.autograd.grad would give gradients of this rank's"
    parameters = [*model.parameters()]
    assert_raises(comm, told, torch.autograd.grad, loss_of(model, TWO), parameters)
    loss = model(**TWO).logits.square().mean()
    loss.backward(create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        sum(x.grad.square().sum() for x in parameters).backward()
    assert_near(comm, step(model, TWO), step(one, TWO))
    found = []
    for x in (model, one):
        x.requires_grad_(False)
        given = EMBEDDED.clone().requires_grad_()
        loss = x(inputs_embeds=given, labels=IDS[:2, :30]).loss
        found.append((loss.item(), torch.autograd.grad(loss, given)))
    assert_near(comm, *found)


def frozen(model, yes=True):
    model.model.embed_tokens.requires_grad_(not yes)


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def nothing(model):
    return


# A model, and what is changed before each call.
TRAINED = {
    "frozen embeddings": ("Llama", [frozen, nothing]),
    "unfrozen later": ("Llama", [frozen, partial(frozen, yes=False)]),
    "tied": ("tied", [nothing, nothing]),
    "tied later": ("Llama", [nothing, tied]),
    "experts without tokens": ("many experts", [nothing, nothing]),
}


@pytest.mark.parametrize("name", TRAINED)
def test_parameters(comm, parallel, name):
    """Parameters that are trained on some ranks, or in some steps, have right gradients."""
    kind, changes = TRAINED[name]
    model, one = build(*KINDS[kind]), build(*KINDS[kind])
    parallel(model)
    for change in changes:
        for given in (TWO, {x: y[:1, :5] for x, y in TWO.items()}):
            change(model), change(one)
            assert_near(comm, step(model, given), step(one, given))


def test_sparse_gradients_are_refused(comm, parallel):
    model = parallel(build(*EQUAL["Llama"])).model
    model.model.embed_tokens.sparse = True
    assert_raises(comm, "gradients must be dense, got layout", step, model, TWO)


def of_layers(**values):
    """Change attributes of layers."""

    def change(model):
        for x in model.modules():
            for name, value in values.items():
                if hasattr(x, name) and not hasattr(x, "model"):
                    setattr(x, name, value)

    return change


def of_config(**values):
    def change(model):
        for name, value in values.items():
            setattr(model.config, name, value)

    return change


def sdpa_in_one_layer(model):
    layer = model.model.layers[1].self_attn
    layer.config = copy.copy(layer.config)
    layer.config._attn_implementation = "sdpa"


def another_layer(model):
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1


def mixing_layer(model):
    class Mixing(torch.nn.Module):
        def forward(self, x):
            return x + x.mean(1, keepdim=True)

    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp, Mixing())


def mixing_hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: out.cumsum(1))


def scaled(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def adapted(model):
    for x in model.model.layers:
        x.self_attn.v_proj = torch.nn.Sequential(
            x.self_attn.v_proj, torch.nn.Linear(16, 16, False)
        )
        torch.nn.init.constant_(x.self_attn.v_proj[1].weight, 0.1)
    model.double()


ASKS = "in this call, but its plan has"
MIXES = "mixes tokens outside of transformers' attention"
SWAPPED = ["full_attention", "sliding_attention"]
# What is changed after the trials, and the error, or None: equal to one process.
CHANGES = {
    "scale": ("Llama", of_layers(scaling=0.5), None),
    "soft-cap": ("Gemma 2", of_layers(attn_logit_softcapping=5.0), None),
    "frequencies": ("Llama", scaled, None),
    "adapters": ("Llama", adapted, None),
    "another layer": ("Llama", another_layer, "does not know a layer: it is of a copy"),
    "fewer layers": ("Llama", of_config(num_hidden_layers=1), None),
    "a layer that mixes tokens": ("Llama", mixing_layer, MIXES),
    "a hook that mixes tokens": ("Llama", mixing_hook, MIXES),
    "temperature": (
        "Llama 4", of_layers(attn_temperature_tuning=True, floor_scale=16), "counts positions"),
    "is_causal of layers": ("Llama", of_layers(is_causal=False), "has is_causal=False, but its"),
    "is_causal of the config": ("Llama", of_config(is_causal=False), f"asks for Full() {ASKS}"),
    "window": ("Mistral", of_config(sliding_window=5), ASKS),
    "types of layers": ("Gemma 3", of_config(layer_types=SWAPPED), "but its mask has none"),
    "chunks": ("Llama 4", of_config(attention_chunk_size=8), ASKS),
    "dropout": ("Llama", of_layers(attention_dropout=0.1), "dropout must be 0 in attention"),
    "sdpa in one layer": ("Llama", sdpa_in_one_layer, "the model has got the attention sdpa"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes(comm, parallel, name):
    """What is changed later is tried again, or refused, also if it is changed on rank 0 alone."""
    kind, change, text = CHANGES[name]
    model, one, given = build(*KINDS[kind]), build(*KINDS[kind]), {"input_ids": LONG[:, :40]}
    parallel(model)
    model(**given)
    if text is not None or name in ("scale", "adapters"):
        if comm.rank == 0:
            change(model)
        message_of(comm, lambda: model(**given))
        if comm.rank != 0:
            change(model)
    else:
        change(model)
    if text is not None:
        return assert_raises(comm, text, model, **given)
    change(one)
    given |= {"labels": LONG[:, :40]}
    assert_near(comm, step(model, given), step(one, given))


def test_copies(comm, parallel):
    """A copy is a model as any other: rank 0 alone may call it; a new object takes its place."""
    model = build(*EQUAL["Llama"])
    expected = step(build(*EQUAL["Llama"]), PADDED)
    cp = parallel(model)
    copies = [copy.deepcopy(model), copy.deepcopy(model)]
    if comm.rank == 0:
        assert_near(MPI.COMM_SELF, step(copies[0], PADDED), expected)
    assert_near(comm, step(parallel(copies[0]).model, PADDED), expected)
    with torch.no_grad():
        copies[1].lm_head.weight.zero_()
    assert_all(comm, not copies[1](IDS).logits.any(), "not the copy's weights")
    assert_near(comm, step(cp.model, PADDED), expected)


def test_free(comm, grid):
    """`free`, and the end of an object, give the model back; a new one takes its place."""
    model = build(*EQUAL["Llama"])
    before = {x: {*vars(x)} for x in model.modules()}
    attention, exact = model.config._attn_implementation, step(build(*EQUAL["Llama"]), PADDED)

    def made():
        cp = ContextParallel(grid, model)
        assert_near(comm, step(model, PADDED), exact)
        return cp

    def assert_undone():
        gc.collect()
        same = all({*vars(x)} == y for x, y in before.items())
        same &= model.config._attn_implementation == attention
        assert_all(comm, same, "not undone")
        assert_near(comm, step(model, PADDED), exact)

    cp = made()
    cp.free(), cp.free()
    assert_undone()
    made()  # and dropped
    assert_undone()
    first = made()
    second = made()  # a cell of a notebook that is run again
    del first
    gc.collect()
    assert_near(comm, step(model, PADDED), exact)
    second.free()
    assert_undone()
