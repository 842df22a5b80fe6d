"""The states of linear and recurrent layers in a `SpreadCache`, which all ranks have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from a2d_mpi.torch.cache import SpreadLayer

if TYPE_CHECKING:
    from a2d_mpi.masks.mask import Mask
    from a2d_mpi.torch.cache import SpreadCache


class StateLayer(LinearAttentionLayer):
    """The states behind the last token of each row, and the columns that convolutions need.

    Attributes
    ----------
    length : int
        As of `SpreadLayer`.
    """

    is_compileable, keys, values = False, None, None

    def __init__(self, cache: SpreadCache, mask: Mask, states: int = 1) -> None:
        super().__init__(number_of_states=states)
        self.cache, self.mask, self.length = cache, mask, 0

    @property
    def states(self) -> list[torch.Tensor | None]:
        """All states and columns."""
        return [*self.conv_states.values(), *self.recurrent_states.values()]

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Keep the last columns of each row; return all that a convolution needs."""
        x, k, pieces = conv_states, conv_kernel_size, self.cache.pieces
        if pieces is None:
            return super().update_conv_state(x, state_idx, conv_kernel_size=k)
        past = self.conv_states[state_idx] if self.has_previous_state[state_idx] else None
        _, rows, x = pieces.columns(x, k, past, True)
        last = torch.cat(rows)
        self.lazy_initialization(conv_states=last, state_idx=state_idx, conv_kernel_size=k)
        self.conv_states[state_idx].copy_(last)
        self.has_previous_state[state_idx] = True
        return x if past is None else torch.cat([past.transpose(0, 1).flatten(1)[None], x], -1)

    def reset(self) -> None:
        LinearAttentionLayer.__init__(self, self.number_of_states)
        self.length = 0

    reorder_cache = SpreadLayer.reorder_cache


class MixedLayer(SpreadLayer, StateLayer):
    """The keys and values of this rank's tokens, and states."""

    lazy_initialization = StateLayer.lazy_initialization

    def __init__(self, cache: SpreadCache, mask: Mask, states: int = 1) -> None:
        StateLayer.__init__(self, cache, mask, states)
        SpreadLayer.__init__(self, cache, mask)

    def reset(self) -> None:
        SpreadLayer.reset(self)
        StateLayer.reset(self)


def add_states(cache: SpreadCache, config: PreTrainedConfig) -> SpreadCache:
    """Replace layers of an empty cache, where transformers' own cache has states; return it."""
    for i, own in enumerate(DynamicCache(config=config).layers):
        if isinstance(own, LinearAttentionLayer):
            kind = MixedLayer if isinstance(own, CacheLayerMixin) else StateLayer
            cache.layers[i] = kind(cache, cache.layers[i].mask, own.number_of_states)
    return cache
