"""Attention of decoding steps to a `SpreadCache`: each rank attends to the keys that it keeps.

The partial results are merged in two exchanges (Helix, Bhatia et al., arXiv:2507.07120).  In the
first, every rank receives the partial results of its share of the rows, and merges them in the
order of ranks.  In the second, all ranks receive all merged rows.  Two ranks, or ranks of one
node, gather all partial results in one exchange instead, if they are small.  The bytes of a step
do not depend on the length of the context.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.comm.channel import Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.torch.exchange import exchange

if TYPE_CHECKING:
    from a2d_mpi.torch.cache import SpreadCache
    from a2d_mpi.torch.layers import Kind

# Most bytes that a rank of one node gathers in one exchange.  4 ranks on 2 cores: 0.5 to 0.6 of
# the time of two exchanges for 6 KB to 0.8 MB.
GATHERED = 1 << 20


class Steps:
    """Attention of decoding steps, and what ranks send for it.

    Parameters
    ----------
    grid : ProcessGrid

    Attributes
    ----------
    cache : SpreadCache
        Of the present step.
    traffic : Traffic
        Messages of this rank, of the phase "decode": channel "all" has partial results, channel
        "tokens" has the tokens that rank 0 chooses.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self.comm, self.traffic = grid.comm, Traffic()
        self.cache: SpreadCache | None = None
        self._failures, self._watch = grid.failures, grid.watch
        self._line = grid.comm_of("all", tuple(range(grid.comm.size)))
        self._near = len(set(grid.layout.nodes or range(2))) == 1
        self._key: tuple = ()  # of the buffers of partial results

    def attend(
        self,
        kind: Kind,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention of the new tokens of a step to all tokens of their rows.

        Parameters
        ----------
        kind : Kind
            Of the layer.
        tensors : (B, H, n, D), (1, Hkv, slots, D), (1, Hkv, slots, Dv) tensors
            q of the new tokens, and k and v of the slots of this rank.
        sink : (H,) tensor, optional
            A logit for each head, which counts once.

        Returns
        -------
        (B, n, H, Dv) tensor
            Rows of padding are 0.
        """
        q, k, v = tensors
        if (key := (q.shape, v.shape[-1], q.dtype)) != self._key:
            self._make(key)
        exact = nullcontext()
        if torch.is_autocast_enabled(q.device.type):
            exact = torch.autocast(q.device.type, enabled=False)
        with exact:
            seen = self.cache.kept[kind.mask].seen
            for row, x, out, lse in zip(seen, q.split(1), self._outs, self._lses):
                first, m, hidden = row
                given = x, k.narrow(2, first, m), v.narrow(2, first, m), hidden
                for to, found in zip((out, lse), _partial(kind, *given)):
                    to.copy_(found.reshape(to.shape))
                if sink is not None and self.comm.rank == 0:
                    total = torch.logaddexp(lse, sink.to(lse)[:, None])
                    out *= torch.exp(lse - total)[..., None]
                    lse.copy_(total)
        merged = torch.from_numpy(self._merged(self._parts)).to(q)
        return merged.view(*q.shape[:3], -1).transpose(1, 2).contiguous()  # as of transformers

    def _make(self, key: tuple) -> None:
        """Make the buffers of partial results, (B, H, n, Dv + 1), for shapes and a dtype."""
        (*shape, _), width, dtype = key
        parts = torch.empty(*shape, width + 1, dtype=torch.promote_types(dtype, torch.float32))
        self._outs, self._lses = parts[..., :-1].split(1), parts[..., -1].split(1)
        self._key, self._parts = key, parts.flatten(0, 2).numpy()

    def _merged(self, parts: np.ndarray) -> np.ndarray:
        """Merge partial results of all ranks, (rows, Dv + 1); return (rows, Dv) on all ranks."""
        ranks, (rows, width) = self.comm.size, parts.shape
        if ranks == 2 or (self._near and ranks * parts.nbytes <= GATHERED):
            every = np.empty((ranks, rows, width), parts.dtype)
            self._exchange("all", [parts] * ranks, every)
            return _merge(every)
        share = -(-rows // ranks)
        padded = np.zeros((ranks, share, width), parts.dtype)
        padded.reshape(-1, width)[:rows] = parts
        every = np.empty_like(padded)
        self._exchange("all", padded, every)
        merged = _merge(every)  # (share, Dv)
        joined = np.empty((ranks, share, width - 1), parts.dtype)
        self._exchange("all", [merged] * ranks, joined)
        return joined.reshape(-1, width - 1)[:rows]

    def choose(self, tokens: np.ndarray) -> np.ndarray:
        """Return on all ranks the integers of rank 0, which every rank passes as an array."""
        none, size, chooses = tokens[:0], self.comm.size, self.comm.rank == 0
        given = [none if chooses or x else tokens for x in range(size)]
        self._exchange("tokens", [tokens if chooses else none] * size, given)
        return tokens

    def _exchange(self, name: str, sent: list, received: list) -> None:
        """Send an array to each rank, and receive one from each; empty ones are not sent."""
        self._watch.doing = "decoding"
        with self._watch.waiting(f"for messages ({name})"):
            exchange(self._line, self._failures, sent, received)
        for direction, arrays in enumerate((sent, received)):
            given = [len(x) and x.nbytes for i, x in enumerate(arrays) if i != self.comm.rank]
            self.traffic.count("decode", name, direction, sum(given), np.count_nonzero(given))


class Step:
    """The attention of the layers of a kind in a step; a model uses it as a plan."""

    def __init__(self, steps: Steps, kind: Kind) -> None:
        self._steps, self._kind = steps, kind

    def attend(self, tensors: tuple, sink: torch.Tensor | None) -> torch.Tensor:
        """Compute the attention of a layer; see `Steps.attend`."""
        return self._steps.attend(self._kind, tensors, sink)

    def refuse(self, problem: str, phase: str = "forward") -> NoReturn:
        """Raise an error, on all ranks, which pass the same."""
        raise CollectiveError(problem)

    def free(self) -> None:
        """Do nothing, unlike a plan."""


def _partial(
    kind: Kind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out, (1, Hkv, H / Hkv n, Dv), and lse of q, (1, H, n, D), and k, (1, Hkv, m, D).

    For one query of 8 heads of 64 in float32, torch's attention takes 22 us with 50 keys and
    4.2 ms with 16000, the products below 61 us and 4.4 ms.  In bfloat16 it takes 18 ms, products
    in float32 57 ms (one busy core, AMD EPYC).
    """
    (_, heads, n, headdim), groups, cap = q.shape, k.shape[1], kind.logit_softcap
    if heads != groups:
        q = q.reshape(1, groups, -1, headdim)
    alike = q.dtype == k.dtype == v.dtype and k.shape == v.shape
    if alike and hidden is None and k.shape[2] and not cap and q.device.type == "cpu":
        function = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return function(q, k, v, 0.0, False, scale=kind.softmax_scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    s = (q * kind.softmax_scale) @ k.mT  # (1, Hkv, H / Hkv n, m)
    if cap:
        s = cap * torch.tanh(s / cap)
    if hidden is not None:
        s.unflatten(2, (-1, n)).masked_fill_(hidden.to(s.device), -torch.inf)
    lse = s.logsumexp(-1, keepdim=True)  # -inf without a visible key
    p = s.sub_(lse.clamp(min=torch.finfo(wide).min)).exp_()
    return p @ v / p.sum(-1, keepdim=True).clamp(min=0.5), lse[..., 0]


def _merge(parts: np.ndarray) -> np.ndarray:
    """Merge partial results in the order of ranks, (ranks, rows, Dv + 1); return (rows, Dv)."""
    lse = parts[..., -1]  # -inf on all ranks in a row of padding
    weights = np.exp(lse - np.maximum(lse.max(0), np.finfo(lse.dtype).min))[..., None]
    return (weights * parts[..., :-1]).sum(0) / np.maximum(weights.sum(0), 1)
