"""A KV cache of transformers whose tokens are spread over the ranks.

Keys and values stay on the rank that computed them.  All ranks keep the same table of the owner of
each token, so they need not communicate about it.  Layers with the same mask keep the same tokens:
a layer with a window or chunks keeps those that a later token can see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.masks.mask import Mask

Rows = list[np.ndarray]  # an array for each row of a batch


class Kept:
    """The tokens that this rank keeps in all layers with one mask, and their slots in the buffers.

    A buffer is (KV heads, slots, elements).  The tokens of a row of the batch have consecutive
    slots, in the order of their positions, and some free slots behind them.

    Parameters
    ----------
    mask : Mask
    rows : int
        Rows of the batch.

    Attributes
    ----------
    positions : list of (m,) int64
        Sorted positions of the kept tokens of each row.
    floors : list of int
        For each row, the position from which on no token has been dropped.
    first : list of int
        For each row, the slot of its first token.
    hidden : dict of int to (queries, m) bool tensor or None
        By row: what the queries of the present step do not see.  All layers with the mask share
        it.
    """

    def __init__(self, mask: Mask, rows: int) -> None:
        self.mask = mask
        self.positions: Rows = [np.empty(0, np.int64)] * rows
        self.floors, self.first, self._ends = [0] * rows, [0] * rows, [0] * rows
        self.hidden: dict[int, torch.Tensor | None] = {}

    def floor(self, position: int) -> int:
        """Return the first position that a token at `position`, or a later one, sees."""
        return min(int(begin[0]) for begin, _ in self.mask.visible(np.array([position])))

    def begin_plan(self, lengths: Sequence[int], totals: Sequence[int], new: Rows) -> None:
        """Begin a call of a plan: `store` returns all that new tokens see, and keeps less.

        Parameters
        ----------
        lengths, totals : sequence of int
            For each row, tokens of all ranks before and after the call.
        new : list of (n,) int64
            Positions of this rank's new tokens of each row.
        """
        self._old = self._drop(lengths)
        self.positions = [np.append(x, y) for x, y in zip(self.positions, new)]
        ends = np.cumsum([0, *map(len, self.positions)])
        whole = [slice(x, y) for x, y in zip(ends, ends[1:])]
        ends = np.cumsum([0, *map(len, new)])
        self._new = [slice(x, y) for x, y in zip(ends, ends[1:])]
        self.first = [x.start for x in whole]
        self._tails = self._drop(totals)
        self._planned = True
        self._lay_out()

    def begin_step(self, lengths: Sequence[int], new: Rows, packed: Rows) -> None:
        """Begin a step: `store` keeps all tokens that the step sees.

        Parameters
        ----------
        lengths : sequence of int
            For each row, tokens of all ranks before the step.
        new : list of (n,) int64
            Positions of the new tokens that this rank keeps of each row.
        packed : list of (n,) int64
            Their indices among all new tokens.
        """
        self._old, self._planned = self._drop(lengths), False
        self.hidden.clear()
        olds = [len(x) for x in self.positions]
        self.positions = [np.append(x, y) for x, y in zip(self.positions, new)]
        ends = [x + len(y) for x, y in zip(self.first, self.positions)]
        self._moved = any(x > y for x, y in zip(ends, self._ends))
        if self._moved:
            self._lay_out()
        places = [x + y + np.arange(len(z)) for x, y, z in zip(self.first, olds, new)]
        self._to, self._from = (torch.from_numpy(np.concatenate(x)) for x in (places, packed))
        self._used = max(x + len(y) for x, y in zip(self.first, self.positions))

    def _drop(self, lengths: Sequence[int]) -> list[slice]:
        """Drop tokens that tokens from `lengths` on do not see; return the slots of the others."""
        for row, length in enumerate(lengths):
            self.floors[row] = floor = max(self.floors[row], self.floor(length))
            dropped = int(np.searchsorted(self.positions[row], floor))
            self.positions[row] = self.positions[row][dropped:]
            self.first[row] += dropped
        return [slice(x, x + len(y)) for x, y in zip(self.first, self.positions)]

    def _lay_out(self) -> None:
        """Give each row slots for its tokens, and a sixteenth more."""
        sizes = [len(x) + len(x) // 16 + 16 for x in self.positions]
        self._ends = np.cumsum(sizes).tolist()
        self.first = [x - y for x, y in zip(self._ends, sizes)]

    def _filled(self, source: torch.Tensor, parts: list[slice]) -> torch.Tensor:
        """Return a new buffer with parts of a tensor."""
        buffer = source.new_empty(len(source), self._ends[-1], source.shape[2])
        for first, part in zip(self.first, parts):
            buffer[:, first : first + part.stop - part.start] = source[:, part]
        return buffer

    def store(self, buffer: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Store keys or values of the call's tokens.

        Parameters
        ----------
        buffer : (KV heads, slots, elements) tensor, optional
        x : (rows, KV heads, n, elements) tensor
            Of all new tokens, or in a plan's call of this rank's, packed in one row.

        Returns
        -------
        buffer : (KV heads, slots, elements) tensor
        seen : (1, KV heads, m, elements) tensor
            For the attention of the call: all slots, or in a plan's call the tokens of all rows.
        """
        x = x.transpose(0, 1).flatten(1, 2)  # (KV heads, tokens, elements)
        if self._planned:
            if buffer is not None:
                pairs = zip(self._old, self._new)
                x = torch.cat([y for a, b in pairs for y in (buffer[:, a], x[:, b])], 1)
            return self._filled(x, self._tails), x[None]
        if self._moved or buffer is None:  # perhaps this rank keeps nothing yet
            buffer = self._filled(x if buffer is None else buffer, self._old)
        to, packed = (y.to(x.device) for y in (self._to, self._from))
        buffer[:, to] = x[:, packed]
        return buffer, buffer[None, :, : self._used]

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget the tokens of each row from a position on."""
        self.positions = [x[: np.searchsorted(x, y)] for x, y in zip(self.positions, lengths)]


class SpreadLayer(CacheLayerMixin):
    """The keys and values of this rank's tokens of a layer."""

    is_croppable = True

    def __init__(self, cache: SpreadCache, mask: Mask) -> None:
        super().__init__()
        self.cache, self.mask, self.length = cache, mask, 0
        self.is_sliding = self.mask.default_distribution != "zigzag"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep those of new tokens that are for this rank; return what the call sees."""
        kept, self.is_initialized = self.cache.kept[self.mask], True
        self.length = self.cache.length
        self.keys, keys = kept.store(self.keys, key_states)
        self.values, values = kept.store(self.values, value_states)
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        n = query_length if isinstance(query_length, int) else len(query_length)  # before 5.4
        return self.length + n, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized, self.length = False, 0

    def _refuse(self, *_: Any) -> None:
        raise CollectiveError("a cache over ranks has no beams: set num_beams to 1")

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse


class SpreadCache(Cache):
    """The KV cache of a batch, spread over ranks; `ContextParallel.prefill` makes it.

    All calls have the same arguments on all ranks.

    Parameters
    ----------
    masks : sequence of Mask
        Mask of each layer.
    rank, ranks : int
        This rank, and the number of ranks.
    room : sequence of int, optional
        Most tokens that each rank may keep, of all rows together.  A new token then goes to the
        rank with the most room.  Default: new tokens go to the ranks in turn.

    Attributes
    ----------
    length : int
        Tokens of each row so far, with padding.
    owners : list of (n,) int64
        For each row, the rank that keeps each token, without padding.
    ids : (rows, length) int64
        Tokens so far, with padding.
    """

    def __init__(
        self, masks: Iterable[Mask], rank: int, ranks: int, room: Sequence[int] | None = None
    ) -> None:
        super().__init__(layers=[SpreadLayer(self, x) for x in masks])
        self.rank, self.ranks, self.room = rank, ranks, room
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.length, self.turn, self.owners = 0, 0, []
        self.kept: dict[Mask, Kept] = {}
        self.ids = np.empty((0, 0), np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of this rank."""
        buffers = (y for x in self.layers for y in (x.keys, x.values) if y is not None)
        return sum(x.numel() * x.element_size() for x in buffers)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, without padding."""
        return [len(x) for x in self.owners]

    @property
    def free(self) -> np.ndarray:
        """Tokens for which each rank has room, (ranks,); with `room` only."""
        owners = np.concatenate([np.empty(0, np.int64), *self.owners])
        return np.array(self.room) - np.bincount(owners, minlength=self.ranks)

    def begin_plan(self, ids: np.ndarray, owners: Rows) -> None:
        """Begin a call of plans, with the ids of new columns and the owner of each new token."""
        lengths, new = self._extend(ids, owners)
        for kept in self.kept.values():
            kept.begin_plan(lengths, self.lengths, new)

    def begin_step(self, ids: np.ndarray, counts: Sequence[int]) -> None:
        """Begin a step.

        Parameters
        ----------
        ids : (rows, n) int64
        counts : sequence of int
            For each row, its last tokens that are no padding.
        """
        total = sum(counts)
        if self.room is None:
            owners = (self.turn + np.arange(total)) % self.ranks
            self.turn = (self.turn + total) % self.ranks
        else:
            owners, free = np.empty(total, np.int64), self.free
            for i in range(total):
                owners[i] = free.argmax()
                free[owners[i]] -= 1
            if free.min(initial=0) < 0:
                raise CollectiveError(f"no rank has room for another token, of {self.room} tokens")
        n = ids.shape[1]
        rows = np.split(owners, np.cumsum(counts)[:-1])
        lengths, new = self._extend(ids, rows)
        places = [n * row + n - len(x) for row, x in enumerate(rows)]  # of each row's first token
        packed = [x + np.flatnonzero(y == self.rank) for x, y in zip(places, rows)]
        for kept in self.kept.values():
            kept.begin_step(lengths, new, packed)

    def _extend(self, ids: np.ndarray, owners: Rows) -> tuple[list[int], Rows]:
        """Add tokens to the table; return lengths before, and positions of this rank's tokens."""
        if not self.owners:
            self.owners = [np.empty(0, np.int64)] * len(ids)
            self.ids = ids[:, :0]
            self.kept = {x.mask: Kept(x.mask, len(ids)) for x in self.layers}
        if any(x.length not in (0, self.length) for x in self.layers):
            raise CollectiveError(
                "an earlier call with this cache was interrupted: make a new one"
            )
        lengths = self.lengths
        self.owners = [np.append(x, y) for x, y in zip(self.owners, owners)]
        self.ids = np.append(self.ids, ids, 1)
        self.length = self.ids.shape[1]
        return lengths, [x + np.flatnonzero(y == self.rank) for x, y in zip(lengths, owners)]

    def set_masks(self, masks: Iterable[Mask]) -> None:
        """Replace the masks of the layers by masks that show the same among the tokens so far."""
        masks, kept = list(masks), {}
        if all(x.mask is y for x, y in zip(self.layers, masks)):
            return
        for layer, mask in zip(self.layers, masks):
            if self.kept and mask not in kept:
                kept[mask] = deepcopy(self.kept[layer.mask])
                kept[mask].mask = mask
            layer.mask = mask
        self.kept = kept

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of each row, given as a negative number."""
        if tokens_to_remove > 0:
            raise CollectiveError(f"give crop a negative number of tokens, got {tokens_to_remove}")
        self.length = max(0, self.length + tokens_to_remove)
        lengths = [max(0, x + tokens_to_remove) for x in self.lengths]
        for kept in self.kept.values():
            for length, floor in zip(lengths, kept.floors):
                if kept.floor(length) < min(floor, length):
                    raise CollectiveError(
                        f"cannot go back to {length} tokens: a layer with a window or chunks has "
                        f"dropped the tokens before {floor}"
                    )
        for kept in self.kept.values():
            kept.crop(lengths)
        self.owners = [x[:y] for x, y in zip(self.owners, lengths)]
        self.ids = self.ids[:, : self.length]
        for x in self.layers:
            x.length = min(x.length, self.length)
