"""The program train: equal to transformers' Trainer on one process; refusals.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import json
import re

import numpy as np
import pytest
import torch
import transformers
from helpers import ROOT, assert_one_line_each, drive_each
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from a2d_mpi.results.hdf5 import TRAINING_SCHEMA, read_file

torch.set_num_threads(1)
TEXT = ROOT / "LICENSE"
LONG = 900  # s: PyTorch takes long to import on busy machines
SEQLEN, STEPS, SEED = 96, 8, 5
COMMON = ["--seqlen", SEQLEN, "--separator", r"\n\n", "--steps", STEPS, "--seed", SEED,
          "--dtype", "float64"]  # fmt: skip
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
# Arguments of the Trainer, and the share of the text that is held out.
CASES = {
    "gpt2": ({"learning_rate": 3e-3, "per_device_train_batch_size": 2}, 0.0),
    "llama": ({"learning_rate": 3e-3, "gradient_accumulation_steps": 3, "max_grad_norm": 0.05,
               "lr_scheduler_type": "cosine", "warmup_steps": 3}, 0.2),
}  # fmt: skip
WAYS = {3: ["--method", "ring"], 4: ["--rows", 2, "--head-ranks", 2], 6: ["--rows", 2]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of each model, with weights in float32."""
    found = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


def packed(part):
    """Return tokens with positions and labels, of which each is (is first, token)."""
    positions, labels = [], []
    for i, (first, token) in enumerate(part):
        positions.append(0 if first or i == 0 else positions[-1] + 1)
        labels.append(-100 if positions[-1] == 0 else token)
    return {"input_ids": [x for _, x in part], "position_ids": positions, "labels": labels}


def sequences(number, share):
    """Return the sequences of a run, and those that are held out."""
    documents, parts = [x for x in TEXT.read_bytes().split(b"\n\n") if x], ([], [])
    for i, x in enumerate(documents):
        part = parts[int((i + 1) * share) > int(i * share)]
        part += [(j == 0, token) for j, token in enumerate(x)]
    whole, held = parts
    places = (int(np.random.default_rng([SEED, i]).integers(len(whole))) for i in range(number))
    return (
        [packed([whole[(x + j) % len(whole)] for j in range(SEQLEN)]) for x in places],
        [packed(held[i : i + SEQLEN]) for i in range(0, len(held) - SEQLEN + 1, SEQLEN)],
    )


@pytest.fixture(scope="module")
def expected(folders, tmp_path_factory):
    """Train on one process; return losses, the held-out loss and the model of each case."""
    found = {}
    for name, (given, share) in CASES.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype="float64")
        own = {"max_steps": STEPS, "per_device_train_batch_size": 1, "logging_steps": 1,
               "per_device_eval_batch_size": 1, "train_sampling_strategy": "sequential",
               "save_strategy": "no", "report_to": [], "disable_tqdm": True}  # fmt: skip
        arguments = transformers.TrainingArguments(tmp_path_factory.mktemp("one"), **own | given)
        of_step = arguments.train_batch_size * arguments.gradient_accumulation_steps
        data, held = sequences(STEPS * of_step, share)
        trainer = transformers.Trainer(
            model, arguments, transformers.default_data_collator, data, held or None
        )
        trainer.train()
        losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
        found[name] = losses, trainer.evaluate()["eval_loss"] if held else None, model
    return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, folders, words):
    """Run all trainings of this file in one launch, because PyTorch takes long to import.

    Return the folder of their files, the exit code and stdout of each, what is to be said of those
    that are refused, and stderr.
    """
    path, cases = tmp_path_factory.mktemp("jobs"), {}
    for ranks, ways in WAYS.items():
        for name, (given, share) in CASES.items():
            files = ["--folder", path / f"{name}-{ranks}", "--output", path / f"{name}-{ranks}.h5"]
            sets = [y for x in given.items() for y in ("--set", f"{x[0]}={x[1]}")]
            command = [folders[name], TEXT, *COMMON, *sets, "--validate", share, *ways, *files]
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
    """Losses and weights are those of transformers' Trainer on one process."""
    path, found, _, stderr = jobs
    for name, (losses, held, model) in expected.items():
        code, said = found[name, ranks]
        assert code == 0 and said.count("(passed, bound 1e-06)") == 2, said + stderr
        run = read_file(path / f"{name}-{ranks}.h5", TRAINING_SCHEMA)
        assert np.allclose(run["loss"], losses, rtol=1e-6, atol=0), (run["loss"], losses)
        assert losses[-1] < losses[0] - 0.1
        trained = transformers.AutoModelForCausalLM.from_pretrained(
            path / f"{name}-{ranks}" / f"checkpoint-{STEPS}"
        )
        assert trained.dtype == torch.float64
        for x, y in zip(trained.parameters(), model.parameters()):
            assert (x - y).abs().max() < 1e-5
        seconds = run["seconds"]
        parts = sum(seconds[x] for x in ("attention", "wait", "optimizer", "other"))
        assert np.allclose(parts, seconds["total"]) and len(parts) == STEPS
        sent = [x for phase in run["traffic"].values() for x in phase.values()]
        assert sent and all(x.shape == (ranks,) and x.max() > 0 for x in sent)
        assert run["held_out"].get("loss") == (held and pytest.approx(held, rel=1e-6))


# One rank has wrong gradients, in float32, in runs with this seed.
MARK = 1234
WRONG = f"""
from a2d_mpi.torch import context
real = context.add_gradients
def add(model, *given):
    for x in model.parameters():
        if rank == 1 and x.grad is not None and x.element_size() == 4 and "{MARK}" in sys.argv:
            x.grad.mul_(1.01)
    real(model, *given)
context.add_gradients = add
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
    """Windows, experts, bfloat16, a tokenizer, two texts."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    sizes |= BYTES | {"num_hidden_layers": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    kinds = ["sliding_attention", "full_attention"]
    windows = transformers.Gemma3TextConfig(sliding_window=16, layer_types=kinds, **sizes)
    windows.save_pretrained(path / "windows")
    transformers.Qwen3MoeConfig(**sizes, **experts).save_pretrained(path / "experts")
    profile = ["--profile", ROOT / "data" / "results" / "16x1.toml"]
    layers = ["--set", "gradient_checkpointing=true"]
    return {
        "windows": [path / "windows", *SHORT, "--dtype", "bfloat16", *layers],
        "experts": [path / "experts", *SHORT, *profile],
        "tokenizer": [words, ROOT / "README.md", *SHORT, "--folder", path / "words"],
    }


def refused_ones(path, words):
    """Return bad input by what is said of it."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": 300}
    transformers.LlamaConfig(**sizes).save_pretrained(path / "vocabulary")
    (path / "broken").mkdir()
    (path / "broken" / "config.json").write_text("{")
    (path / "empty").write_text("")
    (path / "binary").write_bytes(bytes(range(256)))
    long, tiny = ["--seqlen", 2048], ["llama-tiny", *SHORT]
    return {
        "MODEL must be one of llama-tiny, ": ["nope", *SHORT],
        "transformers cannot open the model in": [path / "broken", *SHORT],
        "vocabulary of 256, got 300": [path / "vocabulary", *SHORT],
        "4096 tokens in a row, and the model 2048 positions": [
            "gpt3-175b-layer", *SHORT, "--seqlen", 4096, "--separator", ""],
        "/none: No such file": ["llama-tiny", "/none"],
        "empty has no text": ["llama-tiny", path / "empty"],
        "binary: the model's tokenizer needs text in UTF-8: ": [words, path / "binary"],
        "holds out none or all": [*tiny, "--validate", 1e-3],
        "tokens, but --seqlen needs 2048": [*tiny, *long, "--validate", 0.1],
        "--resume needs --folder": [*tiny, "--resume"],
        "a 3 x 1 grid does not fit 2 ranks": [*tiny, "--rows", 3],
        "--set: ": [*tiny, "--set", "learning_rat=1"],
        "--set seed: the program sets it": [*tiny, "--set", "seed=1"],
        "--set must be NAME=VALUE": [*tiny, "--set", "seed"],
    }  # fmt: skip


def test_models_texts_and_refusals(jobs):
    """All kinds of models train, and bad input is refused in one line."""
    path, found, refused, stderr = jobs
    good = [found[x] for x in ("windows", "experts", "tokenizer")]
    assert all(code == 0 and text.count("(passed, bound") == 2 for code, text in good), good
    assert [x for x, (code, _) in found.items() if code == 2] == refused, stderr
    said = re.findall(r"^train\.py: error: (.*)$", stderr, re.MULTILINE)
    wrong = [(x, y) for x, y in zip(refused, said) if x not in y]
    assert not wrong and len(said) == len(refused), stderr
    assert "Loading weights" not in stderr  # on each rank
    (folder,) = (path / "words").iterdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("the Work")["input_ids"] == [1, 4]
    config = json.loads((folder / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert "a2d_mpi" not in str(config) and model.config._attn_implementation == "sdpa"


def test_needs_torch():
    """Programs with models say so where PyTorch is missing."""
    cases = {"train.py": [TEXT], "generate.py": ["--prompt", "a"]}
    cases = [(x, ["llama-tiny", *y], []) for x, y in cases.items()]
    done, found = drive_each(cases, 2, "sys.modules['torch'] = None")
    assert [code for code, _ in found] == [2] * 2
    assert_one_line_each(done, ["pip install a2d_mpi[torch]"] * 2)
