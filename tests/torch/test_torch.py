"""Plans in PyTorch.  Needs the extra `torch`: `bash jobs/test.sh torch`."""

import numpy as np
import pytest
import torch
from helpers import assert_all
from refused import assert_raises

from a2d_mpi import Attention2D, Causal
from a2d_mpi.comm.calls import PlanCall
from a2d_mpi.torch import attend, shard, unshard
from a2d_mpi.torch.tensors import array_of, tensor_of

pytestmark = pytest.mark.mpi(min_size=4)
DTYPES = ("float32", "float64", "float16", "bfloat16")
SEQLEN = 29


@pytest.fixture
def make(grid):
    """Make a plan, and free it at the end."""
    made = []

    def plan(mask=None, **options):
        sizes = {"seqlen": SEQLEN, "nheads": 4, "nheads_kv": 2, "headdim": 8, **options}
        made.append(Attention2D(grid, mask or Causal(), **sizes))
        return made[-1]

    yield plan
    for x in made:
        x.free()


def tensors(plan, dtype=None):
    """Shards of q, k, v, and a sink, which want gradients; the same whole tensors on all ranks."""
    dtype = dtype or getattr(torch, plan.dtype.name)
    made = torch.Generator().manual_seed(1)
    heads = plan.nheads, plan.nheads_kv, plan.nheads_kv
    whole = [torch.randn(plan.seqlen, h, plan.headdim, generator=made) for h in heads]
    own = [x[plan.tokens].to(dtype).requires_grad_() for x in whole]
    sink = torch.randn(plan.nheads, generator=made).to(getattr(torch, plan.compute_dtype.name))
    return *own, sink.requires_grad_()


def same(found, expected):
    """Return True if tensors have the same bits."""
    return found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_plans_call(make, comm, dtype):
    """Results equal the plan's calls bit for bit, forward and backward."""
    plan = make(dtype=dtype)
    q, k, v, sink = tensors(plan)
    out, lse = attend(plan, q, k, v, sink, return_lse=True)
    dout, dlse = torch.ones_like(out) * 0.5, torch.ones_like(lse) * 0.25
    torch.autograd.backward([out, lse], [dout, dlse])
    arrays = [array_of(x) for x in (q, k, v)]
    shared = [np.shares_memory(x, array_of(y)) for x, y in zip(arrays, (q, k, v)) if x.size]
    expected = plan.forward(*arrays, array_of(sink))
    gradients = plan.backward(array_of(dout), *arrays, *expected, array_of(sink), array_of(dlse))
    good = [same(x, tensor_of(y)) for x, y in zip((out, lse), expected)]
    good += [same(x.grad, tensor_of(y)) for x, y in zip((q, k, v, sink), gradients)]
    assert_all(comm, all(good + shared), f"{good} {shared}")


def addresses(plan, monkeypatch):
    """Return a list that gets (phase, addresses of arrays, addresses of results) of each call."""
    calls = []

    def call(phase):
        real = getattr(plan, phase)

        def called(*arrays, **options):
            results = real(*arrays, **options)
            calls.append((phase, [*map(address, arrays)], [*map(address, results)]))
            return results

        monkeypatch.setattr(plan, phase, called)

    call("forward"), call("backward")
    return calls


def address(x):
    return x if x is None else x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


def pointers(*tensors):
    return [x.data_ptr() for x in tensors]


def no_copies(calls, q, k, v, out):
    """Of a contiguous tensor, of a result, or of what the graph keeps."""
    (_, given, results), (_, again, gradients) = calls
    good = given == pointers(q, k, v) and results[0] == out.data_ptr()
    good &= again[1:6] == [*pointers(q, k, v, out), results[1]] and again[6:] == [None, None]
    return good and gradients == pointers(q.grad, k.grad, v.grad)


def test_takes_the_tensors_memory(make, comm, monkeypatch):
    plan = make(dtype="bfloat16")
    q, k, v, _ = tensors(plan)
    calls = addresses(plan, monkeypatch)
    out = attend(plan, q, k, v)
    out.backward(torch.ones_like(out))
    assert_all(comm, no_copies(calls, q, k, v, out), f"a copy: {calls}")


@pytest.mark.parametrize("cupy", ["real"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
def test_tensors_of_a_gpu(make, comm, cupy, dtype, own, monkeypatch):
    """No copies, all on PyTorch's stream: it is busy until the tensors hold numbers."""
    from a2d_mpi.comm.gpus import bind_gpu

    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch is built for CPUs")
    torch.cuda.set_device(bind_gpu(comm)[0].index)
    options = {"seqlen": 300, "headdim": 32, "dtype": dtype}
    host = tensors(make(**options))[:3]
    expected = attend(make(**options), *host)
    expected.backward(torch.ones_like(expected))

    plan, streams = make(**options), []
    calls = addresses(plan, monkeypatch)
    monkeypatch.setattr(PlanCall, "agree", noting(PlanCall.agree, cupy, streams))
    given = [x.detach().cuda() for x in host]
    stream = torch.cuda.Stream() if own else torch.cuda.default_stream()
    for _ in range(2):  # the first time kernels are compiled, for longer than the stream is busy
        calls.clear(), streams.clear()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            q, k, v = shards = [torch.full_like(x, float("nan")) for x in given]
            torch.cuda._sleep(1 << 29)  # some tenths of a second
            for x, y in zip(shards, given):
                x.copy_(y).requires_grad_()
            busy = not stream.query()
            out = attend(plan, q, k, v)
            out.backward(torch.ones_like(out))
            found = [x.cpu() for x in (out.detach(), q.grad, k.grad, v.grad)]
    bound = {"float32": 3e-5, "bfloat16": 2e-2}[dtype]
    pairs = zip(found, (expected, *(x.grad for x in host)))
    far = [float((x.double() - y.double()).abs().max()) for x, y in pairs]
    good = [x <= bound * max(1, float(y.double().abs().max())) for x, y in zip(far, found)]
    good += [busy, streams == [stream.cuda_stream] * 2, no_copies(calls, q, k, v, out)]
    whole = unshard(plan, out.detach())
    if whole is not None:
        good.append(whole.is_cuda and same(whole[plan.tokens], out.detach()))
    assert_all(comm, all(good), f"{good} {far} {streams} {stream.cuda_stream} {calls}")


def noting(call, cupy, streams):
    """A function that also notes CuPy's current stream."""

    def noted(*arguments, **options):
        streams.append(cupy.cuda.get_current_stream().ptr)
        return call(*arguments, **options)

    return noted


def test_lse_or_out_alone(make, comm):
    """A loss of lse alone, or of out on one rank only, works."""
    plan = make(dtype="float64")
    q, k, v, _ = tensors(plan)
    out, lse = attend(plan, q, k, v, return_lse=True)
    loss = out.sum() if comm.rank == 0 else lse.sum()
    loss.backward()
    assert_all(comm, bool(q.grad.any() if len(q) else True), "no gradient")
    assert_all(comm, not attend(plan, q, k, v).isnan().any(), "NaN")


def test_no_grad_and_double_backward(make, comm):
    plan = make()
    q, k, v, _ = tensors(plan)
    with torch.no_grad():
        free = attend(plan, q, k, v)
    out = attend(plan, q, k, v)
    assert_all(comm, not free.requires_grad and same(free, out.detach()), "another result")
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()


@pytest.mark.parametrize("how", ["no_grad", "requires_grad"])
def test_gradients_on_some_ranks(make, comm, how):
    """The others would wait for the backward pass of this rank: an error of all ranks."""
    plan = make()
    given, wrong = tensors(plan), comm.rank == 1 and how
    mine = [x.detach() if wrong == "requires_grad" else x for x in given]
    with torch.set_grad_enabled(wrong != "no_grad"):
        assert_raises(comm, "ranks disagree on gradients", attend, plan, *mine)
    mixed = [x.detach() if i == comm.rank else x for i, x in enumerate(given)]
    attend(plan, *mixed).sum().backward()  # one tensor is enough


def test_changed_in_place(make, comm):
    """A tensor that one rank changed is an error on all ranks, which stay in step."""
    plan = make()
    q, k, v, _ = tensors(plan)
    out = attend(plan, q, k, v * 1)
    changed = attend(plan, q, k, v)
    if comm.rank == 0:
        changed.mul_(2)
    assert_raises(comm, "modified by an inplace operation", changed.sum().backward)
    out.sum().backward()


def test_autocast(make, comm):
    """Autocast casts q, k and v, as for torch's own attention."""
    plan = make(dtype="bfloat16")
    q, k, v, _ = tensors(plan, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(plan, q, k.bfloat16(), v)
    out.float().sum().backward()
    q16, k16, v16 = (x.detach().bfloat16().requires_grad_() for x in (q, k, v))
    expected = attend(plan, q16, k16, v16)
    expected.float().sum().backward()
    good = same(out, expected) and same(q.grad, q16.grad.float())
    assert_all(comm, good, "another result")


def test_refused(make, comm):
    """A wrong argument on rank 0 is an error of the plan on all ranks."""
    plan = make()
    q, k, v, sink = (x.detach() for x in tensors(plan))
    cases = [
        ((q[:, :3], k, v), "this shard needs"),
        ((q, k.double(), v), "k has shape"),
        ((q, k, v.to(torch.int64)), "dtype int64"),
        ((q.to("meta"), k, v), "q, k, v or sink: "),
        ((q, k, v.to(torch.float8_e4m3fn)), "q, k, v or sink: "),
        ((q, k, v.to_sparse()), "q, k, v or sink: "),
        ((q.numpy(), k, v), "q, k, v or sink: must be a tensor, got ndarray"),
        ((q, k, v, sink[:3]), "sink has shape (3,)"),
        ((q, k, v, sink.bfloat16()), "sink has shape (4,) and dtype bfloat16"),
    ]
    for wrong, text in cases:
        given = wrong if comm.rank == 0 else (q, k, v, sink)[: len(wrong)]
        assert_raises(comm, text, attend, plan, *given)
    attend(plan, q, k, v)


def test_shards(make, comm):
    plan = make()
    for dtype in (torch.int64, torch.bfloat16, torch.bool, torch.float32):
        whole = torch.arange(SEQLEN * 3).reshape(SEQLEN, 3).to(dtype)
        own = shard(plan, whole if plan.grid.comm.rank == 1 else None, root=1)
        back = unshard(plan, own, root=1)
        good = same(own, whole[plan.tokens])
        good &= (back is None) if plan.grid.comm.rank != 1 else same(back, whole)
        assert_all(comm, good, f"{dtype}")


def test_shards_that_are_refused(make, comm):
    """A tensor that is not dense on one rank is an error on all ranks."""
    plan = make()
    whole = torch.ones(SEQLEN)
    own = shard(plan, whole if plan.grid.comm.rank == 0 else None)
    for wrong in ([1.0], whole.to_sparse(), whole.to("meta")):
        for call, bad, good, rank in [(shard, wrong, whole, 0), (unshard, wrong, own, 1)]:
            given = bad if plan.grid.comm.rank == rank else good
            assert_raises(comm, "x must be a NumPy or CuPy array, got", call, plan, given)
