"""drivers/bench.py: kernels beside PyTorch's attention, and steps of models of transformers."""

import helpers

from a2d_mpi.core.config import PHASES
from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import (
    BENCHMARK_SCHEMA,
    DECODING_SCHEMA,
    STEPS_SCHEMA,
    flat,
    kernel_speeds,
)

# In float32 a rank has wrong gradients, and a step after more than 60 tokens, which is no trial of
# `generate`, has a wrong merge and sends twice as much.  Four ranks merge in two exchanges.
WRONG = """
import a2d_mpi.torch.decoding as decoding
from a2d_mpi.torch import gradients
decoding.GATHERED, send, merged = 0, gradients.GradientHooks._send, decoding.Steps._merged
def wrong_send(self, number):
    for x in self._buckets[number]:
        if rank == 1 and x.grad is not None and x.element_size() == 4:
            x.grad.mul_(1.01)
    send(self, number)
def wrong_merged(self, parts):
    if parts.itemsize > 4 or self.cache.length < 60:
        return merged(self, parts)
    merged(self, parts)
    return merged(self, 1.01 * parts)
gradients.GradientHooks._send, decoding.Steps._merged = wrong_send, wrong_merged
"""


def test_kernels_beside_torch_by_backend(tmp_path):
    """Backends that run are in the file by their names; one that does not run here is named."""
    options = ["--shapes", "40x2x8", "--trials", "2", "--masks", "causal", "--kernels", "numpy"]
    options += ["--output", tmp_path / "torch.h5", "--name", "x", "--torch", "default,cudnn,math"]
    done = helpers.drive("bench.py kernels", 0, *options)
    assert "torch's attention by cudnn does not run: " in done.stderr
    found = read_file(tmp_path / "torch.h5", BENCHMARK_SCHEMA)["figures"]["x"]
    names = {"numpy", "product", "torch", "torch-math"}
    speeds = kernel_speeds(found)
    assert speeds.keys() == {f"40x2x8/causal/{phase}" for phase in PHASES}
    assert all(x.keys() == names for x in speeds.values())
    assert all(len(x) == 2 for x in flat(found).values())


def test_steps(tmp_path):
    """Files of both programs; what is missing is added; a wrong gradient, merge or byte fails."""
    train, decode, bad = (tmp_path / f"{x}.h5" for x in ("train", "decode", "bad"))
    plans = ["--plans", "attention2d:2x2,ring", "--trials", 2]
    steps = ["llama-tiny", "--dtype", "float64", "--output", train, *plans]
    tokens = ["llama-tiny", "--dtype", "float64", "--output", decode, "--trials", 3]
    tokens += ["--requests", 3, "--contexts", "20,70", "--ranks"]
    done, found = helpers.drive_each([
        ("bench.py train", [*steps, "--seqlens", 40], []),
        ("bench.py train", [*steps, "--seqlens", "40,50", "--resume"], []),
        ("bench.py train", ["llama-tiny", "--output", bad, *plans, "--seqlens", 40], []),
        ("bench.py train", [*steps, "--seqlens", 40, "--resume", "--seed", 1], []),
        ("bench.py train", [*steps, "--seqlens", 40], []),
        ("bench.py decode", [*tokens, 2], []),
        ("bench.py decode", [*tokens, "2,4", "--resume"], []),
        ("bench.py decode", ["qwen3-moe-tiny", "--output", tmp_path / "bad2.h5", "--trials", 1,
                             "--contexts", "70", "--ranks", "4"], []),
    ], 4, WRONG, timeout=300)  # fmt: skip
    told = done.stdout + done.stderr
    assert [code for code, _ in found] == [0, 0, 1, 2, 2, 0, 0, 1], told
    assert [text.count("4x1x1   ") for _, text in found[:2]] == [1, 1], told  # not once more
    assert found[2][1].count("gradients: error") == 2 and "loss" not in found[2][1], told
    assert "was made with seed 0, but now it is 1" in done.stderr
    assert "exists: give --resume to add to it" in done.stderr
    assert all(f"FAILED 4-70, {x}: error" in found[7][1] for x in ("traffic", "logits")), told

    tree = read_file(train, STEPS_SCHEMA)
    assert tree["settings"]["model"] == "llama-tiny"
    runs = {(x["method"], x["seqlen"]): x for x in tree["runs"].values()}
    assert runs.keys() == {(x, n) for x in ("attention2d", "ring") for n in (40, 50)}
    for run in runs.values():
        assert run["passed"] and run["parts"] == [
            "attention", "wait", "gradients", "optimizer", "other",
        ]  # fmt: skip
        assert run["seconds"].shape == (2, 4, 5) and (run["seconds"] >= 0).all()
        assert (run["sent"] > 0).all()
        assert run["checks"].keys() == {"loss", "gradients", "repeat"}
        assert 0 < run["checks"]["gradients"]["error"] < 1e-10
    assert not all(x["passed"] for x in read_file(bad, STEPS_SCHEMA)["runs"].values())

    tree = read_file(decode, DECODING_SCHEMA)
    assert tree["runs"].keys() == {f"{x}-{n}" for x in (2, 4) for n in (20, 70)}
    # 2 layers, 3 requests of 8 heads of 16 in float64; out and lse.  Rank 0 also sends the tokens.
    sent = {2: 2 * 24 * 17 * 8 + 48, 4: 3 * (2 * 6 * (17 + 16) * 8 + 48)}
    for run in tree["runs"].values():
        assert run["passed"] and run["sent_bytes"] == sent[run["ranks"]]
        assert len(run["seconds"]) == len(run["alone"]) == 3 and run["seconds"].min() > 0
        assert 0 < run["checks"]["logits"]["error"] < 1e-7  # `generate` rounds them to float32


def test_steps_refused(tmp_path):
    new = ["--output", tmp_path / "new.h5"]
    model, long = ["llama-tiny", *new], "2147483648 tokens"
    helpers.assert_each_refused([
        ("bench.py train", [tmp_path, *new], [], "or a folder with config.json"),
        ("bench.py train", ["gpt2-tiny", *new, "--seqlens", "2K"], [], "1024 positions"),
        ("bench.py train", [*model, "--plans", "ring:3"], [], "'ring:3'"),
        ("bench.py train", [*model, "--plans", "auto"], [], "auto needs --profile"),
        ("bench.py train", [*model, "--seqlens", "64,2G"], [], long),
        ("bench.py train", model, ["--seed", "1"], "ranks disagree on --seed"),
        ("bench.py decode", [*model, "--contexts", "2G"], [], long),
        ("bench.py decode", [*model, "--ranks", "1,3"], [], "--ranks must be at most 2, got 3"),
        ("bench.py decode", [*model, "--dtype", "bfloat16"], [], "invalid choice: 'bfloat16'"),
        ("bench.py decode", ["llama-tiny", "--output", "/none/x.h5"], [], "cannot write"),
    ], 2)  # fmt: skip
