"""A KV cache of transformers whose tokens are spread over the ranks.

Keys and values stay on the rank that computed them.  All ranks keep the same table of the owner of
each token, so they need not communicate about it.  Layers with the same mask keep the same tokens:
a layer with a window or chunks keeps those that a later token can see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

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
    seen : list of (int, int, (n, m) bool tensor or None)
        In a step: for each row its first slot, its m tokens, and which of them its n queries do
        not see, if there are any.  All layers with the mask share it.
    """

    def __init__(self, mask: Mask, rows: int) -> None:
        self.mask = mask
        self.positions: Rows = [np.empty(0, np.int64)] * rows
        self.floors, self.first = [0] * rows, [0] * rows
        self._free = [-1] * rows  # slots behind the tokens; -1: there is no buffer yet
        self.seen: list[tuple[int, int, torch.Tensor | None]] = []

    def floor(self, position: int) -> int:
        """Return the first position that a token at `position`, or a later one, sees."""
        return min(int(begin[0]) for begin, _ in self.mask.visible(np.array([position])))

    def begin(
        self, old: Sequence[int], new: Rows, sources: list, total: Sequence[int] | None
    ) -> None:
        """Begin a call: drop what it does not see, and find slots for its tokens.

        Parameters
        ----------
        old : sequence of int
            For each row, tokens of all ranks before the call.
        new : list of (n,) int64
            Positions of the new tokens that this rank keeps of each row.
        sources : list of slice or (n,) int64
            Where they are among the tokens that `store` gets.
        total : sequence of int, optional
            In a call of plans: for each row, tokens of all ranks after the call.  What later
            tokens do not see is then dropped at once.
        """
        slots = self._drop(old)
        self.positions = [np.append(x, y) for x, y in zip(self.positions, new)]
        self._free = [x - len(y) for x, y in zip(self._free, new)]
        self._parts, self._tails = None, None
        if total is None and min(self._free) >= 0:
            places = [x.stop + np.arange(len(y)) for x, y in zip(slots, new)]
            self._to, self._from = (torch.from_numpy(np.concatenate(x)) for x in (places, sources))
            return
        self._parts = [*zip(slots, sources)]
        if total is not None:
            self._place([0] * len(old))
            self._tails = self._drop(total)
        # A sixteenth more than it needs, so that a step seldom moves a row.
        self._free = [len(x) // 16 + 16 for x in self.positions]
        self._place(self._free)

    def see(self, lengths: Sequence[int], counts: Sequence[int], n: int) -> None:
        """Note what the last n columns see, of which `counts` are no padding, in each row."""
        self.seen = []
        for first, keys, end, count in zip(self.first, self.positions, lengths, counts):
            hidden = np.ones((n, len(keys)), bool)
            for begin, stop in self.mask.visible(np.arange(end - count, end)):
                hidden[n - count :] &= (keys < begin[:, None]) | (stop[:, None] <= keys)
            hidden = torch.from_numpy(hidden) if hidden.any() else None
            self.seen.append((first, len(keys), hidden))

    def _drop(self, lengths: Sequence[int]) -> list[slice]:
        """Drop tokens that tokens from `lengths` on do not see; return the slots of the others."""
        for row, length in enumerate(lengths):
            self.floors[row] = floor = max(self.floors[row], self.floor(length))
            dropped = int(np.searchsorted(self.positions[row], floor))
            self.positions[row] = self.positions[row][dropped:]
            self.first[row] += dropped
        return [slice(x, x + len(y)) for x, y in zip(self.first, self.positions)]

    def _place(self, free: Sequence[int]) -> None:
        """Let the rows follow each other in a new buffer, with some free slots behind each."""
        sizes = [len(x) + y for x, y in zip(self.positions, free)]
        self.first = [0, *np.cumsum(sizes[:-1]).tolist()]

    def store(
        self, buffer: torch.Tensor | None, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys or values of the call's tokens.

        Parameters
        ----------
        buffer : (KV heads, slots, elements) tensor, optional
        x : (rows, KV heads, n, elements) tensor
            Of all new tokens, or in a plan's call of this rank's, packed in one row.

        Returns
        -------
        buffer : (KV heads, slots, elements) tensor
        seen : (1, KV heads, slots, elements) tensor
            For the attention of the call.
        """
        if self._parts is None and not len(self._to):
            return buffer, buffer[None]
        x = x.transpose(0, 1).flatten(1, 2)  # (KV heads, tokens, elements)
        if self._parts is None:
            buffer.index_copy_(1, self._to, x.index_select(1, self._from))
            return buffer, buffer[None]

        @torch.inference_mode(False)  # so that a later step may write into it in any mode
        def joined(rows: list[list[torch.Tensor]]) -> torch.Tensor:
            free = [x.new_empty(len(x), y, x.shape[2]) for y in self._free]
            return torch.cat([z for row, y in zip(rows, free) for z in (*row, y)], 1)

        # If there is nothing before a prefill, its attention takes what the model passes.
        whole = x[:, :0] if buffer is None else buffer
        parts = [[whole[:, old], x[:, new]] for old, new in self._parts]
        if self._tails is None:
            kept = seen = joined(parts)
        else:
            seen = x if buffer is None else torch.cat([*chain(*parts)], 1)
            kept = joined([[seen[:, y]] for y in self._tails])
        return kept, seen[None]


class SpreadLayer(DynamicLayer):
    """The keys and values of this rank's tokens of a layer.

    Attributes
    ----------
    length : int
        Tokens of all ranks in each row of the batch, with padding.
    """

    def __init__(self, cache: SpreadCache, mask: Mask) -> None:
        super().__init__()
        self.cache, self.mask, self.length = cache, mask, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep those of new tokens that are for this rank; return what the call sees."""
        kept, self.length = self.cache.kept[self.mask], self.cache.length
        self.keys, keys = kept.store(self.keys, key_states)
        self.values, values = kept.store(self.values, value_states)
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return self.length

    def reset(self) -> None:
        self.keys, self.values, self.length = None, None, 0

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
    pieces : Pieces or None
        In a call of plans: the pieces of recurrent layers.
    owners : list of (n,) int64
        For each row, the rank that keeps each token, without padding.
    ids : (rows, length) int64
        Tokens so far, with padding.
    kept : dict of Mask to Kept
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
        self.owners: Rows = []
        self.kept: dict[Mask, Kept] = {}
        self.ids, self.pieces = np.empty((0, 0), np.int64), None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and states of this rank."""
        kept = [y for x in self.layers for y in (x.keys, x.values, *getattr(x, "states", ()))]
        return sum(x.nbytes for x in kept if x is not None)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the columns for a convolution; a recurrent layer begins each call with it."""
        self.layers[layer_idx].length = self.length
        return super().get_conv_state(layer_idx, state_idx)

    @property
    def length(self) -> int:
        """Tokens of each row so far, with padding."""
        return self.ids.shape[1]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, without padding."""
        return [len(x) for x in self.owners]

    @property
    def free(self) -> np.ndarray:
        """Tokens for which each rank has room, (ranks,); with `room` only."""
        owners = np.concatenate([np.empty(0, np.int64), *self.owners])
        return np.array(self.room) - np.bincount(owners, minlength=self.ranks)

    def begin(self, ids: np.ndarray, counts: np.ndarray, owners: np.ndarray | None = None) -> None:
        """Begin a call with new columns.

        Parameters
        ----------
        ids : (rows, n) int64
        counts : (rows,) int64
            For each row, its last tokens that are no padding.
        owners : (sum of counts,) int64, optional
            In a call of plans: the rank that computes and keeps each of these tokens.  Default: of
            a step, in which all ranks compute all tokens.
        """
        self.pieces = None
        if not self.owners:
            self.owners, self.ids = [np.empty(0, np.int64)] * len(ids), ids[:, :0]
            self.kept = {x.mask: Kept(x.mask, len(ids)) for x in self.layers}
        if any(x.length not in (0, self.length) for x in self.layers):
            raise CollectiveError(
                "an earlier call with this cache was interrupted: make a new one"
            )
        old, n, planned = self.lengths, ids.shape[1], owners is not None
        owners = owners if planned else self._owners_of_step(int(counts.sum()))
        rows = np.split(owners, np.cumsum(counts)[:-1])
        own = [np.flatnonzero(x == self.rank) for x in rows]
        ends = np.cumsum([0, *map(len, own)])
        sources = [slice(x, y) for x, y in zip(ends, ends[1:])]  # this rank has its own ones only
        if not planned:
            sources = [n * row + n - len(x) + y for row, (x, y) in enumerate(zip(rows, own))]
        self.ids = np.append(self.ids, ids, 1)
        self.owners = [np.append(x, y) for x, y in zip(self.owners, rows)]
        for kept in self.kept.values():
            new = [x + y for x, y in zip(old, own)]
            kept.begin(old, new, sources, self.lengths if planned else None)
            if not planned:
                kept.see(self.lengths, counts, n)

    def check_used(self, columns: int) -> None:
        """Raise ValueError on all ranks if a call of the model did not store so many tokens."""
        if self.layers[0].length != columns:
            raise CollectiveError("the model did not use the cache: call model.eval()")

    def _owners_of_step(self, n: int) -> np.ndarray:
        """Return the ranks that keep the next n tokens: in turn, or those with the most room."""
        if self.room is None:
            return (sum(self.lengths) + np.arange(n)) % self.ranks
        owners, free = np.empty(n, np.int64), self.free
        for i in range(n):
            owners[i] = free.argmax()
            free[owners[i]] -= 1
        if free.min() < 0:
            raise CollectiveError(f"no rank has room for another token, of {self.room} tokens")
        return owners

    def set_masks(self, masks: Iterable[Mask]) -> None:
        """Replace the masks of the layers by masks that show the same among the tokens so far."""
        kept = {}
        for layer, mask in zip(self.layers, masks):
            if self.kept and mask not in kept:
                kept[mask] = self.kept[layer.mask]
                if mask != layer.mask:
                    kept[mask] = deepcopy(kept[mask])
                    kept[mask].mask = mask
            layer.mask = mask
        self.kept = kept

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of each row, given as a negative number."""
        if tokens_to_remove > 0:
            raise CollectiveError(f"give crop a negative number of tokens, got {tokens_to_remove}")
        if any(hasattr(x, "states") for x in self.layers):
            raise CollectiveError("cannot go back: recurrent layers keep their last states only")
        lengths = [max(0, x + tokens_to_remove) for x in self.lengths]
        for kept in self.kept.values():
            for length, floor in zip(lengths, kept.floors):
                if kept.floor(length) < min(floor, length):
                    raise CollectiveError(
                        f"cannot go back to {length} tokens: a layer with a window or chunks has "
                        f"dropped the tokens before {floor}"
                    )
        for kept in self.kept.values():
            kept.positions = [x[: np.searchsorted(x, y)] for x, y in zip(kept.positions, lengths)]
        self.owners = [x[:y] for x, y in zip(self.owners, lengths)]
        self.ids = self.ids[:, : max(0, self.length + tokens_to_remove)]
        for x in self.layers:
            x.length = min(x.length, self.length)
