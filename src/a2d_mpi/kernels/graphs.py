"""cuDNN attention on device pointers: graphs are built once per shape, kept and launched.

`supported` says which blocks cuDNN computes, by compute capability.  cuDNN is imported when a
`Graphs` object is made, because the package does not require cuDNN.
Facts about cuDNN are from the documentation and headers of nvidia-cudnn-frontend 1.22
(``docs/operations/Attention.md``, ``node/scaled_dot_product_flash_attention.h``), and from graphs
that were built with cuDNN 9.28 for sm_80, sm_90, sm_100 and sm_120, and with 9.19.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

BACKEND = 91900  # the oldest version with which these graphs were built
FRONTEND = (1, 19)  # the first version in which `sdpa_backward` takes a `score_mod`
PACKAGES = "nvidia-cudnn-frontend>=1.19 and nvidia-cudnn-cu13 (or -cu12) >=9.19"

HIDDEN = -1e30  # logit of hidden keys; with -inf a row of a tile without visible keys is NaN


@dataclass(frozen=True)
class Block:
    """The work of one launch: attention of `nq` queries over `nk` keys, or of fewer.

    Attributes
    ----------
    dtype : {"float16", "bfloat16"}
        Dtype of all tensors but the statistics.
    nheads, nheads_kv, headdim, headdim_v : int
        Heads of q and of k, and widths of k and of v.
    nq, nk : int
        Queries and keys: the rows of the tensors.
    shape : {"full", "causal", "anti-causal", "band", "general"}
        Mask shape, as in `a2d_mpi.kernels.shapes.Run`.  The shapes causal, anti-causal and band
        need ``nq <= nk``, and cuDNN has no soft-cap beside them.  With "general", the launch
        takes an interval of keys for each query.
    scale : float
        Factor of the logits.
    window : int
        Keys that each query of a band sees.
    padded : bool
        Whether the launch takes the numbers of queries and keys, 1 to `nq` and 1 to `nk`.  The
        mask ends at the last one of them, and cuDNN skips the tiles beyond.
    softcap : float, optional
        c > 0: scaled logits s become ``c tanh(s / c)``.
    """

    dtype: str
    nheads: int
    nheads_kv: int
    headdim: int
    headdim_v: int
    nq: int
    nk: int
    shape: str
    scale: float
    window: int = 0
    padded: bool = False
    softcap: float | None = None

    @property
    def scalars(self) -> list[float]:
        """Numbers that a launch takes after all pointers."""
        return [HIDDEN] * (self.shape == "general") + [x for x in [self.softcap] if x is not None]


def reads_past(shape: str, nk: int, capability: tuple[int, int]) -> bool:
    """Return True if gradients of a launch may be NaN when an lse is below -88.

    Half of cuDNN's last tile may be beyond the last key.  On Hopper, cuDNN then takes exp(0 - lse)
    of the zeros there for probabilities, unless a mask hides them (pull request 628 of
    nvidia-cudnn-frontend).
    """
    return capability[0] == 9 and nk % 128 == 64 and shape in ("full", "anti-causal")


def supported(block: Block, capability: tuple[int, int], backward: bool = True) -> str | None:
    """Return the reason why cuDNN does not compute `block`; return None if it does.

    Parameters
    ----------
    block : Block
    capability : (int, int)
        Compute capability of the device.
    backward : bool
        Whether to ask about gradients, too; otherwise only about the forward pass.

    Notes
    -----
    Blocks that are not known to work are refused.  A block that is accepted here may still raise
    `NotSupported` when its graph is built.
    """
    major, widths = capability[0], (block.headdim, block.headdim_v)
    if major not in (8, 9, 10, 12):
        return f"cuDNN attention is not known for compute capability {capability}"
    if any(d % 8 for d in widths):
        return f"cuDNN needs headdims that are multiples of 8, got {widths}"
    if block.scalars and (block.padded or block.shape not in ("full", "general")):
        return "cuDNN has no soft-cap or interval of keys beside a mask of its own"
    # The manual says 128 on other GPUs, for gradients and for a single query.  But graphs for a
    # single query can be built.
    most = 256 if major == 9 or not (backward or block.nq == 1) else 128
    if max(widths) > most and (major, widths) != (10, (192, 128)):
        return f"cuDNN's limit of headdims is {most} for capability {capability}, got {widths}"
    if not backward:
        return None
    if major in (8, 12) and block.scalars:
        return f"cuDNN has no gradients of general masks and soft-caps for {capability}"
    if block.nq == 1:
        # Reported on an H200 with 9.25 and 9.26 (issue 1072).
        return "cuDNN's gradients for one query may be NaN, and it has none for one key, too"
    if not block.padded and reads_past(block.shape, block.nk, capability):
        return f"cuDNN's gradients for {block.nk} keys may be NaN"
    return None


class NotSupported(RuntimeError):
    """cuDNN has no kernel for this block on this device; another kernel can compute it."""


class Launch:
    """A graph that is ready for launch.

    Attributes
    ----------
    block : Block
    workspace_size : int
        Bytes of workspace that a launch needs.
    """

    def __init__(self, graphs: Graphs, block: Block, graph: Any, workspace_size: int) -> None:
        self.block, self.workspace_size = block, workspace_size
        self._graphs, self._graph = graphs, graph
        # cuDNN reads a scalar from the host at each launch.
        self._scalars = np.array(block.scalars, np.float32)

    def __call__(self, pointers: Iterable[int], workspace: int, stream: int) -> None:
        """Queue the launch, and return at once.

        Parameters
        ----------
        pointers : iterable of int
            Forward: pointers to q, k, v, out and stats; the last two are written.  Backward:
            pointers to q, k, v, out, dout, stats, dq, dk and dv; the last three are overwritten.
            For a general block, pointers to begin and end follow.  For a padded block, pointers to
            the numbers of queries and keys follow.
        workspace : int
            Pointer to `workspace_size` bytes.
        stream : int
            CUDA stream.
        """
        pack = dict(enumerate(pointers, 1))
        for i in range(len(self._scalars)):
            pack[len(pack) + 1] = self._scalars.ctypes.data + 4 * i
        self._graphs.execute(self._graph, pack, workspace, stream)


class Graphs:
    """cuDNN graphs of one device, which are built once per block and kept.

    Raises
    ------
    ImportError
        If cuDNN or its frontend is missing or too old, or cannot use the GPU.

    Notes
    -----
    All tensors are contiguous and token-major, (nq, nheads, headdim) and (nk, nheads_kv, headdim);
    out and v have the width headdim_v.
    `stats` is (nheads, nq) float32, the natural log-sum-exp of the logits; cuDNN before 9.26 takes
    only these packed strides.  Each query of a general block sees an interval of keys, given by
    `begin` and `end`, (nq,) int32.  Threads must not share graphs.

    A padded block takes its numbers of queries and keys, (1,) int32 each.  Rows beyond them must
    be finite, because cuDNN multiplies them by 0; what it writes to such rows is undefined.

    The backward graph computes ``p = exp(s - stats)`` and
    ``ds = p (dout v^T - rowsum(dout * out))``.  Then it computes products in float32 of `p` and
    `ds` rounded to the dtype.  So

    * with the statistics over all keys of a sequence, it computes the contribution of this block's
      keys to the gradients;
    * `out` is used only for ``rowsum(dout * out)``;
    * `stats` must not be -inf, because ``exp(s + inf)`` is inf.  With +inf a query contributes 0.

    A query that sees no key of a general block gets an undefined `out` and a statistic near
    `HIDDEN`.  It contributes 0 to the gradients.
    """

    def __init__(self) -> None:
        self._cudnn = _import_cudnn()
        try:
            self._handle: int | None = self._cudnn.create_handle()
        except Exception as error:  # for example, without a GPU, or with an old driver
            raise ImportError(f"cuDNN cannot be used on this GPU: {error}") from error
        self._stream: int | None = None
        # The launch of each block and pass, or the reason why there is none.
        self._built: dict[tuple[Block, bool], Launch | str] = {}

    def get(self, block: Block, backward: bool) -> Launch:
        """Return the launch of `block`; its graph is built at the first call.

        Parameters
        ----------
        block : Block
        backward : bool

        Raises
        ------
        NotSupported
            If cuDNN cannot build a graph.  Its words are in a RuntimeWarning, too: blocks that
            cuDNN is known to refuse have not come as far as here (`supported`).
        """
        built = self._built.get((block, backward))
        if built is None:
            try:
                built = Launch(self, block, *self._build(block, backward))
            except (self._cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
                # The message of a failed graph continues with pages of description.
                reason = str(error).strip().partition("\n")[0].rstrip("_ ")
                pass_ = "gradients" if backward else "forward pass"
                built = f"cuDNN has no kernel for the {pass_} of {block}: {reason}"
                warnings.warn(built, RuntimeWarning, stacklevel=2)
            self._built[block, backward] = built
        if isinstance(built, str):
            raise NotSupported(built)
        return built

    def free(self) -> None:
        """Release the graphs and the handle; no launch is possible afterwards."""
        self._built.clear()
        if self._handle is not None:
            self._cudnn.destroy_handle(self._handle)
            self._handle = None

    def execute(self, graph: Any, pack: dict[int, int], workspace: int, stream: int) -> None:
        """Queue a graph; `Launch` calls this."""
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        graph.execute(pack, workspace, handle=self._handle)

    def _build(self, block: Block, backward: bool) -> tuple[Any, int]:
        """Build a graph whose tensors are numbered from 1 in the order of the pointers."""
        types = self._cudnn.data_type
        io = types.HALF if block.dtype == "float16" else types.BFLOAT16
        graph = self._cudnn.pygraph(
            io_data_type=io,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self._handle,
        )
        # cuDNN orders the axes (batch, head, token, element); the strides give the layout.
        h, hk, nq, nk = block.nheads, block.nheads_kv, block.nq, block.nk
        number, after = iter(range(1, 10)), 10 if backward else 6
        sides, widths = ((nq, h), (nk, hk)) * 2, (block.headdim,) * 2 + (block.headdim_v,) * 2
        queries, keys, outs, values = (
            {"dim": [1, m, n, d], "stride": [n * m * d, d, m * d, 1]}
            for (n, m), d in zip(sides, widths)
        )
        rows = {"dim": [1, h, nq, 1], "stride": [nq * h, nq, 1, 1]}

        def take(layout: dict[str, Any], dtype: Any = io) -> Any:
            return graph.tensor(**layout, data_type=dtype, uid=next(number))

        inputs = {"q": take(queries), "k": take(keys), "v": take(values)}
        options: dict[str, Any] = {"attn_scale": block.scale, **self._mask(block)}
        if backward:
            inputs |= {"o": take(outs), "dO": take(outs), "stats": take(rows, types.FLOAT)}
            results = [(queries, io), (keys, io), (values, io)]
        else:
            options["generate_stats"] = True
            results = [(outs, io), (rows, types.FLOAT)]
        if block.padded:
            one = {"dim": [1] * 4, "stride": [1] * 4, "data_type": types.INT32}
            lengths = (graph.tensor(**one, uid=after + i) for i in range(2))
            options |= zip(("seq_len_q", "seq_len_kv"), lengths)
            options["use_padding_mask"] = True
        options |= self._modifiers(graph, block, backward, after)
        outputs = (graph.sdpa_backward if backward else graph.sdpa)(**inputs, **options)
        for tensor, (layout, dtype) in zip(outputs, results, strict=True):
            tensor.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
            tensor.set_data_type(dtype).set_uid(next(number))
        graph.validate()
        graph.build_operation_graph()
        modes = self._cudnn.heur_mode
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, graph.get_workspace_size()

    def _mask(self, block: Block) -> dict[str, Any]:
        # The last query of a causal block sees all keys, so a single query needs no mask.
        if block.shape in ("full", "general") or (block.shape == "causal" and block.nq == 1):
            return {}
        if block.shape == "anti-causal":
            # With the default alignment, top left, query i then sees the keys from i on.
            return {"diagonal_band_left_bound": 1}
        mask = {
            "diagonal_alignment": self._cudnn.diagonal_alignment.BOTTOM_RIGHT,
            "diagonal_band_right_bound": 0,
        }
        if block.shape == "band" and block.window < block.nk:
            # A left bound of w hides the keys at or before the diagonal minus w, so that w keys
            # stay visible (Attention.md; attn_score_modifiers.h keeps key + w > diagonal).
            mask["diagonal_band_left_bound"] = block.window
        return mask

    def _modifiers(
        self, graph: Any, block: Block, backward: bool, number: int
    ) -> dict[str, Callable[[Any, Any], Any]]:
        """Return modifiers of the logits: a soft-cap, and an interval of keys for each query.

        Tensors are numbered from `number` on.
        """
        types, bounds = self._cudnn.data_type, []
        if block.shape == "general":
            layout = {"dim": [1, 1, block.nq, 1], "stride": [block.nq, block.nq, 1, 1]}
            bounds = [
                graph.tensor(**layout, data_type=types.INT32, uid=number + i) for i in range(2)
            ]
        one = {"dim": [1] * 4, "stride": [1] * 4, "is_pass_by_value": True}
        scalars = [
            graph.tensor(**one, data_type=types.FLOAT, uid=number + len(bounds) + i)
            for i in range(len(block.scalars))
        ]
        scaled: Any = None  # logits over the soft-cap

        def modify(graph: Any, logits: Any) -> Any:
            nonlocal scaled
            if block.softcap is not None:
                scaled = graph.div(a=logits, b=scalars[-1])
                scaled.set_data_type(types.FLOAT)
                tanh = graph.tanh(input=scaled)
                tanh.set_data_type(types.FLOAT)
                logits = graph.mul(a=tanh, b=scalars[-1])
                logits.set_data_type(types.FLOAT)
            if bounds:
                key = graph.gen_index(input=logits, axis=3)
                key.set_data_type(types.INT32)
            for compare, bound in zip((graph.cmp_ge, graph.cmp_lt), bounds):
                seen = compare(input=key, comparison=bound, compute_data_type=types.BOOLEAN)
                seen.set_data_type(types.BOOLEAN)
                logits = graph.binary_select(input0=logits, input1=scalars[0], mask=seen)
                logits.set_data_type(types.FLOAT)
            return logits

        def slope(graph: Any, ds: Any) -> Any:
            # tanh' is the derivative of the soft-cap.  ds of a hidden key is 0 before, too.
            ds = graph.tanh_backward(loss=ds, input=scaled)
            return ds.set_data_type(types.FLOAT)

        modifiers = {}
        if block.scalars:
            modifiers["score_mod"] = modify
        if block.softcap is not None and backward:
            modifiers["score_mod_bprop"] = slope
        return modifiers


@cache
def graphs_of(device: int) -> Graphs:
    """Return the graphs of the current device, whose number is `device`; all plans share them.

    Raises
    ------
    ImportError
        As in `Graphs`.
    """
    graphs = Graphs()
    atexit.register(graphs.free)
    return graphs


def _import_cudnn() -> Any:
    """Import cudnn; raise ImportError if it or its library is missing or too old."""
    with suppress(Exception):
        # cuDNN compiles by NVRTC.  The NVRTC of CUDA 13.0's wheel does not find its builtins
        # unless they are loaded, and cuDNN then refuses every graph (PyTorch's issue 167602).
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvrtc")
    try:
        import cudnn

        backend = cudnn.backend_version()
    except Exception as error:  # a missing library may raise any of many types
        raise ImportError(f"cuDNN attention needs {PACKAGES}: {error}") from error
    frontend = getattr(cudnn, "__version__", "0")
    if _numbers(frontend) < FRONTEND or backend < BACKEND:
        raise ImportError(
            f"cuDNN attention needs {PACKAGES}; found nvidia-cudnn-frontend {frontend} and "
            f"cuDNN {backend}"
        )
    return cudnn


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(x) for x in version.split(".")[:2])
