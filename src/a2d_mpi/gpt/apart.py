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
from copy import copy

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import CollectiveError, agree, errors_of
from a2d_mpi.comm.channel import Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.survival import NoFailures
from a2d_mpi.devices import device_of
from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt import layers
from a2d_mpi.gpt.cache import BlockTable, step_traffic
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.exchange import ArrayExchange, Way
from a2d_mpi.gpt.layers import module_of
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters
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


def part_of(n: int, i: int, parts: int) -> slice:
    """Return part i of n things that are cut into equal parts, up to one thing."""
    return slice(n * i // parts, n * (i + 1) // parts)


def open_apart(
    comm: MPI.Intracomm,
    grid: ProcessGrid | None,
    split: tuple[int, int],
    weights: Parameters,
    rooms: Sequence[int],
    block: int = 16,
    micro_batches: int = MICRO_BATCHES,
    **plan: str,
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
    rooms, block
        As of a `Decoder`.
    micro_batches : int
        Number of micro-batches of a step, at most one for each request.
    **plan
        `method`, `transfers` and `kernel` of a `Decoder`.

    Raises
    ------
    ValueError
        On all ranks, in the same cases as a `Decoder`, or if there is no micro-batch.
    """
    good = isinstance(micro_batches, (int, np.integer)) and micro_batches >= 1
    wrong = None if good else f"micro_batches must be at least 1, got {micro_batches!r}"
    arguments = {"split": split, "room": rooms, "block": block, "micro_batches": micro_batches}
    agree(comm, wrong, arguments)
    new: Apart | None = None
    with errors_of(comm, 0, CollectiveError):
        if grid:
            new = AttentionRank(grid, weights, rooms, block, **plan)
    new = new or FFNRank(weights, rooms, block, **plan)
    new.connect(comm, split[0], micro_batches)
    return new


class Apart(Decoder):
    """A `Decoder` on attention ranks and FFN ranks; all calls are collective over both kinds.

    The first FFN rank has the logits.  On all other ranks they have no rows.  Errors that all
    attention ranks raise together are raised on FFN ranks, too: rank 0, an attention rank, tells.

    Attributes
    ----------
    comm : Intracomm
        Attention ranks, then FFN ranks.
    attention_ranks, ffn_ranks : range
    pipe : ArrayExchange
        Exchange of all ranks, with phases "prefill" and "decode" and the channel "pipe".
    """

    def connect(self, comm: MPI.Intracomm, attention_ranks: int, micro_batches: int) -> None:
        """Connect the ranks of both kinds.  Collective over `comm`."""
        self.comm, self._micro_batches = comm, micro_batches
        self.attention_ranks = range(attention_ranks)
        self.ffn_ranks = range(attention_ranks, comm.size)
        self._chooser = comm, attention_ranks
        self._failures = NoFailures(comm, [])  # here the death of a rank ends the job
        way = self._way._replace(failures=self._failures)
        self.pipe = ArrayExchange(comm, "decode", "pipe", way)
        self._exchanges.append(self.pipe)

    def _batches(self, requests: int) -> list[tuple[slice, Line]]:
        """Cut the requests of a step into micro-batches; return each with its line."""
        number, takes = min(requests, self._micro_batches), self._weights.config.layers + 1
        batches = [part_of(requests, i, number) for i in range(number)]
        return [
            (x, Line(self, self.attention_ranks, x.stop - x.start, takes, tag))
            for tag, x in enumerate(batches)
        ]

    def _no_logits(self) -> np.ndarray:
        return np.empty((0, self._weights.config.vocab))


class Line:
    """The messages of a batch between attention ranks and FFN ranks, layer after layer.

    A rank takes and gives rows in turn.  It posts the receives of the next rows before it gives.
    Each FFN rank receives the rows from one holder; the holders share these messages out in turn.
    All holders receive the rows that come back.

    Parameters
    ----------
    whole : Apart
    holders : sequence of int
        Attention ranks that each have a copy of the rows.
    rows : int
    takes : int
        Number of calls of `take`.
    tag : int
        MPI tag of the batch.
    """

    def __init__(
        self, whole: Apart, holders: Sequence[int], rows: int, takes: int, tag: int
    ) -> None:
        givers = [holders[i % len(holders)] for i in range(len(whole.ffn_ranks))]
        if (rank := whole.comm.rank) in whole.attention_ranks:
            self._to = [x for x, giver in zip(whole.ffn_ranks, givers) if giver == rank]
            self._sources = whole.ffn_ranks
        else:
            self._to, self._sources = holders, [givers[whole.ffn_ranks.index(rank)]]
        self._weights, self._pipe, self._length = whole._weights, whole.pipe, rows
        self._takes, self._tag, self._messages = takes, tag, []
        self._expect()

    def take(self) -> Array:
        """Block until the rows of all sources have arrived; return their sum, in rank order."""
        self._pipe.wait(self._messages)
        total, *others = self._rows
        for x in others:
            total += x
        self._expect()
        return total

    def give(self, rows: Array) -> None:
        """Start to send rows, which must not change afterwards."""
        for peer in self._to:
            self._messages += self._pipe.send(rows, peer, self._tag)

    def end(self) -> None:
        """Block until all rows have been sent."""
        self._pipe.wait(self._messages)

    def _expect(self) -> None:
        self._rows = []
        if self._takes:
            self._takes -= 1
            flat = self._weights.flat
            shape = len(self._sources), self._length, self._weights.config.width
            self._rows = module_of(flat).empty(shape, flat.dtype)
            for x, source in zip(self._rows, self._sources):
                self._messages += self._pipe.receive(x, source, self._tag)


class AttentionRank(Apart):
    """A `Decoder` on one of the attention ranks; see `open_apart`."""

    def step(self, tokens: Mapping[int, int]) -> np.ndarray:
        """Append one token to each given request; return no logits, (0, V)."""
        names, positions, owners = self._append(tokens)
        batches, lines = zip(*self._batches(len(names)))
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
        with errors_of(self.comm, 0, CollectiveError):
            plan = super()._plan(cu_seqlens)
        self.comm.allgather(plan.tokens)
        return plan

    def _hidden(self, model: GPT, tokens: Array) -> Array:
        """Return the final LayerNorm of this rank's tokens of prompts, as a batch of its own."""
        self.pipe.start("prefill")
        takes, rank = self._weights.config.layers + 1, self.comm.rank
        line = Line(self, [rank], len(tokens), takes, rank)
        (hidden,) = self._through([model], [line])
        line.end()
        return hidden

    def _logits(self, model: GPT, hidden: Array) -> np.ndarray:
        """Give the FFN ranks the last row of each prompt."""
        line = Line(self, self.attention_ranks, len(hidden), 0, self.comm.size)
        line.give(hidden)
        line.end()
        self.pipe.start("decode")
        return self._no_logits()


class FFNRank(Apart):
    """A `Decoder` on one of the FFN ranks; see `open_apart`.

    It has the block table, but no grid and no cache.
    """

    def __init__(self, weights: Parameters, rooms: Sequence[int], block: int, **plan: str) -> None:
        self._weights, self.table = weights, BlockTable(rooms, block)
        device, self.traffic, self._exchanges = device_of(weights.flat), Traffic(), []
        self._upload, self._download = device.upload, device.download
        self._way = Way(self.traffic, device, plan.get("transfers", "auto"))

    def prefill(self, prompts: Mapping[int, np.ndarray]) -> np.ndarray:
        """Compute prompts, with one batch for the tokens of each attention rank."""
        self._check(prompts)
        comm, takes = self.comm, self._weights.config.layers
        with errors_of(comm, 0, CollectiveError):
            pass
        owned = comm.allgather(None)[: len(self.attention_ranks)]
        for name, prompt in prompts.items():
            self.table.append(name, len(prompt))
        tokens = np.concatenate(list(prompts.values()))
        positions = positions_in(np.cumsum([0, *map(len, prompts.values())]))
        self.pipe.start("prefill")
        lines = [Line(self, [a], len(x), takes, a) for a, x in enumerate(owned)]
        self._through(lines, [(tokens[x], positions[x]) for x in owned])
        for line in lines:
            line.end()
        logits = self._logits([Line(self, self.attention_ranks, len(prompts), 1, comm.size)])
        self.pipe.start("decode")
        return logits

    def step(self, tokens: Mapping[int, int]) -> np.ndarray:
        """Append one token to each given request; return the logits after it, (requests, V)."""
        names, positions, _ = self._append(tokens)
        batches, lines = zip(*self._batches(len(names)))
        new = np.array(list(tokens.values()))
        self._through(lines, [(new[x], positions[x]) for x in batches])
        return self._logits(lines)

    def release(self, name: int) -> None:
        """Forget a request."""
        self.table.release(name)

    def _through(self, lines: Sequence[Line], batches: Sequence[tuple]) -> None:
        """Give embeddings, then this rank's terms of the MLPs, layer after layer.

        `batches` has the tokens and positions of each batch.
        """
        for line, (tokens, positions) in zip(lines, batches):
            line.give(self._embedded(tokens, positions))
        columns = self._part(self._weights.config.width)  # this rank adds the last bias here
        for w in self._weights.by_layer:
            for line in lines:
                rows, _ = layers.mlp(line.take(), w)
                rows[:, columns] += w["out.bias"]
                line.give(rows)

    def _embedded(self, tokens: np.ndarray, positions: np.ndarray) -> Array:
        """Return the embeddings, (n, E); rows of tokens that this rank does not hold are 0."""
        config, flat = self._weights.config, self._weights.flat
        total = module_of(flat).zeros((len(tokens), config.width), flat.dtype)
        for name, rows in (("wte", tokens), ("wpe", positions)):
            if name in config.shapes:
                own = self._part(config.shapes[name][0])
                held = np.flatnonzero((own.start <= rows) & (rows < own.stop))
                which = self._upload(rows[held] - own.start)
                total[self._upload(held)] += self._weights.named[name][which]
        return total

    def _part(self, n: int) -> slice:
        """Return this rank's part of n things."""
        return part_of(n, self.ffn_ranks.index(self.comm.rank), len(self.ffn_ranks))

    def _logits(self, lines: Sequence[Line]) -> np.ndarray:
        """Compute the logits of the last rows of the lines, (n, V); the first FFN rank has them.

        Each FFN rank computes the columns of its rows of the embeddings.
        """
        own = [line.take() @ self._weights.named["wte"].T for line in lines]
        xp, ranks, vocab = module_of(own[0]), self.ffn_ranks, self._weights.config.vocab
        parts = [xp.concatenate(own)]
        if self.comm.rank != ranks[0]:
            self.pipe.wait(self.pipe.send(parts[0], ranks[0]))
            return self._no_logits()
        messages = []
        for i, rank in enumerate(ranks[1:], 1):
            columns = part_of(vocab, i, len(ranks))
            parts.append(xp.empty((len(parts[0]), columns.stop - columns.start), parts[0].dtype))
            messages += self.pipe.receive(parts[i], rank)
        self.pipe.wait(messages)
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
