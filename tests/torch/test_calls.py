"""What belongs to a call of a model in `ContextParallel` comes with the call, or it is refused.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

# ruff: noqa: F401, F811  the fixtures grid and parallel

import copy
import gc
import pickle
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import assert_all
from refused import assert_raises
from test_context import (
    BERT,
    ENDS,
    EQUAL,
    EXPERTS,
    LOCAL,
    OWN,
    N,
    assert_near,
    build,
    gradients,
    grid,
    parallel,
    sequence,
    spread_step,
    step,
)
from torch.utils.checkpoint import checkpoint

from a2d_mpi.torch import ContextParallel

pytestmark = pytest.mark.mpi(min_size=4)
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
PACKED = [ENDS, np.array([0, 30, N])]  # of two batches
# Three ranks in a row, and one alone.
ON = pytest.mark.parametrize("grid", ["three"], indirect=True)


def logits_of(model, hidden):
    return model.lm_head(hidden.last_hidden_state)


def in_a_thread(call):
    """Return what a call returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


# Ways to compute the logits of a batch.
WAYS = {
    "call": lambda model, given: model(**given).logits,
    "submodel": lambda model, given: logits_of(model, model.model(**given)),
    "forward": lambda model, given: model.forward(**given).logits,
    "forward of the submodel": lambda model, given: logits_of(model, model.model.forward(**given)),
    "positional": lambda model, given: (
        model(given["input_ids"], None, given["position_ids"]).logits
    ),
    "embeddings": lambda model, given: (
        model(
            inputs_embeds=model.model.embed_tokens(given["input_ids"]),
            position_ids=given["position_ids"],
        ).logits
    ),
    "thread": lambda model, given: in_a_thread(lambda: model(**given).logits),
    "functional": lambda model, given: (
        torch.func.functional_call(model, dict(model.named_parameters()), (), dict(given)).logits
    ),
    "checkpoint": lambda model, given: checkpoint(
        lambda: model(**given).logits, use_reentrant=False
    ),
    "compiled": lambda model, given: torch.compile(model, backend="eager")(**given).logits,
}


def two_steps(cp, way, passes=2):
    """Return the sum of two losses and its gradients; the first batch is computed last."""
    cp.model.zero_grad()
    ids = sequence(N)
    batches = [cp.shard(ids, cu_seqlens=x) for x in PACKED]
    losses = [cp.loss(way(cp.model, dict(x.inputs)), x) for x in batches]
    sum(losses).backward()
    cp.sum_gradients()
    return sum(cp.grid.comm.allgather(sum(losses).item())), gradients(cp.model)


def two_exact(name):
    one = [step(build(*EQUAL[name]), *[sequence(N)] * 2, x) for x in PACKED]
    return sum(x[0] for x in one), [x + y for x, y in zip(one[0][1], one[1][1])]


@ON
def test_two_batches(comm, grid, parallel):
    """Two packed batches are sharded before the first is computed, in any way to call a model."""
    model = build(*EQUAL["Llama"])
    cp, exact = parallel(model), two_exact("Llama")
    for name, way in WAYS.items():
        if comm.rank == 0:
            print(name, flush=True)
        assert_near(comm, two_steps(cp, way), exact)


def test_a_call_during_a_call_of_another_thread(comm, parallel):
    """Each thread has the plans of its own batch."""
    model = build(*EQUAL["Llama"])
    cp = parallel(model)
    first, second = (cp.shard(sequence(N), cu_seqlens=x).inputs for x in PACKED)
    expected, found = [model(**x).logits for x in (first, second)], []

    def between(*_):
        handle.remove()
        found.append(in_a_thread(lambda: model(**second).logits))

    handle = model.model.layers[0].mlp.register_forward_hook(between)
    found.insert(0, model(**first).logits)
    assert_all(comm, all(map(torch.equal, found, expected)), "another result")


def test_each_way_alone_is_refused_without_a_batch(comm, parallel):
    """Without the positions of a batch no way leads into the model, also on rank 0 alone."""
    model, ids = build(*EQUAL["Llama"]), sequence(N)
    cp = parallel(model)
    batch = cp.shard(ids, cu_seqlens=ENDS)
    copied = batch.inputs["position_ids"].clone()
    for more in ({"position_ids": copied}, {"position_ids": None}):
        for ways in (model, model.forward, model.model, model.model.forward):
            for ranks in ([0], range(comm.size)):
                wrong = more if comm.rank in ranks else {}
                assert_raises(comm, OWN, ways, **batch.inputs | wrong)
    hidden = model.model.embed_tokens(batch.inputs["input_ids"])
    turned = model.model.rotary_emb(hidden, batch.inputs["position_ids"])
    assert_raises(comm, OWN, model.model.layers[0], hidden, position_embeddings=turned)
    assert_raises(comm, "shift labels", model.forward, **batch.inputs, labels=batch.labels)
    for same in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert_raises(comm, OWN, model, **same.inputs)
    batch.inputs["position_ids"].copy_(copied)  # as into a buffer of a CUDA graph
    assert_raises(comm, "the positions of the batch have changed", model, **batch.inputs)
    with torch.inference_mode():
        model(**cp.shard(ids).inputs)


@pytest.mark.filterwarnings("ignore")  # of reentrant checkpoints
@pytest.mark.parametrize("reentrant", [False, True])
@ON
def test_two_batches_with_checkpoints(comm, grid, parallel, reentrant):
    """Layers are computed again after the forward pass of the other batch."""
    model = build(*EQUAL["Gemma 3"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_near(comm, two_steps(parallel(model), WAYS["submodel"]), two_exact("Gemma 3"))


def test_a_layer_without_a_mask_is_not_computed_again(comm, parallel, monkeypatch):
    """A layer that gets no mask has the plans of its call, and in the backward pass none."""
    from transformers.models.bert import modeling_bert

    monkeypatch.setattr(modeling_bert, "create_bidirectional_mask", lambda **_: None)
    model, ids = build(*EQUAL["BERT"]), sequence(N)
    cp = parallel(model)
    found = spread_step(cp, model, ids, ids.roll(5), ENDS)
    assert_near(comm, found, step(build(*EQUAL["BERT"]), ids, ids.roll(5), ENDS))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [cp.shard(ids, ids.roll(5), x) for x in PACKED]
    loss = cp.loss(model(**batches[0].inputs).logits, batches[0])
    assert_raises(comm, OWN, loss.backward)


def causal_off(model):
    model.config.is_causal = False


def windows(model):
    model.config.sliding_window = 5


def swapped(model):
    model.config.layer_types = model.config.layer_types[::-1]


def chunks(model):
    model.config.attention_chunk_size = 8


def of_layers(**values):
    def change(model):
        for x in model.modules():
            for name, value in values.items():
                if hasattr(x, name) and not hasattr(x, "model"):
                    setattr(x, name, value)

    return change


def sdpa_in_one_layer(model):
    layer = model.model.layers[1].self_attn
    layer.config = copy.copy(layer.config)
    layer.config._attn_implementation = "sdpa"


def another_layer(model):
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])


def dropout(model):
    model.transformer.h[0].mlp.dropout.p = 0.1


def scaled(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def adapted(model):
    for x in model.model.layers:
        x.self_attn.v_proj = torch.nn.Sequential(
            x.self_attn.v_proj, torch.nn.Linear(16, 16, False)
        )
        torch.nn.init.constant_(x.self_attn.v_proj[1].weight, 0.1)
    model.double()


def shared(model):
    model.model.layers[1] = model.model.layers[0]
    model.config.use_cache = False


def one_layer(model):
    model.config.num_hidden_layers = 1


def nothing(model):
    return


ASKS = "in this call, but its plan has"
CHANGED = ": make a new ContextParallel"
# A model, what is changed after ContextParallel was made, arguments of the call, and the error, or
# None: then it is equal to one process with the same change.
CHANGES = {
    "is_causal": ("Llama", nothing, {"is_causal": False}, f"asks for Full() {ASKS} Causal()"),
    "the last logits": ("Llama", nothing, {"logits_to_keep": 1}, "logits_to_keep would count"),
    "direction of an encoder": ("ModernBERT", nothing, {"is_causal": True}, "has is_causal=True"),
    "another window in the call": (
        "Llama",
        nothing,
        {"sliding_window": 3},
        "but its mask has none",
    ),
    "is_causal of a window": ("Mistral", nothing, {"is_causal": False}, ASKS),
    "is_causal of the config": ("Llama", causal_off, {}, f"asks for Full() {ASKS} Causal()"),
    "is_causal of layers": (
        "Llama",
        of_layers(is_causal=False),
        {},
        "self_attn.is_causal was True and is False: make",
    ),
    "window": ("Mistral", windows, {}, ASKS),
    "window of one layer": ("Gemma 3", windows, {}, ASKS),
    "types of layers": ("Gemma 3", swapped, {}, "passes sliding_window=9, but its mask has none"),
    "chunks": ("Llama 4", chunks, {}, ASKS),
    "temperature": ("Llama 4", of_layers(attn_temperature_tuning=True), {}, CHANGED),
    "soft-cap": ("Gemma 2", of_layers(attn_logit_softcapping=5.0), {}, CHANGED),
    "scale": ("Llama", of_layers(scaling=0.5), {}, CHANGED),
    "dropout in attention": ("Llama", of_layers(attention_dropout=0.1), {}, CHANGED),
    "other dropout": ("GPT-2", dropout, {}, CHANGED),
    "sdpa in one layer": ("Llama", sdpa_in_one_layer, {}, "another attention implementation"),
    "another layer": ("Llama", another_layer, {}, "ContextParallel does not know a layer"),
    "frequencies": ("Llama", scaled, {}, None),
    "adapters": ("Llama", adapted, {}, None),
    "a shared layer": ("Llama", shared, {}, None),
    "fewer layers": ("Llama", one_layer, {}, None),
    "hidden states": ("Llama", nothing, {"output_hidden_states": True}, None),
    "no cache": ("Gemma 3", nothing, {"use_cache": False}, None),
    "token types": ("BERT", nothing, {"token_type_ids": "ones"}, None),
}


# In turn on all ranks, and on three of them and the rest: each change once.
WHERE = [(("all", "three")[i % 2], name) for i, name in enumerate(CHANGES)]


@pytest.mark.parametrize("grid, name", WHERE, indirect=["grid"])
def test_changes(comm, grid, parallel, name):
    """What is changed after making is right or refused, also if it is changed on rank 0 alone."""
    model_name, change, more, text = CHANGES[name]
    model, ids = build(*EQUAL[model_name]), sequence(N)
    cp, labels = parallel(model), ids.roll(5) if "BERT" in model_name else ids
    batch = cp.shard(ids, None if labels is ids else labels)
    more = {x: torch.ones_like(batch.labels) if y == "ones" else y for x, y in more.items()}
    if text is None:
        one = build(*EQUAL[model_name])
        for x in (one, model):
            change(x)
        model.zero_grad()
        loss = cp.loss(model(**batch.inputs, **more).logits, batch)
        loss.backward()
        cp.sum_gradients()
        if "token_type_ids" in more:
            one.bert.embeddings.token_type_ids.fill_(1)
        exact = step(one, ids, labels, [0, N])
        found = sum(grid.comm.allgather(loss.item())), gradients(model)
        return assert_near(comm, found, exact)
    model(**batch.inputs)
    if grid.comm.rank == 0:
        change(model)
    only = more if grid.comm.rank == 0 else {}
    assert_raises(grid.comm, text, model, **batch.inputs, **only)
    if grid.comm.rank != 0:
        change(model)
    for call in (model, model.forward):
        assert_raises(grid.comm, text, call, **batch.inputs, **more)


def own_logits(model, ids):
    """Return the logits of the model's own attention, or None if it is not its own."""
    model.eval()
    found = model(ids).logits
    return found if found.shape[1] == ids.shape[1] else None


def test_free_undoes_all(comm, grid):
    """`free`, the end of a `ContextParallel`, and a new one that takes its place."""
    model, ids = build(*EQUAL["Llama"]), sequence(N)
    before = {x: dict(vars(x)) for x in model.modules()}
    attention = model.config._attn_implementation
    exact = step(build(*EQUAL["Llama"]), ids, ids, ENDS)

    def made():
        cp = ContextParallel(grid, model, seqlen=N)
        assert_near(comm, spread_step(cp, model, ids, ends=ENDS), exact)
        return cp

    def is_undone():
        same = [vars(x).keys() == y.keys() for x, y in before.items()]
        hooks = [x._forward_pre_hooks or x._forward_hooks for x in before]
        return all(same) and not any(hooks) and model.config._attn_implementation == attention

    cp = made()
    assert_all(comm, not is_undone(), "not made")
    batch = cp.shard(ids)
    cp.free()
    cp.free()
    assert_all(comm, model.config._attn_implementation == attention, "not its own attention")
    found = step(model, ids, ids, ENDS)
    assert_near(comm, found, exact)
    for call in (model, model.forward, model.model):
        assert_raises(
            grid.comm, "the ContextParallel of this batch has been freed", call, **batch.inputs
        )
    del cp, batch
    gc.collect()
    assert_all(comm, is_undone(), "not undone by free")
    made()  # and dropped
    gc.collect()
    assert_all(comm, is_undone(), "not undone by the end")
    first = made()
    batch = first.shard(ids, cu_seqlens=ENDS)
    second = made()  # a cell of a notebook that is run again
    del first
    assert_raises(grid.comm, OWN, model, **batch.inputs)
    del batch
    gc.collect()
    assert_near(comm, spread_step(second, model, ids, ends=ENDS), exact)
    second.free()
    del second
    gc.collect()
    assert_all(comm, is_undone(), "not undone by the second")


def test_a_batch_keeps_what_its_model_needs(comm, grid):
    """A `ContextParallel` that only a batch keeps computes it."""
    model, ids = build(*EQUAL["Llama"]), sequence(N)
    cp = ContextParallel(grid, model, seqlen=N)
    batch = cp.shard(ids, cu_seqlens=ENDS)
    expected = model(**batch.inputs).logits
    del cp
    gc.collect()
    assert_all(comm, torch.equal(model(**batch.inputs).logits, expected), "another result")
    attention = model.config._attn_implementation
    del batch
    gc.collect()
    assert_all(comm, model.config._attn_implementation != attention, "not undone")


def test_copies(comm, grid, parallel):
    """A copy of a model is a model as any other, and gets a `ContextParallel` of its own."""
    model, ids = build(*EQUAL["Llama"]), sequence(N)
    exact = step(build(*EQUAL["Llama"]), ids, ids, ENDS)
    expected = own_logits(build(*EQUAL["Llama"]), ids)
    cp = parallel(model)
    batch = cp.shard(ids, cu_seqlens=ENDS)
    copies = [copy.deepcopy(model) for _ in range(3)]
    copies.append(pickle.loads(pickle.dumps(model)))
    for x in copies[:3]:
        assert_raises(grid.comm, "a copy of a model needs a ContextParallel", x, **batch.inputs)
    alone = own_logits(copies[0], ids)
    assert_all(comm, torch.allclose(alone, expected), "not the copy's own attention")
    assert_raises(grid.comm, "a copy of a model needs", copies[0], **batch.inputs)
    with torch.no_grad():
        for x in copies[1].parameters():
            x.zero_()
    assert_all(comm, not own_logits(copies[1], ids).any(), "not the copy's weights")
    for x in copies[2:]:
        assert_near(comm, spread_step(parallel(x.train()), x, ids, ends=ENDS), exact)
    assert_near(comm, spread_step(cp, model, ids, ends=ENDS), exact)
    del cp, batch
    late = copy.deepcopy(copies[2])
    del copies
    assert_near(comm, spread_step(parallel(late), late, ids, ends=ENDS), exact)


def test_adapters_afterwards(comm, parallel):
    """The message says in which order, and adapters call `forward` of the model."""
    model, ids = build(*EQUAL["Llama"]), sequence(N)

    class Adapter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, **given):
            return self.model.forward(**given)

    told = "make ContextParallel of the model first, and then what wraps it"
    assert_raises(comm, told, parallel, Adapter())
    cp = parallel(model)
    batch = cp.shard(ids, cu_seqlens=ENDS)
    loss = cp.loss(Adapter()(**batch.inputs).logits, batch)
    loss.backward()
    cp.sum_gradients()
    exact = step(build(*EQUAL["Llama"]), ids, ids, ENDS)
    assert_near(comm, (sum(comm.allgather(loss.item())), gradients(model)), exact)


@pytest.mark.parametrize("first", ["accelerate", "ContextParallel"])
def test_hooks_of_accelerate(comm, parallel, first):
    """They replace `forward`, too, before or afterwards."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, ids = build(*EQUAL["Llama"]), sequence(N)
    if first == "accelerate":
        add_hook_to_module(model.model, ModelHook())
    cp = parallel(model)
    if first != "accelerate":
        add_hook_to_module(model.model, ModelHook())
    exact = step(build(*EQUAL["Llama"]), ids, ids, ENDS)
    assert_near(comm, spread_step(cp, model, ids, ends=ENDS), exact)
    cp.free()
    assert_near(comm, step(model, ids, ids, ENDS), exact)
    if first != "accelerate":
        remove_hook_from_module(model.model)
    del cp
