"""Programs that need PyTorch; models of transformers, by name or of a folder; their tokens.

PyTorch is imported when a model is opened, so that --help and options do without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from a2d_mpi.cli.model_layers import heads_of
from a2d_mpi.cli.options import path
from a2d_mpi.cli.run import together
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning.workload import Workload

if TYPE_CHECKING:
    from mpi4py import MPI
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCAB = 256  # tokens of a model without a tokenizer: bytes
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # files of a folder with weights
_BYTES = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_NAMED: dict[str, dict[str, Any]] = {  # configs
    "llama-tiny": _BYTES | {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 344,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 1 << 17},
    # One layer of GPT-3 175B (arXiv:2005.14165), 64 times narrower, with 12 heads.
    "gpt3-175b-layer": _BYTES | {
        "model_type": "gpt2", "n_embd": 192, "n_layer": 1, "n_head": 12, "n_positions": 2048,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip
NAMES = tuple(_NAMED)


class Tokenizer:
    """Turn texts into tokens and back.

    Parameters
    ----------
    own : PreTrainedTokenizer, optional
        A tokenizer of transformers.  Default: tokens are bytes.
    """

    def __init__(self, own: PreTrainedTokenizerBase | None = None) -> None:
        self.own = own

    def encode(self, text: bytes | str) -> list[int]:
        """Return the tokens of a text; ValueError if a tokenizer gets no UTF-8."""
        if self.own is None:
            return [*(text.encode(errors="surrogateescape") if isinstance(text, str) else text)]
        try:
            text = text.decode() if isinstance(text, bytes) else text
        except UnicodeDecodeError as error:
            raise ValueError(f"the model's tokenizer needs text in UTF-8: {error}") from None
        return self.own(text, verbose=False)["input_ids"]

    def decode(self, tokens: int | Iterable[int], **options: Any) -> str:
        """Return the text of one token or more; `options` are those of transformers."""
        if self.own is None:
            tokens = [tokens] if isinstance(tokens, int) else map(int, tokens)
            return bytes(tokens).decode(errors="replace")
        return self.own.decode(tokens, **options)


def run_torch(program: str, comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Run a program that needs PyTorch, which all ranks import, or none; return its exit code.

    Collective over `comm`.

    Parameters
    ----------
    program : str
        Module of `a2d_mpi.commands`, and function: "train_job.train".
    comm : Intracomm
    args : Namespace
        Options of the program.

    Raises
    ------
    CollectiveError
        On all ranks, if PyTorch or transformers is missing on any rank.
    """

    def imported() -> Callable[[MPI.Intracomm, argparse.Namespace], int]:
        module, _, name = program.partition(".")
        try:
            return getattr(import_module(f"a2d_mpi.commands.{module}"), name)
        except ImportError as error:
            raise ValueError(f"{error}; pip install a2d_mpi[torch]") from None

    return together(comm, imported)(comm, args)


def model_name(text: str) -> str | Path:
    """Parse an option that names a model for `open_model`; a folder becomes a path."""
    return text if text in NAMES else path(text)


def checkpoint_of(name: str | Path) -> str | Path:
    """Return the name or folder of a model; of a folder of checkpoints the latest one."""
    if not isinstance(name, Path) or not name.is_dir() or (name / "config.json").exists():
        return name
    from transformers.trainer_utils import get_last_checkpoint

    return Path(get_last_checkpoint(name) or name)


def workload_of(
    model: PreTrainedModel, seqlen: int, longest: int, dtype: str, backward: bool = True
) -> Workload:
    """Return what attention of a causal model computes, for the choice of a grid.

    Raises
    ------
    ValueError
        If the longest document has more tokens than the model has positions.
    """
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or longest
    if longest > most:
        raise ValueError(f"a text has {longest} tokens in a row, and the model {most} positions")
    heads = heads_of(config)
    return Workload(seqlen=seqlen, **heads, dtype=dtype, mask=Causal(), backward=backward)


def open_model(
    name: str | Path, dtype: str | None = None, seed: int = 0
) -> tuple[PreTrainedModel, Tokenizer]:
    """Make or read a causal model, in evaluation mode, on the CPU.  Local.

    Parameters
    ----------
    name : str or Path
        One of `NAMES`, or a folder of transformers with a config; see `checkpoint_of`.
    dtype : str, optional
        Storage dtype of the weights.  Default: as the folder's config says; float32 for a name.
    seed : int
        Seed of random weights: of a name, and of a folder without weights.  Weights are drawn in
        float32.

    Returns
    -------
    PreTrainedModel
    Tokenizer
        Of the folder.  Tokens are bytes if it has none.

    Raises
    ------
    ValueError
        If there is no such model, transformers cannot open it, or it has no tokenizer and its
        vocabulary is not of bytes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one for each rank
    torch.manual_seed(seed)
    if name in _NAMED:
        config = AutoConfig.for_model(**_NAMED[name])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return _as(model, dtype), Tokenizer()
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"MODEL must be one of {', '.join(NAMES)}, or a folder with config.json, got {name}"
        )
    here, own = {"local_files_only": True}, None
    try:
        config = AutoConfig.from_pretrained(folder, **here)
        dtype = dtype or str(config.dtype or "float32").removeprefix("torch.")
        if any(x for pattern in WEIGHTS for x in folder.glob(pattern)):
            kind = getattr(torch, dtype)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, **here)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if any(folder.glob("tokenizer*.json")):
            own = AutoTokenizer.from_pretrained(folder, **here)
    except Exception as error:  # of any kind: what is in the folder is the user's
        what = " ".join(str(error).split())[:400] or type(error).__name__
        raise ValueError(f"transformers cannot open the model in {folder}: {what}") from error
    vocabulary = model.get_input_embeddings().num_embeddings
    if own is None and vocabulary != VOCAB:
        raise ValueError(
            f"{folder} has no tokenizer, so tokens are bytes, and the model must have a "
            f"vocabulary of {VOCAB}, got {vocabulary}"
        )
    return _as(model, dtype), Tokenizer(own)


def _as(model: PreTrainedModel, dtype: str | None) -> PreTrainedModel:
    """Return a model in evaluation mode with weights of a dtype, which its config names, too."""
    import torch

    if dtype is not None:
        model.config.dtype = getattr(torch, dtype)
        model.to(model.config.dtype)
    if model.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    return model.eval()
