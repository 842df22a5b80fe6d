"""What plan.py reads in a config.json, and counts: heads, windows, parameters of the model.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import json
import re

import pytest
import transformers
from helpers import ROOT, parser_of

from a2d_mpi.cli.model_layers import read_model
from a2d_mpi.commands import plan

H100 = ROOT / "data" / "machines" / "h100-8.toml"
LLAMA = {  # Llama 3 8B
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 10,
         "num_key_value_heads": 4, "head_dim": 16}  # fmt: skip
S, F, C = "sliding_attention", "full_attention", "chunked_attention"


def saved(folder, **fields):
    """Write a config.json; return the folder."""
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_llama(tmp_path):
    model = read_model(saved(tmp_path, **LLAMA))
    assert model.heads == {"nheads": 32, "nheads_kv": 8, "headdim": 128, "headdim_v": 128}
    assert model.layers == {(F, 0): 32}
    assert (model.parameters, model.dtype) == (8_030_261_248, "bfloat16")
    assert model.cache(1000) == 1000 * 32 * 2 * 8 * 128
    assert read_model(tmp_path / "config.json") == model
    tied = read_model(saved(tmp_path, **LLAMA | {"tie_word_embeddings": True})).parameters
    assert model.parameters - tied == 128256 * 4096


@pytest.mark.parametrize("config, states", [
    ("Qwen3NextConfig", 32 * 128 * (128 + 128)), ("FalconH1Config", 128 * (8 * 256 + 1)),
    ("Lfm3Config", 0),
])  # fmt: skip
def test_recurrent_layers(tmp_path, config, states):
    """Layers that attend are counted apart from those that send states."""
    config = getattr(transformers, config)()
    config.save_pretrained(tmp_path)
    model, types = read_model(tmp_path), config.layer_types
    recurrent = sum(x in ("linear_attention", "conv", "hybrid") for x in types)
    assert (model.recurrent, model.states) == (recurrent, states)
    assert sum(model.layers.values()) == len(types) - recurrent + types.count("hybrid")


@pytest.mark.parametrize("name, fields, layers", [
    ("llama", {}, {(F, 0): 6}),
    ("mistral", {"sliding_window": 9}, {(S, 9): 6}),
    ("mistral", {"sliding_window": None}, {(F, 0): 6}),
    ("qwen2", {"sliding_window": 9, "max_window_layers": 4}, {(F, 0): 6}),
    ("qwen2", {"sliding_window": 9, "max_window_layers": 4, "use_sliding_window": True},
     {(S, 9): 2, (F, 0): 4}),
    ("gemma2", {"sliding_window": 9}, {(S, 9): 3, (F, 0): 3}),
    ("gemma3_text", {"sliding_window": 9, "layer_types": [S, F, F, S, F, F]},
     {(S, 9): 2, (F, 0): 4}),
    ("llama4_text", {"attention_chunk_size": 8}, {(C, 8): 5, (F, 0): 1}),
])  # fmt: skip
def test_windows(tmp_path, name, fields, layers):
    model = read_model(saved(tmp_path, **SMALL, model_type=name, **fields))
    assert model.layers == layers
    assert model.heads == {"nheads": 4, "nheads_kv": 4, "headdim": 16, "headdim_v": 16}


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
    model = read_model(saved(tmp_path, model_type="deepseek_v3", num_hidden_layers=4, **mla))
    assert model.heads == {"nheads": 128, "nheads_kv": 128, "headdim": 24, "headdim_v": 12}
    assert model.cache(100) == 100 * 4 * (32 + 8)


@pytest.mark.parametrize("name", ["falcon", "bert", "gpt_oss", "qwen3_moe", "phi3", "olmo2"])
def test_other_families(tmp_path, name):
    """Heads are those of the projections, where these have a name of their own."""
    config = transformers.AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    read = read_model(tmp_path)
    assert sum(read.layers.values()) == config.num_hidden_layers and read.parameters > 1e8
    assert read.heads["nheads"] == config.num_attention_heads
    assert read.heads["nheads_kv"] == (1 if name == "falcon" else getattr(
        config, "num_key_value_heads", config.num_attention_heads))  # fmt: skip


def test_driver(tmp_path, capsys):
    """The table is for the model: weights, KV cache and seconds of all layers."""
    parser = parser_of("drivers/plan.py")
    words = f"--profile {H100} --ranks 4 --seqlen 16K --mask full --top 1".split()
    file = saved(tmp_path, **LLAMA) / "config.json"
    for given in (["--model", str(file)], ["--nheads", "32", "--nheads-kv", "8"]):
        assert plan.rank_plans(parser.parse_args([*words, *given])) == 0
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
    ({"model_type": "none"}, "transformers cannot make the model of"),
    ({**LLAMA, "num_attention_heads": "4"}, "num_attention_heads"),
    ({**LLAMA, "per_layer_config": {"0": {"intermediate_size": 8}}}, "is a per-layer attribute"),
    ({"model_type": "minimax", "num_hidden_layers": 4}, "a layer of linear_attention"),
    ({"model_type": "bart"}, "is_encoder_decoder: no plan computes an encoder with a decoder"),
    ({**LLAMA, "num_key_value_heads": 3}, "nheads_kv must divide nheads, got 3 and 32"),
    ({**LLAMA, "dtype": "int4"}, "dtype"),
    ([1], "transformers cannot make the model of"),
    ("{", "transformers cannot make the model of"),
]


@pytest.mark.parametrize("fields, told", REFUSED)
def test_refused(tmp_path, fields, told):
    """Each wrong file is one sentence."""
    text = fields if isinstance(fields, str) else json.dumps(fields)
    (tmp_path / "config.json").write_text(text)
    words = f"--profile {H100} --ranks 4 --seqlen 4K --model {tmp_path}".split()
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        plan.rank_plans(parser_of("drivers/plan.py").parse_args(words))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("words, told", [
    ("--model /none", "cannot make the model of /none"),
    ("", "give --nheads, or --model FILE"),
    ("--model . --nheads-kv 4", "--model sets the heads: leave out --nheads"),
])  # fmt: skip
def test_wrong_options(tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(saved(tmp_path, **LLAMA))
    words = f"--profile {H100} --ranks 4 --seqlen 4K {words}".split()
    with pytest.raises(ValueError, match=told):
        plan.rank_plans(parser_of("drivers/plan.py").parse_args(words))
