"""What docs/pytorch.md and docs/distributed.md show, and the examples of PyTorch and TRL.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import importlib
import re

import pytest
from helpers import ROOT, launch
from pages import blocks, read

# Losses are the same on all ranks, the tuned model is saved, and embeddings are those of single
# documents in float64.
END = """
from copy import deepcopy
found, exact = (x(input_ids=ids, labels=ids).loss.item() for x in (model, deepcopy(model)))
nbytes = comm.gather(answer.past_key_values.nbytes)
if comm.rank == 0:
    print("equal", abs(found - exact) < 1e-5 * exact, tuple(answer.sequences.shape), nbytes)
"""
# Compiling for the CPU takes half a minute.
QUICK = """
import torch
compiled, real = [], torch.compile
torch.compile = lambda x: compiled.append(x) or real(x, backend="aot_eager")
"""
# One process computes the batches of both replicas.
REPLICAS = """
good = [len(compiled) == 2, len({*comm.allgather(tuple(x.item() for x in norms))}) == 1]
if comm.rank == 0:
    torch.manual_seed(0)
    one = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).train()
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        for replica in range(replicas):
            for turn in range(passes):
                (loss_of(one, step, turn) / replicas).backward()
        norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        good += [abs(norms[step] / norm - 1) < 1e-5]
        optimizer.step()
    print("good", all(good), len(good))
"""
# The programs run in one launch, because PyTorch takes long to import.
EACH = "import runpy, sys\nfor x in sys.argv[1:]: runpy.run_path(x, run_name='__main__')"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Run the programs; return their folder, and what they printed."""
    path, example = tmp_path_factory.mktemp("pages"), ROOT / "examples" / "pytorch.py"
    for name, parts in {
        "pytorch": [*blocks("docs/pytorch.md", "python"), END],
        "distributed": [QUICK, *blocks("docs/distributed.md", "python"), REPLICAS],
    }.items():
        (path / f"{name}.py").write_text("\n".join(parts))
    lora = ROOT / "examples" / "lora.py"
    programs = example, path / "pytorch.py", path / "distributed.py", lora
    return path, launch(4, "-c", EACH, *programs, cwd=path, timeout=300).stdout


def test_example(printed):
    """The example of PyTorch trains."""
    assert len((ROOT / "examples" / "pytorch.py").read_text().splitlines()) <= 25
    found = re.findall(r"rank (\d), step (\d): loss (\d\.\d+)", printed[1])
    first, last = ([float(x) for _, y, x in found if y == step] for step in "04")
    assert len(found) == 20 and len(first) == 4 and max(last) < min(first), found


def test_example_of_trl(printed):
    """The example of TRL tunes an adapter, and saves it."""
    assert (printed[0] / "lora" / "adapter_model.safetensors").exists()
    losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", printed[1])]
    assert len(losses) == 5 and losses[-1] < losses[0], printed[1]


def test_page_of_distributed(printed):
    """All ways have the same norms, which are those of one process."""
    assert re.search("^good True 5$", printed[1], re.M), printed[1]


def test_page(printed):
    """The examples run as one program; names of the room exist."""
    folder, said = printed
    names = sorted(x.name for x in (folder / "trained").iterdir())
    assert names == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    pattern = r"^equal True \(1, 2340\) \[([\d, ]+)\]$"
    (kept,) = re.findall(pattern, said, re.MULTILINE)
    kept = [int(x) for x in kept.split(",")]
    assert len(kept) == 4 and max(kept) < 1.2 * min(kept), kept
    room = importlib.import_module("a2d_mpi.torch")
    page = read("docs/pytorch.md")
    assert all(f"`{x}" in page or f" {x}" in page for x in room.__all__)
    for name in re.findall(r"^\.\. auto\w+:: a2d_mpi\.torch\.(\w+)$", read("docs/api.rst"), re.M):
        assert hasattr(room, name)
