"""Plans of linear attention."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from a2d_mpi.attention.arguments import check_grid, check_tensors
from a2d_mpi.comm.calls import Caller, Flags
from a2d_mpi.comm.channel import Channel, Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.sizes import whole_number
from a2d_mpi.devices.host import HOST
from a2d_mpi.kernels.threads import BlasThreads
from a2d_mpi.linear.chunks import CausalSums, FullSums
from a2d_mpi.linear.features import FEATURE_MAPS, NORMS
from a2d_mpi.linear.states import STATES, Decay, Piece, StateExchange, pieces_of
from a2d_mpi.masks.compiled import compile_mask
from a2d_mpi.masks.mask import Causal, Full, Mask
from a2d_mpi.sharding.distribution import distribute

# The fastest of 16 to 512 tokens on one core of an Intel Xeon (4096 tokens, heads of 32, 64 and
# 128).  32 and 128 take up to 10 % longer.
CHUNK = 64
LONGEST = 512  # most tokens of a chunk: each head has a table of C x C factors


class Kept(NamedTuple):
    """Arrays that `LinearAttention.forward` keeps for `backward`.

    Attributes
    ----------
    states : (pieces, H, F, W) compute_dtype
        State before each piece of this rank; with a full mask, the state of all tokens.
    scale : (n, 1 or H, 1) compute_dtype or None
        Factor of each row in the normalisation.
    """

    states: ndarray
    scale: ndarray | None


class LinearAttention(Caller):
    """Linear attention of one sequence that is spread over the ranks of a grid.

    ``out_i = norm(sum over visible j of decay^(i - j) (phi(q_i) . phi(k_j)) v_j)``, where phi is
    the feature map.  A rank does not need the tokens of other ranks.  It needs only their state,
    which is a sum over these tokens: one matrix for each head.  The ranks exchange states once in
    each pass, however long the sequence is.  Making a plan, `forward` and `backward` are
    collective over ``grid.comm``.

    Parameters
    ----------
    grid : ProcessGrid
        Its shape does not matter.
    mask : Mask
        `Full()` or `Causal()`.
    seqlen : int
        N, tokens of the sequence, at least 1.
    nheads, headdim : int
        H heads of D elements, of q, k, v and out.
    feature_map : {"none", "elu+1", "relu"}
        The feature map phi.  "none" is the identity, also for features that the caller computes;
        "elu+1" and "relu" act on each element.
    norm : {"output", "denominator", "none"}
        "output": divide by the root of the mean square of all heads of a token plus 1e-6
        (TransNormer).  "denominator": divide by 1e-6 plus the sum of the weights
        ``decay^(i - j) (phi(q_i) . phi(k_j))``.  It needs a feature map other than "none".
    decay : float or sequence of nheads floats, optional
        Decay of all heads or of each head, above 0 and at most 1, for causal masks only.  Default:
        nothing decays.
    states : {"gather", "ring"}
        Exchange of states.  "gather": one all-gather (LASP-2).  "ring": from rank to rank (LASP).
        The results are the same, bit for bit.
    distribution : str
        Owner of each token.  Under a causal mask, each run of consecutive tokens of a rank has a
        state: one per rank if contiguous, two if zigzag.  "striped" has no runs, and is refused.
    dtype : {"float32", "float64", "float16", "bfloat16"}
        Dtype of q, k, v, out and their gradients.  Computations and states have float32 or wider.
    chunk : int
        Tokens that are computed at once, 1 to 512.
    threads : int, optional
        BLAS threads.  The default is as in `AttentionPlan`.

    Attributes
    ----------
    tokens, tokens_kv : (n,) int64
        Sorted global indices of this rank's shard, of q and of k and v.
    distribution : Distribution
    kept_elements : int
        Elements of what `forward` keeps for `backward` on this rank.
    traffic : Traffic
        Bytes and messages since the plan was made, by phase and communicator ("all").
    timings : dict of str to float
        Seconds of the latest call on this rank, after the ranks have agreed on the arguments.
        "forward/total" is the sum of "forward/compute" and "forward/wait".  "backward/..." is
        likewise.

    Raises
    ------
    ValueError
        On all ranks, with the numbers, if an argument is wrong on any rank or differs between
        ranks.
    RanksLost
        On all surviving ranks, if a rank died and MPI continues.  All calls raise it, too.

    Notes
    -----
    Arrays are NumPy arrays.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        mask: Mask,
        *,
        seqlen: int,
        nheads: int,
        headdim: int,
        feature_map: str = "none",
        norm: str = "output",
        decay: float | Sequence[float] | None = None,
        states: str = "gather",
        distribution: str = "contiguous",
        dtype: np.typing.DTypeLike = "float32",
        chunk: int = CHUNK,
        threads: int | None = None,
    ) -> None:
        check_grid(grid)
        self.grid, self.mask, self.traffic = grid, mask, Traffic()
        self.timings: dict[str, float] = {}
        arguments = {}
        with grid.call("making", self) as call:
            rank = grid.comm.rank
            with call.checks():
                config = AttentionConfig(seqlen, nheads, headdim, dtype=dtype)
                config.check_room(grid.comm.size)
                options = {"feature_map": feature_map, "norm": norm, "states": states}
                options["chunk"] = chunk
                _check(mask, options)
                decays = _decays(decay, config.nheads, mask)
                self._threads = BlasThreads(threads, grid.cores)
                seen = compile_mask(Causal(), config.seqlen, config.seqlen)  # for "balanced"
                sizes = config.seqlen, grid.rows, grid.cols, grid.heads
                self.distribution = distribute(distribution, *sizes, seen=seen)
                arguments = {
                    "method": type(self).__name__,
                    **config.arguments,
                    **options,
                    "mask": type(mask).__name__,
                    "decay": decays.tolist(),
                    "distribution": self.distribution,
                }
                self._norm, self._causal = NORMS[norm], isinstance(mask, Causal)
                # A state is (H, F, W).
                self._shape = config.nheads, config.headdim, config.headdim + self._norm.columns
                self._nbytes = math.prod(self._shape) * config.compute_dtype.itemsize
                self._pieces = pieces_of(self.distribution, self._causal)
                self.tokens = self.tokens_kv = self.distribution.tokens(rank)
                self._map, self._map_backward = FEATURE_MAPS[feature_map]
            call.agree(arguments)
            comm = grid.comm_of("all", tuple(range(grid.comm.size)))
        self.config, self.dtype = config, config.dtype_of("q")
        self.compute_dtype = config.compute_dtype
        channel = self._channel = Channel(comm, "all", self.traffic)
        if self._causal:
            powers = Decay(decays, min(chunk, config.seqlen), self.compute_dtype)
            self._exchange = StateExchange(channel, self._pieces, states, powers)
            self._sums = CausalSums(self._exchange, powers, _cut(self._pieces, rank, chunk))
        else:
            self._exchange = StateExchange(channel, self._pieces, states, None)
            self._sums = FullSums(self._exchange)
        (heads, _, columns), n = self._shape, len(self.tokens)
        _, none = self._norm.forward(np.empty((0, heads, columns), self.compute_dtype))
        own = sum(x.owner == grid.comm.rank for x in self._pieces)
        shapes = (own, *self._shape), None if none is None else (n, *none.shape[1:])
        self._kept = [x if x is None else (x, self.compute_dtype.name) for x in shapes]
        self.kept_elements = sum(math.prod(x) for x in shapes if x is not None)

    def forward(
        self, q: ndarray, k: ndarray, v: ndarray, *, _recorded: bool = False
    ) -> tuple[ndarray, Kept]:
        """Compute linear attention.

        Parameters
        ----------
        q, k, v : (n, nheads, headdim) dtype
            Shards of this rank: row i is the token ``tokens[i]``.

        Returns
        -------
        out : (n, nheads, headdim) dtype
            Shard of this rank.
        kept : Kept
            Argument of `backward`.

        Raises
        ------
        ValueError
            On all ranks, if an array has the wrong shape or dtype on any rank.
        """
        return self._call("forward", {"q": q, "k": k, "v": v}, recorded=_recorded)

    def backward(
        self, dout: ndarray, q: ndarray, k: ndarray, v: ndarray, out: ndarray, kept: Kept
    ) -> tuple[ndarray, ndarray, ndarray]:
        """Compute the gradients of a loss with respect to q, k and v.

        Parameters
        ----------
        dout : (n, nheads, headdim) dtype
            Gradient with respect to out, shard of this rank.
        q, k, v, out, kept
            Arguments and results of `forward`.

        Returns
        -------
        dq, dk, dv : (n, nheads, headdim) dtype
            Shards of this rank.

        Raises
        ------
        ValueError
            On all ranks, if an array has the wrong shape or dtype on any rank.
        """
        return self._call("backward", {"dout": dout, "q": q, "k": k, "v": v, "out": out}, kept)

    def packed(self, kept: Kept) -> ndarray:
        """Return what `forward` keeps as one array, (kept_elements,) compute_dtype.  Local."""
        return np.concatenate([x.ravel() for x in kept if x is not None])

    def unpacked(self, packed: ndarray) -> Kept:
        """Return views of an array of `packed`.  Local."""
        shapes = [x if x is None else x[0] for x in self._kept]
        parts = np.split(packed, [math.prod(shapes[0])])
        return Kept(*(x if x is None else part.reshape(x) for part, x in zip(parts, shapes)))

    def predicted_traffic(self, rank: int | None = None) -> dict[tuple[str, str], list[int]]:
        """Predict the bytes of one forward and one backward call.  Local.

        Parameters
        ----------
        rank : int, optional
            A rank of ``grid.comm``.  Default: this rank.

        Returns
        -------
        dict of (str, str) to [int, int]
            Bytes sent and received by phase and communicator, with the keys of ``traffic.bytes``.
            Source: `a2d_mpi.linear.states.StateExchange.traffic`.
        """
        rank = self.grid.comm.rank if rank is None else rank
        counts = {
            (phase, "all"): self._exchange.traffic(rank, self._nbytes, phase == "backward")
            for phase in PHASES
        }
        return {key: both for key, both in counts.items() if any(both)}

    def free(self) -> None:
        """Do nothing: this plan keeps no buffers between calls.  All plans have this method."""

    def _call(
        self,
        phase: str,
        arrays: dict[str, ndarray],
        kept: Kept | None = None,
        recorded: bool = False,
    ) -> tuple:
        """Run one call; collective over the ranks of the grid.

        `recorded`: whether a backward pass can follow, the same on all ranks.
        """
        transport = self._exchange.transport
        with self.grid.call(phase, self, transport.settle) as call:
            with call.checks():
                self._check_arrays(arrays, phase, kept)
            call.agree(flags=Flags(recorded=recorded))
            self._channel.begin_phase(phase, transport, call.watch)
            start = time.perf_counter()
            # Suppress warnings, which every rank would print: results show overflows and NaN.
            with self._threads.limited(), np.errstate(over="ignore", invalid="ignore"):
                if phase == "forward":
                    results = self._forward(**arrays)
                else:
                    results = self._backward(kept, **arrays)
            total = time.perf_counter() - start
            wait = sum(end - begin for begin, end in self._channel.waits)
            seconds = {"compute": total - wait, "wait": wait, "total": total}
            self.timings |= {f"{phase}/{part}": x for part, x in seconds.items()}
            return results

    def _check_arrays(self, arrays: dict[str, ndarray], phase: str, kept: Kept | None) -> None:
        n = len(self.tokens)
        if check_tensors(arrays, (n, n), self.config) is not HOST:
            raise ValueError("linear attention takes NumPy arrays, got CuPy arrays")
        if phase == "forward":
            return
        got = type(kept).__name__
        if isinstance(kept, Kept):
            got = [x if x is None else (np.shape(x), np.asarray(x).dtype.name) for x in kept]
        if got != self._kept:
            raise ValueError(
                f"kept must be the second result of forward, with states and scale {self._kept}, "
                f"got {got}"
            )

    def _forward(self, q: ndarray, k: ndarray, v: ndarray) -> tuple[ndarray, Kept]:
        sums, states = self._sums.forward(*self._mapped(q, k, v))
        out, scale = self._norm.forward(_turned(sums))
        kept = Kept(np.array(states, self.compute_dtype).reshape(-1, *self._shape), scale)
        return out.astype(self.dtype), kept

    def _backward(
        self, kept: Kept, dout: ndarray, q: ndarray, k: ndarray, v: ndarray, out: ndarray
    ) -> tuple[ndarray, ...]:
        dout, out = (x.astype(self.compute_dtype) for x in (dout, out))
        do = _turned(self._norm.backward(dout, out, kept.scale))  # (H, n, W)
        fq, fk, fv = self._mapped(q, k, v)
        dfq, dfk, dfv = self._sums.backward(do, fq, fk, fv, kept.states)
        dq, dk = self._map_backward(dfq, fq), self._map_backward(dfk, fk)
        dv = dfv[..., : self.config.headdim]
        return tuple(_turned(x).astype(self.dtype) for x in (dq, dk, dv))

    def _mapped(self, q: ndarray, k: ndarray, v: ndarray) -> list[ndarray]:
        """Compute features, (H, n, F), and values, (H, n, W), with ones for a denominator."""
        q, k, v = (_turned(x.astype(self.compute_dtype)) for x in (q, k, v))
        ones = np.ones((*v.shape[:2], self._norm.columns), v.dtype)
        return [self._map(q), self._map(k), np.concatenate([v, ones], axis=2)]


def _turned(x: ndarray) -> ndarray:
    """Make a head-major array token-major, or the other way round; the result is contiguous."""
    return np.ascontiguousarray(x.swapaxes(0, 1))


def _check(mask: Mask, options: Mapping[str, Any]) -> None:
    """Check the mask, and the arguments of a plan that are not sizes of its tensors."""
    if not isinstance(mask, (Full, Causal)):
        raise ValueError(
            f"linear attention needs a full or a causal mask, got {type(mask).__name__}"
        )
    choices_of = {"feature_map": FEATURE_MAPS, "norm": NORMS, "states": STATES}
    for name, choices in choices_of.items():
        if options[name] not in choices:
            raise ValueError(f"{name} must be one of {tuple(choices)}, got {options[name]!r}")
    if options["norm"] == "denominator" and options["feature_map"] == "none":
        raise ValueError(
            "norm 'denominator' needs a feature_map that is not negative: otherwise a sum of "
            "weights may be 0"
        )
    whole_number("chunk", options["chunk"], 1, LONGEST)


def _decays(decay: float | Sequence[float] | None, nheads: int, mask: Mask) -> ndarray:
    """Return the decay of each head, (nheads,) float64."""
    try:
        decays = np.array(1.0 if decay is None else decay, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"decay must be one number or {nheads} numbers, got {decay!r}") from None
    if decays.shape not in ((), (nheads,)):
        raise ValueError(f"decay must be one number or {nheads} numbers, got shape {decays.shape}")
    if not ((decays > 0) & (decays <= 1)).all():
        raise ValueError(f"decay must be above 0 and at most 1, got {decay!r}")
    if decay is not None and not isinstance(mask, Causal):
        raise ValueError(f"a decay needs a causal mask, got {type(mask).__name__}")
    return np.broadcast_to(decays, nheads).copy()


def _cut(pieces: Sequence[Piece], rank: int, chunk: int) -> list[list[slice]]:
    """Cut each piece of a rank into chunks; return them as rows of the shard."""
    cut, begin = [], 0
    for piece in pieces:
        if piece.owner == rank:
            end = begin + piece.tokens
            starts = range(begin, end, chunk)
            cut.append([slice(start, min(start + chunk, end)) for start in starts])
            begin = end
    return cut
