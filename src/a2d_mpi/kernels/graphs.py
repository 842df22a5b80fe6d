"""cuDNN attention on device pointers: graphs are built once per shape, kept and launched.

cuDNN is imported when `Graphs` is made: the package needs it only then.  Facts about cuDNN are
from the documentation and headers of nvidia-cudnn-frontend 1.22 (``docs/operations/
Attention.md``, ``node/scaled_dot_product_flash_attention.h``), and from building plans with
cuDNN 9.28 for sm_80, sm_90 and sm_100.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from a2d_mpi.kernels.cudnn_blocks import Block

BACKEND = 91100  # cuDNN 9.11: 9.9 has no band on Hopper and no masks for one query, 9.10 errs
FRONTEND = (1, 14)  # `generate_stats`
PACKAGES = "nvidia-cudnn-frontend>=1.14 and nvidia-cudnn-cu13 (or -cu12) >=9.11"

GRADIENTS = ("native", "float32")


class NotSupported(RuntimeError):
    """cuDNN has no kernel for this block on this device; another kernel can compute it."""


class Graphs:
    """cuDNN graphs of one device, built once per block and kept.

    Parameters
    ----------
    stream : int, optional
        CUDA stream of the handle; default: the stream of the first launch.
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
    before 9.26 takes only these packed strides.  Pointers are Python integers.  A launch
    returns at once; graphs are not to be shared by threads.

    `forward` writes `out` and `stats`; `backward` overwrites `dq`, `dk` and `dv`.  The backward
    graph is ``p = exp(s - stats)``, ``ds = p (dout v^T - rowsum(dout * out))``, products in
    float32 of `p` and `ds` rounded to the dtype, so that

    * with the statistics over all keys of a sequence it computes the contribution of this block's
      keys to the gradients;
    * `out` enters by ``rowsum(dout * out)`` alone;
    * `stats` must not be -inf: ``exp(s + inf)`` is inf.  With +inf a query contributes 0.
    """

    def __init__(
        self,
        stream: int | None = None,
        deterministic: bool = False,
        target: Mapping[str, Any] | None = None,
    ) -> None:
        self._cudnn = _import_cudnn()
        self.deterministic = deterministic
        self._handle: int | None = None
        self._stream: int | None = None
        # (graph, workspace bytes) of each block, or the reason that there is none.
        self._built: dict[tuple[Block, bool, str], tuple[Any, int] | str] = {}
        if target is None:
            self._handle = self._cudnn.create_handle()
            target = {"handle": self._handle}
        self._target = dict(target)
        if stream is not None:
            self._use(stream)

    def forward(
        self,
        block: Block,
        q: int,
        k: int,
        v: int,
        out: int,
        stats: int,
        workspace: int,
        stream: int,
    ) -> None:
        """Write the attention of `block` to `out` and `stats`.

        Parameters
        ----------
        block : Block
        q, k, v : int
            Pointers to the inputs.
        out, stats : int
            Pointers to the outputs.
        workspace : int
            Pointer to ``workspace_size(block, False)`` bytes.
        stream : int
            CUDA stream.

        Raises
        ------
        NotSupported
        """
        graph, _ = self._get(block, False, "native")
        self._launch(graph, (q, k, v, out, stats), workspace, stream)

    def backward(
        self,
        block: Block,
        q: int,
        k: int,
        v: int,
        out: int,
        dout: int,
        stats: int,
        dq: int,
        dk: int,
        dv: int,
        workspace: int,
        stream: int,
        gradients: str = "native",
    ) -> None:
        """Write the gradients of `block` to `dq`, `dk` and `dv`.

        Parameters
        ----------
        block : Block
        q, k, v, out, dout, stats : int
            Pointers to the inputs.
        dq, dk, dv : int
            Pointers to the outputs.
        workspace : int
            Pointer to ``workspace_size(block, True, gradients)`` bytes.
        stream : int
            CUDA stream.
        gradients : {"native", "float32"}
            Dtype of `dq`, `dk` and `dv`: that of the block, or float32.

        Raises
        ------
        NotSupported
        """
        graph, _ = self._get(block, True, gradients)
        self._launch(graph, (q, k, v, out, dout, stats, dq, dk, dv), workspace, stream)

    def workspace_size(self, block: Block, backward: bool, gradients: str = "native") -> int:
        """Bytes of workspace that a launch needs; the graph is built at the first call.

        Raises
        ------
        NotSupported
        """
        return self._get(block, backward, gradients if backward else "native")[1]

    def free(self) -> None:
        """Release the graphs and the handle; nothing can be launched afterwards."""
        self._built.clear()
        if self._handle is not None:
            self._cudnn.destroy_handle(self._handle)
            self._handle = None

    def _use(self, stream: int) -> None:
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream

    def _launch(self, graph: Any, pointers: tuple[int, ...], workspace: int, stream: int) -> None:
        if self._handle is None:
            raise RuntimeError("these graphs have no device to run on")
        self._use(stream)
        graph.execute(dict(enumerate(pointers, 1)), workspace, handle=self._handle)

    def _get(self, block: Block, backward: bool, gradients: str) -> tuple[Any, int]:
        """Graph and size of its workspace; built at the first call."""
        key = (block, backward, gradients)
        found = self._built.get(key)
        if found is None:
            if gradients not in GRADIENTS:
                raise ValueError(f"gradients must be one of {GRADIENTS}, got {gradients!r}")
            try:
                found = self._build(block, backward, gradients)
            except self._cudnn.cudnnGraphNotSupportedError as error:
                # A plan's failure quotes the plan, over pages.
                reason = str(error).strip().splitlines()[0].rstrip("_ ")
                pass_ = f"{gradients} gradients" if backward else "forward pass"
                found = f"cuDNN has no kernel for the {pass_} of {block}: {reason}"
            self._built[key] = found
        if isinstance(found, str):
            raise NotSupported(found)
        return found

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
        uid = iter(range(1, 10))

        def take(layout: dict[str, list[int]], dtype: Any = io) -> Any:
            return graph.tensor(**layout, data_type=dtype, uid=next(uid))

        def give(tensor: Any, layout: dict[str, list[int]], dtype: Any) -> None:
            tensor.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
            tensor.set_data_type(dtype).set_uid(next(uid))

        inputs = {"q": take(queries), "k": take(keys), "v": take(keys)}
        options = {"attn_scale": block.scale, **self._mask(block)}
        if backward:
            inputs |= {"o": take(queries), "dO": take(queries), "stats": take(rows, types.FLOAT)}
            options["use_deterministic_algorithm"] = self.deterministic
            outputs = graph.sdpa_backward(**inputs, **options)
            dtype = types.FLOAT if gradients == "float32" else io
            for tensor, layout in zip(outputs, (queries, keys, keys)):
                give(tensor, layout, dtype)
        else:
            out, stats = graph.sdpa(**inputs, **options, generate_stats=True)
            give(out, queries, io)
            give(stats, rows, types.FLOAT)
        graph.validate()
        graph.build_operation_graph()
        modes = self._cudnn.heur_mode
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, graph.get_workspace_size()

    def _mask(self, block: Block) -> dict[str, Any]:
        # The last query sees all keys: a single one needs no triangle.
        if block.shape == "full" or (block.shape == "causal" and block.nq == 1):
            return {}
        mask = {
            "diagonal_alignment": self._cudnn.diagonal_alignment.BOTTOM_RIGHT,
            "diagonal_band_right_bound": 0,
        }
        if block.shape == "band" and block.window < block.nk:
            # A left bound of w hides the keys at or before the diagonal minus w (Attention.md;
            # attn_score_modifiers.h keeps key + w > diagonal): w keys are left, not w + 1.
            mask["diagonal_band_left_bound"] = block.window
        return mask


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
