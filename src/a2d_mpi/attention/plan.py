"""What all distributed attention algorithms share: a checked, reusable plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.engine import Engine
from a2d_mpi.attention.executor import Executor, executors
from a2d_mpi.comm.channel import Channel, Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.rendezvous import Call
from a2d_mpi.comm.threads import BlasThreads
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.dtypes import as_dtype, compute_dtype
from a2d_mpi.core.masks import Mask
from a2d_mpi.core.sizes import LARGEST, Layout, Problem, check_room, check_sizes, misfit
from a2d_mpi.devices import device_of
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array
from a2d_mpi.planning import cost
from a2d_mpi.schedules import METHODS
from a2d_mpi.schedules.accounts import tensor_shape
from a2d_mpi.schedules.steps import WIDE


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
        Heads of k and v, a divisor of nheads; query head h reads KV head
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
        One of `a2d_mpi.kernels.KERNELS`; "auto": the fastest for the arrays' device and the dtype.
    overlap : bool or str
        Compute while messages travel.  False: phase by phase, with the same results bit for bit.
        One of `a2d_mpi.comm.transport.PROGRESS` says who calls MPI meanwhile; True is the first of
        them, the best here (`drivers/bench_overlap.py`).
    transfers : {"auto", "device", "host"}
        How device arrays get to MPI: as they are, or through the host; see
        `a2d_mpi.comm.gpus.gpu_aware`.
    threads : int, optional
        BLAS threads of a rank's kernels on the host.  Default: what one of the environment
        variables `a2d_mpi.comm.threads.VARIABLES` says; if none is set, as many as ``grid.cores``.
    check_finite : bool
        Refuse NaN and infinite elements (on a GPU, by a copy to the host).  Otherwise they reach
        the results of the queries and keys that see them: on the host only these, on a GPU also
        others of the same block of a kernel.

    Attributes
    ----------
    tokens : (n,) int64
        Sorted global indices of the tokens that this rank owns.
    traffic : Traffic
        Bytes and messages since the plan was made, by phase and communicator.
    timings : dict of str to float
        Seconds of the latest call on this rank: "forward/compute" (kernels), "forward/merge"
        (merges and sums of partial results, sorting of keys), "forward/wait" (the communication
        that nothing hid: inside MPI waits; on a GPU, neither computing nor merging),
        "forward/total" (all from the moment when the ranks have agreed on the arguments);
        "backward/..." likewise.  On a GPU by CUDA events; looking at them waits for the GPU.
    staged_bytes : int
        Bytes of device arrays that were copied to or from the host, for want of CUDA-aware MPI.

    Notes
    -----
    Arrays are NumPy arrays on all ranks, or CuPy arrays on all ranks; results are of the same
    kind.  With CuPy everything is queued on the current stream, as with CuPy's own functions; a
    call of a single rank returns before it is done.

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
        dtype: np.typing.DTypeLike = "float32",
        distribution: str | None = None,
        softmax_scale: float | None = None,
        kernel: str = "auto",
        overlap: bool | str = True,
        transfers: str = "auto",
        threads: int | None = None,
        check_finite: bool = False,
    ) -> None:
        self.grid, self.mask, self.overlap = grid, mask, bool(overlap)
        self.traffic = Traffic()
        self._broken, self._check_finite = False, check_finite
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
            "overlap": overlap,
            "transfers": transfers,
        }
        with grid.rendezvous.turn() as problem:
            try:
                self._prepare(config, threads)
            except Exception as error:  # whatever it is, the other ranks must hear of it
                problem = problem or str(error) or type(error).__name__
            number = grid.rendezvous.plans + 1
            grid.rendezvous.meet(Call("making", number, 0, type(self).__name__))
            grid.rendezvous.agree(problem, config)
            grid.rendezvous.plans = self._number = number
        self._calls = 0

    def _prepare(self, config: dict, threads: int | None) -> None:
        """Check the arguments and do what needs no communication; completes `config`."""
        grid, mask = self.grid, self.mask
        if not isinstance(mask, Mask):
            raise ValueError(f"mask must be a Mask, got {mask!r}")
        sizes = {name: config[name] for name in LARGEST}
        check_sizes(**sizes)
        self.seqlen, self.nheads, self.nheads_kv, self.headdim = (int(x) for x in sizes.values())
        self.dtype = config["dtype"] = as_dtype(config["dtype"])
        self.compute_dtype = compute_dtype(self.dtype)
        check_room(
            *(self.seqlen, self.nheads, self.nheads_kv, self.headdim, self.dtype.itemsize),
            grid.comm.size,
        )
        mask.check(self.seqlen)
        why = misfit(self.nheads, self.nheads_kv, grid.heads)
        if why:
            raise ValueError(f"a head axis of {grid.heads} ranks: {why}")
        if threads is not None and (not isinstance(threads, (int, np.integer)) or threads < 1):
            raise ValueError(f"threads must be a positive integer, got {threads!r}")
        only = METHODS[self.method].distribution
        name = config["distribution"] or only or mask.default_distribution
        if only and name != only:
            raise ValueError(f"a {self.method} has no {name} distribution")
        self.distribution = Distribution(name, self.seqlen, grid.comm.size, grid.heads)
        config["distribution"] = self.distribution.name
        scale = config["softmax_scale"]
        self.softmax_scale = 1 / math.sqrt(self.headdim) if scale is None else float(scale)
        if not math.isfinite(self.softmax_scale):
            raise ValueError(f"softmax_scale must be finite, got {scale!r}")
        config["softmax_scale"] = self.softmax_scale
        overlap = config["overlap"]
        self._engine = Engine(
            config["kernel"],
            self.dtype,
            self.softmax_scale,
            config["transfers"],
            overlap if isinstance(overlap, str) else "poll" if overlap else "none",
            grid.comm if overlap and grid.comm.size > 1 else None,
            BlasThreads.of_rank(threads, grid.cores),
        )
        config["mask"] += f" (digest {mask.digest(self.seqlen)})"
        self.tokens = self.distribution.tokens(grid.comm.rank)
        self.problem = Problem(
            *(self.distribution.counts, self.nheads, self.nheads_kv, self.headdim),
            *(self.dtype.itemsize, self.compute_dtype.itemsize),
        )
        self._executors = {phase: self._chain(phase, grid.comm.rank) for phase in PHASES}
        channels = {}
        for executor in chain.from_iterable(self._executors.values()):
            channels |= executor.schedule.channels
        self._channels = {
            name: Channel(self._comm_of(name, ranks), name, self.traffic)
            for name, ranks in channels.items()
        }
        config |= self._options

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """``out = softmax(softmax_scale q k^T) v`` over the keys that the mask shows.

        Parameters
        ----------
        q : (n, nheads, headdim) dtype
            Shard of this rank: row i is the token ``tokens[i]``.
        k, v : (n, nheads_kv, headdim) dtype
            Shard of this rank.

        Returns
        -------
        out : (n, nheads, headdim) dtype
            Shard of this rank; 0 for a query that sees no key.
        lse : (n, nheads) float32 or wider
            Log-sum-exp of the scaled logits, nats; -inf for a query that sees no key.

        Raises
        ------
        ValueError
            On all ranks, if an array has the wrong shape or dtype on any of them.
        """
        with self._running("forward", q=q, k=k, v=v) as given:
            return self._run("forward", given)

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of a loss with respect to q, k and v.

        Parameters
        ----------
        dout : (n, nheads, headdim) dtype
            Gradient with respect to out, shard of this rank.
        q, k, v, out, lse
            What `forward` took and returned.

        Returns
        -------
        dq : (n, nheads, headdim) dtype
        dk, dv : (n, nheads_kv, headdim) dtype
            Shards of this rank.

        Raises
        ------
        ValueError
            On all ranks, if an array has the wrong shape or dtype on any of them.
        """
        given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        with self._running("backward", **given) as given:
            with self._engine.clock("compute"):
                given["delta"] = self._engine.device.delta(given["dout"], given.pop("out"))
            return self._run("backward", given)

    @property
    def timings(self) -> dict[str, float]:
        return self._engine.timings

    def spans(self, phase: str) -> list[tuple[str, float, float]]:
        """What this rank did when in the latest call of a phase; see `Engine.spans`."""
        return self._engine.spans(phase)

    @property
    def staged_bytes(self) -> int:
        return self._engine.staged_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that the plan keeps, but the blocks of its kernel.

        `a2d_mpi.planning.memory.buffers` predicts them.
        """
        return self._engine.work.nbytes(apart="kernel")

    @property
    def deterministic(self) -> bool:
        """Whether gradients of the latest call's kernel repeat bit for bit; out and lse do."""
        return getattr(self._engine.kernel, "deterministic", True)

    @property
    def product_dtype(self) -> np.dtype:
        """What the kernel of the latest call rounds probabilities to before it multiplies them."""
        return getattr(self._engine.kernel, "product_dtype", self.compute_dtype)

    def predicted_traffic(self, rank: int | None = None) -> dict[tuple[str, str], list[int]]:
        """What one forward and one backward call of `rank` send and receive.

        By `a2d_mpi.planning.cost`.  Same keys and values as ``traffic.bytes``.
        """
        rank = self.grid.comm.rank if rank is None else rank
        return cost.traffic(self.method, self.layout, self.problem, rank)

    @property
    def layout(self) -> Layout:
        """The grid as `a2d_mpi.planning.cost` knows it."""
        return self.grid.layout

    def area(self, rank: int | None = None) -> int:
        """Visible (query, key) pairs that `rank` (default: this one) computes.

        For each of the heads of its context group: ``nheads / grid.heads``.
        """
        rank = self.grid.comm.rank if rank is None else rank
        return sum(executor.area() for executor in self._chain("forward", rank))

    def free(self) -> None:
        """Release the buffers.  The grid stays.  Local."""
        self._engine.work.clear()
        for executor in chain.from_iterable(self._executors.values()):
            executor.free()

    @property
    def _options(self) -> dict[str, object]:
        """Arguments of this method alone; ranks must agree on them too."""
        return {}

    def _chain(self, phase: str, rank: int) -> list[Executor]:
        """Executors of all that a rank does in a phase, one after the other."""
        return executors(
            *(self.method, phase, self.layout, self.problem, rank, self.overlap),
            *(self.distribution.name, self.mask),
        )

    def _comm_of(self, name: str, ranks: tuple[int, ...]) -> MPI.Intracomm:
        """The communicator of these ranks, in this order."""
        grid = self.grid
        if name == "head":
            return grid.head_comm
        known = {tuple(range(grid.group_comm.size)): grid.group_comm}
        known[tuple(grid.row * grid.cols + c for c in range(grid.cols))] = grid.row_comm
        known[tuple(r * grid.cols + grid.col for r in range(grid.rows))] = grid.col_comm
        return known[ranks]

    def _run(self, phase: str, tensors: dict[str, Array]) -> tuple[Array, ...]:
        """Results of a phase as the caller gets them, in the order of `KINDS`."""
        engine, executors = self._engine, self._executors[phase]
        for executor in executors:
            tensors = executor.run(engine, self._channels, tensors)
        for name, x in tensors.items():
            dtype = self.compute_dtype if name == "lse" else self.dtype
            if x.dtype != dtype or executors[-1].in_buffers:
                tensors[name] = engine.device.empty(x.shape, dtype)
                with engine.clock("merge"):
                    engine.device.put(tensors[name], x)
        return tuple(tensors.values())

    def _checked(self, arrays: dict[str, Array]) -> tuple[dict[str, Array], bool]:
        """The arrays, C-contiguous, and whether no element is known to be NaN or infinite."""
        devices, engine = [], self._engine
        if self._broken:
            raise ValueError("an earlier call was interrupted: make a new grid and a new plan")
        for name, x in arrays.items():
            shape = len(self.tokens), *tensor_shape(self.problem, name)
            dtype = self.compute_dtype if name in WIDE else self.dtype
            try:
                devices.append(device_of(x))
            except TypeError as error:
                raise ValueError(f"{name} {error}") from None
            if x.shape != shape or x.dtype != dtype:
                raise ValueError(
                    f"{name} has shape {x.shape} and dtype {x.dtype}, "
                    f"this shard needs {shape} and {dtype}"
                )
            if not devices[0].owns(x):
                raise ValueError(f"{name} is not on the device that is current")
        engine.move_to(devices[0])
        found = {name: engine.device.contiguous(x) for name, x in arrays.items()}
        if not self._check_finite and engine.device is not HOST:
            return found, True  # looking would wait for the GPU
        # A query that sees no key has lse -inf.
        bad = [x for x, y in found.items() if not engine.device.finite(y, lowest=x == "lse")]
        if bad and self._check_finite:
            raise ValueError(f"{', '.join(bad)}: NaN or infinite elements (check_finite)")
        return found, not bad

    @contextmanager
    def _running(self, phase: str, **arrays: Array) -> Iterator[dict[str, Array]]:
        """A phase of all ranks, from their meeting on; ValueError on all if any has a problem."""
        engine, rendezvous = self._engine, self.grid.rendezvous
        with rendezvous.turn() as problem:
            tensors, finite = {}, True
            try:
                tensors, finite = self._checked(arrays)
            except Exception as error:  # whatever it is, the other ranks must hear of it
                problem = problem or str(error) or type(error).__name__
            call = Call(phase, self._number, self._calls + 1, type(self).__name__)
            engine.connect(rendezvous, call, problem, finite)
            self._calls += 1
            for channel in self._channels.values():
                channel.start(phase, engine.transport, rendezvous.watch)
            self._broken = True  # messages are under way until the end
            with engine.transport.progressing(self.grid.comm), engine.running(phase):
                yield tensors
            self._broken = False
            engine.waits[phase] = [
                wait for channel in self._channels.values() for wait in channel.waits
            ]
