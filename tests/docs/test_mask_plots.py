"""`drivers/plot.py masks`, and masks in the other programs that need no MPI."""

import numpy as np
import pytest
from helpers import ROOT, drive

from a2d_mpi.experiments.mask_table import PartitionCost, best_of, read_table
from a2d_mpi.figures.mask_plots import tiling
from a2d_mpi.masks.patterns import PATTERNS, make_mask
from a2d_mpi.sharding.choice import CHOICES
from a2d_mpi.sharding.distribution import distribute


@pytest.mark.parametrize("text", PATTERNS)
def test_tiles_are_those_of_owners(text):
    """The rank of a pair is in the row of the query's owner and the key's column."""
    mask, tokens, owner = make_mask(text, 60), np.arange(60), np.empty(60, int)
    for name in (None, "striped"):
        found = tiling(text, 60, 2, 3, name)
        assert found.distribution == name if name else found.distribution in CHOICES
        shards = distribute(found.distribution, mask, 60, 2, 3)
        for rank in range(6):
            owner[shards.tokens(rank)] = rank
        ranks = (owner // 3)[:, None] * 3 + (owner % 3)[None, :]
        visible = mask.dense(tokens, tokens)
        assert np.array_equal(found.ranks, np.where(visible, ranks, -1))
        assert found.areas.tolist() == [(found.ranks == rank).sum() for rank in range(6)]


def test_table(tmp_path):
    """The table has the bytes of each partition, and the balance of its distribution."""
    sizes = ["--ranks", "4", "--seqlen", "512"]
    done = drive("plot.py", 0, "partitions", *sizes, "--masks", "full,causal")
    head, full, causal = (x.split(" | ") for x in done.stdout.splitlines()[2:])
    assert len(head) == len(full) == len(causal) == 5
    # 2 x 2: a quarter of q and of out from another rank, and of k and v; lse is 2 / 128 of out.
    assert full[1].startswith("1.0039 (1.000, 2x2)")
    assert causal[2].startswith("1.0039 (1.000, 2x2)")


@pytest.mark.thorough
@pytest.mark.parametrize("text, plan", [
    ("causal", "attention2d/contiguous"), ("causal_document:seed=4", "attention2d/zigzag"),
    ("share_question:seed=2", "ring/balanced"), ("sliding_window", "attention2d/contiguous"),
])  # fmt: skip
def test_committed_table(text, plan):
    """The committed table of docs/masks.md equals the table of this code."""
    known = read_table(ROOT / "data" / "results" / "masks.csv")
    found = best_of(plan, text, 131072, 16)
    rounded = PartitionCost(found.grid, round(found.uneven, 4), round(found.moved, 5))
    assert known[16, 131072, text, plan] == rounded


@pytest.mark.thorough
def test_table_is_completed(tmp_path):
    """Missing entries are added to a table."""
    path, picture = tmp_path / "table.csv", tmp_path / "table.png"
    options = ["partitions", "--ranks", "2", "--seqlen", "64", "--output", path, "--masks"]
    drive("plot.py", 0, *options, "full,causal_document", "--seeds", "1,2")
    text = path.read_text().replace(
        "full,ring/balanced,2x1,1.0000,1", "full,ring/balanced,2x1,1.0000,9"
    )
    assert "9.00000" in text
    path.write_text(text)
    done = drive("plot.py", 0, *options, "full,causal", "--picture", picture)
    assert "9.0000 (1.000, 2x1)" in done.stdout, done.stderr
    table = read_table(path)
    drawn = {f"causal_document:seed={i}" for i in (1, 2)}
    assert {x[2] for x in table} == {"full", "causal", *drawn}
    assert len(table) == 4 * 4 and picture.read_bytes().startswith(b"\x89PNG")
