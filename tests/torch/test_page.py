"""What docs/pytorch.md shows.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import importlib
import re

from helpers import launch
from pages import blocks, read

# Losses are the same on all ranks, and embeddings are those of single documents in float64.
END = """
assert len(set(comm.allgather(total))) == 1
packed.free()
ids, exact = comm.bcast(text), bert.double()
with torch.no_grad():
    alone = [exact(ids[:, a:b]).last_hidden_state[0].mean(0) for a, b in zip(ends, ends[1:])]
error = embeddings - torch.nn.functional.normalize(torch.stack(alone))
assert error.abs().max() < 1e-6, error
"""


def test_page(tmp_path):
    """The examples run as one program; names of the room exist."""
    example = tmp_path / "example.py"
    example.write_text("\n".join([*blocks("docs/pytorch.md", "python"), END]))
    done = launch(4, example, timeout=100)
    steps = re.findall(r"^(\d) ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [step for step, _ in steps] == ["0", "1", "2"], done.stdout
    first, _, last = (float(loss) for _, loss in steps)
    assert last < first < 6
    (kept,) = re.findall(r"^torch.Size\(\[1, 2340\]\) \[([\d, ]+)\]$", done.stdout, re.MULTILINE)
    kept = [int(x) for x in kept.split(",")]
    assert len(kept) == 4 and max(kept) < 1.2 * min(kept), kept
    room = importlib.import_module("a2d_mpi.torch")
    page = read("docs/pytorch.md")
    assert all(f"`{x}" in page or f" {x}" in page for x in room.__all__)
    for name in re.findall(r"^\.\. auto\w+:: a2d_mpi\.torch\.(\w+)$", read("docs/api.rst"), re.M):
        assert hasattr(room, name)
