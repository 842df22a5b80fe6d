"""The kernel of cuDNN against float64, on the emulated GPU and on a real GPU if there is one."""

import sys
import warnings
from importlib import import_module
from itertools import product

import numpy as np
import pytest
from blocks import WAYS, Block, gpu_failures, in_parts, random_intervals
from cases import METHODS, OTHERS, label
from dense import wrong_with
from helpers import DEEPER, assert_all, deeper, distance
from oracles import sinks

from a2d_mpi import Documents, SlidingWindow
from a2d_mpi.core import reference
from a2d_mpi.kernels import make_kernel, shapes
from a2d_mpi.masks.intervals import Intervals
from a2d_mpi.masks.mask import Causal

CALLS = "a2d_mpi.kernels.cudnn_calls"  # imported with the CuPy of a test


class Recorded:
    """Graphs of a real GPU that record what is launched, and what cuDNN refuses unexpectedly."""

    def __init__(self, graphs, works):
        self._graphs, self.works = graphs, works
        self.launched, self.passes, self.refused = [], set(), []

    def get(self, block, backward):
        try:
            launch = self._graphs.get(block, backward)
        except RuntimeError as error:  # NotSupported, of this import of the kernels
            self.refused.append(str(error))
            raise

        def recorded(*given):
            self.launched.append(block)
            self.passes.add(backward)
            launch(*given)

        recorded.block, recorded.workspace_size = block, launch.workspace_size
        return recorded


made = []  # the `Recorded` of a test


@pytest.fixture(autouse=True)
def cudnn_launched(cupy):
    """Let a test on a real GPU fail if cuDNN computed nothing, and only the fallback did."""
    yield
    graphs = made.copy()
    made.clear()
    hopper = cupy.kind == "real" and int(cupy.cuda.Device().compute_capability) // 10 == 9
    for x in graphs:
        assert not x.refused
        assert bool(x.launched) == x.works
        if hopper and x.works:
            assert x.passes == {False, True}


def cudnn_kernel(cupy, block, **options):
    """Return cuDNN's kernel, or its stand-in on the emulated GPU, for a block."""
    from a2d_mpi.devices.cuda import Cuda
    from a2d_mpi.kernels.cudnn import CudnnKernel, graphs_of

    if cupy.kind == "emulated":
        from graphs import HostGraphs

        options["graphs"] = HostGraphs(options.pop("refuse", ()))
    else:
        found = graphs_of(Cuda.current().index)
        options["graphs"] = Recorded(found, bool(block.visible.any()))
        made.append(options["graphs"])
    given = block.dtype, block.scale, Cuda.current()
    return CudnnKernel(*given, logit_softcap=block.cap, **options)


MASKS = {  # shapes of their runs
    "full": {"full"},
    "causal": {"causal"},
    "window": {"causal", "band", "anti-causal"},
    "zigzag": {"causal", "full"},
    "documents": {"general"},
    "sinks": {"full", "band", "causal"},
    "one": {"general"},
    "two": {"general"},
    "many": {"general"},
    "nothing": set(),
}


def intervals_of(mask, nq, nk):
    i, rng = np.arange(nq), np.random.default_rng(2)
    if mask == "window":  # its left edge, a band, its right edge
        return ((np.clip(i - 70, 0, None), np.minimum(i + 81, nk)),)
    if mask == "zigzag":  # masked rows, triangle, rectangle
        return ((i * 0, np.where(i < 70, 0, np.where(i < 140, i - 20, 180))),)
    if mask == "documents":
        return ((i // 30 * 30, np.minimum(i // 30 * 30 + 30, nk)),)
    if mask == "sinks":  # the second one begins where the window leaves the sinks
        begin = np.maximum(i - 69, 0)
        late = begin > 10
        return ((i * 0, np.where(late, 10, i + 1)), (begin, np.where(late, i + 1, 0)))
    if mask == "many":  # in any order; a third of the queries sees nothing, some of them in a row
        cuts = np.sort(rng.integers(0, nk + 1, (10, nq)), axis=0)
        cuts[:, (i % 5 == 2) | (i // 20 == 4)] = 0
        return tuple((cuts[j], cuts[j + 1]) for j in rng.permutation(5) * 2)
    if mask == "nothing":
        return ((i * 0 + 3, i * 0 + 3),)
    return random_intervals(nq, nk, mask, 2)


@pytest.fixture
def small(monkeypatch, cupy):
    """Let small blocks have general runs that are cut and cropped."""
    monkeypatch.setattr(f"{CALLS}.KEYS", 32)
    monkeypatch.setattr(shapes, "LONGEST", 70)


@pytest.fixture
def padded(monkeypatch):
    """Let blocks be of masks that vary, and let small launches have different sizes."""
    monkeypatch.setattr(Intervals, "varying", True)
    monkeypatch.setattr(shapes, "SIZES", (40, 90))
    monkeypatch.setattr(shapes, "PAIRS", 128 * 128)


@pytest.fixture(params=["padded", "exact"])
def launches(request):
    """Let launches be padded, or have the sizes of their runs."""
    if request.param == "padded":
        request.getfixturevalue("padded")
    return request.param


def block_of(mask, nq, nk, heads=(2, 1), d=32, dtype="bfloat16", scale=0.2, **options):
    """Return a block with a mask of `MASKS`, or with intervals; `heads` may include headdims."""
    intervals = intervals_of(mask, nq, nk) if isinstance(mask, str) else mask
    sizes = nq, nk, *heads, *([d] if len(heads) < 3 else [])
    return Block(sizes, dtype, intervals, scale, **options)


FRESH = [(False, True)]  # results that are not wide, and are not added to


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("mask", MASKS)
def test_cudnn(cupy, mask, launches):
    """Out and gradients of every run of a block are right in both dtypes of the caller.

    Each mask has one dtype with padded launches, and the other one with exact launches.
    """
    first = (launches == "exact") == (list(MASKS).index(mask) % 2)
    dtype, heads = ("float16", (1, 1)) if first else ("bfloat16", (4, 2))
    block, bad = block_of(mask, 200, 240, heads, dtype=dtype), []
    kernel = cudnn_kernel(cupy, block)
    for way in (*WAYS, (True, True)):
        bad += gpu_failures(cupy, kernel, block, ways=[way])
        launched = kernel._calls.graphs.launched
        assert {x.shape for x in launched} == MASKS[mask]
        own = launches == "padded"
        assert all(x.padded == (own and x.shape != "general") for x in launched)
    assert not bad


# Heads, KV heads, headdim and headdim_v; a soft-cap.
WIDTHS = {
    "cap": ((8, 2, 32, 32), 5.0),
    "narrow": ((8, 2, 24, 16), None),
    "narrow, cap": ((8, 2, 24, 16), 5.0),
    "latent": ((4, 2, 192, 128), None),
    "latent, cap": ((4, 2, 192, 128), 5.0),
}


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # without the cap
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("mask, case, dtype", [
    # First each mask once, and each case in both dtypes.
    pytest.param(mask, case, dtype, marks=[] if i % 10 == j * 2 + k else DEEPER)
    for (i, mask), (j, case), (k, dtype) in product(
        enumerate(MASKS), enumerate(WIDTHS), enumerate(("float16", "bfloat16"))
    )
])  # fmt: skip
def test_soft_caps_and_widths(cupy, mask, case, dtype):
    """cuDNN computes a soft-cap with full and general launches only, values of any width with all.

    A kernel without the cap fails.
    """
    heads, cap = WIDTHS[case]
    expected = {"full", "general"} if cap else MASKS[mask]
    for nq, nk in [(200, 240)] + [(130, 90)] * (mask in ("full", "one", "two")):
        block = block_of(mask, nq, nk, heads, dtype=dtype, scale=0.5, cap=cap)
        kernel = cudnn_kernel(cupy, block)
        assert not gpu_failures(cupy, kernel, block, poisoned=True)
        launched = kernel._calls.graphs.launched
        assert launched or not block.visible.any()
        assert {x.shape for x in launched} <= expected
        assert {x.softcap for x in launched} <= {cap}
        assert cupy.kind == "real" or not kernel.fallbacks  # an A100 leaves gradients to it
        if cap and mask == "full":
            kernel.plain.logit_softcap = None
            assert gpu_failures(cupy, kernel, block, ways=FRESH), "no cap passed"


@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
@pytest.mark.parametrize("refused", ["causal", "general"])
def test_cudnn_without_a_kernel(cupy, refused):
    block = block_of("one" if refused == "general" else refused, 80, 90, (4, 2))
    kernel = cudnn_kernel(cupy, block, refuse=(refused,))
    assert not gpu_failures(cupy, kernel, block) and not kernel._calls.graphs.launched


@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
def test_auto_without_cudnn(cupy, monkeypatch):
    """The plain kernel computes, and a warning says why: it is many times slower."""
    from a2d_mpi.devices.cuda import Cuda

    device, sixteen = Cuda.current(), np.dtype("float16")
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.warns(RuntimeWarning, match="'cupy' computes: cuDNN attention needs"):
        assert make_kernel("auto", device, sixteen, 1.0).name == "cupy"
    with pytest.raises(ImportError, match="cuDNN attention needs"):
        make_kernel("cudnn", device, sixteen, 1.0)
    with warnings.catch_warnings():  # cuDNN has no float32
        warnings.simplefilter("error")
        assert make_kernel("auto", device, np.dtype("float32"), 1.0).name == "cupy"


def test_a_gradient_of_lse_is_left_to_the_plain_kernel(cupy):
    """With dout = 0 no out has the delta of a gradient of lse, so the plain kernel computes."""
    block = block_of("causal", 64, 64, (2, 2))
    q, k, v, dout = block.inputs
    dout = dout * 0
    dlse = np.random.default_rng(0).standard_normal((64, 2)).astype(np.float32)
    visible, i = np.tri(64, dtype=bool), np.arange(64)
    _, lse = reference.attention(q, k, v, visible, 0.2)
    exact = reference.attention_backward(dout, q, k, v, lse, -dlse, visible, 0.2)
    kernel, errors = cudnn_kernel(cupy, block), []
    given = [cupy.asarray(x) for x in (dout, q, k, v, lse.astype(np.float32), -dlse)]
    for any_delta in (False, True):
        found = [cupy.empty(x.shape, np.float32) for x in (q, k, v)]
        kernel.backward(
            *given, Intervals([(i * 0, i + 1)]), *found, fresh=True, any_delta=any_delta
        )
        errors.append(max(distance(cupy.asnumpy(x), y) for x, y in zip(found, exact)))
    assert errors[1] < 1e-5 and errors[0] > 0.1, errors


def packed(rng, n, skip, single):
    """Return documents of at least `skip` tokens; the queries of one document see no key.

    If `single`, every other document has one token.
    """
    lengths = rng.integers(skip, 4 * skip, n)
    if single:
        lengths[1::2] = 1
    ends = np.cumsum(lengths)
    first, i = np.repeat(ends - lengths, lengths), np.arange(ends[-1])
    hidden = np.repeat(np.arange(n) == n // 3, lengths)
    keys = i + 3 * np.repeat(np.arange(n), lengths)  # gaps between the keys
    begin, end = (np.where(hidden, 0, x) for x in (first + keys - i, keys + 1))
    return begin, end, int(keys[-1]) + 10


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("heads", deeper([(2, 2), (4, 2)], [(4, 2)]))
@pytest.mark.parametrize("wide, fresh", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["documents", "single", "general"])
def test_documents(cupy, heads, wide, fresh, kind, monkeypatch):
    """Documents of any lengths need few sizes, with gaps between keys and NaN in masked rows."""
    skip = {"emulated": 10, "real": 70}[cupy.kind]
    monkeypatch.setattr(f"{CALLS}.SHORTEST", 8 if kind == "general" else 1)
    begin, end, nk = packed(np.random.default_rng(1), 9, skip, kind == "single")
    if kind == "general":  # the last but one; keys in the other order
        rows = np.flatnonzero(begin == np.unique(begin)[-2])
        end[rows[1::2]] -= 1
        after = np.array([end[begin == x].max() for x in begin])
        begin, end = np.where(end, nk - after, 0), np.where(end, nk - after + end - begin, 0)
    block = block_of(((begin, end),), len(begin), nk, heads, 16)
    kernel = cudnn_kernel(cupy, block)
    assert not gpu_failures(cupy, kernel, block, poisoned=True, ways=[(wide, fresh)])
    launched = kernel._calls.graphs.launched
    assert any(x.shape == "general" for x in launched) == (kind == "general")
    assert {(x.nq, x.nk) for x in launched if x.padded} <= {(n, n) for n in (40, 90, 180, 270)}


@pytest.mark.parametrize("headdim", deeper([8, 64, 128, 192, 256], [64, 256]))
@pytest.mark.parametrize("mask", ["causal", "window", "one"])
def test_headdims(cupy, headdim, mask):
    """Of general masks, too; one KV head for three heads."""
    block = block_of(mask, 150, 170, (3, 1), headdim, "float16", None)
    assert not gpu_failures(cupy, cudnn_kernel(cupy, block), block, ways=FRESH)


@pytest.mark.usefixtures("small", "launches")
def test_padding_may_be_anything(cupy):
    """Masked rows and masked keys between others may hold anything."""
    i = np.arange(90)
    sees = i % 7 != 3
    first = 10 + i // 2, np.where(sees, np.minimum(20 + i // 3 * 2, 70), 0)
    intervals = first, (i * 0 + 80, np.where(sees, 80 + i % 3 * 5, 0))
    block = block_of(intervals, 90, 100, (4, 2))
    assert not gpu_failures(cupy, cudnn_kernel(cupy, block), block, poisoned=True)


@pytest.mark.parametrize("mask", ["full", "causal", "one"])
@pytest.mark.parametrize("nk", [192, 200])
@pytest.mark.usefixtures("launches")
def test_very_negative_logits(cupy, mask, nk):
    """exp(-lse) overflows in float32; zeros beyond the last key must not count."""

    def far(q, k, *_):
        q[..., 0], k[..., 0] = 60, -60  # logits are about -700

    block = block_of(mask, 128, nk, (2, 2), change=far)
    assert block.exact["lse"][np.isfinite(block.exact["lse"])].max() < -100
    assert not gpu_failures(cupy, cudnn_kernel(cupy, block), block, ways=FRESH)


@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
@pytest.mark.parametrize("major", [8, 9])
def test_half_a_tile_beyond_the_last_key(cupy, monkeypatch, launches, major):
    """On Hopper the launch is padded or general, and hides what lies beyond the last key."""
    from a2d_mpi.devices.cuda import Cuda

    monkeypatch.setattr(Cuda.current(), "capability", (major, 0))
    block = block_of("full", 128, 192, (2, 2))
    kernel = cudnn_kernel(cupy, block)
    assert not gpu_failures(cupy, kernel, block, ways=FRESH)
    backward = kernel._calls.graphs.launched[-1]
    general = launches == "exact" and major == 9
    assert backward.shape == ("general" if general else "full")
    assert backward.padded == (launches == "padded")


@pytest.mark.parametrize("nq, nk", [(0, 90), (80, 0), (0, 0)])
@pytest.mark.parametrize("wide, fresh", WAYS)
def test_no_queries_or_keys(cupy, nq, nk, wide, fresh):
    block = block_of(((np.zeros(nq, int), np.zeros(nq, int)),), nq, nk, (4, 2))
    found = block.run(cudnn_kernel(cupy, block), None, cupy, wide, fresh)
    assert (found.pop("lse") == -np.inf).all()
    assert not any(x.astype(np.float32).any() for x in found.values())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
@pytest.mark.parametrize("mask", ["one", "many"])
def test_forward_by_cudnn_backward_by_the_plain_kernel(cupy, monkeypatch, mask):
    """On an A100, general masks run forward by cuDNN and backward by the plain kernel."""
    from a2d_mpi.devices.cuda import Cuda

    monkeypatch.setattr(Cuda.current(), "capability", (8, 0))
    block = block_of(mask, 90, 80)
    kernel = cudnn_kernel(cupy, block)
    assert not gpu_failures(cupy, kernel, block)
    assert all(x.nheads_kv == 1 for x in kernel._calls.graphs.launched)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parts", deeper([4, 16, 32], [4]))
def test_partials_of_cudnn(cupy, dtype, parts):
    """Partial results of parts x parts blocks, rounded by cuDNN, keep the bound of one block."""
    from a2d_mpi.devices.cuda import Cuda

    n = {"emulated": 256, "real": 2048}[cupy.kind]
    block = block_of("causal", n, n, (2, 2), 32, dtype, None)
    assert not block.wrong(in_parts(block, parts, cudnn_kernel(cupy, block), Cuda.current()))


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
@pytest.mark.parametrize("method", [METHODS[(len(METHODS) - 1) // 2], OTHERS[-1]], ids=label)
@pytest.mark.parametrize("distribution", deeper([None, "striped"], ["striped"]))
def test_plans(comm, grid_of, cupy, method, distribution, monkeypatch):
    """Partial results of many runs merge within a rank and between ranks."""
    from graphs import HostGraphs

    from a2d_mpi.comm.gpus import bind_gpu

    bind_gpu(comm)
    cudnn = import_module("a2d_mpi.kernels.cudnn")  # not one that was imported with another CuPy
    graphs, grid = HostGraphs(), grid_of(*method[1])
    monkeypatch.setattr(cudnn, "graphs_of", lambda index: graphs)
    monkeypatch.setattr(f"{CALLS}.SHORTEST", 6)
    sizes, bad = {"seqlen": 150, "nheads": 4, "nheads_kv": 2, "headdim": 8}, []
    packed = Documents([0, 11, 90, 150], Causal())
    for mask, more in (
        (Causal(), {"logit_softcap": 3.0}),
        (packed, {}),
        (SlidingWindow(30, 20), {"headdim_v": 16}),
        (sinks(20, 50, 150), {}),
    ):
        options = {"dtype": "bfloat16", "kernel": "cudnn", "distribution": distribution}
        plan = method[0](grid, mask, **sizes, **options, **more)
        # cuDNN rounds the gradients of each run, which are about 1.
        ways = {"upload": cupy.asarray, "download": cupy.asnumpy, "slack": 2**-8}
        bad += [f"{mask}: {x}" for x in wrong_with(plan, **ways)]
    if not graphs.launched:
        bad.append("nothing was launched")
    assert_all(comm, not bad, "; ".join(bad))
