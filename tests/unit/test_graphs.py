"""cuDNN graphs: what is refused, kept and built; launching them needs a GPU."""

import ctypes
import dataclasses
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from a2d_mpi.kernels import graphs
from a2d_mpi.kernels.graphs import Block, Graphs, NotSupported, supported

BLOCK = Block("bfloat16", 16, 16, 128, 128, nq=512, nk=1024, shape="full", scale=0.1)


FORWARD = {"backward": False}


@pytest.mark.parametrize("major, options, change, reason", [
    *[(x, {}, {}, None) for x in (8, 9, 10, 12)], (7, {}, {}, "7, 0"),
    (9, {}, {"headdim": 100}, "multiples of 8"), (9, {}, {"headdim": 256}, None),
    (10, {}, {"headdim": 192}, None), (10, {}, {"headdim": 192, "headdim_v": 192}, "128"),
    (9, {}, {"headdim_v": 100}, "multiples of 8"), (9, {}, {"headdim": 192}, None),
    (8, FORWARD, {"headdim": 256}, None), (8, {}, {"headdim": 256}, "limit of headdims is 128"),
    (10, FORWARD, {"headdim": 256, "nq": 1}, "limit of headdims is 128"),
    *[(9, {}, {x: 264}, "limit of headdims is 256") for x in ("headdim", "headdim_v")],
    *[(x, {}, {"shape": "general"}, None) for x in (9, 10)],
    *[(x, {}, {"shape": "general"}, "general mask") for x in (8, 12)],
    (8, FORWARD, {"shape": "general"}, None), (9, FORWARD, {"nq": 1, "nk": 1}, None),
    (9, {}, {"nq": 1, "nk": 1}, "one query"), (9, {}, {"nq": 1}, "one query"),
    (9, {}, {"nk": 192}, "192 keys may be NaN"), (9, {}, {"nk": 256}, None),
    (9, {}, {"nk": 192, "shape": "causal", "nq": 192}, None), (8, {}, {"nk": 192}, None),
    (9, {}, {"nk": 192, "padded": True}, None), (9, FORWARD, {"nk": 192}, None),
    (9, {}, {"nheads_kv": 2}, None), (8, {}, {"padded": True}, None),
    (9, FORWARD, {"padded": True, "shape": "general"}, "beside a mask"),
    (9, {}, {"softcap": 30.0}, None),
    (8, FORWARD, {"softcap": 30.0}, None), (8, {}, {"softcap": 30.0}, "soft-caps"),
    (9, {}, {"softcap": 30.0, "shape": "general"}, None),
    (9, FORWARD, {"softcap": 30.0, "shape": "causal"}, "no soft-cap"),
    (9, FORWARD, {"softcap": 30.0, "padded": True}, "no soft-cap"),
])  # fmt: skip
def test_supported(major, options, change, reason):
    told = supported(dataclasses.replace(BLOCK, **change), (major, 0), **options)
    assert told is None if reason is None else reason in told


def test_missing_and_old_packages(monkeypatch):
    modules = [
        SimpleNamespace(backend_version=lambda x=backend: x, __version__=frontend)
        for backend, frontend in ((91100, "1.22.0"), (92800, "1.18.0"))
    ]
    for module in (None, *modules, SimpleNamespace(backend_version=lambda: 92800)):
        monkeypatch.setitem(sys.modules, "cudnn", module)
        with pytest.raises(ImportError, match=r"nvidia-cudnn-frontend.*nvidia-cudnn-cu13"):
            Graphs()


@pytest.fixture
def launched(monkeypatch):
    """Return graphs on a stand-in for cuDNN, and the list of its calls."""
    log = []

    class Refusal(Exception):
        pass

    class Graph:
        def execute(self, pack, workspace, handle):
            log.append(("launch", pack, workspace, handle))

    def fake_build(self, block, backward):
        log.append(("build", block.nq, backward))
        if block.nq == 13:
            raise Refusal("no engine for ____\n{plan}")
        if block.nq == 14:
            raise RuntimeError
        return Graph(), block.nq

    cudnn = SimpleNamespace(
        __version__="1.22.0",
        backend_version=lambda: 92800,
        cudnnGraphNotSupportedError=Refusal,
        create_handle=lambda: 77,
        set_stream=lambda handle, stream: log.append(("stream", handle, stream)),
        destroy_handle=lambda handle: log.append(("destroy", handle)),
    )
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(graphs.Graphs, "_build", fake_build)
    yield Graphs(), log
    graphs.graphs_of.cache_clear()


def test_graphs_are_built_once(launched):
    found, log = launched
    assert found.get(BLOCK, False).workspace_size == 512
    found.get(BLOCK, False)(range(1, 6), 6, stream=9)
    found.get(dataclasses.replace(BLOCK), False)(range(1, 6), 6, stream=9)
    launch = ("launch", {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}, 6, 77)
    assert log == [("build", 512, False), ("stream", 77, 9), launch, launch]
    log.clear()
    for _ in range(2):
        found.get(BLOCK, True)(range(11, 20), 6, 10)
    launch = ("launch", dict(enumerate(range(11, 20), 1)), 6, 77)
    assert log == [("build", 512, True), ("stream", 77, 10), launch, launch]
    found.free()
    found.free()
    assert log[-2:] == [launch, ("destroy", 77)]


def test_a_launch_reads_scalars_from_the_host(launched):
    found, log = launched
    for shape, cap in (("general", None), ("full", 30.0), ("general", 30.0)):
        block = dataclasses.replace(BLOCK, shape=shape, softcap=cap)
        tensors = 7 if shape == "general" else 5
        found.get(block, False)(range(1, tensors + 1), 6, stream=9)
        pack = list(log[-1][1].items())
        assert pack[:tensors] == [(i, i) for i in range(1, tensors + 1)]
        numbers, scalars = zip(*pack[tensors:])
        assert numbers == tuple(range(tensors + 1, len(pack) + 1))
        expected = [graphs.HIDDEN] * (shape == "general") + [cap] * (cap is not None)
        assert [ctypes.c_float.from_address(x).value for x in scalars] == [
            np.float32(x) for x in expected
        ]


def test_plans_share_the_graphs_of_a_device(launched):
    assert graphs.graphs_of(3) is graphs.graphs_of(3) is not graphs.graphs_of(4)


@pytest.mark.parametrize("nq, words", [(13, r"no engine for$"), (14, "")])
def test_a_refusal_is_told_once_and_kept(launched, nq, words):
    """In the words of cuDNN, whatever class its error has."""
    found, log = launched
    refused = dataclasses.replace(BLOCK, nq=nq)
    text = rf"no kernel for the forward pass of Block.*nq={nq}.*{words}"
    with pytest.warns(RuntimeWarning, match=text), pytest.raises(NotSupported, match=text):
        found.get(refused, False)
    with warnings.catch_warnings(), pytest.raises(NotSupported, match=text):
        warnings.simplefilter("error")
        found.get(refused, False)
    assert log == [("build", nq, False)]


def test_a_cudnn_that_cannot_use_the_gpu(launched, monkeypatch):
    def create_handle():
        raise Exception("CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(sys.modules["cudnn"], "create_handle", create_handle)
    with pytest.raises(ImportError, match=r"cannot be used on this GPU: CUDNN_STATUS_NOT_IN"):
        Graphs()
