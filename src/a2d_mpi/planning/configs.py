"""Models of transformers as their config.json describes them: heads, masks, parameters.

Neither torch nor transformers is needed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from a2d_mpi.core.atomic import read_regular
from a2d_mpi.core.sizes import whole_number
from a2d_mpi.masks.documents import Documents
from a2d_mpi.masks.mask import Causal, Full, Mask
from a2d_mpi.masks.windows import SlidingWindow
from a2d_mpi.planning.workload import Workload

# Fields with several names, and what transformers assumes where files leave a field out.
_NAMES = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
          "n_layer": "num_hidden_layers", "num_experts": "num_local_experts",
          "n_routed_experts": "num_local_experts", "torch_dtype": "dtype"}  # fmt: skip
_ASSUMED: dict[str, dict[str, object]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {"sliding_window_pattern": 6, "num_attention_heads": 8,
                    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208},
    "cohere2": {"sliding_window_pattern": 4},
    "llama4_text": {"sliding_window_pattern": 4},
    "gpt_oss": {"sliding_window_pattern": 2},
    "qwen2": {"use_sliding_window": False}, "qwen3": {"use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False},
}  # fmt: skip
_REFUSED = {"per_layer_config": "layers with different heads", "index_topk": "sparse attention",
            "is_encoder_decoder": "an encoder with a decoder"}  # fmt: skip
_SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# Decoders whose parameters are counted, and what they have that a Llama has not.
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "mixtral", "phi3", "granite"), ""),
    "gemma": "tied", "gemma2": "tied, four norms", "gemma3_text": "tied, four norms, qk norms",
    "qwen2": "qkv bias", "qwen3": "qk norms", "qwen3_moe": "qk norms", "smollm3": "tied",
    "deepseek_v2": "", "deepseek_v3": "", "gpt2": "tied, biases, LayerNorm",
    "gpt_oss": "biases, sinks",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model, as far as attention and memory need it.

    Attributes
    ----------
    family : str
        `model_type` of the config.
    heads : dict of str to int
        nheads, nheads_kv, headdim and headdim_v, as of a plan.
    layers : dict of (str, int) to int
        Number of layers of each kind: "full_attention", or "sliding_attention" or
        "chunked_attention" with the tokens of the window or of a chunk.
    dtype : str or None
    parameters : int or None
        None: the parameters of this family are not counted.
    cached : int
        Elements of a token in the KV cache of a layer: of keys and values, or of MLA's latents.
    """

    family: str
    heads: Mapping[str, int]
    layers: Mapping[tuple[str, int], int]
    dtype: str | None
    parameters: int | None
    cached: int

    def workloads(self, work: Workload) -> list[tuple[int, Workload]]:
        """Return the number of layers with each mask, and their workload.

        `work` has the mask of the layers without a window; they come first.  The others have this
        mask, too.
        """
        found: Counter[Mask] = Counter()
        for (kind, size), number in self.layers.items():
            found[_inside(work.mask, kind, size, work.seqlen)] += number
        order = sorted(found, key=lambda mask: mask != work.mask)
        return [(found[mask], replace(work, mask=mask)) for mask in order]

    def cache(self, seqlen: int) -> int:
        """Return the elements of the KV cache; layers with a window keep that only."""
        kept = (n * min(size or seqlen, seqlen) for (_, size), n in self.layers.items())
        return self.cached * sum(kept)


def _inside(mask: Mask, kind: str, size: int, seqlen: int) -> Mask:
    """Return what a mask shows inside a window or inside chunks; size 0: everywhere."""
    if size == 0 or size >= seqlen:
        return mask
    inside: Mask = SlidingWindow(size - 1, 0 if mask == Causal() else size - 1)
    if kind == "chunked_attention":
        cuts = np.array([*range(0, seqlen, size), seqlen])
        inside = Documents(cuts, causal=mask == Causal())
    return inside if mask in (Causal(), Full()) else mask & inside


def read_model(path: str | os.PathLike[str]) -> Model:
    """Read the config.json of a model of transformers, or of a folder that has one.

    Raises
    ------
    ValueError
        If it is no config, or no plan computes such a model.  The message names the field.
    OSError
        If the file cannot be read.
    """
    path = os.path.join(path, "config.json") if os.path.isdir(path) else path
    try:
        whole = json.loads(read_regular(path))
        fields = whole | (whole.get("text_config") or {})
    except (ValueError, TypeError, AttributeError) as error:  # it is no JSON, or no object
        raise ValueError(f"cannot read {path} as a config of transformers: {error}") from error
    config = {_NAMES.get(name, name): x for name, x in fields.items() if x is not None}
    try:
        return _model(_ASSUMED.get(config.get("model_type", ""), {}) | config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    if name not in config and default is None:
        raise ValueError(f"{name} is missing")
    return whole_number(name, config.get(name, default))


def _model(config: Mapping[str, Any]) -> Model:
    for name, what in _REFUSED.items():
        if config.get(name):
            raise ValueError(f"{name}: no plan computes {what}")
    size = partial(_size, config)
    family, nheads = config.get("model_type", "?"), size("num_attention_heads")
    kv = size("num_key_value_heads", 1 if config.get("multi_query") else nheads)
    d = dv = size("head_dim", size("hidden_size") // nheads)
    cached = 2 * kv * d
    if latent := config.get("kv_lora_rank"):  # MLA
        rotated = size("qk_rope_head_dim")
        kv, d, dv = nheads, size("qk_nope_head_dim") + rotated, size("v_head_dim")
        cached = latent + rotated
    heads = {"nheads": nheads, "nheads_kv": kv, "headdim": d, "headdim_v": dv}
    counted = None
    if family in _FAMILIES:
        counted = _parameters(config, _FAMILIES[family], nheads, kv, d, dv)
    return Model(family, heads, _layers(config), config.get("dtype"), counted, cached)


def _layers(config: Mapping[str, Any]) -> Counter[tuple[str, int]]:
    """Count the layers of each kind."""
    size = partial(_size, config)
    number, types = size("num_hidden_layers"), config.get("layer_types")
    if types is None:
        kind = next((x for x, name in _SIZES.items() if config.get(name)), "full_attention")
        kind = kind if config.get("use_sliding_window", True) else "full_attention"
        if "sliding_window_pattern" in config:
            period = size("sliding_window_pattern")
            full = [i % period == period - 1 for i in range(number)]
        else:
            full = [i < config.get("max_window_layers", 0) for i in range(number)]
        types = ["full_attention" if x else kind for x in full]
    if len(types) != number:
        raise ValueError(f"layer_types has {len(types)} layers, num_hidden_layers is {number}")
    if others := set(types) - {"full_attention", *_SIZES}:
        raise ValueError(f"layer_types: no plan computes a layer of {min(others)}")
    return Counter((x, size(_SIZES[x]) if x in _SIZES else 0) for x in types)


def _parameters(config: Mapping[str, Any], has: str, h: int, kv: int, d: int, dv: int) -> int:
    """Count the parameters of a decoder; `has` is of `_FAMILIES`."""
    size = partial(_size, config)
    e, layers, layer_norm = size("hidden_size"), size("num_hidden_layers"), "LayerNorm" in has
    biases = "biases" in has or config.get("mlp_bias", False)
    qkv = h * d + kv * (d + dv)
    attention = e * (qkv + h * dv) + 2 * d * ("qk norms" in has) + h * ("sinks" in has)
    biased = config.get("attention_bias", "biases" in has)
    attention += qkv * ("qkv bias" in has or biased) + e * biased
    if latent := config.get("kv_lora_rank"):
        rank, rotated = config.get("q_lora_rank"), size("qk_rope_head_dim")
        q = e * rank + rank + rank * h * d if rank else e * h * d
        attention = q + e * (latent + rotated) + latent * (1 + h * (d - rotated + dv)) + h * dv * e

    def mlp(width: int) -> int:
        matrices = 2 if layer_norm else 3
        return matrices * e * width + ((matrices - 1) * width + e) * biases

    of_layers = [mlp(size("intermediate_size", 4 * e))] * layers
    if experts := config.get("num_local_experts"):
        width = size("moe_intermediate_size", size("intermediate_size"))
        moe = experts * (mlp(width) + e + biases) + mlp(width) * config.get("n_shared_experts", 0)
        dense, step = config.get("mlp_only_layers", ()), config.get("decoder_sparse_step", 1)
        for i in range(config.get("first_k_dense_replace", 0), layers):
            if i not in dense and (i + 1) % step == 0:
                of_layers[i] = moe
    attention += (4 if "four norms" in has else 2) * (1 + layer_norm) * e
    tables = size("vocab_size") * (2 - config.get("tie_word_embeddings", "tied" in has))
    ends = e * (tables + config.get("n_positions", 0) + 1 + layer_norm)  # and the last norm
    return layers * attention + sum(of_layers) + ends
