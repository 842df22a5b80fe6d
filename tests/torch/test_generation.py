"""`ContextParallel.generate`: tokens over ranks are those of one process, or the call is refused.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers import assert_all
from refused import assert_raises

sys.path.append(str(Path(__file__).parent))
from test_context import EQUAL, VOCAB, build

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import ContextParallel

pytestmark = pytest.mark.mpi(min_size=4)
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "pad_token_id": 0}
LATENTS = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {x: y for x, y in EQUAL.items() if "Masked" not in y[0]} | {
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENTS),
}


def made(name, dtype=torch.float32, **options):
    """Return a model that generates up to 600 tokens."""
    kind, config, given = MODELS[name]
    more = {"max_position_embeddings": 600, "eos_token_id": None} | options
    if name.startswith("Phi-3"):
        more["original_max_position_embeddings"] = 600
        rope = given["rope_parameters"] | {"original_max_position_embeddings": 600}
        more["rope_parameters"] = rope
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
def parallel(comm, request):
    """Make a `ContextParallel` on some of the ranks, and on the others; it is freed afterwards."""
    kept = []

    def make(model, ranks=comm.size, **options):
        part = comm.Split(comm.rank // ranks, comm.rank)
        rows = 2 if part.size % 2 == 0 else 1
        grid = ProcessGrid(part, rows, part.size // rows)
        kept.append((ContextParallel(grid, model, seqlen=40, **options), grid, part))
        return kept[-1][0]

    yield make
    for cp, grid, part in kept:
        cp.free()
        grid.free()
        part.Free()


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens(comm, parallel, name):
    """vLLM 54300: decoding over ranks gave random tokens.  Short and long prompts, 1 to 4 ranks."""
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
        behind = [torch.stack([x.roll(y - len(x)) for x, y in zip(z, lengths)]) for z in (ids, mask)]
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
    """vLLM 41623: output drifted.  float32 logits are as near to float64 as those of one process."""
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
    near = [*cache.kept.values()][0]
    assert_all(comm, comm.allreduce(len(near.positions[0])) <= 9, "a window keeps too much")
    later = np.bincount(owners[400:], minlength=comm.size)
    assert_all(comm, np.ptp(later) <= 1, f"{later} tokens are not in turn")
    held = 2 * 2 * 8 * 4 * (len(own) + 16 + len(own) // 16)  # k and v, heads, elements, bytes
    assert_all(comm, cache.nbytes <= held + 2 * 2 * 8 * 4 * 40, f"{cache.nbytes} of {held} bytes")


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
        assert_same(comm, spread(cp, ids if name == "Llama" else first.sequences[:, :101], past_key_values=cache, **options), first.sequences) if name == "Llama" else None
        again = torch.cat([first.sequences, prompt(3)], 1)
        one_ = comm.bcast(spread(cp, again, past_key_values=copied, **options).sequences)
        cache.reset()
        assert_all(comm, cache.length == cache.get_seq_length() == cache.nbytes == 0, "not empty")
        assert_same(comm, spread(cp, again, past_key_values=cache, **options), one_)
