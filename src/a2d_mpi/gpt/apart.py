"""Decoding with attention and FFN on different ranks (Step-3, arXiv:2507.19427).

The A attention ranks hold the cache, the LayerNorms, and the projections before and after
attention.  They attend as the ranks of a `Decoder` do.  The F FFN ranks hold the MLPs and the
embeddings, which also give the logits.  Each FFN rank has some columns of the first matrix of an
MLP, the same rows of the second matrix, and some rows of the embeddings.

The requests of a step are cut into micro-batches.  In each layer, a micro-batch goes from the
attention ranks to the FFN ranks and back.  At any time one micro-batch is computed by the FFN
ranks, one travels, and one is computed by the attention ranks: a pipeline of three stages.

    attention ranks    x = x + received;  x = x + proj(attention(qkv(ln1(x))));  send ln2(x)
    FFN rank f         send out_f(gelu(fc_f(received))) to all attention ranks, which add them up

The first rows that attention ranks receive are embeddings.  The last rows that they send are the
output of the final LayerNorm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import CollectiveError, agree, errors_of
from a2d_mpi.comm.channel import Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.devices import device_of
from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt import layers
from a2d_mpi.gpt.cache import BlockTable
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.exchange import ArrayExchange
from a2d_mpi.gpt.layers import module_of
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.pipe import Line, Pipe, part_of
from a2d_mpi.gpt.steps import step_traffic
from a2d_mpi.masks.documents import positions_in

MICRO_BATCHES = 3  # one for each stage: attention, transfer, FFN
# Weights of the FFN ranks, and the axis along which these ranks divide them.
_SHARED = {"wte": 0, "wpe": 0, "fc.weight": 1, "fc.bias": 0, "out.weight": 0, "out.bias": 0}


def weights_of_rank(
    weights: Parameters, rank: int, split: tuple[int, int]
) -> tuple[np.ndarray, dict[str, tuple[int, ...]]]:
    """Return the weights that a rank holds.

    Parameters
    ----------
    weights : Parameters
        All weights.
    rank : int
        Attention ranks come first.
    split : (int, int)
        Number of attention ranks and of FFN ranks.

    Returns
    -------
    (n,) ndarray
        A flat copy.
    dict of str to tuple of int
        Shapes by name, as `Parameters` takes them.
    """
    (attention_ranks, ffn_ranks), own = split, {}
    ffn = rank - attention_ranks
    for name, weight in weights.named.items():
        axis = _SHARED.get(name if name in _SHARED else name.partition(".")[2])
        if axis is None and ffn < 0:
            own[name] = weight
        elif axis is not None and ffn >= 0:
            part = part_of(weight.shape[axis], ffn, ffn_ranks)
            own[name] = weight[:, part] if axis else weight[part]
    flat = np.concatenate([weight.reshape(-1) for weight in own.values()])
    return flat, {name: weight.shape for name, weight in own.items()}


def attention_grid(
    comm: MPI.Intracomm, split: tuple[int, int], shape: tuple[int, int, int]
) -> ProcessGrid | None:
    """Make the grid of the attention ranks; return None on FFN ranks.  Collective.

    Parameters
    ----------
    comm : Intracomm
        Attention ranks, then FFN ranks.
    split : (int, int)
        Number of attention ranks and of FFN ranks.
    shape : (int, int, int)
        Rows, columns and ranks along the head axis of the grid.

    Raises
    ------
    ValueError
        On all ranks, if the two numbers do not add up to the ranks of `comm`, one of them is 0, or
        the grid does not fit the attention ranks.
    """
    fits = min(split) >= 1 and sum(split) == comm.size
    kinds = f"{split[0]} attention ranks and {split[1]} FFN ranks"
    wrong = f"{kinds} must be the {comm.size} ranks of the job, at least one of each"
    agree(comm, None if fits else wrong)
    kind, grid = comm.Split(int(comm.rank >= split[0]), comm.rank), None
    with errors_of(comm, 0, CollectiveError):
        if comm.rank < split[0]:
            grid = ProcessGrid(kind, *shape)
    kind.Free()
    return grid


def open_apart(
    comm: MPI.Intracomm,
    grid: ProcessGrid | None,
    split: tuple[int, int],
    weights: Parameters,
    rooms: Sequence[int],
    block: int = 16,
    method: str = "attention2d",
    transfers: str = "auto",
    kernel: str = "auto",
    micro_batches: int = MICRO_BATCHES,
) -> Apart:
    """Make a `Decoder` on attention ranks and FFN ranks.  Collective.

    Parameters
    ----------
    comm : Intracomm
        Attention ranks, then FFN ranks.
    grid : ProcessGrid or None
        Result of `attention_grid`.
    split : (int, int)
        Number of attention ranks and of FFN ranks.
    weights : Parameters
        Weights of this rank; see `weights_of_rank`.
    rooms, block, method, transfers, kernel
        As of a `Decoder`.
    micro_batches : int
        Number of micro-batches of a step, at most one for each request.

    Raises
    ------
    ValueError
        On all ranks, in the same cases as a `Decoder`, or if there is no micro-batch.
    """
    good = isinstance(micro_batches, (int, np.integer)) and micro_batches >= 1
    wrong = None if good else f"micro_batches must be at least 1, got {micro_batches!r}"
    arguments = {"split": split, "room": rooms, "block": block, "micro_batches": micro_batches}
    agree(comm, wrong, arguments)
    if grid is None:
        return FFNRank(comm, split[0], weights, rooms, block, transfers, micro_batches)
    return AttentionRank(
        comm, grid, weights, rooms, block, method, transfers, kernel, micro_batches
    )


class Apart(Decoder):
    """A `Decoder` on attention ranks and FFN ranks; all calls are collective over both kinds.

    The first FFN rank has the logits.  On all other ranks they have no rows.  Errors that all
    attention ranks raise together are raised on FFN ranks, too: rank 0, an attention rank, tells.
    """

    _pipe: Pipe

    def all_or_none(self) -> AbstractContextManager[None]:
        """Return a context manager without effect: here the death of a rank ends the job."""
        return nullcontext()

    def _chooser(self) -> tuple[MPI.Intracomm, int]:
        """Return all ranks, and the first FFN rank."""
        return self._pipe.comm, self._pipe.ffn_ranks[0]

    def _no_logits(self) -> np.ndarray:
        return np.empty((0, self._weights.config.vocab))


class AttentionRank(Apart):
    """A `Decoder` on one of the attention ranks; see `open_apart`."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        grid: ProcessGrid,
        weights: Parameters,
        rooms: Sequence[int],
        block: int,
        method: str,
        transfers: str,
        kernel: str,
        micro_batches: int,
    ) -> None:
        with errors_of(comm, 0, CollectiveError):
            super().__init__(grid, weights, rooms, block, method, transfers, kernel)
        self._pipe = Pipe(comm, grid.comm.size, micro_batches, weights, self._way)

    def step(self, tokens: Mapping[int, int]) -> np.ndarray:
        """Append one token to each given request; return no logits, (0, V)."""
        names, positions, owners = self._append(tokens)
        batches, lines = zip(*self._pipe.step(len(names)))
        models = []
        for x in batches:
            attention = copy(self.attention)  # it counts the layers of its batch
            attention.begin(names[x], positions[x], owners[x])
            models.append(GPT(self._weights, attention, positions[x]))
        for line, hidden in zip(lines, self._through(models, lines)):
            line.give(hidden)
        for line in lines:
            line.end()
        return self._no_logits()

    def free(self) -> None:
        """Free the communicators.  Collective."""
        super().free()
        self._pipe.free()

    def _through(self, models: Sequence[GPT], lines: Sequence[Line]) -> Iterator[Array]:
        """Compute batch after batch, layer after layer; yield each batch's final LayerNorm."""
        rows = [0.0] * len(lines)
        for i in range(self._weights.config.layers):
            for b, (model, line) in enumerate(zip(models, lines)):
                rows[b], hidden = model.attend(i, rows[b] + line.take())
                line.give(hidden)
        for x, line in zip(rows, lines):
            yield layers.layer_norm(x + line.take(), self._weights.named, "ln_f")[0]

    def _plan(self, cu_seqlens: np.ndarray) -> AttentionPlan:
        """Make the plan of the prompts, and tell the FFN ranks which tokens this rank owns."""
        with errors_of(self._pipe.comm, 0, CollectiveError):
            plan = super()._plan(cu_seqlens)
        self._pipe.comm.allgather(plan.tokens)
        return plan

    def _hidden(self, model: GPT, tokens: Array) -> Array:
        """Return the final LayerNorm of this rank's tokens of prompts, as a batch of its own."""
        pipe, takes = self._pipe, self._weights.config.layers + 1
        line = pipe.line(pipe.prefill, [pipe.comm.rank], len(tokens), takes, pipe.comm.rank)
        (hidden,) = self._through([model], [line])
        line.end()
        return hidden

    def _logits(self, model: GPT, hidden: Array) -> np.ndarray:
        """Give the FFN ranks the last row of each prompt."""
        pipe = self._pipe
        line = pipe.line(pipe.prefill, pipe.attention_ranks, len(hidden), 0, pipe.comm.size)
        line.give(hidden)
        line.end()
        return self._no_logits()


class FFNRank(Apart):
    """A `Decoder` on one of the FFN ranks; see `open_apart`.

    It has the block table, but no grid and no cache.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        attention_ranks: int,
        weights: Parameters,
        rooms: Sequence[int],
        block: int,
        transfers: str,
        micro_batches: int,
    ) -> None:
        with errors_of(comm, 0, CollectiveError):
            pass
        self._weights, self.table, self.traffic = weights, BlockTable(rooms, block), Traffic()
        device, config = device_of(weights.flat), weights.config
        self._upload, self._download = device.upload, device.download
        way = self.traffic, device, transfers
        self._pipe = Pipe(comm, attention_ranks, micro_batches, weights, way)
        self._place = comm.rank - attention_ranks, comm.size - attention_ranks
        self._columns = part_of(config.width, *self._place)  # this rank adds the last bias here

    def prefill(self, prompts: Mapping[int, np.ndarray]) -> np.ndarray:
        """Compute prompts, with one batch for the tokens of each attention rank."""
        self._check(prompts)
        pipe, takes = self._pipe, self._weights.config.layers
        with errors_of(pipe.comm, 0, CollectiveError):
            pass
        owned = pipe.comm.allgather(None)[: len(pipe.attention_ranks)]
        for name, prompt in prompts.items():
            self.table.append(name, len(prompt))
        tokens = np.concatenate(list(prompts.values()))
        positions = positions_in(np.cumsum([0, *map(len, prompts.values())]))
        lines = [pipe.line(pipe.prefill, [a], len(x), takes, a) for a, x in enumerate(owned)]
        self._through(lines, [(tokens[x], positions[x]) for x in owned])
        for line in lines:
            line.end()
        last = pipe.line(pipe.prefill, pipe.attention_ranks, len(prompts), 1, pipe.comm.size)
        return self._logits(pipe.prefill, [last])

    def step(self, tokens: Mapping[int, int]) -> np.ndarray:
        """Append one token to each given request; return the logits after it, (requests, V)."""
        names, positions, _ = self._append(tokens)
        batches, lines = zip(*self._pipe.step(len(names)))
        new = np.array(list(tokens.values()))
        self._through(lines, [(new[x], positions[x]) for x in batches])
        return self._logits(self._pipe.decode, lines)

    def release(self, name: int) -> None:
        """Forget a request."""
        self.table.release(name)

    def free(self) -> None:
        """Free the communicators.  Collective."""
        self._pipe.free()

    def _through(self, lines: Sequence[Line], batches: Sequence[tuple]) -> None:
        """Give embeddings, then this rank's terms of the MLPs, layer after layer.

        `batches` has the tokens and positions of each batch.
        """
        for line, (tokens, positions) in zip(lines, batches):
            line.give(self._embedded(tokens, positions))
        for w in self._weights.by_layer:
            for line in lines:
                rows, _ = layers.mlp(line.take(), w)
                rows[:, self._columns] += w["out.bias"]
                line.give(rows)

    def _embedded(self, tokens: np.ndarray, positions: np.ndarray) -> Array:
        """Return the embeddings, (n, E); rows of tokens that this rank does not hold are 0."""
        config, flat = self._weights.config, self._weights.flat
        total = module_of(flat).zeros((len(tokens), config.width), flat.dtype)
        for name, rows in (("wte", tokens), ("wpe", positions)):
            if name in config.shapes:
                own = part_of(config.shapes[name][0], *self._place)
                held = np.flatnonzero((own.start <= rows) & (rows < own.stop))
                which = self._upload(rows[held] - own.start)
                total[self._upload(held)] += self._weights.named[name][which]
        return total

    def _logits(self, exchange: ArrayExchange, lines: Sequence[Line]) -> np.ndarray:
        """Compute the logits of the last rows of the lines, (n, V); the first FFN rank has them.

        Each FFN rank computes the columns of its rows of the embeddings.
        """
        own = [line.take() @ self._weights.named["wte"].T for line in lines]
        xp, ranks, vocab = module_of(own[0]), self._pipe.ffn_ranks, self._weights.config.vocab
        parts = [xp.concatenate(own)]
        if self._pipe.comm.rank != ranks[0]:
            exchange.wait(exchange.send(parts[0], ranks[0]))
            return self._no_logits()
        messages = []
        for i, rank in enumerate(ranks[1:], 1):
            columns = part_of(vocab, i, len(ranks))
            parts.append(xp.empty((len(parts[0]), columns.stop - columns.start), parts[0].dtype))
            messages += exchange.receive(parts[i], rank)
        exchange.wait(messages)
        return self._download(xp.concatenate(parts, axis=1))


def step_traffic_apart(
    config: GPTConfig,
    rank: int,
    grid: tuple[int, int],
    ffn_ranks: int,
    requests: int,
    micro_batches: int,
    itemsize: int,
) -> tuple[int, int]:
    """Return the bytes and messages that a rank sends in a decoding step.

    They do not depend on the length of the context.

    Parameters
    ----------
    config : GPTConfig
    rank : int
        Attention ranks come first.
    grid : (int, int)
        R C and U of the grid of the attention ranks.
    ffn_ranks, requests, micro_batches : int
    itemsize : int
        Bytes of an element.
    """
    attention_ranks, batches = grid[0] * grid[1], min(requests, micro_batches)
    if rank < attention_ranks:
        nbytes, messages = step_traffic(config, *grid, requests, itemsize)
        messages, elements = messages * batches, 0
        peers = len(range(rank, ffn_ranks, attention_ranks))  # FFN ranks that it gives rows
    else:
        part = part_of(config.vocab, rank - attention_ranks, ffn_ranks)
        elements = requests * (part.stop - part.start) * (rank > attention_ranks)  # logits
        nbytes, messages, peers = 0, int(elements > 0), attention_ranks
    rows = peers * (config.layers + 1)
    elements += rows * requests * config.width
    return nbytes + elements * itemsize, messages + rows * batches
