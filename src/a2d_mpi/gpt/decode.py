"""Inference: a plan computes prompts, then tokens follow one by one; all ranks share the KV cache.

A decoding step has one row for each request.  Attention of the rows is divided among the ranks
(`a2d_mpi.gpt.cache`); all ranks compute everything else for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace

import numpy as np

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import Call, CollectiveError, errors_of
from a2d_mpi.comm.channel import Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.sizes import misfit
from a2d_mpi.devices import device_of
from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.cache import BlockTable, Cache, SpreadAttention, heads_kv_of
from a2d_mpi.gpt.exchange import ArrayExchange, Way
from a2d_mpi.gpt.layers import module_of
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.kernels import make_kernel
from a2d_mpi.masks.documents import Documents, positions_in


class Decoder:
    """Decoding of requests.  All calls are collective and have the same arguments on all ranks.

    Parameters
    ----------
    grid : ProcessGrid
        Grid of the plans that compute prompts.  With a head axis of U ranks, rank
        ``(r C + c) U + u`` keeps share u of the heads of the KV blocks of position ``r C + c``.
    weights : Parameters
        The same on all ranks; NumPy or CuPy arrays.
    rooms : sequence of int
        KV blocks that each position of the grid may keep.
    block : int
        Tokens of a KV block.
    method, kernel : str
        Method and kernel of the plans.
    transfers : {"auto", "device", "host"}
        Path of CuPy arrays to MPI, as of a plan.

    Attributes
    ----------
    table : BlockTable
    cache : Cache
    attention : SpreadAttention
        Attention of decoding steps.
    traffic : Traffic
        Messages of this rank outside plans: phase "prefill" with channel "all", phase "decode"
        with channels "context" (the context-parallel group) and "all".

    Raises
    ------
    ValueError
        On all ranks, if the rooms do not fit the grid, the grid does not fit the heads, or an
        argument differs between ranks.  Also if the model has linear layers, or the kernel does
        not take its arrays.  `prefill` and `step` raise it, too, before anything changes, if a
        request or a token is wrong.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        weights: Parameters,
        rooms: Sequence[int],
        block: int = 16,
        method: str = "attention2d",
        transfers: str = "auto",
        kernel: str = "auto",
    ) -> None:
        self._grid, self._weights, self._method = grid, weights, method
        # All ranks and the first one that has the logits; and what to do if a rank dies.
        self._chooser, self._failures = (grid.comm, 0), grid.failures
        self._options, c = {"transfers": transfers, "kernel": kernel}, weights.config
        ranks, call = grid.group_comm.size, Call(grid.comm)
        with call.checks():
            if c.hybrid:
                raise ValueError(
                    f"cannot decode with linear layers, got layer_pattern {c.layer_pattern}"
                )
            if len(rooms) != ranks:
                raise ValueError(
                    f"room must be a number for each of the {ranks} positions, got {list(rooms)}"
                )
            if why := misfit(c.nheads, c.nheads_kv, grid.heads):
                raise ValueError(f"a head axis of {grid.heads} ranks: {why}")
            self.table, device = BlockTable(rooms, block), device_of(weights.flat)
            # Plans make their kernels late, in the middle of a prompt.
            make_kernel(kernel, device, weights.flat.dtype, c.headdim**-0.5)
        call.agree({"room": rooms, "block": block, "method": method, **self._options})
        shape = c.layers, heads_kv_of(c, grid.heads, 0).stop, c.headdim
        self.cache = Cache(self.table, grid.group_comm.rank, shape, weights.flat)
        self._upload, self._download = device.upload, device.download
        self.traffic = Traffic()
        self._way = Way(self.traffic, device, transfers, grid.failures)
        comms = {"context": grid.group_comm, "all": grid.comm}
        self._exchanges = [ArrayExchange(x, "decode", y, self._way) for y, x in comms.items()]
        self.attention = SpreadAttention(grid, c, self.cache, self._exchanges)

    def admit(self, name: int, prompt: int, max_tokens: int) -> bool:
        """Reserve room in the cache for a request.

        Parameters
        ----------
        name : int
        prompt : int
            Tokens of the prompt.
        max_tokens : int
            Tokens that the request may have in the end, including the prompt.

        Returns
        -------
        bool
            False if too little room is free now.

        Raises
        ------
        ValueError
            If the request has more tokens than the model or the whole cache can take.
        """
        longest = self._weights.config.seqlen
        if not 0 < prompt <= max_tokens <= longest:
            raise ValueError(
                f"request {name} has a prompt of {prompt} tokens and {max_tokens} tokens in all; "
                f"the model takes prompts of at least 1 and at most {longest} in all"
            )
        return self.table.admit(name, max_tokens)

    def prefill(self, prompts: Mapping[int, np.ndarray]) -> np.ndarray:
        """Compute prompts, which are packed as documents.  Collective.

        Parameters
        ----------
        prompts : dict of int to (n,) int64
            Tokens of each admitted request.

        Returns
        -------
        (requests, V) array
            Logits after the last token of each prompt, in the order of `prompts`.
        """
        self._check(prompts)
        cu_seqlens = np.cumsum([0, *map(len, prompts.values())])
        packed, plan = np.concatenate(list(prompts.values())), self._plan(cu_seqlens)
        own, kept = plan.tokens, []  # `kept`: keys and values by layer

        def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            kept.append((k, v))
            return plan.forward(q, k, v)

        keeping = SimpleNamespace(tokens=own, forward=forward)
        model = GPT(self._weights, keeping, positions_in(cu_seqlens)[own])
        hidden = self._hidden(model, self._upload(packed[own]))
        self._move(prompts, own, kept)
        plan.free()
        last = np.flatnonzero(np.isin(own, cu_seqlens[1:] - 1))
        own_rows = self._download(hidden[self._upload(last)])
        gathered = self._grid.comm.allgather(list(zip(own[last], own_rows)))
        rows = dict(row for of_rank in gathered for row in of_rank)
        return self._logits(model, self._upload(np.stack([rows[x - 1] for x in cu_seqlens[1:]])))

    def step(self, tokens: Mapping[int, int]) -> np.ndarray:
        """Append one token to each of some requests.  Collective.

        Parameters
        ----------
        tokens : dict of int to int
            The token of each request.

        Returns
        -------
        (requests, V) array
            Logits after the token of each request, in the order of `tokens`.
        """
        names, positions, owners = self._append(tokens)
        self.attention.begin(names, positions, owners)
        model = GPT(self._weights, self.attention, positions)
        return self._logits(model, model.hidden(self._upload(np.array(list(tokens.values())))))

    def release(self, name: int) -> None:
        """Forget the request `name`, and free its memory."""
        self.table.release(name)
        self.cache.release(name)

    def free(self) -> None:
        """Free the communicators.  Collective, also after a loss."""
        while self._exchanges:
            self._exchanges.pop().free()

    def all_or_none(self) -> AbstractContextManager[None]:
        """Return a context manager that raises `RanksLost` on all ranks that are left.

        It does so at the end of the ``with`` statement, if a rank died in it.
        """
        return self._failures.all_or_none()

    def decide(self, choose: Callable[[], dict[int, int]]) -> dict[int, int]:
        """Return on all ranks what `choose` returns on the first rank that has the logits."""
        comm, root = self._chooser
        with errors_of(comm, root):
            chosen = choose() if comm.rank == root else None
        return comm.bcast(chosen, root)

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes and messages that this rank has sent in decoding steps; see `step_traffic`."""
        kinds = self.traffic.bytes, self.traffic.messages
        return tuple(sum(x[key][0] for key in x if key[0] == "decode") for x in kinds)

    def _append(self, tokens: Mapping[int, int]) -> tuple[list[int], np.ndarray, list[int]]:
        """Add one token to each request of the table; return requests, positions and owners."""
        self._check({name: [token] for name, token in tokens.items()})
        names = list(tokens)
        positions = np.array([self.table.requests[x].length for x in names])
        return names, positions, [self.table.append(x, 1)[0] for x in names]

    def _check(self, new: Mapping[int, Sequence[int] | np.ndarray]) -> None:
        """Refuse tokens of requests, before anything changes.

        All ranks have the same arguments and the same table, so all ranks raise the same error.
        """
        vocab = self._weights.config.vocab
        if not new:
            raise CollectiveError("there are no requests")
        for name, tokens in new.items():
            request = self.table.requests.get(name)
            if request is None:
                raise CollectiveError(f"request {name} was not admitted")
            room = request.max_tokens - request.length
            if not 0 < len(tokens) <= room:
                raise CollectiveError(
                    f"request {name} has room for {room} more tokens, got {len(tokens)}"
                )
            given = np.asarray(tokens)
            if len(wrong := given[(given < 0) | (given >= vocab)]):
                raise CollectiveError(
                    f"request {name}: tokens must be from 0 to {vocab - 1}, got {wrong[0]}"
                )

    def _plan(self, cu_seqlens: np.ndarray) -> AttentionPlan:
        """Make a plan for prompts that are packed as documents."""
        mask, c = Documents(cu_seqlens, causal=True), self._weights.config
        sizes = {"seqlen": int(cu_seqlens[-1]), "dtype": self._weights.flat.dtype, **c.heads}
        return make_plan(self._method, self._grid, mask, **sizes, **self._options)

    def _hidden(self, model: GPT, tokens: Array) -> Array:
        """Return the output of the last layer for this rank's tokens of prompts."""
        return model.hidden(tokens)

    def _logits(self, model: GPT, hidden: Array) -> np.ndarray:
        return self._download(model.logits(hidden))

    def _move(self, prompts: Mapping[int, np.ndarray], own: np.ndarray, kept: list) -> None:
        """Move keys and values from the ranks that computed them to the ranks that keep them."""
        config, comm, everyone = self._weights.config, self._grid.comm, self._exchanges[1]
        heads = [heads_kv_of(config, self._grid.heads, u) for u in range(self._grid.heads)]
        to = np.concatenate([self.table.append(x, len(y)) for x, y in prompts.items()])
        held = (self.table.requests[x].held[self.cache.rank] for x in prompts)
        ends = np.cumsum([0, *held]).tolist()
        sent = [np.flatnonzero(to[own] == p) for p in range(len(self.table.free))]
        sent = [self._upload(x) for x in sent for _ in heads]  # rows for each rank
        coming = [x[to[x] == self.cache.rank] for x in comm.allgather(own)]
        order = self._upload(np.argsort(np.concatenate(coming)))
        everyone.start("prefill")
        for layer, both in enumerate(kept):
            xp, shape = module_of(both[0]), (heads[0].stop, config.headdim)
            given = [
                xp.stack([x[rows][:, heads[p % len(heads)]] for x in both])
                for p, rows in enumerate(sent)
            ]  # (2, tokens, heads that are kept there, D)
            received = [xp.empty((2, len(x), *shape), both[0].dtype) for x in coming]
            everyone.wait(everyone.all_to_all(given, received))
            k, v = xp.concatenate(received, axis=1)[:, order]  # by request and position
            for name, begin, end in zip(prompts, ends, ends[1:]):
                if begin < end:
                    self.cache.put(layer, name, k[begin:end], v[begin:end])
        everyone.start("decode")
