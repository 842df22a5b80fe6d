"""Calls of a plan: the check of the tensors, the meeting of all ranks, the run of a phase."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from a2d_mpi.attention.engine import Engine
from a2d_mpi.attention.executor import Executor
from a2d_mpi.comm.channel import Channel, Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.rendezvous import Call
from a2d_mpi.core.config import OF_KEYS, AttentionConfig
from a2d_mpi.devices import device_of
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array


class Calls:
    """Calls of one plan on this rank, one after the other.

    Parameters
    ----------
    name : str
        Of the plan's class.
    number : int
        Of the plan among those of the grid.
    grid : ProcessGrid
    config : AttentionConfig
    tokens, tokens_kv : int
        n, m: tokens of this rank's shards of queries and of keys.
    engine : Engine
    executors : mapping of str to list of Executor
        By phase; those of a phase are run one after the other.
    traffic : Traffic
        Counts all messages.
    check_finite : bool
        Refuse NaN and infinite elements.
    """

    def __init__(
        self,
        name: str,
        number: int,
        grid: ProcessGrid,
        config: AttentionConfig,
        tokens: int,
        tokens_kv: int,
        engine: Engine,
        executors: Mapping[str, list[Executor]],
        traffic: Traffic,
        check_finite: bool,
    ) -> None:
        self._name, self.number, self._made = name, number, 0
        self._grid, self._config, self._tokens = grid, config, (tokens, tokens_kv)
        self._engine, self._executors = engine, executors
        self._broken, self._check_finite = False, check_finite
        self._traffic, self._channels = traffic, {}

    def connect(self) -> None:
        """Get the communicators of all channels; collective over the ranks of the grid."""
        described = [x.channels for x in chain.from_iterable(self._executors.values())]
        channels = {name: ranks for found in described for name, ranks in found.items()}
        # In an order that is the same on all ranks: the grid may have to make communicators.
        for name, ranks in sorted(channels.items(), key=lambda x: x[1]):
            self._channels[name] = Channel(self._grid.comm_of(name, ranks), name, self._traffic)

    def run(
        self, phase: str, arrays: dict[str, Array], sink: Array | None = None
    ) -> tuple[Array, ...]:
        """Run one call; collective over the ranks of the grid.

        Parameters
        ----------
        phase : {"forward", "backward"}
        arrays : dict of str to arrays
            The caller's shards by tensor name, (n, heads, headdim), of lse (n, heads).
        sink : (nheads,) array, optional

        Returns
        -------
        tuple of arrays
            Results as the caller gets them, in the order of `a2d_mpi.schedules.steps.KINDS`, and
            in the backward pass the gradient of a sink.

        Raises
        ------
        ValueError
            On all ranks, if an array is wrong on any of them.
        """
        engine, rendezvous = self._engine, self._grid.rendezvous
        with rendezvous.turn() as problem:
            tensors, finite = {}, True
            try:
                tensors, finite = self._checked(arrays)
                sink = self._checked_sink(sink)
            except Exception as error:  # of any kind: the other ranks must hear of it
                problem = problem or str(error) or type(error).__name__
            call = Call(phase, self.number, self._made + 1, self._name)
            engine.connect(rendezvous, call, problem, finite, sink is not None)
            self._made += 1
            for channel in self._channels.values():
                channel.start(phase, engine.transport, rendezvous.watch)
            self._broken = True  # messages are under way until the end
            with engine.transport.progressing(self._grid.comm), engine.running(phase):
                results = self._computed(phase, tensors, sink)
            self._broken = False
            engine.waits[phase] = [
                wait for channel in self._channels.values() for wait in channel.waits
            ]
            return results

    def free(self) -> None:
        """Release the buffers."""
        self._engine.work.clear()
        for executor in chain.from_iterable(self._executors.values()):
            executor.free()

    def _computed(
        self, phase: str, tensors: dict[str, Array], sink: Array | None
    ) -> tuple[Array, ...]:
        """Results of a phase, in arrays of their own and in the caller's dtypes."""
        engine, executors, more = self._engine, self._executors[phase], ()
        # The last executor but an exchange of heads: its out is yet to be rounded.
        attends = [x for x in executors if "head" not in x.channels][-1]
        if phase == "backward":
            with engine.clock("compute"):  # delta: (n, nheads)
                tensors["delta"] = engine.device.delta(tensors["dout"], tensors.pop("out"))
                if sink is not None:
                    more = (engine.device.sink_gradient(tensors["lse"], tensors["delta"], sink),)
        for executor in executors:
            sinks = sink is not None and phase == "forward" and executor is attends
            tensors = executor.run(engine, self._channels, tensors, accumulated=sinks)
            if sinks:
                with engine.clock("merge"):
                    engine.device.add_sink(*tensors.values(), self._own_heads(sink))
        for name, x in tensors.items():
            dtype = self._config.dtype_of(name)
            if x.dtype != dtype or executors[-1].in_buffers:
                tensors[name] = engine.device.empty(x.shape, dtype)  # (n, heads, headdim)
                with engine.clock("merge"):
                    engine.device.put(tensors[name], x)
        return *tensors.values(), *more

    def _own_heads(self, sink: Array) -> Array:
        """The part of a sink that belongs to this rank's context group."""
        n = len(sink) // self._grid.heads
        return sink[self._grid.head * n :][:n]

    def _checked_sink(self, sink: Array | None) -> Array | None:
        """The sink, C-contiguous; after the arrays, whose device it must be on."""
        if sink is None:
            return None
        try:
            device_of(sink)
        except TypeError as error:
            raise ValueError(f"sink {error}") from None
        shape, dtype = (self._config.nheads,), self._config.compute_dtype
        if sink.shape != shape or sink.dtype != dtype:
            raise ValueError(
                f"sink has shape {sink.shape} and dtype {sink.dtype}, "
                f"this plan needs {shape} and {dtype}"
            )
        device = self._engine.device
        if not device.owns(sink):
            raise ValueError("sink is not on the device of q, k and v")
        sink = device.contiguous(sink)
        if self._check_finite and not device.finite(sink, lowest=True):
            raise ValueError("sink: NaN or infinite elements (check_finite)")
        return sink

    def _checked(self, arrays: dict[str, Array]) -> tuple[dict[str, Array], bool]:
        """The arrays, C-contiguous, and whether no element is known to be NaN or infinite."""
        devices, engine = [], self._engine
        if self._broken:
            raise ValueError("an earlier call was interrupted: make a new grid and a new plan")
        for name, x in arrays.items():
            tokens, dtype = self._tokens[name in OF_KEYS], self._config.dtype_of(name)
            shape = tokens, *self._config.shape(name)
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
            return found, True  # the check would wait for the GPU
        # A query that sees no key has lse -inf.
        bad = [x for x, y in found.items() if not engine.device.finite(y, lowest=x == "lse")]
        if bad and self._check_finite:
            raise ValueError(f"{', '.join(bad)}: NaN or infinite elements (check_finite)")
        return found, not bad
