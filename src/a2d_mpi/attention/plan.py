"""Plans of distributed attention: checked, reusable operators."""

from __future__ import annotations

import numpy as np

from a2d_mpi.attention.calls import Calls
from a2d_mpi.attention.engine import Engine
from a2d_mpi.attention.executor import executors
from a2d_mpi.attention.figures import Figures
from a2d_mpi.comm.channel import Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.rendezvous import Call
from a2d_mpi.comm.threads import BlasThreads
from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.masks import Mask
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import misfit
from a2d_mpi.devices.protocol import Array
from a2d_mpi.schedules import METHODS, problem_of


class AttentionPlan(Figures):
    """Exact self-attention of one sequence that is spread over the ranks of a grid.

    A plan checks its arguments on all ranks together, keeps its buffers, and can be called many
    times.  Making it, `forward` and `backward` are collective over ``grid.comm``.

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
        KV heads, a divisor of nheads; query head h reads KV head ``h // (nheads // nheads_kv)``.
        Default: nheads.
    seqlen_kv : int, optional
        M, tokens of k and v, if they are of another sequence (cross-attention).  Masks are aligned
        so that the last query and the last key belong together.  Default: seqlen.
    dtype : {"float32", "float64", "float16", "bfloat16"}
        Of q, k, v, out and their gradients.  16-bit tensors travel as they are, also partial
        outs: a merge is a convex combination and does not amplify their rounding.  They are
        computed in float32, and so are lse and the partial gradients on the wire, which are
        summed.
    distribution : {"contiguous", "zigzag", "striped", "triangle", "balanced"}, optional
        Owner of each token.  Default: the one that balances the mask.
    distribution_kv : str, optional
        Likewise, of k and v in cross-attention.  Default: as `distribution`.
    softmax_scale : float, optional
        Default: ``1 / sqrt(headdim)``.
    logit_softcap : float, optional
        c > 0: scaled logits s become ``c tanh(s / c)``.  Default: they stay as they are.
    kernel : str
        One of `a2d_mpi.kernels.KERNELS`; "auto": the fastest for the arrays' device, the dtype
        and the soft-cap.
    overlap : bool or str
        Compute while messages travel.  False: phase by phase, with the same results bit for bit.
        One of `a2d_mpi.comm.transport.PROGRESS` names the caller of MPI meanwhile; True is the
        first of them, the best here (`drivers/bench_overlap.py`).
    transfers : {"auto", "device", "host"}
        Way of device arrays to MPI: as they are, or through the host; see
        `a2d_mpi.comm.gpus.gpu_aware`.
    threads : int, optional
        BLAS threads of a rank's kernels on the host.  Default: the value of the first environment
        variable of `a2d_mpi.comm.threads.VARIABLES` that is set; without one, ``grid.cores``.
    check_finite : bool
        Refuse NaN and infinite elements (on a GPU, by a copy to the host).  Otherwise they reach
        the results of the queries and keys that see them: on the host only these, on a GPU also
        others of the same block of a kernel.

    Attributes
    ----------
    tokens : (n,) int64
        Sorted global indices of this rank's shard.
    tokens_kv : (m,) int64
        Those of its keys and values; the same in self-attention.
    config : AttentionConfig
        Sizes, shapes and dtypes; also as `seqlen`, `nheads`, `nheads_kv`, `headdim`, `dtype`,
        `compute_dtype`, `softmax_scale` and `logit_softcap`.
    traffic : Traffic
        Bytes and messages since the plan was made, by phase and communicator.
    timings : dict of str to float
        Seconds of the latest call on this rank: "forward/compute" (kernels), "forward/merge"
        (merges and sums of partial results, sorting of keys), "forward/wait" (communication that
        was not hidden: inside MPI waits; on a GPU, neither computing nor merging),
        "forward/total" (from the agreement on the arguments to the end); "backward/..." likewise.
        On a GPU by CUDA events; reading them waits for the GPU.
    staged_bytes : int
        Bytes of device arrays that were copied to or from the host, for want of CUDA-aware MPI.

    Notes
    -----
    Arrays are NumPy arrays on all ranks, or CuPy arrays on all ranks, and so are the results.
    With CuPy everything is queued on the current stream, as with CuPy's own functions; a call of
    a single rank returns before it is done.

    Raises
    ------
    ValueError
        On all ranks, with the numbers, if an argument is wrong or differs on any of them.
    """

    method = ""  # its name in `a2d_mpi.schedules.METHODS`

    def __init__(
        self,
        grid: ProcessGrid,
        mask: Mask,
        *,
        seqlen: int,
        nheads: int,
        headdim: int,
        nheads_kv: int | None = None,
        seqlen_kv: int | None = None,
        dtype: np.typing.DTypeLike = "float32",
        distribution: str | None = None,
        distribution_kv: str | None = None,
        softmax_scale: float | None = None,
        logit_softcap: float | None = None,
        kernel: str = "auto",
        overlap: bool | str = True,
        transfers: str = "auto",
        threads: int | None = None,
        check_finite: bool = False,
    ) -> None:
        self.grid, self.mask, self.overlap, self.traffic = grid, mask, bool(overlap), Traffic()
        name, arguments = type(self).__name__, {}
        with grid.rendezvous.turn() as problem:
            number = grid.rendezvous.plans + 1
            try:
                if not isinstance(mask, Mask):
                    raise ValueError(f"mask must be a Mask, got {mask!r}")
                sizes = seqlen, nheads, headdim, nheads_kv
                others = {
                    "softmax_scale": softmax_scale,
                    "logit_softcap": logit_softcap,
                    "seqlen_kv": seqlen_kv,
                }
                config = AttentionConfig(*sizes, dtype=dtype, **others)
                _check_fit(config, mask, grid, threads)
                named = distribution, distribution_kv
                _check_method(self.method, mask, config, named)
                lengths = config.seqlen, config.seqlen_kv
                digest = mask.aligned(*lengths).digest(*lengths)  # and all intervals are checked
                self._describe(problem_of(self.method, self.layout, config, mask, *named))
                self._engine = _engine(grid, config, kernel, overlap, transfers, threads)
                sizes = self.layout, self.problem, grid.comm.rank, self.overlap
                chains = {phase: executors(self.method, phase, *sizes) for phase in PHASES}
                self._calls = Calls(
                    *(name, number, grid, config, len(self.tokens), len(self.tokens_kv)),
                    *(self._engine, chains, self.traffic, check_finite),
                )
                arguments = {"method": name, **config.arguments}
                arguments["mask"] = f"{type(mask).__name__} (digest {digest})"
                arguments["distribution"] = self.distribution.name
                arguments["distribution_kv"] = self.problem.shards_kv.name
                if digest := METHODS[self.method].digest:
                    group = self.problem.context_group(grid.heads)
                    arguments["placement"] = f"a placement with digest {digest(group)}"
                arguments |= {"kernel": kernel, "overlap": overlap, "transfers": transfers}
                arguments |= self._options
            except Exception as error:  # of any kind: the other ranks must hear of it
                problem = problem or str(error) or type(error).__name__
            grid.rendezvous.meet(Call("making", number, 0, name))
            grid.rendezvous.agree(problem, arguments)
            grid.rendezvous.plans = number
            self._calls.connect()

    def _describe(self, problem: Problem) -> None:
        """Set the attributes that need no communication."""
        self.problem, self.config, self.distribution = problem, problem.config, problem.shards
        config, rank = problem.config, self.grid.comm.rank
        self.seqlen, self.nheads, self.nheads_kv = config.seqlen, config.nheads, config.nheads_kv
        self.headdim, self.softmax_scale = config.headdim, config.softmax_scale
        self.logit_softcap = config.logit_softcap
        self.dtype, self.compute_dtype = config.dtype_of("q"), config.compute_dtype
        self.tokens = problem.shards.tokens(rank)  # (n,)
        self.tokens_kv = self.tokens if problem.keys is None else problem.keys.tokens(rank)  # (m,)

    def forward(
        self, q: Array, k: Array, v: Array, sink: Array | None = None
    ) -> tuple[Array, Array]:
        """Compute ``out = softmax(softmax_scale q k^T) v`` over the visible keys.

        Parameters
        ----------
        q : (n, nheads, headdim) dtype
            Shard of this rank: row i is the token ``tokens[i]``.
        k, v : (m, nheads_kv, headdim) dtype
            Shard of this rank: row i is the token ``tokens_kv[i]``.
        sink : (nheads,) compute_dtype, optional
            A logit per head in the denominator of the softmax, the same on all ranks (values are
            not compared): that of a key which all queries see and whose value is 0; -inf: none.

        Returns
        -------
        out : (n, nheads, headdim) dtype
            Shard of this rank; 0 for a query that sees no key.
        lse : (n, nheads) float32 or wider
            Log-sum-exp of the logits, scaled and capped, and of the sink, nats; -inf, or the sink,
            for a query that sees no key.

        Raises
        ------
        ValueError
            On all ranks, if an array has the wrong shape or dtype on any of them.
        """
        return self._calls.run("forward", {"q": q, "k": k, "v": v}, sink)

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        sink: Array | None = None,
    ) -> tuple[Array, ...]:
        """Compute the gradients of a loss with respect to q, k and v, and perhaps the sink.

        Parameters
        ----------
        dout : (n, nheads, headdim) dtype
            Gradient with respect to out, shard of this rank.
        q, k, v, out, lse
            Arguments and results of `forward`.
        sink : (nheads,) compute_dtype, optional
            That of `forward`, if its gradient is wanted; dq, dk and dv do not need it, as it
            counts in lse.

        Returns
        -------
        dq : (n, nheads, headdim) dtype
        dk, dv : (m, nheads_kv, headdim) dtype
            Shards of this rank.
        dsink : (nheads,) compute_dtype
            Only with a sink: the share of this rank's tokens.  As for any weight that all ranks
            have, the gradient is the sum over the ranks of ``grid.comm``, left to the caller.

        Raises
        ------
        ValueError
            On all ranks, if an array has the wrong shape or dtype on any of them.
        """
        given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        return self._calls.run("backward", given, sink)

    def free(self) -> None:
        """Release the buffers.  The grid stays.  Local."""
        self._calls.free()

    @property
    def _options(self) -> dict[str, object]:
        """Arguments of this method alone; ranks must agree on them too."""
        return {}


def _check_fit(
    config: AttentionConfig, mask: Mask, grid: ProcessGrid, threads: int | None
) -> None:
    """Raise ValueError for arguments that do not fit each other, the grid or the machine."""
    config.check_room(grid.comm.size)
    mask.aligned(config.seqlen, config.seqlen_kv)
    why = misfit(config.nheads, config.nheads_kv, grid.heads)
    if why:
        raise ValueError(f"a head axis of {grid.heads} ranks: {why}")
    if threads is not None and (not isinstance(threads, (int, np.integer)) or threads < 1):
        raise ValueError(f"threads must be a positive integer, got {threads!r}")


def _check_method(
    method: str, mask: Mask, config: AttentionConfig, named: tuple[str | None, str | None]
) -> None:
    """Raise ValueError for a mask, lengths or distributions that are not for a method."""
    known = METHODS[method]
    if not known.takes(mask):
        raise ValueError(
            f"a {method} needs a causal mask, got {type(mask).__name__}: it leaves out the pairs "
            "of a query and a later key"
        )
    if (known.causal or known.place) and config.seqlen_kv != config.seqlen:
        raise ValueError(
            f"a {method} has one sequence, got {config.seqlen} queries and {config.seqlen_kv} keys"
        )
    for name in named:
        if known.distribution and name not in (None, known.distribution):
            raise ValueError(f"a {method} has no {name} distribution")


def _engine(
    grid: ProcessGrid,
    config: AttentionConfig,
    kernel: str,
    overlap: bool | str,
    transfers: str,
    threads: int | None,
) -> Engine:
    progress = overlap if isinstance(overlap, str) else "poll" if overlap else "none"
    polls = grid.comm if overlap and grid.comm.size > 1 else None
    blas = BlasThreads.of_rank(threads, grid.cores)
    return Engine(kernel, config, transfers, progress, polls, blas)
