"""cuDNN attention on device pointers: graphs are built once per shape, kept and launched.

cuDNN is imported when `Graphs` is made: the package needs it only then.  Facts about cuDNN are
from the documentation and headers of nvidia-cudnn-frontend 1.22 (``docs/operations/
Attention.md``, ``node/scaled_dot_product_flash_attention.h``), and from building plans with
cuDNN 9.28 for sm_80, sm_90, sm_100 and sm_120.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from a2d_mpi.kernels.cudnn_blocks import Block

BACKEND = 91100  # cuDNN 9.11: 9.9 has no band on Hopper and no masks for one query, 9.10 errs
FRONTEND = (1, 14)  # `generate_stats`
PACKAGES = "nvidia-cudnn-frontend>=1.14 and nvidia-cudnn-cu13 (or -cu12) >=9.11"

GRADIENTS = ("native", "float32")
HIDDEN = -1e30  # the logit of a hidden key; -inf would be NaN where a row of a tile is all hidden
_HIDDEN = np.array(HIDDEN, np.float32)  # cuDNN reads a scalar from the host at each launch


class NotSupported(RuntimeError):
    """cuDNN has no kernel for this block on this device; another kernel can compute it."""


class Launch:
    """A graph that is ready to be launched.

    Attributes
    ----------
    block : Block
    workspace_size : int
        Bytes of workspace that a launch needs.
    """

    def __init__(self, graphs: Graphs, block: Block, graph: Any, workspace_size: int) -> None:
        self.block, self.workspace_size = block, workspace_size
        self._graphs, self._graph = graphs, graph

    def __call__(self, pointers: Iterable[int], workspace: int, stream: int) -> None:
        """Queue the launch; returns at once.

        Parameters
        ----------
        pointers : int each
            Forward: of q, k, v, out and stats, of which the last two are written.  Backward: of q,
            k, v, out, dout, stats, dq, dk and dv, of which the last three are overwritten.  Of a
            general block, those of begin and end follow.
        workspace : int
            Pointer to `workspace_size` bytes.
        stream : int
            CUDA stream.
        """
        pack = dict(enumerate(pointers, 1))
        if self.block.shape == "general":
            pack[len(pack) + 1] = _HIDDEN.ctypes.data
        self._graphs.execute(self._graph, pack, workspace, stream)


class Graphs:
    """cuDNN graphs of one device, built once per block and kept.

    Parameters
    ----------
    deterministic : bool
        Gradients that repeat bit for bit.  Their workspace holds a score per query and key of
        each head, gigabytes for long blocks.
    target : mapping, optional
        Arguments of ``cudnn.pygraph`` that describe the device, in place of a handle of the
        current one.  ``device_property`` and ``sm_version`` build graphs without a device; such
        graphs cannot be launched.

    Raises
    ------
    ImportError
        cuDNN or its frontend is missing or too old.

    Notes
    -----
    All tensors are contiguous and token-major, (nq, nheads, headdim) and (nk, nheads_kv,
    headdim); `stats` is (nheads, nq) float32, the natural log-sum-exp of the logits: cuDNN
    before 9.26 takes only these packed strides.  The interval of keys that each query of a general
    block sees is `begin` and `end`, (nq,) int32.  Graphs are not to be shared by threads.

    The backward graph is ``p = exp(s - stats)``, ``ds = p (dout v^T - rowsum(dout * out))``,
    products in float32 of `p` and `ds` rounded to the dtype, so that

    * with the statistics over all keys of a sequence it computes the contribution of this block's
      keys to the gradients;
    * `out` enters by ``rowsum(dout * out)`` alone;
    * `stats` must not be -inf: ``exp(s + inf)`` is inf.  With +inf a query contributes 0.

    A query that sees no key of a general block gets an `out` of no meaning and a statistic near
    `HIDDEN`; it contributes 0 to the gradients.
    """

    def __init__(
        self, deterministic: bool = False, target: Mapping[str, Any] | None = None
    ) -> None:
        self._cudnn = _import_cudnn()
        self.deterministic = deterministic
        self._handle: int | None = None
        self._stream: int | None = None
        # The launch of each block, or the reason that there is none.
        self._built: dict[tuple[Block, bool, str], Launch | str] = {}
        if target is None:
            self._handle = self._cudnn.create_handle()
            target = {"handle": self._handle}
        self._target = dict(target)

    def get(self, block: Block, backward: bool, gradients: str = "native") -> Launch:
        """The launch of `block`; its graph is built at the first call.

        Parameters
        ----------
        block : Block
        backward : bool
        gradients : {"native", "float32"}
            Dtype of `dq`, `dk` and `dv`: that of the block, or float32.

        Raises
        ------
        NotSupported
        """
        key = (block, backward, gradients if backward else "native")
        found = self._built.get(key)
        if found is None:
            if gradients not in GRADIENTS:
                raise ValueError(f"gradients must be one of {GRADIENTS}, got {gradients!r}")
            try:
                found = Launch(self, block, *self._build(*key))
            except self._cudnn.cudnnGraphNotSupportedError as error:
                # A plan's failure quotes the plan, over pages.
                reason = str(error).strip().splitlines()[0].rstrip("_ ")
                pass_ = f"{gradients} gradients" if backward else "forward pass"
                found = f"cuDNN has no kernel for the {pass_} of {block}: {reason}"
            self._built[key] = found
        if isinstance(found, str):
            raise NotSupported(found)
        return found

    def free(self) -> None:
        """Release the graphs and the handle; nothing can be launched afterwards."""
        self._built.clear()
        if self._handle is not None:
            self._cudnn.destroy_handle(self._handle)
            self._handle = None

    def execute(self, graph: Any, pack: dict[int, int], workspace: int, stream: int) -> None:
        """Queue a graph; called by `Launch`."""
        if self._handle is None:
            raise RuntimeError("these graphs have no device to run on")
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        graph.execute(pack, workspace, handle=self._handle)

    def _build(self, block: Block, backward: bool, gradients: str) -> tuple[Any, int]:
        """Build a graph whose tensors are numbered from 1 in the order of the pointers."""
        types = self._cudnn.data_type
        io = types.HALF if block.dtype == "float16" else types.BFLOAT16
        graph = self._cudnn.pygraph(
            io_data_type=io,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            **self._target,
        )
        # cuDNN names the axes (batch, head, token, element); the strides tell how they lie.
        h, hk, d, nq, nk = (
            block.nheads, block.nheads_kv, block.headdim, block.nq, block.nk
        )  # fmt: skip
        queries = {"dim": [1, h, nq, d], "stride": [nq * h * d, d, h * d, 1]}
        keys = {"dim": [1, hk, nk, d], "stride": [nk * hk * d, d, hk * d, 1]}
        rows = {"dim": [1, h, nq, 1], "stride": [h * nq, nq, 1, 1]}
        uid = iter(range(1, 13))

        def take(layout: dict[str, Any], dtype: Any = io) -> Any:
            return graph.tensor(**layout, data_type=dtype, uid=next(uid))

        inputs = {"q": take(queries), "k": take(keys), "v": take(keys)}
        options = {"attn_scale": block.scale, **self._mask(block)}
        if backward:
            inputs |= {"o": take(queries), "dO": take(queries), "stats": take(rows, types.FLOAT)}
            options["use_deterministic_algorithm"] = self.deterministic
            dtype = types.FLOAT if gradients == "float32" else io
            results = [(queries, dtype), (keys, dtype), (keys, dtype)]
        else:
            options["generate_stats"] = True
            results = [(queries, io), (rows, types.FLOAT)]
        numbers = [next(uid) for _ in results]
        if block.shape == "general":
            ends = {"dim": [1, 1, nq, 1], "stride": [nq, nq, 1, 1]}
            begin, end = take(ends, types.INT32), take(ends, types.INT32)
            one = {"dim": [1] * 4, "stride": [1] * 4, "is_pass_by_value": True}
            hidden = take(one, types.FLOAT)
            options["score_mod"] = self._interval_mask(begin, end, hidden)
        outputs = (graph.sdpa_backward if backward else graph.sdpa)(**inputs, **options)
        for tensor, (layout, dtype), number in zip(outputs, results, numbers, strict=True):
            tensor.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
            tensor.set_data_type(dtype).set_uid(number)
        graph.validate()
        graph.build_operation_graph()
        modes = self._cudnn.heur_mode
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, graph.get_workspace_size()

    def _mask(self, block: Block) -> dict[str, Any]:
        # The last query sees all keys: a single one needs no triangle.
        if block.shape in ("full", "general") or (block.shape == "causal" and block.nq == 1):
            return {}
        if block.shape == "anti-causal":
            # Of left bounds see below; alone and with top-left alignment, the first sees all keys.
            return {"diagonal_band_left_bound": 1}
        mask = {
            "diagonal_alignment": self._cudnn.diagonal_alignment.BOTTOM_RIGHT,
            "diagonal_band_right_bound": 0,
        }
        if block.shape == "band" and block.window < block.nk:
            # A left bound of w hides the keys at or before the diagonal minus w (Attention.md;
            # attn_score_modifiers.h keeps key + w > diagonal): w keys are left, not w + 1.
            mask["diagonal_band_left_bound"] = block.window
        return mask

    def _interval_mask(self, begin: Any, end: Any, hidden: Any) -> Callable[[Any, Any], Any]:
        """A modifier of the logits that hides all keys but those of each query's interval."""
        types = self._cudnn.data_type

        def mask(graph: Any, logits: Any) -> Any:
            key = graph.gen_index(input=logits, axis=3)
            key.set_data_type(types.INT32)
            for compare, bound in ((graph.cmp_lt, end), (graph.cmp_ge, begin)):
                seen = compare(input=key, comparison=bound, compute_data_type=types.BOOLEAN)
                seen.set_data_type(types.BOOLEAN)
                logits = graph.binary_select(input0=logits, input1=hidden, mask=seen)
                logits.set_data_type(types.FLOAT)
            return logits

        return mask


@cache
def graphs_of(device: int, deterministic: bool) -> Graphs:
    """The graphs of the current device, whose number is `device`: all plans share them.

    Raises
    ------
    ImportError
        As for `Graphs`.
    """
    found = Graphs(deterministic)
    atexit.register(found.free)
    return found


def _import_cudnn() -> Any:
    """The module cudnn; ImportError where it or its library is missing or too old."""
    try:
        import cudnn

        found = cudnn.backend_version()
    except Exception as error:  # a missing library shows as one of many types
        raise ImportError(f"cuDNN attention needs {PACKAGES}: {error}") from error
    frontend = getattr(cudnn, "__version__", "0")
    if tuple(int(x) for x in frontend.split(".")[:2]) < FRONTEND or found < BACKEND:
        raise ImportError(
            f"cuDNN attention needs {PACKAGES}; found nvidia-cudnn-frontend {frontend} and "
            f"cuDNN {found}"
        )
    return cudnn
