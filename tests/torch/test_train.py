"""drivers/train.py: equal to plain transformers on one process, whatever the options; refusals.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import json
import math
import re

import numpy as np
import pytest
import torch
import transformers
from helpers import ROOT, assert_one_line_each, drive_each
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import TRAINING_SCHEMA

torch.set_num_threads(1)
TEXT = ROOT / "LICENSE"
LONG = 900  # s: PyTorch takes long to import on busy machines
SEQLEN, STEPS, WARMUP, RATE, SEED = 96, 10, 3, 3e-3, 5
COMMON = ["--seqlen", SEQLEN, "--separator", r"\n\n", "--steps", STEPS, "--warmup-steps", WARMUP,
          "--rate", RATE, "--seed", SEED, "--dtype", "float64", "--every", STEPS]  # fmt: skip
OWN = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
BYTES = OWN | {"vocab_size": 256}
MODELS = {
    "gpt2": transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=SEQLEN, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, **BYTES,
    ),
    "llama": transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **BYTES,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of each model, with weights in float32."""
    found = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


def sequences(step, accumulate, share):
    """Return the documents of the sequences of a step."""
    documents = [x for x in TEXT.read_bytes().split(b"\n\n") if x]
    documents = [x for i, x in enumerate(documents) if int((i + 1) * share) == int(i * share)]
    whole = [(i == 0, x) for y in documents for i, x in enumerate(y)]
    found = []
    for i in range(accumulate):
        rng = np.random.default_rng([SEED, step * accumulate + i])
        begin = int(rng.integers(len(whole)))
        for place in range(begin, begin + SEQLEN):
            first, token = whole[place % len(whole)]
            if first or place == begin:
                found.append([])
            found[-1].append(token)
    return [torch.tensor(x) for x in found]


def plain(folder, accumulate=1, clip=1.0, share=0.0):
    """Train in plain transformers; return losses and the model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    decay = [x for x in model.parameters() if x.dim() > 1]
    others = [x for x in model.parameters() if x.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)

    def factor(step):
        if step < WARMUP:
            return (step + 1) / WARMUP
        turn = math.pi * (step - WARMUP) / (STEPS - WARMUP)
        return 0.1 + 0.9 * (1 + math.cos(turn)) / 2

    schedule, losses = torch.optim.lr_scheduler.LambdaLR(optimizer, factor), []
    for step in range(STEPS):
        optimizer.zero_grad()
        documents = sequences(step, accumulate, share)
        n, loss = sum(len(x) - 1 for x in documents), 0.0
        for x in documents:
            if len(x) > 1:
                term = model(input_ids=x[None], labels=x[None]).loss * ((len(x) - 1) / n)
                term.backward()
                loss += term.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        losses.append(loss)
    return losses, model


# Options of the program, and those of `plain`.
CASES = {
    "gpt2": ([], {}),
    "llama": (["--accumulate", 3, "--clip", 0.05, "--checkpoint-layers", "--validate", 0.2],
              {"accumulate": 3, "clip": 0.05, "share": 0.2}),
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(folders):
    return {x: plain(folders[x], **y) for x, (_, y) in CASES.items()}


WAYS = {3: ["--method", "ring"], 4: ["--rows", 2, "--head-ranks", 2], 6: ["--rows", 2]}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, folders, words):
    """Run all trainings of this file in one launch, because PyTorch takes long to import.

    Return the folder of their files, the exit code and stdout of each, what is to be said of those
    that are refused, and stderr.
    """
    path = tmp_path_factory.mktemp("jobs")
    cases = {}
    for ranks, ways in WAYS.items():
        for name, (options, _) in CASES.items():
            files = ["--folder", path / f"{name}-{ranks}", "--output", path / f"{name}-{ranks}.h5"]
            command = [folders[name], TEXT, *COMMON, *options, *ways, *files]
            cases[name, ranks] = "train.py", command, [], ranks
    for dtype in ("float32", "float64"):
        command = [folders["gpt2"], *SHORT, "--seed", MARK, "--dtype", dtype]
        cases["wrong", dtype] = "train.py", command, [], 2
    refused = refused_ones(path, words)
    for x, command in (good_ones(path, words) | refused).items():
        cases[x] = "train.py", command, [], 2
    done, found = drive_each([*cases.values()], max(WAYS), WRONG, timeout=LONG)
    return path, dict(zip(cases, found)), [*refused], done.stderr


@pytest.mark.parametrize("ranks", WAYS)
def test_equals_one_process(jobs, expected, ranks):
    """Losses and weights after ten steps are those of plain transformers."""
    path, found, _, stderr = jobs
    for name, (losses, model) in expected.items():
        code, said = found[name, ranks]
        assert code == 0 and said.count("(passed, bound 1e-10)") == 2, said + stderr
        run = read_file(path / f"{name}-{ranks}.h5", TRAINING_SCHEMA)
        assert np.allclose(run["loss"], losses, rtol=1e-6, atol=0), (run["loss"], losses)
        assert losses[-1] < losses[0] - 0.1
        (folder,) = (path / f"{name}-{ranks}").iterdir()
        trained = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert trained.dtype == torch.float64
        for x, y in zip(trained.parameters(), model.parameters()):
            assert (x - y).abs().max() < 1e-6
        seconds = run["seconds"]
        parts = sum(seconds[x] for x in ("attention", "wait", "gradients", "optimizer", "other"))
        assert np.allclose(parts, seconds["total"]) and len(parts) == STEPS
        assert all(x.shape == (ranks,) for x in run["traffic"]["forward"].values())
        if "loss" in run["held_out"]:
            held = run["held_out"]["loss"]
            assert abs(held / evaluated(model) - 1) < 1e-6


def evaluated(model):
    """Return the mean loss of the held-out documents, in whole sequences."""
    documents = [x for x in TEXT.read_bytes().split(b"\n\n") if x]
    held = [x for i, x in enumerate(documents) if int((i + 1) * 0.2) > int(i * 0.2)]
    whole = [(i == 0, x) for y in held for i, x in enumerate(y)]
    losses = []
    for begin in range(0, len(whole) - SEQLEN + 1, SEQLEN):
        parts = []
        for first, token in whole[begin : begin + SEQLEN]:
            if first or not parts:
                parts.append([])
            parts[-1].append(token)
        for x in map(torch.tensor, parts):
            with torch.no_grad():
                logits = model(input_ids=x[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, x[1:], reduction="none"))
    return float(torch.cat(losses).mean())


# One rank has wrong gradients, in float32, in runs with this seed.
MARK = 1234
WRONG = f"""
from a2d_mpi.torch import gradients
real = gradients.GradientHooks._start
def start(self):
    for x in self._parameters:
        if rank == 1 and x.grad is not None and x.element_size() == 4 and "{MARK}" in sys.argv:
            x.grad.mul_(1.01)
    real(self)
gradients.GradientHooks._start = start
"""
SHORT = [TEXT, "--seqlen", 60, "--separator", r"\n\n", "--steps", 2]


def test_wrong_gradients_are_found(jobs):
    """The check of the first step fails if one rank has a wrong gradient."""
    (code, said), (other, _) = (jobs[1]["wrong", x] for x in ("float32", "float64"))
    assert (code, other) == (1, 0), said + jobs[3]
    assert "gradients: error" in said and "(FAILED, bound 1e-05)" in said


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Return a folder with a config, a tokenizer of words, and no weights."""
    folder = tmp_path_factory.mktemp("words")
    names = ["?", "the", "of", "License", "Work", "or", "and", "to", "You"]
    model = WordLevel({x: i for i, x in enumerate(names)}, unk_token="?")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    config = transformers.LlamaConfig(vocab_size=len(names), **sizes, **OWN)
    config.save_pretrained(folder)
    return folder


def good_ones(path, words):
    """Windows, experts, bfloat16, a tokenizer, two texts, one of them binary."""
    profile = ["--profile", ROOT / "data" / "results" / "16x1.toml"]
    return {
        "windows": ["gemma3-tiny", *SHORT, "--dtype", "bfloat16", "--checkpoint-layers"],
        "experts": ["qwen3-moe-tiny", *SHORT, *profile],
        "tokenizer": [words, ROOT / "README.md", *SHORT, "--folder", path / "words"],
        "bytes": ["llama-tiny", path / "binary", *SHORT],
    }


def refused_ones(path, words):
    """Return bad input by what is said of it."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": 256}
    whole = sizes | {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    for name, config in {
        "dropout": transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=256),
        "bert": transformers.BertConfig(**whole),
        "vocabulary": transformers.LlamaConfig(**sizes | {"vocab_size": 300}),
    }.items():
        config.save_pretrained(path / name)
    (path / "broken").mkdir()
    (path / "broken" / "config.json").write_text("{")
    (path / "empty").write_text("")
    (path / "binary").write_bytes(bytes(range(256)))
    long = ["--seqlen", 2048]
    return {
        "MODEL must be one of llama-tiny, ": ["nope", *SHORT],
        "transformers cannot open the model in": [path / "broken", *SHORT],
        "vocabulary of 256, got 300": [path / "vocabulary", *SHORT],
        "has dropout 0.1 in attention, not 0": [path / "dropout", *SHORT],
        "its masks are not causal": [path / "bert", *SHORT],
        "the model 1024 positions: --seqlen 1024": [
            "gpt2-tiny", *SHORT, *long, "--separator", ""],
        "/none: No such file": ["llama-tiny", "/none"],
        "empty has no text": ["llama-tiny", path / "empty"],
        "binary: the model's tokenizer needs text in UTF-8: ": [words, path / "binary"],
        "holds out none or all": ["llama-tiny", *SHORT, "--validate", 1e-3],
        "tokens, but --seqlen 2048 needs more": [
            "llama-tiny", *SHORT, *long, "--validate", 0.1],
        "--resume needs --folder": ["llama-tiny", *SHORT, "--resume"],
        "a 3 x 1 grid does not fit 2 ranks": ["llama-tiny", *SHORT, "--rows", 3],
        "weights and activations of one rank": ["llama-tiny", *SHORT, "--seqlen", "1G"],
        "matrices of the check in float64 (--check none": [
            "llama-tiny", *SHORT, "--seqlen", "64K", "--separator", ""],
        "must be a number from 0": ["llama-tiny", *SHORT, "--clip", -1],
    }  # fmt: skip


def test_models_texts_and_refusals(jobs):
    """All kinds of models train, and bad input is refused in one line."""
    path, found, refused, stderr = jobs
    good = [found[x] for x in ("windows", "experts", "tokenizer", "bytes")]
    assert all(code == 0 and text.count("(passed, bound") == 2 for code, text in good), good
    assert [x for x, (code, _) in found.items() if code == 2] == refused, stderr
    said = re.findall(r"^train\.py: error: (.*)$", stderr, re.MULTILINE)
    wrong = [(x, y) for x, y in zip(refused, said) if x not in y]
    assert not wrong and len(said) == len(refused), stderr
    assert "Loading weights" not in stderr  # on each rank
    (folder,) = (path / "words").iterdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("the Work")["input_ids"] == [1, 4]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert "a2d_mpi" not in str(config) and model.config._attn_implementation == "sdpa"


def test_needs_torch(tmp_path):
    """All drivers with models say so where PyTorch is missing."""
    output = ["--output", tmp_path / "new.h5"]
    cases = {"train.py": [TEXT], "bench.py decode": output, "generate.py": ["--prompt", "a"]}
    cases = [(x, ["llama-tiny", *y], []) for x, y in cases.items()]
    done, found = drive_each(cases, 2, "sys.modules['torch'] = None")
    assert [code for code, _ in found] == [2] * 3
    assert_one_line_each(done, ["pip install a2d_mpi[torch]"] * 3)
