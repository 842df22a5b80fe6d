"""Tiny hybrid models of transformers, also with float64 in place of float32 inside."""

import inspect
import re
import sys
import types

import torch

SIZES = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
GATED = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
KIMI = MOE | {
    "num_key_value_heads": 4, "short_conv_kernel_size": 4, "linear_num_heads": 4,
    "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16,
    "n_group": 1, "topk_group": 1,
    "moe_shared_expert_intermediate_size": 16, "first_k_dense_replace": 1,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
CONV = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
NEMOTRON = {
    "hybrid_override_pattern": "M*", "layers_block_type": None, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
}  # fmt: skip
ZAMBA2 = {
    "mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 8,
    "chunk_size": 16, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"],
    "attention_hidden_size": 64, "attention_head_dim": 16, "adapter_rank": 4,
    "hybrid_layer_ids": [1], "num_key_value_heads": 4, "use_mem_rope": True,
}  # fmt: skip
# Options of models by the first part of the names of their classes.
HYBRIDS = {
    "Qwen3Next": GATED | MOE, "Qwen3_5": GATED, "Qwen3_5Moe": GATED | MOE,
    "OlmoHybrid": GATED | {"linear_num_key_heads": 4}, "LaraMini": GATED | MOE, "KimiLinear": KIMI,
    "BailingHybrid": KIMI, "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "FalconH1": MAMBA | {"mamba_d_ssm": 64},
    "GraniteMoeHybrid": MAMBA | MOE | {"layer_types": ["mamba", "attention"]},
    "NemotronH": NEMOTRON, "Zamba2": ZAMBA2, "Lfm2": CONV, "Lfm2Moe": CONV | MOE, "Lfm3": CONV,
}  # fmt: skip


def build(name, exact=True, seed=0, **options):
    """Return a model with the weights of a seed; `exact`: with float64 everywhere."""
    import transformers

    kind = getattr(transformers, f"{name}ForCausalLM")
    file = sys.modules[kind.__module__]
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(
        transformers, f"{name}Config"
    )
    own = HYBRIDS.get(name, {}) | options
    known = {*config().to_dict(), *config.attribute_map, *own}
    config = config(**{x: y for x, y in (SIZES | own).items() if x in known})
    config._experts_implementation = "eager"  # the others have no float64
    torch.manual_seed(seed)
    model = getattr(_exact(file) if exact else file, kind.__name__)(config)
    for x, parameter in model.named_parameters():  # also gates and decays
        with torch.no_grad():
            parameter.add_(0.2 * torch.randn(parameter.shape))
            if x.endswith("A_log"):  # so that states last for many tokens
                parameter.sub_(4)
    return model.double() if exact else model


def _exact(module):
    """Return a file of transformers with float64 in place of float32."""
    name = module.__name__ + "_exact"
    if name not in sys.modules:
        text = inspect.getsource(module).replace(".float()", ".double()")
        text = re.sub(r"torch\.float(32)?\b", "torch.float64", text)
        text = text.replace("@auto_docstring", "@(lambda *a, **_: a[0] if a else lambda x: x)")
        sys.modules[name] = found = types.ModuleType(name)
        found.__package__, found.__file__ = module.__package__, module.__file__
        exec(compile(text, module.__file__, "exec"), vars(found))
    return sys.modules[name]


def positions(n, starts):
    """Return the positions of documents that begin at `starts`, (1, n)."""
    return torch.cat([torch.arange(y - x) for x, y in zip(starts, [*starts[1:], n])])[None]
