"""Texts, cut into documents and into the batches of training steps."""

import hashlib

import numpy as np
import pytest

from a2d_mpi.experiments.text import Text


def test_batches(tmp_path):
    """Batches have the right documents, targets and positions, also at the end of the text."""
    (path := tmp_path / "text").write_bytes(b"ab--cdefg--h")
    text, seen = Text(path, b"--"), set()
    assert bytes(text.bytes.tolist()) == b"abcdefgh" and text.begins.tolist() == [0, 2, 7, 8]
    document = np.repeat([0, 1, 2], [2, 5, 1])
    for step in range(40):
        batch = text.batch(11, 0, step)
        start = bytes(text.bytes.tolist()).index(int(batch.tokens[0]))
        seen.add(start)
        where = (start + np.arange(12)) % 8
        assert (batch.tokens == text.bytes[where[:-1]]).all()
        same = (document[where[1:]] == document[where[:-1]]) & (where[1:] > 0)
        assert (batch.targets == np.where(same, text.bytes[where[1:]], -1)).all()
        ends = np.append(np.flatnonzero(~same[:-1]) + 1, 11)
        assert batch.cu_seqlens.tolist() == [0, *ends]
        begins = np.repeat([0, *ends[:-1]], np.diff([0, *ends]))
        assert (batch.positions == np.arange(11) - begins).all()
    assert len(seen) == 8
    assert (Text(path, b"").batch(11, 0, 0).targets >= 0).all()
    (tmp_path / "empty").write_bytes(b"----")
    with pytest.raises(ValueError, match="has no text"):
        Text(tmp_path / "empty", b"--")


def test_held_out_documents(tmp_path):
    """Held-out documents are evenly spaced; each document is in one part."""
    documents = [bytes([65 + i]) * (i + 1) for i in range(21)]
    (path := tmp_path / "text").write_bytes(b"--".join(documents))
    for share, expected in ((0.1, [9, 19]), (0.25, [3, 7, 11, 15, 19])):
        trained, held = (Text(path, b"--", share, x) for x in (False, True))
        assert bytes(held.bytes.tolist()) == b"".join(documents[i] for i in expected)
        rest = b"".join(x for i, x in enumerate(documents) if i not in expected)
        assert bytes(trained.bytes.tolist()) == rest
        p = np.array([i + 1 for i in range(21) if i not in expected]) / len(rest)
        assert trained.sizes() == {"documents": 21 - len(expected), "bytes": len(rest),
                                   "unigram_entropy": pytest.approx(-p @ np.log(p))}  # fmt: skip
        assert trained.sha256 == held.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=r"has 21 documents, so a share of 0\.01 holds out none"):
        Text(path, b"--", 0.01, held_out=True)
