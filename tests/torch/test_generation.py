"""`ContextParallel.generate`: tokens over ranks are those of one process, or the call is refused.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import copy
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from helpers import assert_all
from refused import assert_raises
from test_context import EQUAL, MLA, VOCAB, build

from a2d_mpi import Causal, ProcessGrid, SlidingWindow
from a2d_mpi.torch import ContextParallel, layers
from a2d_mpi.torch.cache import Kept

pytestmark = pytest.mark.mpi(min_size=4)
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "pad_token_id": 0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {x: y for x, y in EQUAL.items() if "Masked" not in y[0]} | {
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", MLA),
}


def made(name, dtype=torch.float32, **options):
    """Return a model that generates up to 600 tokens."""
    kind, config, given = MODELS[name]
    more = {"max_position_embeddings": 600, "eos_token_id": None} | options
    if name.startswith("Phi-3"):
        short = {"original_max_position_embeddings": more["max_position_embeddings"]}
        more |= short | {"rope_parameters": given["rope_parameters"] | short}
    return build(kind, config, given | more, dtype).eval()


def prompt(n, rows=1, seed=1):
    return torch.randint(1, VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))


def padded(lengths):
    """Return prompts of some lengths with padding before them, and their mask."""
    ids, n = prompt(max(lengths), len(lengths)), max(lengths)
    mask = torch.stack([torch.arange(n) >= n - x for x in lengths]).long()
    return ids * mask, mask


def one(comm, model, ids, mask=None, seed=7, **options):
    """Return what one process generates."""
    mask = torch.ones_like(ids) if mask is None else mask
    torch.manual_seed(seed)
    return model.generate(ids, attention_mask=mask, **options) if comm.rank == 0 else None


def spread(cp, ids, seed=7, **options):
    """Return what ranks with different random states generate."""
    torch.manual_seed(seed if cp.grid.comm.rank == 0 else 1000 + cp.grid.comm.rank)
    return cp.generate(ids, **options)


def assert_same(comm, found, expected):
    """Assert that a result of all ranks is that of rank 0."""
    expected = comm.bcast(expected)
    found = found if isinstance(found, torch.Tensor) else found.sequences
    expected = expected if isinstance(expected, torch.Tensor) else expected.sequences
    assert_all(comm, torch.equal(found, expected), f"{found.tolist()}, not {expected.tolist()}")


@pytest.fixture
def parallel(parallel):
    """Models are tried for fewer tokens than they generate."""
    return partial(parallel, seqlen=40)


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens(comm, parallel, name):
    """vLLM 54300: decoding over ranks gave random tokens.  Prompts of 7 to 301, 1 to 4 ranks."""
    for ranks, n in ((4, 7), (3, 301), (2, 120)):
        model = made(name)
        expected = one(comm, model, prompt(n), max_new_tokens=24, **SAMPLED)
        cp = parallel(model, ranks)
        assert_same(comm, spread(cp, prompt(n), max_new_tokens=24, **SAMPLED), expected)
        cp.free()


@pytest.mark.parametrize("name", MODELS)
def test_batches(comm, parallel, name):
    """Prompts of different lengths, padded before or behind, short and long ones."""
    model, options = made(name), SAMPLED | {"max_new_tokens": 12}
    cp = None
    for lengths in ((150, 7, 61), (3, 1, 9)):
        ids, mask = padded(lengths)
        cp = cp and cp.free()
        expected = comm.bcast(one(comm, model, ids, mask, **options))
        cp = parallel(model)
        assert_same(comm, spread(cp, ids, attention_mask=mask, **options), expected)
        behind = [
            torch.stack([x.roll(y - len(x)) for x, y in zip(z, lengths)]) for z in (ids, mask)
        ]
        found = spread(cp, behind[0], attention_mask=behind[1], **options)
        expected[:, : ids.shape[1]] = behind[0]
        assert_same(comm, found, expected)


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Llama 4", "gpt-oss", "DeepSeek-V3"])
def test_conversation(comm, parallel, name):
    """SGLang 23415: a cached prefix was taken for shorter.  Short and long turns, odd lengths."""
    model, alone, cache = made(name), made(name), None
    cp, ids = parallel(model), prompt(101)
    for turn, more in enumerate((0, 5, 150, 1)):
        ids = torch.cat([ids, prompt(more, seed=turn)], 1)
        options = SAMPLED | {"max_new_tokens": 9, "return_dict_in_generate": True}
        expected = one(comm, alone, ids, **options)
        before = 0 if cache is None else cache.length
        found = spread(cp, ids, past_key_values=cache, **options)
        assert_same(comm, found, expected)
        assert_all(comm, cache in (None, found.past_key_values), "another cache")
        cache, ids = found.past_key_values, found.sequences
        assert_all(comm, cache.length == ids.shape[1] - 1 > before, f"{cache.length} tokens")


def test_a_batch_goes_on(comm, parallel):
    """A long continuation of rows that have padding."""
    model, alone, cache = made("Gemma 3"), made("Gemma 3"), None
    cp, (ids, mask) = parallel(model), padded((80, 12, 33))
    for more in (0, 70):
        ids = torch.cat([ids, prompt(more, len(ids), seed=9)], 1)
        mask = torch.cat([mask, torch.ones_like(ids[:, mask.shape[1] :])], 1)
        options = SAMPLED | {"max_new_tokens": 9, "return_dict_in_generate": True}
        expected = one(comm, alone, ids, mask, **options)
        found = spread(cp, ids, attention_mask=mask, past_key_values=cache, **options)
        assert_same(comm, found, expected)
        cache, ids = found.past_key_values, found.sequences


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "gpt-oss", "DeepSeek-V3", "GPT-2"])
def test_logits(comm, parallel, name):
    """vLLM 41623: output drifted.  float32 logits are as near to float64 as on one process."""
    ids, options = prompt(300), {"max_new_tokens": 60, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    exact = made(name, torch.float64).generate(ids, attention_mask=torch.ones_like(ids), **options)
    model = made(name)
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    found = parallel(model).generate(ids, **options)
    assert_same(comm, found, alone)
    far = [
        max(float((x - y).norm() / y.norm()) for x, y in zip(z.logits, exact.logits))
        for z in (alone, found)
    ]
    assert_all(comm, far[1] <= 2 * far[0] + 1e-6, f"off by {far[1]}, one process by {far[0]}")


def test_a_window_that_fills(comm, parallel):
    """HF 37574: window 8, a prompt of 6 tokens, decoding past 8."""
    model = made("Mistral", sliding_window=8)
    expected = one(comm, model, prompt(6), max_new_tokens=20, **SAMPLED)
    cp = parallel(model, longest=6)
    assert_same(comm, spread(cp, prompt(6), max_new_tokens=20, **SAMPLED), expected)


def test_what_is_kept(comm, parallel):
    """Each token lies on one rank; layers with a window keep what a later token can see."""
    cp = parallel(made("Gemma 3"))
    cache = cp.prefill(prompt(400))
    near, full = cache.kept.values()
    for kept, expected in ((near, np.arange(399 - 8, 399)), (full, np.arange(399))):
        found = np.sort(np.concatenate(comm.allgather(kept.positions[0])))
        assert_all(comm, np.array_equal(found, expected), f"{found}")
    for _ in range(3):  # whose tokens go to the ranks in turn
        cp.generate(torch.cat([torch.from_numpy(cache.ids), prompt(2)], 1), cache=cache)
        owners = cache.owners[0]
        found = np.sort(np.concatenate(comm.allgather(full.positions[0])))
        own = np.flatnonzero(owners == comm.rank)
        full = [*cache.kept.values()][1]
        assert_all(comm, np.array_equal(full.positions[0], own), "another table")
    near, _ = cache.kept.values()
    assert_all(comm, comm.allreduce(len(near.positions[0])) <= 9, "a window keeps too much")
    later = np.bincount(owners[400:], minlength=comm.size)
    assert_all(comm, np.ptp(later) <= 1, f"{later} tokens are not in turn")
    held = 2 * 2 * 8 * 4 * (len(own) + 16 + len(own) // 16)  # k and v, heads, elements, bytes
    assert_all(comm, cache.nbytes <= held + 2 * 2 * 8 * 4 * 40, f"{cache.nbytes} of {held} bytes")


def test_one_copy(comm):
    """Attention of a prefill takes the keys as they are; one copy has what later tokens see."""
    x = torch.randn(1, 60, 3, 8).transpose(1, 2)  # (1, KV heads, tokens, elements)
    for mask, n in ((Causal(), 60), (SlidingWindow(4, 0), 4)):
        kept = Kept(mask, 1)
        kept.begin([0], [np.arange(60)], [slice(0, 60)], [60])
        buffer, seen = kept.store(None, x)
        assert seen.data_ptr() == x.data_ptr() and torch.equal(seen, x)
        assert torch.equal(buffer[:, :n], x[0, :, 60 - n :])
        assert buffer.shape[1] == n + n // 16 + 16
        kept.begin([60], [np.array([60])], [np.array([0])], None)  # a step has room
        assert kept.store(buffer, x[:, :, :1])[0] is buffer


def test_trials_of_layers(comm, monkeypatch):
    """They hold what modules give once: it may be more than the weights."""
    alive, run = [], layers._Watch.run

    def counting(*args):
        most.append(sum(x() is not None for x in alive))
        seen = run(*args)
        alive.extend(weakref.ref(x) for _, x in seen[:1])
        return seen

    most: list[int] = []
    monkeypatch.setattr(layers._Watch, "run", counting)
    layers.layers_of(made("Llama"), 60)
    assert len(alive) > 2 and max(most) == 1, f"{most}"


def test_crop_and_reset(comm, parallel):
    """A cache goes back, and forward again; a window cannot go back past what it has dropped."""
    options, ids = SAMPLED | {"max_new_tokens": 12, "return_dict_in_generate": True}, prompt(90)
    for name in ("Llama", "Gemma 3"):
        cp = parallel(made(name))
        first = spread(cp, ids, **options)
        cache = first.past_key_values
        copied = copy.deepcopy(cache)
        if name == "Gemma 3":
            cache.crop(-1)
            assert_raises(comm, "has dropped the tokens before", cache.crop, -30)
        else:
            cache.crop(-30)
            assert_all(comm, cache.get_seq_length() == 71, "another length")
            assert_same(comm, spread(cp, ids, past_key_values=cache, **options), first)
        again = torch.cat([first.sequences, prompt(3)], 1)
        one_ = comm.bcast(spread(cp, again, past_key_values=copied, **options).sequences)
        cache.reset()
        assert_all(comm, cache.length == cache.get_seq_length() == cache.nbytes == 0, "not empty")
        assert_same(comm, spread(cp, again, past_key_values=cache, **options), one_)


def test_room(comm, parallel):
    """New tokens go where there is room; what does not fit is refused before it is computed."""
    model, options = made("Llama"), SAMPLED | {"max_new_tokens": 30}
    expected = one(comm, model, prompt(120), **options)
    cp = parallel(model)
    cache = cp.prefill(prompt(120))
    own = np.bincount(cache.owners[0], minlength=comm.size)
    room = own + np.eye(comm.size, dtype=int)[2] * 30
    found = spread(cp, prompt(120), room=room.tolist(), return_dict_in_generate=True, **options)
    assert_same(comm, found, expected)
    later = found.past_key_values.owners[0][119:]
    assert_all(comm, (later == 2).all(), f"tokens went to {later}")
    text = f"ranks would keep {own.tolist()}, and 30 that follow do not fit"
    before = cp.decoding_traffic.bytes.copy()
    assert_raises(comm, text, cp.generate, prompt(120), room=(room - 1).tolist(), **options)
    room[0] -= 1
    room[1] += 9
    assert_raises(comm, text, cp.generate, prompt(120), room=room.tolist(), **options)
    assert_all(comm, before == cp.decoding_traffic.bytes, "computed something")
    told = "there is room for [3, 3, 3, 3]"
    assert_raises(comm, told, cp.generate, prompt(6), room=[3] * 4, max_new_tokens=9)
    for wrong in ([1], [-1] * comm.size):
        assert_raises(comm, "room must be tokens", cp.generate, prompt(6), room=wrong)


class Stops(transformers.StoppingCriteria):
    """Stops after some calls on one rank only, as a clock may."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores, **_):
        self.calls -= 1
        return torch.full((len(input_ids),), self.calls == 0)


class Prints:
    """A streamer that keeps what it gets."""

    def __init__(self, fails=None):
        self.put_so_far, self.ended, self.fails = [], False, fails

    def put(self, tokens):
        if self.fails == "put" and self.put_so_far:
            raise BrokenPipeError("nobody reads")
        self.put_so_far += tokens.flatten().tolist()

    def end(self):
        self.ended = True
        if self.fails == "end":
            raise BrokenPipeError("nobody reads")


def test_what_generate_takes(comm, parallel, letters):
    """Processors, several eos tokens, criteria, a streamer, scores; rank 0 decides alone."""
    model, ids, first = made("Llama"), prompt(70), comm.rank == 0
    alone, cp = made("Llama"), parallel(model)
    bad = {"bad_words_ids": [[7], [8, 9]], "renormalize_logits": True}
    cases = [
        {"do_sample": True, "top_p": 0.7, "repetition_penalty": 1.3, "min_new_tokens": 3},
        {"do_sample": False, "eos_token_id": [5, 9, 17, 23, 31], "no_repeat_ngram_size": 2},
        {"do_sample": True, "typical_p": 0.5, "num_return_sequences": 3, "eos_token_id": [3, 4]},
        {"do_sample": True, "min_p": 0.05} | bad,
    ]
    for options in cases:
        options = options | {"max_new_tokens": 15, "pad_token_id": 0}
        options |= {"return_dict_in_generate": True, "output_scores": True}
        expected = comm.bcast(one(comm, alone, ids, **options))
        found = spread(cp, ids, **options)
        assert_same(comm, found, expected)
        near = [torch.allclose(x, y, atol=1e-4) for x, y in zip(found.scores, expected.scores)]
        assert_all(comm, all(near) and len(near) == len(expected.scores), "other scores")
    calls = 4 if first else 2  # another rank would have stopped before
    stopping = transformers.StoppingCriteriaList([Stops(calls)])
    found = spread(cp, ids, stopping_criteria=stopping, streamer=(shown := Prints()), **SAMPLED)
    assert_all(comm, found.shape[1] == 74, f"{found.shape[1]} tokens")
    printed = found[0].tolist() if first else []
    assert_all(
        comm, shown.put_so_far == printed and shown.ended == first, "printed something else"
    )
    stop = {"tokenizer": letters, "stop_strings": [letters.decode(found[0, 71])]}
    stop |= {"max_new_tokens": 9}
    expected = one(comm, alone, ids, **stop, **SAMPLED)
    assert_same(comm, spread(cp, ids, **stop, **SAMPLED), expected)


class Fails:
    """A user's processor or criterion, which may fail at its second call."""

    def __init__(self, fails, how):
        self.calls, self.fails, self.how = 0, fails, how

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.fails and self.calls == 2:
            if self.how == "excludes all":
                return scores - torch.inf
            raise KeyError("no key")
        return torch.zeros(len(input_ids), dtype=bool) if self.how == "stops" else scores


@pytest.mark.parametrize("rank", [0, 2])
def test_what_fails_on_one_rank(comm, parallel, rank):
    """What fails on rank 0 fails on all ranks; other ranks do not call what a user passes."""
    cp, ids, fails = parallel(made("Llama")), prompt(70), comm.rank == rank
    expected = one(comm, made("Llama"), ids, max_new_tokens=5)
    cases = [
        ("'no key'", {"logits_processor": [Fails(fails, "raises")]}),
        ("'no key'", {"stopping_criteria": [Fails(fails, "stops")]}),
        ("probability", {"logits_processor": [Fails(fails, "excludes all")], "do_sample": True}),
        ("nobody reads", {"streamer": Prints(fails and "put")}),
        ("nobody reads", {"streamer": Prints(fails and "end")}),
    ]
    for text, options in cases:
        options = {"max_new_tokens": 5} | options
        if rank == 0:
            told = f"rank 0 could not choose a token: {text}"
            assert_raises(comm, told, cp.generate, ids, **options)
        else:
            found = cp.generate(ids, **options)
            assert_all(comm, found.shape == (1, 75), f"{found.shape}")
    assert_same(comm, cp.generate(ids, max_new_tokens=5), expected)


def test_a_cache_for_others(comm, parallel):
    """`model.generate` with the cache of `prefill`, and of a grid of fewer ranks."""
    model, ids = made("Llama"), prompt(90)
    expected = one(comm, model, ids, max_new_tokens=9, **SAMPLED)
    cp = parallel(model)
    for n in (90, 12):
        cache = cp.prefill(ids[:, :n] if comm.rank == 1 else None, root=1)
        assert_all(comm, cache.get_seq_length() == n - 1, f"{cache.get_seq_length()} tokens")
    torch.manual_seed(7)
    options = SAMPLED | {"max_new_tokens": 9}
    ones = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=ones, past_key_values=cp.prefill(ids), **options)
    assert_same(comm, found, expected)
    found = cp.generate(ids if comm.rank == 3 else None, root=3, max_new_tokens=4)
    assert_same(comm, found, one(comm, made("Llama"), ids, max_new_tokens=4))
    ids, mask = padded((20, 5))  # transformers finds the mask of padding, also of a root
    options = {"max_new_tokens": 4, "pad_token_id": 0}
    expected = comm.bcast(one(comm, made("Llama"), ids, mask, **options))
    assert_same(comm, cp.generate(ids if comm.rank == 3 else None, root=3, **options), expected)
    assert_same(comm, cp.generate(ids, attention_mask=mask.bool(), **options), expected)
    few = parallel(made("Llama"), 2).prefill(prompt(20))
    told = "must be of `prefill` on 4 ranks, numbered as here, got SpreadCache of rank 0 of 2"
    assert_raises(comm, told, cp.generate, prompt(20), past_key_values=few)


def test_refused(comm, parallel):
    """Each is one sentence on all ranks, before anything is computed."""
    model, ids = made("GPT-2"), prompt(20)
    cp = parallel(model)
    beams = "over ranks there are greedy search and sampling, no beam_search"
    wrong_id = ids.clone()
    wrong_id[0, 3] = VOCAB
    holes = torch.ones_like(ids)
    holes[0, 5] = 0
    dynamic = transformers.DynamicCache(config=model.config)
    cache = cp.prefill(prompt(20, 2))
    cases = [
        ({"num_beams": 2}, beams),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"cache_implementation": "quantized"}, "cache_implementation"),
        ({"past_key_values": dynamic}, "numbered as here, got DynamicCache"),
        ({"assistant_model": made("GPT-2")}, "no assisted_generation"),
        ({"prompt_lookup_num_tokens": 3}, "no assisted_generation"),
        ({"guidance_scale": 2.0}, "guidance_scale needs a second prompt"),
        ({"use_cache": False}, "use_cache must be true"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions and"),
        ({"custom_generate": "x"}, "takes no custom_generate"),
        ({"input_ids": wrong_id}, f"input_ids[0, 3] must be 0 to {VOCAB - 1}, got"),
        ({"input_ids": ids[:, :0]}, "at least one in each row, got shape (1, 0)"),
        ({"input_ids": None}, "input_ids must be (B, N) tokens"),
        ({"input_ids": ids.double()}, "input_ids must be integers"),
        ({"attention_mask": holes}, "must be 1 for consecutive tokens"),
        ({"attention_mask": holes[:, 1:]}, "attention_mask must have shape (1, 20)"),
        ({"attention_mask": holes * 0}, "row 0 of attention_mask has no token"),
        ({"max_new_tokens": 600}, "GPT2LMHeadModel, 619 tokens: a call with"),
        ({"max_new_tokens": 599}, "GPT2LMHeadModel, 618 tokens: a call with"),
        ({"input_ids": prompt(700)}, "GPT2LMHeadModel, 703 tokens: a call with"),
        ({"past_key_values": cache}, "the cache has 2 rows of 19 tokens, and the prompt 1 of 20"),
        ({"max_length": 5, "max_new_tokens": None}, "max_length"),
        ({"root": 9}, "root must be a rank"),
        ({"temperature": -1.0, "do_sample": True}, "temperature"),
    ]
    for options, text in cases:
        given = {"input_ids": ids, "max_new_tokens": 4} | options
        assert_raises(comm, text, cp.generate, **given)
    assert_raises(comm, "ranks disagree on input_ids", cp.generate, ids.roll(comm.rank))
    told = "ranks disagree on new tokens"
    assert_raises(comm, told, cp.generate, ids, max_new_tokens=4 + comm.rank)
    other = torch.cat([prompt(20, 2), prompt(10, 2)], 1)
    other[1, 7] += 1 if other[1, 7] < VOCAB - 1 else -1
    assert_raises(comm, "at 7 of row 1, but the cache", cp.generate, other, cache=cache)
    assert_raises(comm, "has no beams", cache.reorder_cache, torch.tensor([0]))
    model.train()
    cp._training = True
    model.gradient_checkpointing_enable()
    assert_raises(comm, "call model.eval()", cp.generate, prompt(80), max_new_tokens=2)
    model.eval()
    found = cp.generate(ids, max_new_tokens=4)
    assert_same(comm, found, one(comm, made("GPT-2"), ids, max_new_tokens=4))


def test_models_that_cannot(comm, parallel):
    """A model that sees later tokens, or keeps other state."""
    cp = parallel(build(*EQUAL["BERT"], torch.float32).eval())
    assert_raises(comm, "a layer sees later tokens", cp.generate, prompt(9), max_new_tokens=1)
    sparse = MLA | {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 8}
    # vLLM 54300: sparse attention over latents, whose indexer has keys of its own.
    model = build("DeepseekV32ForCausalLM", "DeepseekV32Config", sparse, torch.float32).eval()
    with pytest.raises(ValueError):
        parallel(model)


def test_the_probe_compares_steps(comm, parallel, monkeypatch):
    """It finds a sink that every rank counts, a token that two ranks keep, and a lost one."""
    from a2d_mpi.torch import decoding

    attend, merged = decoding.Steps.attend, decoding.Steps._merged
    told = "logits of decoded steps are not the same over ranks as on one"

    def keeping(self, kind, tensors, sink):
        self.sink = sink
        return attend(self, kind, tensors, sink)

    def everywhere(self, parts):
        sink = self.sink.numpy(force=True).repeat(len(parts) // len(self.sink))
        if self.comm.rank:
            total = np.logaddexp(parts[:, -1], sink)
            parts[:, :-1] *= np.exp(parts[:, -1] - total)[:, None]
            parts[:, -1] = total
        return merged(self, parts)

    model = made("gpt-oss")
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(3.0)
    monkeypatch.setattr(decoding.Steps, "attend", keeping)
    monkeypatch.setattr(decoding.Steps, "_merged", everywhere)
    assert_raises(comm, told, parallel(model).generate, prompt(9), max_new_tokens=2)
    monkeypatch.undo()
    begin = Kept.begin

    def all_of_it(self, old, new, sources, total):
        if total is None:
            new, sources = [np.arange(x, x + 1) for x in old], [np.arange(1)]
        begin(self, old, new, sources, total)

    def none_of_it(self, old, new, sources, total):
        if total is None:
            new, sources = [x[:0] for x in new], [x[:0] for x in sources]
        begin(self, old, new, sources, total)

    for wrong in (all_of_it, none_of_it):
        monkeypatch.setattr(Kept, "begin", wrong)
        assert_raises(comm, told, parallel(made("Llama")).generate, prompt(9), max_new_tokens=2)
        monkeypatch.undo()
    parallel(made("Llama"), probe=False).generate(prompt(9), max_new_tokens=2)


def test_a_probe_of_few_tokens(comm, parallel):
    """The probe has fewer tokens than plans take, and steps compute all of them."""
    model = made("Llama")
    expected = one(comm, model, prompt(3), max_new_tokens=4)
    found = spread(parallel(model, seqlen=2 * comm.size), prompt(3), max_new_tokens=4)
    assert_same(comm, found, expected)


TYPES = (torch.arange(100) >= 50).long()[None] * 4 + 5  # tokens of two speakers, 5 and 9
OF_TOKENS = {
    "token_type_ids": (1, {"token_type_ids": TYPES}),
    "positions of its own": (1, {"position_ids": torch.arange(100)[None] * 2}),
    "rows": (2, {"token_type_ids": torch.cat([TYPES, TYPES.flip(1)]), "num_return_sequences": 2}),
    "labels": (1, {"labels": torch.ones(1, 100, dtype=torch.int64)}),
}


@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.parametrize("n", [20, 100])
def test_arguments_of_tokens(comm, parallel, name, n):
    """HF 12642: each part of the work gets its share of an argument with a row for each token."""
    rows, given = OF_TOKENS[name]
    given = {x: y[:, :n] if isinstance(y, torch.Tensor) else y for x, y in given.items()}
    model, ids = made("GPT-2", torch.float64), prompt(n, rows)
    options = {"max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    options |= {"pad_token_id": 0, "do_sample": rows > 1}
    expected = comm.bcast(one(comm, model, ids, **given, **options))
    found = spread(parallel(model), ids, **given, **options)
    assert_same(comm, found, expected)
    for x, y in zip(found.logits, expected.logits):
        assert_all(comm, torch.allclose(x, y, rtol=1e-9, atol=1e-9), "other logits")


def test_arguments_that_are_refused(comm, parallel):
    """What is no number for each token, and what differs between ranks."""
    cp, ids, types = parallel(made("GPT-2")), prompt(100), TYPES
    told = "generation over ranks takes no token_type_ids that is not a number for each token"
    assert_raises(comm, told, cp.generate, ids, token_type_ids=types[:, :99], max_new_tokens=2)
    for name in ("inputs_embeds", "encoder_hidden_states"):
        given = {"max_new_tokens": 2, name: torch.zeros(1, 3, 32)}
        assert_raises(comm, f"{name} must be integers, (B, N)", cp.generate, ids, **given)
    told = "ranks disagree on token_type_ids"
    assert_raises(comm, told, cp.generate, ids, token_type_ids=types.roll(comm.rank))
    given = {"token_type_ids": types} if comm.rank else {}
    assert_raises(comm, told, cp.generate, ids, max_new_tokens=2, **given)
    root = 3
    found = cp.generate(
        ids if comm.rank == root else None, root=root, max_new_tokens=3,
        token_type_ids=types if comm.rank == root else None,
    )  # fmt: skip
    expected = cp.generate(ids, token_type_ids=types, max_new_tokens=3)
    assert_same(comm, found, expected if comm.rank == 0 else None)


def test_random_models(comm, parallel):
    """keys_values 43: dropout of an adapter that came later, in a model that is training."""
    from peft import LoraConfig, get_peft_model

    model = made("Llama")
    cp = parallel(model, seqlen=120)
    adapter = {"target_modules": "all-linear", "init_lora_weights": False}
    get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, **adapter))
    model.train()
    torch.manual_seed(comm.rank)
    for n in (20, 90):
        with pytest.raises(ValueError, match=r"call model.eval\(\)|is random in training"):
            cp.generate(prompt(n), max_new_tokens=4)
    model.eval()
    expected = one(comm, made("Llama").eval(), prompt(20), max_new_tokens=4)
    found = cp.generate(prompt(20), max_new_tokens=4)
    assert_all(comm, found.shape == (1, 24), f"{found.shape}, {expected}")


def test_prompt_tuning(comm, parallel):
    """Virtual tokens of PEFT are in a wrapper that the model does not know."""
    from peft import PromptTuningConfig, get_peft_model

    model = made("Llama")
    cp = parallel(model)
    wrapper = get_peft_model(
        model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    )
    told = "PROMPT_TUNING of PEFT puts virtual tokens before the prompt"
    assert_raises(comm, told, cp.generate, prompt(20), max_new_tokens=2)
    del wrapper


def test_models_that_view_attention(comm, parallel):
    """JetMoe calls `view` of attention, also in a step; a config asks for logits of routers."""
    sizes = {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    for kind, given in (("JetMoe", sizes), ("Mixtral", moe)):
        given = given | {"eos_token_id": None}
        model = build(f"{kind}ForCausalLM", f"{kind}Config", given, torch.float64).eval()
        expected = one(comm, model, prompt(70), max_new_tokens=4)
        assert_same(comm, parallel(model).generate(prompt(70), max_new_tokens=4), expected)


def test_a_cache_of_another_grid(comm, parallel):
    """A grid that numbers the same ranks otherwise."""
    model, ids = made("Llama"), prompt(80)
    found = parallel(model).generate(ids, max_new_tokens=3, return_dict_in_generate=True)
    other = comm.Split(0, -comm.rank)
    grid = ProcessGrid(other, 1, other.size)
    cp = ContextParallel(grid, model)
    ids = torch.cat([found.sequences, prompt(91)], 1)
    with pytest.raises(ValueError, match="got SpreadCache of rank 3 of 4 on rank 0"):
        cp.generate(ids, past_key_values=found.past_key_values, max_new_tokens=3)
    cp.free()
    grid.free()
    other.Free()


def test_generation_configs_and_modes(comm, parallel, letters):
    """Stop strings and caches of a generation config; a turn after one in `inference_mode`."""
    model, ids = made("Llama"), prompt(70)
    cp, alone = parallel(model), made("Llama")
    options = {"max_new_tokens": 3, "return_dict_in_generate": True}
    with torch.inference_mode():
        found = cp.generate(ids, **options)
    more = torch.cat([found.sequences.clone(), prompt(3)], 1)
    expected = one(comm, alone, more, **options)
    assert_same(
        comm, cp.generate(more, past_key_values=found.past_key_values, **options), expected
    )
    stop = [letters.decode(found.sequences[0, 71])]
    model.generation_config.stop_strings = alone.generation_config.stop_strings = stop
    expected = one(comm, alone, ids, tokenizer=letters, max_new_tokens=9)
    assert_same(comm, cp.generate(ids, tokenizer=letters, max_new_tokens=9), expected)
    model.generation_config.stop_strings = None
    model.generation_config.cache_implementation = "static"
    told = "cache_implementation is 'static', as an option or in the generation config"
    assert_raises(comm, told, cp.generate, ids, max_new_tokens=3)


def test_lengths_of_longrope(comm, parallel):
    """vLLM 27414: up to the original length a model is right; beyond it says why not."""
    kind, config, given = MODELS["Phi-3, longrope of a short sequence"]
    sizes = {"original_max_position_embeddings": 64}
    rope = {"rope_parameters": given["rope_parameters"] | sizes}
    sizes |= {"max_position_embeddings": 256, "eos_token_id": None, "pad_token_id": 0}
    given = given | sizes | rope
    for seqlen, n, new in ((40, 35, 10), (60, 55, 9)):
        model, ids = build(kind, config, given, torch.float32).eval(), prompt(n)
        expected = one(comm, model, ids, max_new_tokens=new)
        cp = parallel(model, seqlen=seqlen)
        assert_same(comm, cp.generate(ids, max_new_tokens=new), expected)
        cp.free()
    ids, mask = padded((30, 30))
    wide = torch.nn.functional.pad(ids, (40, 0)), torch.nn.functional.pad(mask, (40, 0))
    told = "Phi3ForCausalLM drops its cache within 72 columns, with padding"
    cp = parallel(build(kind, config, given, torch.float32).eval(), seqlen=60)
    assert_raises(comm, told, cp.generate, wide[0], attention_mask=wide[1], max_new_tokens=3)
