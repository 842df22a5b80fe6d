"""Texts, cut into documents and into the sequences of a training."""

import hashlib

import numpy as np
import pytest

from a2d_mpi.cli.text import Text, read_documents


def written(path, content):
    path.write_bytes(content)
    return path


def test_sequences(tmp_path):
    """Sequences have the right tokens, positions and labels, also at the end of the text."""
    path = written(tmp_path / "text", b"ab--cdefg--h")
    documents, held, digest = read_documents([path], b"--", 0.0, list)
    text = Text(documents, 11, 40)
    assert bytes(text.tokens.tolist()) == b"abcdefgh" and len(text) == 40
    assert not held and digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [Text(documents, x).longest for x in (3, 11)] == [3, 5]
    document, seen = np.repeat([0, 1, 2], [2, 5, 1]), set()
    for number in range(40):
        found = text[number]
        start = bytes(text.tokens.tolist()).index(int(found["input_ids"][0]))
        seen.add(start)
        where = (start + np.arange(11)) % 8
        assert (found["input_ids"] == text.tokens[where]).all()
        same = (document[where[1:]] == document[where[:-1]]) & (where[1:] > 0)
        positions = [0]
        for x in same:
            positions.append(positions[-1] + 1 if x else 0)
        assert found["position_ids"].tolist() == positions
        targets = np.where(same, text.tokens[where[1:]], -100)
        assert found["labels"].tolist() == [-100, *targets]
    assert len(seen) == 8
    endless = Text(documents, 30, 1, separated=False)
    assert endless[0]["position_ids"].tolist() == [*range(30)] and endless.longest == 30
    cut = Text(documents, 3)
    assert [bytes(x["input_ids"].tolist()) for x in map(cut.__getitem__, range(len(cut)))] == [
        b"abc", b"def",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="has no text"):
        read_documents([path, written(tmp_path / "empty", b"----")], b"--", 0.0, list)


def test_several_texts(tmp_path):
    """Texts are encoded document by document; without a separator each file is a document."""
    paths = [written(tmp_path / str(i), x) for i, x in enumerate((b"to be", b"or--not"))]

    def encode(document):
        return [len(x) for x in document.split()]

    documents, _, digests = read_documents(paths, b"--", 0.0, encode)
    assert [x.tolist() for x in documents] == [[2, 2], [2], [3]]
    assert digests.split() == [hashlib.sha256(x.read_bytes()).hexdigest() for x in paths]
    assert [len(x) for x in read_documents(paths, b"", 0.0, encode)[0]] == [2, 1]


def test_held_out_documents(tmp_path):
    """Held-out documents are evenly spaced; each document is in one part."""
    documents = [bytes([65 + i]) * (i + 1) for i in range(21)]
    path = written(tmp_path / "text", b"--".join(documents))
    for share, expected in ((0.1, [9, 19]), (0.25, [3, 7, 11, 15, 19])):
        rest, held, _ = read_documents([path], b"--", share, list)
        assert [bytes(x.tolist()) for x in held] == [documents[i] for i in expected]
        left = [x for i, x in enumerate(documents) if i not in expected]
        assert [bytes(x.tolist()) for x in rest] == left
    for share in (0.01, 1.0):
        with pytest.raises(ValueError, match=f"has 21 documents, so a share of {share} holds out"):
            read_documents([path], b"--", share, list)
