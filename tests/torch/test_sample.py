"""data/make_sample.py, on a small random BERT.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import h5py
import numpy as np
import torch
from helpers import assert_one_line_each, drive_each
from transformers import BertConfig, BertModel, BertTokenizerFast, GPT2Config, GPT2Model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[", "]", "sep", "one", "two", "three", "four"]
SCRIPT, LAYER, NHEADS, HEADDIM = "../data/make_sample.py", 1, 3, 8


def expected(model, windows):
    """Return q, k and v of a layer in float64, by hooks on the whole model."""
    found, modules = {}, model.double().encoder.layer[LAYER].attention.self
    for name in ("query", "key", "value"):
        getattr(modules, name).register_forward_hook(
            lambda module, given, out, name=name: found.setdefault(name[0], []).append(out[0])
        )
    with torch.no_grad():
        for ids in windows:
            model(torch.tensor([ids]))
    return {x: torch.cat(y).reshape(-1, NHEADS, HEADDIM).numpy() for x, y in found.items()}


def test_sample(tmp_path):
    """The file has what a hook sees in float64, of windows of the model's length."""
    torch.manual_seed(0)
    sizes = {"hidden_size": NHEADS * HEADDIM, "num_hidden_layers": 3, "intermediate_size": 40}
    config = BertConfig(vocab_size=len(WORDS), num_attention_heads=NHEADS, **sizes,
                        max_position_embeddings=8, initializer_range=0.5)  # fmt: skip
    model = BertModel(config).eval()
    model.save_pretrained(folder := tmp_path / "bert")
    (tmp_path / "vocab").write_text("\n".join(WORDS))
    BertTokenizerFast(str(tmp_path / "vocab")).save_pretrained(folder)
    GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    (text := tmp_path / "text").write_text("one two three [SEP] four one two three\nfour one two")
    words = text.read_text().replace("[SEP]", "[ sep ]").split()  # it is no special token
    ids = [WORDS.index(x) for x in words]
    windows = [[2, *ids[i : i + 6], 3] for i in range(0, len(ids), 6)]
    assert [len(x) for x in windows] == [8, 8, 3]
    exact, files = expected(model, windows), [tmp_path / "whole.h5", tmp_path / "cut.h5"]
    common = "--text", text, "--layer", LAYER
    cases = [
        [files[0], *common, "--model", folder, "--tokens", 19, "--dtype", "float32"],
        [files[1], *common, "--model", folder, "--tokens", 12],
        [tmp_path / "x.h5", *common, "--model", folder, "--tokens", 20],
        [tmp_path / "x.h5", "--text", text, "--layer", 3, "--model", folder],
        [tmp_path / "x.h5", *common, "--model", tmp_path / "gpt2"],
        [tmp_path / "x.h5", *common, "--model", tmp_path],
    ]
    done, found = drive_each([(SCRIPT, x, []) for x in cases], 0)
    assert [code for code, _ in found] == [0, 0, 2, 2, 2, 2], done.stdout + done.stderr
    told = "--tokens 20 is too many: the text holds 19", "--layer must be at most 2, got 3"
    assert_one_line_each(done, [*told, "must have a BertModel, got GPT2Model", "config.json"])
    for path, tokens, bound in zip(files, (19, 12), (1e-5, 1e-3)):
        with h5py.File(path) as file:
            assert [file.attrs[x] for x in ("seqlen", "window", "layer")] == [tokens, 8, LAYER]
            assert file.attrs["model"] == "bert" and file.attrs["text"] == "text"
            for name, x in exact.items():
                error = np.abs(file[name][()] - x[:tokens]).max()
                assert error <= bound * np.abs(x).max(), (path.name, name)
    assert not (tmp_path / "x.h5").exists()
