"""Texts, cut into documents and into the sequences of training steps."""

import hashlib

import numpy as np
import pytest

from a2d_mpi.experiments.text import read_texts


def written(path, content):
    path.write_bytes(content)
    return path


def test_sequences(tmp_path):
    """Sequences have the right tokens and documents, also at the end of the text."""
    path = written(tmp_path / "text", b"ab--cdefg--h")
    text, held, digest = read_texts([path], b"--", 0.0, list)
    assert bytes(text.tokens.tolist()) == b"abcdefgh" and text.begins.tolist() == [0, 2, 7, 8]
    assert held is None and digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [text.longest(x) for x in (3, 11)] == [3, 5]
    document, seen = np.repeat([0, 1, 2], [2, 5, 1]), set()
    for number in range(40):
        batch = text.batch(11, 0, number)
        start = bytes(text.tokens.tolist()).index(int(batch.tokens[0]))
        seen.add(start)
        where = (start + np.arange(11)) % 8
        assert (batch.tokens == text.tokens[where]).all()
        same = (document[where[1:]] == document[where[:-1]]) & (where[1:] > 0)
        ends = np.append(np.flatnonzero(~same) + 1, 11)
        assert batch.cu_seqlens.tolist() == [0, *ends]
        assert batch.nlabels == same.sum() == sum(len(x) - 1 for x in batch.documents)
        assert (np.concatenate(batch.documents) == batch.tokens).all()
    assert len(seen) == 8
    endless, _, _ = read_texts([path], b"", 0.0, list)
    assert endless.batch(30, 0, 0).cu_seqlens.tolist() == [0, 30] and endless.longest(30) == 30
    with pytest.raises(ValueError, match="has no text"):
        read_texts([path, written(tmp_path / "empty", b"----")], b"--", 0.0, list)


def test_several_texts(tmp_path):
    """Texts are encoded document by document; without a separator each file is a document."""
    paths = [written(tmp_path / str(i), x) for i, x in enumerate((b"to be", b"or--not"))]

    def encode(document):
        return [len(x) for x in document.split()]

    text, _, digests = read_texts(paths, b"--", 0.0, encode)
    assert text.tokens.tolist() == [2, 2, 2, 3] and text.begins.tolist() == [0, 2, 3, 4]
    assert digests.split() == [hashlib.sha256(x.read_bytes()).hexdigest() for x in paths]
    text, _, _ = read_texts(paths, b"", 0.0, encode)
    assert text.begins.tolist() == [0, 2, 3] and text.at(1, 3).cu_seqlens.tolist() == [0, 1, 2, 3]


def test_held_out_documents(tmp_path):
    """Held-out documents are evenly spaced; each document is in one part."""
    documents = [bytes([65 + i]) * (i + 1) for i in range(21)]
    path = written(tmp_path / "text", b"--".join(documents))
    for share, expected in ((0.1, [9, 19]), (0.25, [3, 7, 11, 15, 19])):
        trained, held, _ = read_texts([path], b"--", share, list)
        assert bytes(held.tokens.tolist()) == b"".join(documents[i] for i in expected)
        rest = b"".join(x for i, x in enumerate(documents) if i not in expected)
        assert bytes(trained.tokens.tolist()) == rest
        p = np.array([i + 1 for i in range(21) if i not in expected]) / len(rest)
        assert trained.sizes() == {"documents": 21 - len(expected), "tokens": len(rest),
                                   "unigram_entropy": pytest.approx(-p @ np.log(p))}  # fmt: skip
    for share in (0.01, 1.0):
        with pytest.raises(ValueError, match=f"has 21 documents, so a share of {share} holds out"):
            read_texts([path], b"--", share, list)
