"""What plan.py reads in a config.json is what transformers makes of it.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import pytest
import torch
import transformers

from a2d_mpi.planning.configs import read_model

KINDS = [
    ("Llama", {}), ("Llama", {"attention_bias": True, "mlp_bias": True}), ("Mistral", {}),
    ("Mixtral", {}), ("Phi3", {}), ("Granite", {}), ("SmolLM3", {}), ("Ministral3", {}),
    ("Gemma", {}), ("Gemma2", {}), ("Gemma3Text", {}), ("GPT2", {}), ("GPT2", {"n_inner": 100}),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 20}), ("Qwen3", {}),
    ("Qwen3Moe", {"head_dim": 128, "mlp_only_layers": [1, 3], "decoder_sparse_step": 2}),
    ("GptOss", {}), ("DeepseekV2", {}), ("DeepseekV3", {}), ("DeepseekV3", {"q_lora_rank": None}),
    ("Llama", {"tie_word_embeddings": True}), ("Gemma2", {"tie_word_embeddings": False}),
]  # fmt: skip


@pytest.mark.parametrize("name, options", KINDS, ids=lambda x: str(x))
def test_counts(tmp_path, name, options):
    """Parameters, heads and windows are those of the model, on the device meta."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    config = getattr(transformers, f"{name}Config")(**options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    read = read_model(tmp_path)
    assert read.parameters == model.num_parameters()
    assert sum(read.layers.values()) == config.num_hidden_layers
    types = getattr(config, "layer_types", None) or []
    windows = [n for (kind, _), n in read.layers.items() if kind == "sliding_attention"]
    assert not types or sum(windows) == types.count("sliding_attention")
    weights = dict(model.named_parameters())
    out = next(
        x for y, x in weights.items() if y.endswith(("o_proj.weight", "attn.c_proj.weight"))
    )
    assert read.heads["nheads"] * read.heads["headdim_v"] in out.shape
    for end, heads, width in (("q_proj", "nheads", "headdim"), ("k_proj", "nheads_kv", "headdim")):
        for x in (x for y, x in weights.items() if y.endswith(f"{end}.weight")):
            assert len(x) == read.heads[heads] * read.heads[width]
