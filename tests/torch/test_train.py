"""drivers/train.py: equal to plain transformers on one process, whatever the options; refusals.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import math

import h5py
import numpy as np
import pytest
import torch
import transformers
from helpers import ROOT, assert_one_line_each, drive, drive_each

from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import TRAINING_SCHEMA

torch.set_num_threads(1)
TEXT = ROOT / "LICENSE"
SEQLEN, STEPS, WARMUP, RATE, SEED = 96, 10, 3, 3e-3, 5
COMMON = ["--seqlen", SEQLEN, "--separator", r"\n\n", "--steps", STEPS, "--warmup-steps", WARMUP,
          "--rate", RATE, "--seed", SEED, "--dtype", "float64", "--every", STEPS]  # fmt: skip
BYTES = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
MODELS = {
    "gpt2": transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=SEQLEN, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, **BYTES,
    ),
    "llama": transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=None, **BYTES,
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


@pytest.mark.parametrize("ranks, ways", [
    (3, ["--method", "ring"]), (4, ["--rows", 2, "--head-ranks", 2]), (6, ["--rows", 2]),
])  # fmt: skip
def test_equals_one_process(tmp_path, folders, expected, ranks, ways):
    """Losses and weights after ten steps are those of plain transformers."""
    files = {x: ["--folder", tmp_path / x, "--output", tmp_path / f"{x}.h5"] for x in CASES}
    cases = [("train.py", [folders[x], TEXT, *COMMON, *options, *ways, *files[x]], [])
             for x, (options, _) in CASES.items()]  # fmt: skip
    done, found = drive_each(cases, ranks, timeout=300)
    assert [code for code, _ in found] == [0, 0], done.stdout + done.stderr
    for (name, (losses, model)), (_, said) in zip(expected.items(), found):
        assert said.count("(passed, bound 1e-10)") == 2
        run = read_file(tmp_path / f"{name}.h5", TRAINING_SCHEMA)
        assert np.allclose(run["loss"], losses, rtol=1e-6, atol=0), (run["loss"], losses)
        assert losses[-1] < losses[0] - 0.1
        (folder,) = (tmp_path / name).iterdir()
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
