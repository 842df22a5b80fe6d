"""What docs/pytorch.md and docs/distributed.md show, and the example of PyTorch.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import importlib
import re

import pytest
from helpers import ROOT, launch
from pages import blocks, read

from a2d_mpi.experiments.models import open_model

# Losses are the same on all ranks, the tuned model is saved, and embeddings are those of single
# documents in float64.
END = """
if comm.rank == 0:
    saved = AutoModelForCausalLM.from_pretrained("TUNED").state_dict()
    assert all(torch.equal(x, saved[name]) for name, x in model.state_dict().items())
assert len(set(comm.allgather(total))) == 1
packed.free()
ids, exact = comm.bcast(text), bert.double()
with torch.no_grad():
    alone = [exact(ids[:, a:b]).last_hidden_state[0].mean(0) for a, b in zip(ends, ends[1:])]
error = embeddings - torch.nn.functional.normalize(torch.stack(alone))
assert error.abs().max() < 1e-6, error
"""
# Compiling for the CPU takes half a minute.
QUICK = """
import torch
compiled, real = [], torch.compile
torch.compile = lambda x: compiled.append(x) or real(x, backend="aot_eager")
"""
# A Trainer on one process gets the sequences of both replicas.
REPLICAS = """
good = [len(compiled) == 2, len({*comm.allgather(tuple(x.item() for x in norms))}) == 1]
if comm.rank == 0:
    pairs = [{x: torch.stack([y[x] for y in z]) for x in z[0]} for z in zip(texts(0), texts(1))]
    torch.manual_seed(0)
    one = LlamaForCausalLM(LlamaConfig(**config.to_dict()))  # config names the attention of cp
    alone = Trainer(one, arguments, train_dataset=pairs, data_collator=lambda x: x[0])
    alone.train()
    for step, found, exact in zip(range(3), trainer.state.log_history, alone.state.log_history):
        good += [abs(found[x] / exact[x] - 1) < 1e-5 for x in ("loss", "grad_norm")]
    good += [torch.allclose(x, y, 0, 1e-6) for x, y in zip(model.parameters(), one.parameters())]
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
    open_model("gemma3-tiny")[0].save_pretrained(path / "FOLDER")
    programs = example, path / "pytorch.py", path / "distributed.py"
    return path, launch(4, "-c", EACH, *programs, cwd=path, timeout=300).stdout


def test_example(printed):
    """The example of PyTorch trains."""
    assert len((ROOT / "examples" / "pytorch.py").read_text().splitlines()) <= 25
    found = re.findall(r"rank (\d), step (\d): loss (\d\.\d+)", printed[1])
    first, last = ([float(x) for _, y, x in found if y == step] for step in "04")
    assert len(found) == 20 and len(first) == 4 and max(last) < min(first), found


def test_page_of_distributed(printed):
    """All ways have the same norms, and the Trainer has those of one process."""
    folder, said = printed
    assert re.search("^good True 29$", said, re.M) and (folder / "trained").is_dir(), said


def test_page(printed):
    """The examples run as one program; names of the room exist."""
    said = printed[1]
    steps = re.findall(r"^(\d) ([\d.]+)$", said, re.MULTILINE)
    assert [step for step, _ in steps] == ["0", "1", "2"], said
    first, _, last = (float(loss) for _, loss in steps)
    assert last < first < 6
    (kept,) = re.findall(r"^torch.Size\(\[1, 2340\]\) \[([\d, ]+)\]$", said, re.MULTILINE)
    kept = [int(x) for x in kept.split(",")]
    assert len(kept) == 4 and max(kept) < 1.2 * min(kept), kept
    room = importlib.import_module("a2d_mpi.torch")
    page = read("docs/pytorch.md")
    assert all(f"`{x}" in page or f" {x}" in page for x in room.__all__)
    for name in re.findall(r"^\.\. auto\w+:: a2d_mpi\.torch\.(\w+)$", read("docs/api.rst"), re.M):
        assert hasattr(room, name)
