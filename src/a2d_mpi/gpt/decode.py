"""Inference: prompts by a plan, then one token after the other, K/V spread over all ranks.

A decoding step has one row for each request.  All ranks compute all rows, but for attention: each
rank attends to the blocks that it keeps, and the partial results are merged where they are needed
(Helix, Bhatia et al., arXiv:2507.07120): first every rank gets its share of the heads from all
others, then all get all heads.  The bytes of a step do not depend on the length of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.documents import Documents
from a2d_mpi.devices.host import HOST
from a2d_mpi.gpt.cache import Cache, Table
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.kernels import make_kernel


class Decoder:
    """Requests on all ranks.  All calls are collective, with the same arguments.

    Parameters
    ----------
    grid : ProcessGrid
        Of the plans that compute prompts.
    weights : Parameters
        The same on all ranks; NumPy arrays.
    rooms : sequence of int
        Blocks of keys and values that each rank may keep.
    block : int
        Tokens of a block.
    method : str
        Of the plans.

    Attributes
    ----------
    table : Table
    cache : Cache
    sent : int
        Bytes that this rank has sent in decoding steps.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        weights: Parameters,
        rooms: Sequence[int],
        block: int = 16,
        method: str = "attention2d",
    ) -> None:
        self._grid, self._weights, self._method = grid, weights, method
        self._comm = grid.comm.Dup()
        if len(rooms) != self._comm.size:
            raise ValueError(f"room of {len(rooms)} ranks for {self._comm.size}")
        c, self._dtype = weights.config, weights.flat.dtype
        shape = c.layers, c.nheads_kv, c.headdim
        self.table, self.sent = Table(rooms, block), 0
        self.cache = Cache(self.table, self._comm.rank, shape, self._dtype)
        self.rank = self._comm.rank
        self._kernel = make_kernel("auto", HOST, self._dtype, c.headdim**-0.5)

    def prefill(self, prompts: Mapping[int, np.ndarray], most: Mapping[int, int]) -> np.ndarray:
        """Take in prompts, packed as documents; returns the logits after each, (requests, V).

        Parameters
        ----------
        prompts : dict of int to (n,) int64
            Tokens of each request; none is empty.
        most : dict of int to int
            Tokens that each request may have in the end, with those of its prompt.

        Raises
        ------
        ValueError
            If there is no room for all of them; then none is taken in.
        """
        for done, name in enumerate(prompts):
            try:
                self.check(name, len(prompts[name]), most[name])
                self.table.admit(name, most[name])
            except ValueError:
                for other in list(prompts)[:done]:
                    self.table.release(other)
                raise
        lengths = [len(x) for x in prompts.values()]
        cu_seqlens = np.cumsum([0, *lengths])
        packed = np.concatenate(list(prompts.values()))
        places = np.concatenate([np.arange(n) for n in lengths])
        keeping = _Keeping(self._plan(cu_seqlens))
        own = keeping.tokens
        model = GPT(self._weights, keeping, places[own])
        hidden = model.hidden(packed[own])
        self._move(prompts, keeping, places)
        keeping.plan.free()
        last = np.isin(own, cu_seqlens[1:] - 1)
        rows = dict(x for y in self._comm.allgather(list(zip(own[last], hidden[last]))) for x in y)
        return model.logits(np.stack([rows[x - 1] for x in cu_seqlens[1:]]))

    def step(self, tokens: Mapping[int, int]) -> np.ndarray:
        """Add one token to each of some requests; returns the logits after it, (requests, V)."""
        names = list(tokens)
        positions = np.array([self.table.requests[x].length for x in names])
        owners = [self.table.append(x, 1)[0] for x in names]
        model = GPT(self._weights, _Step(self, names, positions, owners), positions)
        return model.logits(model.hidden(np.array(list(tokens.values()))))

    def release(self, name: int) -> None:
        """Forget a request; its memory is free."""
        self.table.release(name)
        self.cache.release(name)

    def free(self) -> None:
        """Free the communicator.  Collective."""
        self._comm.Free()

    def check(self, name: int, prompt: int, most: int) -> None:
        """Check a request: a prompt of so many tokens, and so many in all.

        Raises
        ------
        ValueError
            If it could not be taken in even if there were no others.
        """
        if not 0 < prompt <= most <= self._weights.config.seqlen:
            raise ValueError(
                f"request {name}: a prompt of {prompt} tokens, {most} in all; the model takes "
                f"{self._weights.config.seqlen}"
            )
        if self.table.blocks(most) > self.table.total:
            raise ValueError(
                f"request {name} needs {self.table.blocks(most)} blocks of {self.table.block} "
                f"tokens; all {self._comm.size} ranks together have room for {self.table.total}"
            )

    def agreed(self, choices: Mapping[int, Callable[[], int]]) -> dict[int, int]:
        """Choices of the first rank, on all."""
        return self._comm.bcast({x: y() for x, y in choices.items()} if self.rank == 0 else None)

    def _plan(self, cu_seqlens: np.ndarray) -> AttentionPlan:
        return make_plan(
            *(self._method, self._grid, Documents(cu_seqlens, causal=True)),
            seqlen=int(cu_seqlens[-1]),
            **self._weights.config.heads,
            dtype=self._dtype,
        )

    def _move(
        self, prompts: Mapping[int, np.ndarray], keeping: _Keeping, places: np.ndarray
    ) -> None:
        """Move keys and values from the ranks that computed them to those that keep them."""
        comm, own = self._comm, keeping.tokens
        to = np.concatenate([self.table.append(x, len(y)) for x, y in prompts.items()])
        of = np.repeat(list(prompts), [len(x) for x in prompts.values()])
        shards = comm.allgather(own)
        sent = [own[to[own] == p] for p in range(comm.size)]  # tokens, by rank
        received = np.concatenate([x[to[x] == comm.rank] for x in shards])
        order = np.searchsorted(own, np.concatenate(sent))
        counts = [len(x) for x in sent], [int((to[x] == comm.rank).sum()) for x in shards]
        for layer, (k, v) in enumerate(keeping.kept):
            rows = np.stack([k, v], axis=1)[order]  # (tokens, 2, Hkv, D)
            size = int(np.prod(rows.shape[1:]))
            found = np.empty((len(received), *rows.shape[1:]), rows.dtype)
            both = ([n * size for n in x] for x in counts)
            comm.Alltoallv((rows, next(both)), (found, next(both)))
            for name in np.unique(of[received]):
                here = of[received] == name
                where = places[received[here]]
                self.cache.put(layer, int(name), where, *found[here].swapaxes(0, 1))

    def attend(self, layer: int, names: Sequence[int], q: np.ndarray) -> np.ndarray:
        """Attention of a row for each request to all its keys, (requests, H, D)."""
        out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf, q.dtype)
        for i, name in enumerate(names):
            k, v = self.cache.get(layer, name)
            if len(k):
                seen = (np.zeros(1, np.int64), np.full(1, len(k)))
                self._kernel.forward(q[[i]], k, v, (seen,), out[i : i + 1], lse[i : i + 1])
        return self._merged(out, lse)

    def _merged(self, out: np.ndarray, lse: np.ndarray) -> np.ndarray:
        """Merge the partial results of all ranks, in their order, heads shared out."""
        ranks, (b, h, d) = self._comm.size, out.shape
        if ranks == 1:
            return out
        share = -(-h // ranks)
        whole = np.zeros((b, ranks * share, d + 1), out.dtype)
        whole[:, :h, :d], whole[:, :h, d] = out, lse
        given = np.ascontiguousarray(whole.reshape(b, ranks, share, d + 1).swapaxes(0, 1))
        received = np.empty_like(given)  # (ranks, B, heads of this rank, D + 1)
        self._comm.Alltoall(given, received)
        weights = received[..., d] - received[..., d].max(axis=0)
        np.exp(weights, out=weights)  # (ranks, B, heads of this rank)
        merged = (weights[..., None] * received[..., :d]).sum(axis=0)
        merged /= weights.sum(axis=0)[..., None]
        heads = np.empty((ranks, *merged.shape), out.dtype)
        self._comm.Allgather(np.ascontiguousarray(merged), heads)
        self.sent += given.nbytes - given[0].nbytes + heads.nbytes - merged.nbytes
        return np.ascontiguousarray(heads.swapaxes(0, 1).reshape(b, ranks * share, d)[:, :h])


def step_bytes(config: GPTConfig, ranks: int, requests: int, itemsize: int) -> int:
    """Bytes that a rank sends in a decoding step, whatever the length of the context."""
    if ranks == 1:
        return 0
    share = -(-config.nheads // ranks)
    rows = (ranks - 1) * requests * share * (2 * config.headdim + 1)
    return config.layers * rows * itemsize


def sample(
    logits: np.ndarray,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: Sequence[int] = (),
) -> int:
    """Draw a token: the likeliest at temperature 0, else one of the `top_k` likeliest."""
    if temperature == 0:
        return int(np.argmax(logits))
    x = logits.astype(np.float64) / temperature
    if top_k is not None and top_k < len(x):
        x[x < np.partition(x, -top_k)[-top_k]] = -np.inf
    p = np.exp(x - x.max())
    return int(np.random.default_rng(seed).choice(len(p), p=p / p.sum()))


def serve(
    decoder: Decoder,
    prompts: Mapping[int, np.ndarray],
    new: Mapping[int, int],
    choose: Callable[[int, int, np.ndarray], int],
) -> Iterator[tuple[int, np.ndarray | ValueError]]:
    """Generate the tokens of requests, as many at once as there is room for.  Collective.

    Parameters
    ----------
    decoder : Decoder
    prompts : dict of int to (n,) int64
    new : dict of int to int
        Tokens to generate for each request, at least one.
    choose : callable
        ``choose(request, length, logits)`` is the next token, asked of the first rank.

    Yields
    ------
    Each request when it is done, with its new tokens, or with the error that refused it; those
    that there is no room for yet wait.
    """
    waiting, running, found = list(prompts), {}, {}
    while waiting or running:
        taken, claimed = {}, 0
        for name in list(waiting):
            most = len(prompts[name]) + new[name] - 1  # the last token is not looked at again
            blocks = decoder.table.blocks(most)
            if claimed + blocks > decoder.table.unclaimed and (running or taken):
                break  # in order: none overtakes another
            waiting.remove(name)
            try:
                decoder.check(name, len(prompts[name]), most)
            except ValueError as error:
                yield name, error
                continue
            taken[name], claimed = most, claimed + blocks
        logits = {}
        if running:
            logits = dict(zip(running, decoder.step(running)))
        if taken:
            after = decoder.prefill({x: prompts[x] for x in taken}, taken)
            logits |= dict(zip(taken, after))
        for name in taken:
            found[name] = []
        running = decoder.agreed(
            {x: partial(choose, x, len(found[x]), y) for x, y in logits.items()}
        )
        for name, token in list(running.items()):
            found[name].append(token)
            if len(found[name]) == new[name]:
                decoder.release(name)
                del running[name]
                yield name, np.array(found.pop(name))


class _Keeping:
    """A plan's attention that keeps the keys and values of every layer."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan, self.tokens = plan, plan.tokens
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple:
        self.kept.append((k, v))
        return self.plan.forward(q, k, v)


class _Step:
    """Attention of a decoding step, layer after layer."""

    def __init__(
        self, decoder: Decoder, names: Sequence[int], positions: np.ndarray, owners: Sequence[int]
    ) -> None:
        self._decoder, self._names, self.tokens = decoder, names, positions
        self._owners, self._layer = owners, 0

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple:
        decoder, layer = self._decoder, self._layer
        self._layer += 1
        for i, (name, owner) in enumerate(zip(self._names, self._owners)):
            if owner == decoder.rank:
                decoder.cache.put(layer, name, self.tokens[[i]], k[[i]], v[[i]])
        return decoder.attend(layer, self._names, q), None
