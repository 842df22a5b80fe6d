"""Plans of all layers of a model: their masks, and one grid for several kinds of layers."""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from machines import slowest_seconds

from a2d_mpi import Causal, Full
from a2d_mpi.cli.model_layers import Model, read_model
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.planner import candidates
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload

H100 = ROOT / "data" / "machines" / "h100-8.toml"
S, F, C = "sliding_attention", "full_attention", "chunked_attention"


def model_of(layers):
    """Return a model with these numbers of layers."""
    heads = {"nheads": 4, "nheads_kv": 4, "headdim": 16, "headdim_v": 16}
    return Model("any", heads, layers, None, 1000, 128)


@pytest.mark.parametrize("kind, size", [(F, 0), (S, 7), (S, 40), (C, 8), (C, 40)])
@pytest.mark.parametrize("text", ["causal", "full", "causal_document:0,11,30"])
def test_masks_of_layers(kind, size, text):
    """Layers see what the mask shows inside their window or chunk."""
    n = 30
    work = Workload(n, 4, 16, mask=make_mask(text, n))
    ((number, work),) = model_of({(kind, size): 6}).workloads(work)
    i, j = np.ogrid[:n, :n]
    near = {F: i == i, S: abs(i - j) < size, C: i // max(size, 1) == j // max(size, 1)}[kind]
    tokens = np.arange(n)
    expected = make_mask(text, n).dense(tokens, tokens) & near
    assert number == 6 and np.array_equal(work.mask.dense(tokens, tokens), expected)


def test_bidirectional_windows():
    ((_, work),) = model_of({(S, 9): 6}).workloads(Workload(64, 4, 16, mask=Full()))
    assert (work.mask.left, work.mask.right) == (8, 8)


def test_cache():
    assert model_of({(S, 100): 3, (F, 0): 2}).cache(1000) == 128 * (3 * 100 + 2 * 1000)


def test_plans_for_all_layers():
    """The fastest plan of all layers is found, and its numbers are sums over the layers."""
    machine = read_machine(H100)
    work = Workload(8192, 4, 64, mask=Causal(), backward=True)
    layers = model_of({(S, 256): 4, (F, 0): 2}).workloads(work)
    assert [(n, x.mask == Causal()) for n, x in layers] == [(2, True), (4, False)]
    every = candidates(machine, 4, layers, number=None)
    best = candidates(machine, 4, layers)[0]
    assert (best.layout, best.seconds) == (every[0].layout, every[0].seconds)
    assert {x.layout.distribution for x in every if x.layout.positions > 1} >= {
        "contiguous", "zigzag"
    }  # fmt: skip
    for x in every[:3]:
        alone = [slowest_seconds(predict(machine, x.method, x.layout, y)) for _, y in layers]
        assert np.isclose(x.seconds, 2 * alone[0] + 4 * alone[1], rtol=1e-12)
        assert np.isclose(sum(x.split.values()), x.seconds, rtol=1e-12)
    one, same = candidates(machine, 4, work)[0], candidates(machine, 4, [(6, work)])[0]
    assert same.layout == one.layout and same.received == 6 * one.received
    assert np.isclose(same.seconds, 6 * one.seconds, rtol=1e-12)
    assert same.memory == one.memory and np.isclose(same.over_bound, one.over_bound, rtol=1e-12)


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_without_transformers(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"--model: .*{name}.*; pip install a2d_mpi\[torch\]"):
        read_model(Path("config.json"))
