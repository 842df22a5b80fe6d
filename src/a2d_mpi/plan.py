"""What all distributed attention algorithms share: a checked, reusable plan."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from a2d_mpi import cost
from a2d_mpi.backend import Workspace, as_dtype, compute_dtype
from a2d_mpi.comm import Channel, Traffic, agree
from a2d_mpi.distribution import Distribution
from a2d_mpi.grid import ProcessGrid
from a2d_mpi.masks import Interval, Mask
from a2d_mpi.tiles import make_tile


class AttentionPlan:
    """Exact self-attention of one sequence that is spread over the ranks of a grid.

    A plan checks its arguments on all ranks together, knows who owns which token, keeps its
    buffers, and can be called many times.  Making it, `forward` and `backward` are collective over
    ``grid.comm``.

    Parameters
    ----------
    grid : ProcessGrid
    mask : Mask
        `Full()`, `Causal()`, ...
    seqlen : int
        N, tokens of the whole sequence; any number from 1 on, also below the number of ranks.
    nheads, headdim : int
        H query heads of D elements.
    nheads_kv : int, optional
        Heads of k and v, a divisor of nheads; query head h reads key head
        ``h // (nheads // nheads_kv)``.  Default: nheads.
    dtype : {"float32", "float64", "float16", "bfloat16"}
        Of q, k, v, out and their gradients.  16-bit tensors travel as they are, also partial
        outs (a merge is a convex combination: it does not amplify their rounding); they are
        computed in float32, and so are lse and the partial gradients on the wire, which are
        summed.
    distribution : {"contiguous", "zigzag", "striped"}, optional
        Who owns which token.  Default: the one that balances the mask.
    softmax_scale : float, optional
        Default: ``1 / sqrt(headdim)``.
    kernel : str
        One of `a2d_mpi.tiles.KERNELS`.
    overlap : bool
        Compute while messages travel.  False: phase by phase, with the same results bit for bit.

    Attributes
    ----------
    tokens : (n,) int64
        Sorted global indices of the tokens that this rank owns.
    traffic : Traffic
        Bytes and messages since the plan was made, by phase and communicator.
    timings : dict of str to float
        Seconds of the latest call on this rank: "forward/compute" (kernels), "forward/merge"
        (merges and sums of partial results, sorting of keys), "forward/wait" (inside MPI waits:
        the communication that nothing hid), "forward/total" (all from the moment when the ranks
        have agreed on the arguments); "backward/..." likewise.

    Raises
    ------
    ValueError
        On all ranks, with the numbers, if an argument is wrong or differs on any of them.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        mask: Mask,
        *,
        seqlen: int,
        nheads: int,
        headdim: int,
        nheads_kv: int | None = None,
        dtype: np.typing.DTypeLike = "float32",
        distribution: str | None = None,
        softmax_scale: float | None = None,
        kernel: str = "auto",
        overlap: bool = True,
    ) -> None:
        self.grid, self.mask, self.overlap = grid, mask, bool(overlap)
        self.traffic = Traffic()
        self.timings: dict[str, float] = {}
        self._work = Workspace()
        self._broken = False
        config = {
            "method": type(self).__name__,
            "seqlen": seqlen,
            "mask": type(mask).__name__,
            "nheads": nheads,
            "nheads_kv": nheads if nheads_kv is None else nheads_kv,
            "headdim": headdim,
            "dtype": dtype,
            "distribution": distribution,
            "softmax_scale": softmax_scale,
            "kernel": kernel,
            "overlap": self.overlap,
        }
        problem = None
        try:
            if not isinstance(mask, Mask):
                raise ValueError(f"mask must be a Mask, got {mask!r}")
            for name in ("seqlen", "nheads", "nheads_kv", "headdim"):
                value = config[name]
                if not isinstance(value, (int, np.integer)) or value < 1:
                    raise ValueError(f"{name} must be a positive integer, got {value!r}")
            self.seqlen, self.nheads, self.headdim = int(seqlen), int(nheads), int(headdim)
            self.nheads_kv = int(config["nheads_kv"])
            if self.nheads % self.nheads_kv:
                raise ValueError(
                    f"nheads_kv must divide nheads, got {self.nheads_kv} and {self.nheads}"
                )
            self.dtype = as_dtype(dtype)
            config["dtype"] = self.dtype
            mask.check(self.seqlen)
            self.distribution = Distribution(
                distribution or mask.default_distribution, self.seqlen, grid.comm.size
            )
            config["distribution"] = self.distribution.name
            self.softmax_scale = (
                1 / math.sqrt(self.headdim) if softmax_scale is None else float(softmax_scale)
            )
            if not math.isfinite(self.softmax_scale):
                raise ValueError(f"softmax_scale must be finite, got {softmax_scale!r}")
            config["softmax_scale"] = self.softmax_scale
            self._tile = make_tile(kernel, self.dtype, self.softmax_scale, self._poll, self._work)
            config["mask"] += f" (digest {mask.digest(self.seqlen)})"
            self.compute_dtype = compute_dtype(self.dtype)
            self.tokens = self.distribution.tokens(grid.comm.rank)
            self._channels = self._set_up()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = str(error) or type(error).__name__
        agree(grid.comm, problem, config)

    def forward(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """``out = softmax(softmax_scale q k^T) v`` over the keys that the mask shows.

        Parameters
        ----------
        q : (n, nheads, headdim) dtype
            My part: row i is the token ``tokens[i]``.
        k, v : (n, nheads_kv, headdim) dtype
            My part.

        Returns
        -------
        out : (n, nheads, headdim) dtype
            My part; 0 for a query that sees no key.
        lse : (n, nheads) float32 or wider
            Log-sum-exp of the scaled logits, nats; -inf for a query that sees no key.

        Raises
        ------
        ValueError
            On all ranks, if an array has the wrong shape or dtype on any of them.
        """
        q, k, v = self._checked(q=q, k=k, v=v)
        with self._running("forward"):
            out, lse = self._forward(q, k, v)
            return out.astype(self.dtype, copy=False), lse

    def backward(
        self,
        dout: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        out: np.ndarray,
        lse: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gradients of a loss with respect to q, k and v.

        Parameters
        ----------
        dout : (n, nheads, headdim) dtype
            Gradient with respect to out, my part.
        q, k, v, out, lse
            What `forward` took and returned.

        Returns
        -------
        dq : (n, nheads, headdim) dtype
        dk, dv : (n, nheads_kv, headdim) dtype
            My part of each.

        Raises
        ------
        ValueError
            On all ranks, if an array has the wrong shape or dtype on any of them.
        """
        dout, q, k, v, out, lse = self._checked(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
        with self._running("backward"):
            with self._clock("compute"):
                delta = np.einsum("thd,thd->th", dout, out, dtype=self.compute_dtype)
            gradients = self._backward(dout, q, k, v, lse, delta)
            return tuple(x.astype(self.dtype, copy=False) for x in gradients)

    def predicted_traffic(self, rank: int | None = None) -> dict[tuple[str, str], list[int]]:
        """What `a2d_mpi.cost` says one forward and one backward call of `rank` send and receive.

        Same keys and values as ``traffic.bytes``.
        """
        raise NotImplementedError

    def area(self, rank: int | None = None) -> int:
        """Visible (query, key) pairs that `rank` (default: this one) computes."""
        raise NotImplementedError

    def free(self) -> None:
        """Release the buffers.  The grid stays.  Local."""
        self._work.clear()

    def _set_up(self) -> tuple[Channel, ...]:
        """Prepare what needs no communication; returns the channels of the algorithm."""
        raise NotImplementedError

    def _forward(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def _backward(
        self,
        dout: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        lse: np.ndarray,
        delta: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        raise NotImplementedError

    @property
    def problem(self) -> cost.Problem:
        """The sizes that `a2d_mpi.cost` asks for."""
        return cost.Problem(
            self.distribution.counts,
            self.nheads,
            self.nheads_kv,
            self.headdim,
            self.dtype.itemsize,
            self.compute_dtype.itemsize,
        )

    def _new(self, name: str) -> np.ndarray:
        """New array for my part of the result `name`, to accumulate in."""
        return np.empty((len(self.tokens), *self._shape(name)), self.compute_dtype)

    def _buffer(self, key: object, name: str, tokens: int, wide: bool = False) -> np.ndarray:
        """The plan's buffer `key`, for `tokens` tokens of the tensor `name`.

        In the dtype in which it is sent; with `wide`, in that in which it is computed.
        """
        dtype = self.compute_dtype if wide else self._dtype_of(name)
        return self._work.get(key, (tokens, *self._shape(name)), dtype)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in ("lse", "delta"):
            return (self.nheads,)
        return (self.nheads_kv if name in ("k", "v", "dk", "dv") else self.nheads, self.headdim)

    def _dtype_of(self, name: str) -> np.dtype:
        """Of the tensor as the caller has it, or as it is sent."""
        wide = ("lse", "delta", "dq", "dk", "dv")
        return self.compute_dtype if name in wide else self.dtype

    def _checked(self, **arrays: np.ndarray) -> list[np.ndarray]:
        """The arrays, C-contiguous; ValueError on all ranks if one is wrong on any."""
        problem = None
        if self._broken:
            problem = "an earlier call was interrupted: make a new grid and a new plan"
        for name, x in arrays.items():
            shape, dtype = (len(self.tokens), *self._shape(name)), self._dtype_of(name)
            if not isinstance(x, np.ndarray):
                problem = problem or f"{name} must be a NumPy array, got {type(x).__name__}"
            elif x.shape != shape or x.dtype != dtype:
                problem = problem or (
                    f"{name} has shape {x.shape} and dtype {x.dtype}, "
                    f"this part needs {shape} and {dtype}"
                )
        if self.grid.comm.allreduce(problem is not None, op=MPI.LOR):
            agree(self.grid.comm, problem)
        return [np.ascontiguousarray(x) for x in arrays.values()]

    def _poll(self) -> None:
        # Any MPI call moves what is in flight; this one has a fixed cost.
        if self.overlap and self.grid.comm.size > 1:
            self.grid.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    @contextmanager
    def _running(self, phase: str) -> Iterator[None]:
        self._phase = phase
        for channel in self._channels:
            channel.start(phase)
        for part in ("compute", "merge"):
            self.timings[f"{phase}/{part}"] = 0.0
        start = time.perf_counter()
        self._broken = True  # messages are under way until the end
        yield
        self._broken = False
        self.timings[f"{phase}/wait"] = sum(channel.waited for channel in self._channels)
        self.timings[f"{phase}/total"] = time.perf_counter() - start

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timings[f"{self._phase}/{part}"] += time.perf_counter() - start


def intervals_of(
    mask: Mask,
    q_chunks: list[np.ndarray],
    k_chunks: list[np.ndarray],
    pieces: Iterable[tuple[int | None, int | None]],
) -> dict[tuple[int | None, int | None], tuple[Interval, ...]]:
    """Visible keys of each piece (query chunk i, key chunk j) of a tile.

    Parameters
    ----------
    mask : Mask
    q_chunks, k_chunks : lists of (n,) int64
        Tokens of each chunk.
    pieces : pairs (i, j)
        None stands for all chunks: of queries one after the other, of keys sorted.
    """
    found = {}
    for i, j in pieces:
        q = np.concatenate(q_chunks) if i is None else q_chunks[i]
        k = np.sort(np.concatenate(k_chunks)) if j is None else k_chunks[j]
        found[i, j] = mask.intervals(q, k)
    return found
