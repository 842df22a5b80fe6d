"""The layers of a model of transformers, by its config: heads, masks, parameters.

PyTorch and transformers are imported when a config is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from a2d_mpi.masks.documents import Documents
from a2d_mpi.masks.mask import Causal, Full, Mask
from a2d_mpi.masks.windows import SlidingWindow
from a2d_mpi.planning.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_REFUSED = {"index_topk": "sparse attention", "is_encoder_decoder": "an encoder with a decoder"}
_RECURRENT = "linear_attention", "conv", "hybrid"  # "hybrid" attends, too
# Names of heads, and of the elements of keys and values, or of a state.
_DELTA = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("linear_num_heads", "linear_head_dim", "linear_head_dim"),
)
_MAMBA2 = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("n_mamba_heads", "mamba_headdim", "mamba_d_state"),
)
_SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


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
    parameters : int
    cached : int
        Elements of a token in the KV cache of a layer: of keys and values, or of MLA's latents.
    recurrent, states : int
        Number of recurrent layers, and elements of what a piece of tokens sends in each of them:
        its transition and its state (`a2d_mpi.torch.recurrent`), without columns of convolutions.
    """

    family: str
    heads: Mapping[str, int]
    layers: Mapping[tuple[str, int], int]
    dtype: str | None
    parameters: int
    cached: int
    recurrent: int = 0
    states: int = 0

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


def read_model(path: Path) -> Model:
    """Read the config.json of a model of transformers, or of a folder that has one.

    The model is made without its weights, to count them.

    Raises
    ------
    ValueError
        If transformers is not installed or cannot make the model, or no plan computes such a
        model.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(f"--model: {error}; pip install a2d_mpi[torch]") from None
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
        with torch.device("meta"):
            # Of an encoder with a decoder it makes the decoder, and changes the config.
            size = AutoModelForCausalLM.from_config(deepcopy(config)).num_parameters()
    except Exception as error:  # of any kind: what is in the file is the user's
        what = " ".join(str(error).split())[:400] or type(error).__name__
        raise ValueError(f"transformers cannot make the model of {path}: {what}") from error
    try:
        return _model(config, size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _model(config: PreTrainedConfig, parameters: int) -> Model:
    def given(name: str) -> Any:
        return getattr(config, name, None)

    for name, what in _REFUSED.items():
        if given(name):
            raise ValueError(f"{name}: no plan computes {what}")
    heads = heads_of(config)
    cached = heads["nheads_kv"] * (heads["headdim"] + heads["headdim_v"])
    if latent := given("kv_lora_rank"):
        cached = latent + config.qk_rope_head_dim
    usual = next((x for x, name in _SIZES.items() if given(name)), "full_attention")
    types = given("layer_types") or [usual] * config.num_hidden_layers
    recurrent = [x for x in types if x in _RECURRENT]
    types = ["full_attention" if x == "hybrid" else x for x in types]
    types = [x for x in types if x not in (*_RECURRENT, "mlp", "moe")]
    if not types:
        raise ValueError("layer_types: no layer attends")
    if others := set(types) - {"full_attention", *_SIZES}:
        raise ValueError(f"layer_types: no plan computes a layer of {min(others)}")
    layers = Counter((x, given(_SIZES[x]) if x in _SIZES else 0) for x in types)
    dtype = given("dtype") and str(config.dtype).removeprefix("torch.")
    states = _states(config) if {*recurrent} - {"conv"} else 0
    return Model(
        config.model_type, heads, layers, dtype, parameters, cached, len(recurrent), states
    )


def heads_of(config: PreTrainedConfig) -> dict[str, int]:
    """Return nheads, nheads_kv, headdim and headdim_v of a model's attention, as of a plan."""
    nheads = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None)
    kv = kv or (1 if getattr(config, "multi_query", None) else nheads)
    d = dv = getattr(config, "head_dim", None) or config.hidden_size // nheads
    if getattr(config, "kv_lora_rank", None):  # MLA
        kv, d, dv = nheads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return {"nheads": nheads, "nheads_kv": kv, "headdim": d, "headdim_v": dv}


def _states(config: PreTrainedConfig) -> int:
    """Return the elements of the transition and the state of a piece in a recurrent layer."""
    for names in (*_DELTA, *_MAMBA2):
        h, a, b = (getattr(config, x, None) for x in names)
        if h and a and b:
            return h * a * (a + b) if names in _DELTA else h * (a * b + 1)
    raise ValueError("layer_types: no plan computes a layer of linear_attention")
