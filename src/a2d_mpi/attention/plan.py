"""Attention plans: checked operators that can be called many times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from a2d_mpi.attention.arguments import check_grid, check_problem, check_room, check_tensors
from a2d_mpi.attention.device_state import DeviceState
from a2d_mpi.attention.executor import CompiledPhase, Options
from a2d_mpi.comm.calls import Caller, Flags
from a2d_mpi.comm.channel import Channel, Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array
from a2d_mpi.masks.mask import Mask
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.slices import slices_of
from a2d_mpi.schedules.writing import problem_of, write

if TYPE_CHECKING:
    from a2d_mpi.devices.recorder import Recorded

KEPT = 8  # plans that a plan keeps for other masks


class AttentionPlan(Caller):
    """Exact attention of one sequence that is spread over the ranks of a grid.

    A plan checks its arguments on all ranks together, keeps its buffers, and can be called many
    times.  Making a plan, `forward` and `backward` are collective over ``grid.comm``.

    Parameters
    ----------
    grid : ProcessGrid
    mask : Mask
        `Full()`, `Causal()`, ...
    seqlen : int
        N, tokens of the sequence.  At least 1; it may be smaller than the number of ranks.
    nheads, headdim : int
        H query heads of D elements.  D is the length of a head of q and of k.
    nheads_kv : int, optional
        KV heads, a divisor of nheads; query head h reads KV head ``h // (nheads // nheads_kv)``.
        Default: nheads.
    seqlen_kv : int, optional
        M, tokens of k and v in cross-attention.  The mask is aligned so that the last query and
        the last key belong together.  Default: seqlen.
    headdim_v : int, optional
        Elements of a head of v, out and their gradients; on GPUs it must equal headdim.
        Default: headdim.
    dtype : {"float32", "float64", "float16", "bfloat16"}
        Dtype of q, k, v, out and their gradients.  16-bit tensors are computed in float32.  They
        travel in 16 bits, and so do partial outs: a merge is a convex combination and does not
        amplify their rounding.  lse and partial gradients travel in float32.
    distribution : {"contiguous", "zigzag", "striped", "triangle", "balanced"}, optional
        Owner of each token.  In cross-attention it may be a pair of names, the first for tokens of
        q and the second for tokens of k and v.  Default: zigzag for `Causal`, contiguous for
        `Full` and `SlidingWindow`.  For other masks, the default is the contiguous, zigzag or
        balanced distribution with the least predicted time on a typical machine.  A grid of
        `ProcessGrid.from_layout` may have another default, the distribution of the layout.
    wire : {"bfloat16", "mxfp8", "mxfp4"}, optional
        Narrow format of tensors in messages: see `a2d_mpi.core.wire`.  q, k, v and dout are
        rounded to it before anything else, also on a single rank, so that every rank computes
        with the same rounded tensors.  Partial results are rounded when they are sent.  lse and
        delta keep their dtype.  Default: no narrow format.
    softmax_scale : float, optional
        Default: ``1 / sqrt(headdim)``.
    logit_softcap : float, optional
        c > 0: scaled logits s become ``c tanh(s / c)``.  Default: no soft-cap.
    kernel : str
        One of `a2d_mpi.kernels.KERNELS`.  "auto" takes the fastest kernel for the arrays' device,
        the dtype and the soft-cap.
    overlap : bool
        Compute while messages travel.  False: communicate and compute in turn.  The results are
        the same bit for bit.
    slices : int or (int, int), optional
        Slices into which a rank cuts its heads, in both phases, or in the forward and in the
        backward pass; see `a2d_mpi.schedules.pipeline`.  Messages of a slice travel while other
        slices compute, and buffers shrink.  A slice has whole KV heads.  Results are the same bit
        for bit.  Default: the planner's number, and without a planner the number of
        `a2d_mpi.schedules.slices.default`; one for rings without a head axis and without overlap.
    transfers : {"auto", "device", "host"}
        Path of device arrays to MPI: directly, or through the host; see
        `a2d_mpi.comm.gpus.gpu_aware`.
    threads : int, optional
        BLAS threads of a rank's kernels on the host.  Default: the value of the first environment
        variable of `a2d_mpi.kernels.threads.VARIABLES` that is set; without one, ``grid.cores``.

    Attributes
    ----------
    tokens : (n,) int64
        Sorted global indices of this rank's shard.
    tokens_kv : (m,) int64
        Sorted global indices of this rank's keys and values; equal to `tokens` in self-attention.
    distribution : Distribution
        Owners of the tokens.  `distribution.why` says why `distribution.name` was chosen.
    config : AttentionConfig
        Sizes, shapes and dtypes.  The plan has attributes `seqlen`, `nheads`, `nheads_kv`,
        `headdim`, `headdim_v`, `dtype`, `compute_dtype`, `softmax_scale` and `logit_softcap`, too.
    layout : Layout
        Shape of the grid, order of its ranks, and slices: what `a2d_mpi.planning` takes.
    slices : (int, int)
        Slices of a rank's heads in the forward and in the backward pass.
    traffic : Traffic
        Bytes and messages since the plan was made, by phase and communicator.
    timings : dict of str to float
        Seconds of the latest call on this rank.  "forward/compute": kernels.  "forward/merge":
        merges and sums of partial results, and all copies.  "forward/wait": communication
        that was not hidden, which is the time inside MPI waits; on a GPU it is all time without
        computing or merging.  "forward/total": from the agreement on the arguments to the end.
        "backward/..." likewise.  GPU times come from CUDA events; reading them waits for the GPU.
    staged_bytes : int
        Bytes of device arrays that were copied to or from the host, because MPI is not
        CUDA-aware or `transfers` is "host".

    Raises
    ------
    ValueError
        On all ranks, with the numbers, if an argument is wrong on any rank or differs between
        ranks.
    RanksLost
        On all surviving ranks, if a rank died and MPI continues.  All calls raise it, too.  See
        `ProcessGrid.shrink`.

    Notes
    -----
    Arrays are NumPy arrays on all ranks, or CuPy arrays on all ranks.  Results are of the same
    kind.  With CuPy all work is queued on the current stream, as by CuPy's own functions; on a
    single rank a call returns before the work is done.
    """

    method = ""  # name in `a2d_mpi.schedules.method.METHODS`

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
        headdim_v: int | None = None,
        dtype: np.typing.DTypeLike = "float32",
        distribution: str | tuple[str, str] | None = None,
        wire: str | None = None,
        softmax_scale: float | None = None,
        logit_softcap: float | None = None,
        kernel: str = "auto",
        overlap: bool = True,
        slices: int | tuple[int, int] | None = None,
        transfers: str = "auto",
        threads: int | None = None,
    ) -> None:
        check_grid(grid)
        self.grid, self._plans_of_masks = grid, []
        self._compared = {"kernel": kernel, "overlap": overlap, "transfers": transfers}
        both = distribution if isinstance(distribution, tuple) else (distribution, None)
        self._asked_slices, self._asked_distributions = slices, both

        def prepare() -> None:
            self.overlap = bool(overlap)
            self.config = AttentionConfig(
                seqlen, nheads, headdim, nheads_kv, seqlen_kv=seqlen_kv, headdim_v=headdim_v,
                dtype=dtype, wire=wire, softmax_scale=softmax_scale, logit_softcap=logit_softcap,
            )  # fmt: skip
            self._state = DeviceState(kernel, self.config, transfers, overlap, grid, threads)

        self._make(mask, prepare)

    def with_mask(self, mask: Mask) -> AttentionPlan:
        """Return a plan with the same arguments and another mask, such as the documents of a step.

        Collective over ``grid.comm``, unless this plan has the mask, or keeps the plan: it keeps
        the latest `KEPT` ones that it has made.  All of them share their buffers.

        Parameters
        ----------
        mask : Mask
            The same on all ranks.

        Returns
        -------
        AttentionPlan
            What the class makes of these arguments.  If `distribution` was not given, it is chosen
            anew, and `tokens` may differ.

        Raises
        ------
        ValueError
            On all ranks, as of the class.  If ranks pass different masks of plans that are kept,
            the next call of a plan raises it.
        """
        for plan in (self, *self._plans_of_masks):
            if type(mask) is type(plan.mask) and mask == plan.mask:
                return plan
        plan = copy(self)
        plan._plans_of_masks, plan._state = [], self._state.twin()
        plan._make(mask)
        self._plans_of_masks = [*self._plans_of_masks, plan][-KEPT:]
        return plan

    def _make(self, mask: Mask, prepare: Callable[[], None] = lambda: None) -> None:
        """Write the programs for a mask, after `prepare`; collective over the ranks."""
        self.mask, self.traffic, arguments = mask, Traffic(), {}
        with self.grid.call("making", self) as call:
            with call.checks():
                prepare()
                config = self.config
                names = self._asked_distributions
                config.check_room(self.grid.comm.size)
                check_problem(self.method, mask, config, names)
                problem = problem_of(self.method, self.grid.layout, config, mask, *names)
                self._describe(problem)
                one = (METHODS[self.method].ring and self.grid.heads == 1) or not self.overlap
                chosen = slices_of(self._asked_slices, config, self.grid.layout, one)
                self.slices, self.layout = chosen, replace(self.grid.layout, slices=chosen)
                work = self.layout, problem, self.grid.comm.rank, self.overlap
                programs = {x: write(self.method, x, *work) for x in PHASES}
                if "cupy" not in sys.modules:  # a GPU's memory is not the node's
                    check_room(programs["forward"], problem, self.grid)
                self._phases = {x: CompiledPhase(y) for x, y in programs.items()}
                arguments = {
                    "method": type(self).__name__,
                    **config.arguments,
                    "mask": f"{type(mask).__name__} (digest {problem.seen.digest})",
                    "distribution": self.distribution.name,
                    "distribution of the keys": self.problem.keys.name,
                    **self._compared,
                    "slices": self.slices,
                }
            call.agree(arguments)
            self._channels = self._connected()

    def _describe(self, problem: Problem) -> None:
        """Set the attributes that need no communication."""
        self.problem, self.config, self.distribution = problem, problem.config, problem.queries
        config, rank = problem.config, self.grid.comm.rank
        self.seqlen, self.nheads, self.nheads_kv = config.seqlen, config.nheads, config.nheads_kv
        self.headdim, self.headdim_v = config.headdim, config.headdim_v
        self.softmax_scale, self.logit_softcap = config.softmax_scale, config.logit_softcap
        self.dtype, self.compute_dtype = config.dtype_of("q"), config.compute_dtype
        self.tokens = problem.queries.tokens(rank)  # (n,)
        self.tokens_kv = problem.keys.tokens(rank)  # (m,)

    def _connected(self) -> dict[str, Channel]:
        """Make the channels of all programs, by name; collective over the ranks of the grid."""
        members_of = {n: ranks for x in self._phases.values() for n, ranks in x.channels.items()}
        # Sorted, because the grid may have to make communicators: all ranks in the same order.
        return {
            name: Channel(self.grid.comm_of(name, ranks), name, self.traffic)
            for name, ranks in sorted(members_of.items(), key=lambda x: x[1])
        }

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        sink: Array | None = None,
        *,
        _recorded: bool = False,
    ) -> tuple[Array, ...]:
        """Compute ``out = softmax(softmax_scale q k^T) v`` over the visible keys.

        Parameters
        ----------
        q : (n, nheads, headdim) dtype
            Shard of this rank: row i is the token ``tokens[i]``.
        k : (m, nheads_kv, headdim) dtype
            Shard of this rank: row i is the token ``tokens_kv[i]``.
        v : (m, nheads_kv, headdim_v) dtype
            Shard of this rank, with the rows of k.
        sink : (nheads,) compute_dtype, optional
            One logit per head in the denominator of the softmax.  It acts as a key that all
            queries see and whose value is 0; -inf means no sink.  It must be the same on all
            ranks; values are not compared.

        Returns
        -------
        out : (n, nheads, headdim_v) dtype
            Shard of this rank; 0 for a masked row.
        lse : (n, nheads) float32 or wider
            Log-sum-exp of the logits and the sink, in nats; logits are scaled and soft-capped.
            A masked row has -inf, or the sink.

        Raises
        ------
        ValueError
            On all ranks, if an array has the wrong shape or dtype on any rank, or ranks disagree
            on an option.
        """
        given = {"q": q, "k": k, "v": v} | ({} if sink is None else {"sink": sink})
        return self._call("forward", given, _recorded)

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        sink: Array | None = None,
        dlse: Array | None = None,
    ) -> tuple[Array, ...]:
        """Compute the gradients of a loss with respect to q, k and v, and perhaps the sink.

        Parameters
        ----------
        dout : (n, nheads, headdim_v) dtype
            Gradient with respect to out, shard of this rank.
        q, k, v, out, lse
            Arguments and results of `forward`.
        sink : (nheads,) compute_dtype, optional
            The sink of `forward`, if its gradient is wanted.  dq, dk and dv do not need it,
            because lse includes the sink.
        dlse : (n, nheads) compute_dtype, optional
            Gradient with respect to lse, shard of this rank, if the loss depends on lse.  Either
            all ranks pass it or none.  Masked rows, where lse is -inf, are ignored.  cuDNN cannot
            take this gradient; the plain CUDA kernel then computes the call.

        Returns
        -------
        dq : (n, nheads, headdim) dtype
        dk : (m, nheads_kv, headdim) dtype
        dv : (m, nheads_kv, headdim_v) dtype
            Shards of this rank.
        dsink : (nheads,) compute_dtype
            Only with a sink: the gradient from this rank's tokens.  The caller sums it over the
            ranks of ``grid.comm``, as the gradient of any weight that all ranks have.

        Raises
        ------
        ValueError
            On all ranks, if an array has the wrong shape or dtype on any rank.
        """
        given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        optional = {"sink": sink, "dlse": dlse}
        given |= {name: x for name, x in optional.items() if x is not None}
        return self._call("backward", given)

    def scatter(self, x: Array | None, root: int = 0) -> Array:
        """Cut an array of the whole sequence on one rank into the shards of all ranks.

        Parameters
        ----------
        x : (seqlen, ...) array
            On rank `root` of ``grid.comm``, NumPy or CuPy, of any dtype.  Other ranks pass None.
        root : int
            Rank that has `x`.

        Returns
        -------
        (n, ...) array
            Shard of this rank: row i is the token ``tokens[i]``.  CuPy arrays go through the host.

        Raises
        ------
        ValueError
            On all ranks, if `x` has the wrong number of rows, or `root` is not a rank or is not
            the same on all ranks.
        """
        from a2d_mpi.comm.shards import scatter

        return scatter(self, self.distribution, x, root)

    def scatter_kv(self, x: Array | None, root: int = 0) -> Array:
        """Cut an array with a row for each key on one rank into the shards of all ranks.

        Parameters
        ----------
        x : (seqlen_kv, ...) array
            As in `scatter`.
        root : int

        Returns
        -------
        (m, ...) array
            Shard of this rank: row i is the token ``tokens_kv[i]``.

        Raises
        ------
        ValueError
            As in `scatter`.
        """
        from a2d_mpi.comm.shards import scatter

        return scatter(self, self.problem.keys, x, root)

    def gather(self, x: Array, root: int = 0) -> Array | None:
        """Join the shards of all ranks on one rank: the opposite of `scatter`.

        Parameters
        ----------
        x : (n, ...) array
            Shard of this rank, NumPy or CuPy, of any dtype.
        root : int
            Rank that gets the result.

        Returns
        -------
        (seqlen, ...) array or None
            In the order of the sequence on rank `root` of ``grid.comm``; None on other ranks.

        Raises
        ------
        ValueError
            On all ranks, if `x` has the wrong number of rows on any rank, or ranks disagree on
            `root`, the dtype or the shape of a row.
        """
        from a2d_mpi.comm.shards import gather

        return gather(self, self.distribution, x, root)

    def free(self) -> None:
        """Release the buffers, also for plans `with_mask`; later calls make them again.  Local."""
        self._state.work.clear()

    @property
    def timings(self) -> dict[str, float]:
        """See the attributes of the class."""
        return self._state.clocks.timings

    @property
    def staged_bytes(self) -> int:
        """See the attributes of the class."""
        return getattr(self._state.transport, "staged_bytes", 0)

    def recording(self) -> AbstractContextManager[list[Recorded]]:
        """Record all calls of this rank inside a ``with`` statement.  Local.

        ``with plan.recording() as calls: plan.forward(q, k, v)``.
        `a2d_mpi.checks.trace` makes a timeline of all ranks from their lists.

        Returns
        -------
        context manager of a list of Recorded
            The list holds the calls after the ``with`` statement.
        """
        from a2d_mpi.devices.recorder import recording

        return recording(self._state.clocks)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers without the kernel's, as `a2d_mpi.planning.memory` predicts."""
        return self._state.work.nbytes(apart="kernel")

    @property
    def kernel(self) -> str | None:
        """Name of the latest call's kernel; None before the first one.  See also `blocks`."""
        return getattr(self._state.kernel, "name", None)

    @property
    def kernel_why(self) -> str:
        """Reason why "auto" took no faster kernel in the latest call; empty if there is none."""
        return getattr(self._state.kernel, "why", "")

    @property
    def blocks(self) -> dict[tuple[str, str], int]:
        """Blocks that this rank has computed so far, by phase and name of the kernel.

        A block belongs to the fallback of a kernel if the fallback computed any part of it.  For
        example, the kernel "cudnn" leaves to "cupy" what cuDNN cannot compute.
        """
        kernel, blocks = self._state.kernel, self._state.blocks.copy()
        for (phase, other), n in getattr(kernel, "fallbacks", {}).items():
            blocks[phase, kernel.name] -= n
            blocks[phase, other] += n
        return dict(+blocks)  # without kernels that computed no block

    @property
    def deterministic(self) -> bool:
        """True if gradients of the latest call's kernel repeat bit for bit, as out and lse do."""
        return getattr(self._state.kernel, "deterministic", True)

    @property
    def product_dtype(self) -> np.dtype:
        """Dtype to which the latest call's kernel rounds probabilities before products."""
        return getattr(self._state.kernel, "product_dtype", self.compute_dtype)

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
            Source: `a2d_mpi.planning.cost`.
        """
        from a2d_mpi.planning import cost

        return cost.traffic(*self._work_of(rank))

    def predicted_memory(self, backward: bool = True, rank: int | None = None) -> int:
        """Predict the bytes by which the process of a rank grows.  Local.

        The growth is counted from before the arrays and the plan are made to the end of the calls.
        A kernel on the host is known, and counts, after its first call.

        Parameters
        ----------
        backward : bool
            Whether there is a backward call after the forward call.
        rank : int, optional
            A rank of ``grid.comm``.  Default: this rank.

        Returns
        -------
        int
            Bytes.  Source: `a2d_mpi.planning.memory`.
        """
        from a2d_mpi.planning import memory

        kernel = self.kernel if self.kernel in memory.KERNELS else None
        return memory.peak_memory(*self._work_of(rank), backward, kernel)

    def area(self, rank: int | None = None) -> int:
        """Count the visible (query, key) pairs that a rank computes.  Local.

        Parameters
        ----------
        rank : int, optional
            A rank of ``grid.comm``.  Default: this rank.

        Returns
        -------
        int
            Pairs of one head.  A context-parallel group has ``nheads / grid.heads`` heads.
        """
        from a2d_mpi.planning import cost

        return cost.pairs(*self._work_of(rank))

    def _work_of(self, rank: int | None) -> tuple[str, Layout, Problem, int]:
        """Return what predictions take; the default rank is this rank."""
        rank = self.grid.comm.rank if rank is None else rank
        return self.method, self.layout, self.problem, rank

    def _call(
        self, phase: str, arrays: dict[str, Array], recorded: bool = False
    ) -> tuple[Array, ...]:
        """Run one call; collective over the ranks of the grid.

        Ranks check their arrays, agree, start the channels, run the programs, and return results.
        All else here serves options.

        Parameters
        ----------
        phase : {"forward", "backward"}
        arrays : dict of str to arrays
            The caller's shards by tensor name, (n, heads, headdim); lse is (n, heads), a sink is
            (nheads,).
        recorded : bool
            Whether a backward pass can follow, the same on all ranks; `a2d_mpi.torch` says so.

        Returns
        -------
        tuple of arrays
            Results in the order of `a2d_mpi.schedules.steps.KINDS`.  The last one is the gradient
            of the sink, if there is one.

        Raises
        ------
        ValueError
            On all ranks, if an array is wrong on any rank.
        """
        state, mine = self._state, Flags()
        with self.grid.call(phase, self, state.settle) as call:
            with call.checks():
                lengths = len(self.tokens), len(self.tokens_kv)
                state.move_to(check_tensors(arrays, lengths, self.config))
                tensors, finite = state.prepared(arrays)
                mine = Flags(
                    on_host=state.device is HOST,
                    sink="sink" in arrays,
                    dlse="dlse" in arrays,
                    recorded=bool(recorded),
                    staged=state.staged,
                    not_finite=not finite,
                )
            any_rank = call.agree(flags=mine)
            state.choose_transport(any_rank.staged)
            for channel in self._channels.values():
                channel.begin_phase(phase, state.transport, call.watch)
            sink, dsink = tensors.pop("sink", None), ()
            with state.running(phase):
                if self.config.wire:
                    state.round(tensors)
                if phase == "backward":
                    dsink, sink = state.set_delta(tensors, sink), None
                if sink is not None:  # of the heads of this rank
                    sink = sink.reshape(self.grid.heads, -1)[self.grid.head]
                careful, any_delta = any_rank.not_finite, any_rank.dlse
                options = Options(careful=careful, any_delta=any_delta, sink=sink)
                results = self._phases[phase].run(state, self._channels, tensors, options)
                results = *results.values(), *dsink
            state.clocks.waits[phase] = [x for y in self._channels.values() for x in y.waits]
            return results
