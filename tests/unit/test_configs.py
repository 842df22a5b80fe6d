"""Models of transformers by their config.json: layers, heads, parameters, plans of all layers."""

import json
import re

import numpy as np
import pytest
from helpers import ROOT, assert_one_line_each, drive_each, parser_of

from a2d_mpi import Causal, Full
from a2d_mpi.experiments import plan
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning.configs import read_model
from a2d_mpi.planning.model import predict, slowest_seconds
from a2d_mpi.planning.planner import candidates
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload

H100 = ROOT / "data" / "machines" / "h100-8.toml"
LLAMA = {  # Llama 3 8B
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "sliding_window": 9,
         "vocab_size": 10}  # fmt: skip


def saved(folder, **fields):
    """Write a config.json; return the folder."""
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_llama(tmp_path):
    model = read_model(saved(tmp_path, **LLAMA))
    assert model.heads == {"nheads": 32, "nheads_kv": 8, "headdim": 128, "headdim_v": 128}
    assert model.layers == {("full_attention", 0): 32}
    assert (model.parameters, model.dtype) == (8_030_261_248, "bfloat16")
    assert model.cache(1000) == 1000 * 32 * 2 * 8 * 128
    tied = read_model(saved(tmp_path, **LLAMA | {"tie_word_embeddings": True})).parameters
    assert model.parameters - tied == 128256 * 4096


S, F, C = "sliding_attention", "full_attention", "chunked_attention"


@pytest.mark.parametrize("fields, layers", [
    ({}, {(S, 9): 6}),
    ({"sliding_window": None}, {(F, 0): 6}),
    ({"use_sliding_window": False}, {(F, 0): 6}),
    ({"model_type": "qwen2", "max_window_layers": 4}, {(F, 0): 6}),
    ({"use_sliding_window": True, "max_window_layers": 4}, {(S, 9): 2, (F, 0): 4}),
    ({"sliding_window_pattern": 3}, {(S, 9): 4, (F, 0): 2}),
    ({"model_type": "gemma2"}, {(S, 9): 3, (F, 0): 3}),
    ({"layer_types": [S, F, F, S, F, F]}, {(S, 9): 2, (F, 0): 4}),
    ({"sliding_window": None, "attention_chunk_size": 8, "sliding_window_pattern": 4},
     {(C, 8): 5, (F, 0): 1}),
])  # fmt: skip
def test_windows(tmp_path, fields, layers):
    model = read_model(saved(tmp_path, **SMALL | fields))
    assert model.layers == layers
    nested = saved(tmp_path, model_type="a vision model", text_config=SMALL | fields)
    assert read_model(nested).layers == layers


def test_fields_that_files_leave_out(tmp_path):
    """gpt-2 has other names, Gemma 3 leaves out heads, and MLA has heads of two widths."""
    gpt = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
    model = read_model(saved(tmp_path, **gpt, vocab_size=50257))
    assert (model.parameters, model.heads["headdim"]) == (124_439_808, 64)
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
            "intermediate_size": 10240, "sliding_window": 1024}  # fmt: skip
    model = read_model(saved(tmp_path, model_type="gemma3", text_config=text))
    assert model.heads == {"nheads": 8, "nheads_kv": 4, "headdim": 256, "headdim_v": 256}
    assert model.layers == {(S, 1024): 29, (F, 0): 5}
    assert model.cache(4096) == 2 * 4 * 256 * (29 * 1024 + 5 * 4096)
    mla = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    model = read_model(saved(tmp_path, **SMALL | {"sliding_window": None}, **mla))
    assert model.heads == {"nheads": 4, "nheads_kv": 4, "headdim": 24, "headdim_v": 12}
    assert (model.cache(100), model.parameters) == (100 * 6 * (32 + 8), None)


@pytest.mark.parametrize("kind, size", [(F, 0), (S, 7), (S, 40), (C, 8), (C, 40)])
@pytest.mark.parametrize("text", ["causal", "full", "causal_document:0,11,30"])
def test_masks_of_layers(tmp_path, kind, size, text):
    """Layers see what the mask shows inside their window or chunk."""
    fields = {"layer_types": [kind] * 6, "sliding_window": size, "attention_chunk_size": size}
    model, n = read_model(saved(tmp_path, **SMALL | fields)), 30
    ((number, work),) = model.workloads(Workload(n, 4, 16, mask=make_mask(text, n)))
    i, j = np.ogrid[:n, :n]
    near = {F: i == i, S: abs(i - j) < size, C: i // max(size, 1) == j // max(size, 1)}[kind]
    tokens = np.arange(n)
    expected = make_mask(text, n).dense(tokens, tokens) & near
    assert number == 6 and np.array_equal(work.mask.dense(tokens, tokens), expected)


def test_plans_for_all_layers(tmp_path):
    """The fastest plan of all layers is found, and its numbers are sums over the layers."""
    machine = read_machine(H100)
    fields = SMALL | {"sliding_window": 256, "layer_types": [S, S, F, S, S, F]}
    work = Workload(8192, 4, 64, mask=Causal(), backward=True)
    layers = read_model(saved(tmp_path, **fields)).workloads(work)
    assert [(n, x.mask == Causal()) for n, x in layers] == [(2, True), (4, False)]
    every = candidates(machine, 4, layers, number=None)
    best = candidates(machine, 4, layers)[0]
    assert (best.layout, best.seconds) == (every[0].layout, every[0].seconds)
    assert {x.layout.distribution for x in every if x.layout.positions > 1} >= {
        "contiguous", "zigzag"
    }  # fmt: skip
    for x in every[:3]:
        alone = [slowest_seconds(predict(machine, x.method, x.layout, y)) for _, y in layers]
        assert np.isclose(x.seconds, 2 * alone[0] + 4 * alone[1], rtol=1e-12)
        assert np.isclose(sum(x.split.values()), x.seconds, rtol=1e-12)
    one, same = candidates(machine, 4, work)[0], candidates(machine, 4, [(6, work)])[0]
    assert same.layout == one.layout and same.received == 6 * one.received
    assert np.isclose(same.seconds, 6 * one.seconds, rtol=1e-12)
    assert (same.memory, same.over_bound) == (one.memory, one.over_bound)


def test_driver(tmp_path, capsys):
    """The table is for the model: weights, KV cache and seconds of all layers."""
    parser = parser_of("drivers/plan.py")
    words = f"--profile {H100} --ranks 4 --seqlen 16K --mask full --top 1".split()
    file = saved(tmp_path, **LLAMA) / "config.json"
    for given in (["--model", str(file)], ["--nheads", "32", "--nheads-kv", "8"]):
        assert plan.rank(parser.parse_args([*words, *given])) == 0
    printed = capsys.readouterr().out
    assert "8.03 G parameters: 16.1 GB on every rank; KV cache: 2.15 GB, 537 MB on a" in printed
    assert "llama: layers: 32 full_attention; 32 heads of 128, 8 KV heads; bfloat16" in printed
    bytes_of = {"MB": 1e6, "GB": 1e9}
    rows = re.findall(r"^attention2d .*", printed, re.MULTILINE)
    every, one = (
        float(x) * bytes_of[unit]
        for x, unit in re.findall(r"([\d.]+) ([MG]B)  +0 B", "".join(rows))
    )
    assert 31.7 < every / one < 32.3


REFUSED = [
    ({"hidden_size": 64, "num_attention_heads": 4}, "config.json: num_hidden_layers is missing"),
    ({**SMALL, "num_attention_heads": "4"}, "num_attention_heads must be a positive integer"),
    ({**SMALL, "layer_types": ["linear_attention"] * 6}, "computes a layer of linear_attention"),
    ({**SMALL, "layer_types": [F]}, "layer_types has 1 layers, num_hidden_layers is 6"),
    ({**SMALL, "layer_types": [C] * 6}, "attention_chunk_size is missing"),
    ({**SMALL, "per_layer_config": {"0": {}}}, "no plan computes layers with different heads"),
    ({**SMALL, "num_key_value_heads": 3}, "nheads_kv must divide nheads, got 3 and 4"),
    ({**SMALL, "dtype": "int4"}, "dtype must be one of"),
    ([1], "config.json as a config of transformers"),
    ("{", "config.json as a config of transformers"),
]


def test_refused(tmp_path):
    """Each wrong file is one sentence that names the field."""
    options = ["--profile", H100, "--ranks", 4, "--seqlen", "4K"]
    cases = [([*options, "--model", "/none"], "/none"), (options, "give --nheads, or --model")]
    for i, (fields, told) in enumerate(REFUSED):
        (tmp_path / str(i)).mkdir()
        text = fields if isinstance(fields, str) else json.dumps(fields)
        (tmp_path / str(i) / "config.json").write_text(text)
        cases.append(([*options, "--model", tmp_path / str(i)], told))
    heads = [*options, "--model", saved(tmp_path, **LLAMA), "--nheads-kv", 4]
    cases.append((heads, "--model sets the heads: leave out --nheads"))
    done, found = drive_each([("plan.py", x, []) for x, _ in cases], 0)
    assert [code for code, _ in found] == [2] * len(cases), done.stdout + done.stderr
    assert_one_line_each(done, [told for _, told in cases])


def test_bidirectional(tmp_path):
    ((_, work),) = read_model(saved(tmp_path, **SMALL)).workloads(Workload(64, 4, 16, mask=Full()))
    assert (work.mask.left, work.mask.right) == (8, 8)
