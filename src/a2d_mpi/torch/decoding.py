"""Attention of decoding steps to a `SpreadCache`: each rank attends to the keys that it keeps.

The partial results are merged in two exchanges (Helix, Bhatia et al., arXiv:2507.07120).  In the
first, every rank receives the partial results of its share of the rows, and merges them in the
order of ranks.  In the second, all ranks receive all merged rows.  Two ranks, or ranks of one
node, gather all partial results in one exchange instead, if they are small.  The bytes of a step
do not depend on the length of the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.comm.channel import Channel, Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.transport import Transport
from a2d_mpi.core.sizes import next_ranks
from a2d_mpi.masks.mask import Mask

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
        self._failures, self._watch, self._transport = grid.failures, grid.watch, Transport()
        comm = grid.comm_of("all", tuple(range(grid.comm.size)))
        self._channels = {x: Channel(comm, x, self.traffic) for x in ("all", "tokens")}
        for channel in self._channels.values():
            channel.begin_phase("decode", self._transport, grid.watch)
        self._near = len(set(grid.layout.nodes or range(2))) == 1

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
        q, (k,), (v,) = tensors
        (rows, heads, n, _), width, kept = q.shape, v.shape[-1], self.cache.kept[kind.mask]
        wide = torch.promote_types(q.dtype, torch.float32)
        parts = q.new_zeros(heads, rows, n, width + 1, dtype=wide)  # out, and lse
        out, lse = parts[..., :-1], parts[..., -1]
        lse.fill_(-torch.inf)
        with torch.autocast(q.device.type, enabled=False):
            for row, (length, held) in enumerate(zip(self.cache.lengths, kept.positions)):
                new = slice(n - min(n, length), n)  # the others are padding
                own = slice(kept.first[row], kept.first[row] + len(held))
                if len(held) and new.start < n:
                    if row not in kept.hidden:
                        queries = np.arange(length - n, length)[new]
                        kept.hidden[row] = _hidden(kind.mask, queries, held)
                    given = q[row, :, new], k[:, own], v[:, own], kept.hidden[row]
                    out[:, row, new], lse[:, row, new] = _partial(kind, *given)
            if sink is not None and self.comm.rank == 0:
                total = torch.logaddexp(lse, sink.to(lse)[:, None, None])
                out *= torch.exp(lse - total)[..., None]
                lse.copy_(total)
        merged = self._merged(parts.flatten(0, 2).numpy(force=True))
        merged = torch.from_numpy(merged).to(q).unflatten(0, (heads, rows, n))
        return merged.permute(1, 2, 0, 3)

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
        channel, rank, messages = self._channels[name], self.comm.rank, []
        peers, self._watch.doing = next_ranks(rank, self.comm.size), "decoding"
        with self._failures.translated(self._transport.settle):
            for peer in peers:
                messages += channel.irecv([received[peer]], peer, 0)
            for peer in peers:
                messages += channel.isend([sent[peer]], peer, 0)
            if len(received[rank]):
                received[rank][...] = sent[rank]
            channel.wait(messages)
        channel.waits.clear()


class Step:
    """The attention of the layers of a kind in a step; a model uses it as a plan."""

    def __init__(self, steps: Steps, kind: Kind) -> None:
        self._steps, self._kind = steps, kind
        self.softmax_scale, self.logit_softcap = kind.softmax_scale, kind.logit_softcap

    def attend(self, tensors: tuple, sink: torch.Tensor | None) -> torch.Tensor:
        """Compute the attention of a layer; see `Steps.attend`."""
        return self._steps.attend(self._kind, tensors, sink)

    def refuse(self, problem: str, phase: str = "forward") -> NoReturn:
        """Raise an error, on all ranks, which pass the same."""
        raise CollectiveError(problem)

    def free(self) -> None:
        """Do nothing, unlike a plan."""


def _hidden(mask: Mask, queries: np.ndarray, keys: np.ndarray) -> torch.Tensor | None:
    """Return which keys each query does not see, (queries, keys); None if each sees all."""
    seen = np.zeros((len(queries), len(keys)), bool)
    for begin, end in mask.visible(queries):
        seen |= (begin[:, None] <= keys) & (keys < end[:, None])
    return None if seen.all() else torch.from_numpy(~seen)


def _partial(
    kind: Kind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out, (H, n, Dv), and lse, (H, n), of q, (H, n, D), and k, (Hkv, m, D), and v.

    For one query of 8 heads of 64 in float32, torch's attention takes 22 us with 50 keys and
    4.2 ms with 16000, the products below 61 us and 4.4 ms.  In bfloat16 it takes 18 ms, products
    in float32 57 ms (one busy core, AMD EPYC).
    """
    (heads, n, _), scale, cap = q.shape, kind.softmax_scale, kind.logit_softcap
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.unflatten(0, (len(k), -1)).flatten(1, 2)  # (Hkv, H / Hkv n, D)
    alike = q.dtype == k.dtype == v.dtype and k.shape == v.shape
    if alike and hidden is None and not cap and q.device.type == "cpu":
        given = q[None], k[None], v[None]
        function = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        (out,), (lse,) = function(*given, 0.0, False, scale=scale)
    else:
        q, k, v = (x.to(wide) for x in (q, k, v))
        s = (q * scale) @ k.transpose(1, 2)  # (Hkv, H / Hkv n, m)
        if cap:
            s = cap * torch.tanh(s / cap)
        if hidden is not None:
            s.unflatten(1, (-1, n)).masked_fill_(hidden.to(s.device), -torch.inf)
        largest = s.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)
        p = s.sub_(largest).exp_()
        total = p.sum(-1, keepdim=True)  # at least 1, or 0 without a visible key
        out, lse = (p @ v) / total.clamp(min=1), (total.log() + largest)[..., 0]
    return out.reshape(heads, n, -1), lse.reshape(heads, n)


def _merge(parts: np.ndarray) -> np.ndarray:
    """Merge partial results in the order of ranks, (ranks, rows, Dv + 1); return (rows, Dv)."""
    lse = parts[..., -1]  # -inf on all ranks in a row of padding
    weights = np.exp(lse - lse.max(0).clip(np.finfo(lse.dtype).min))[..., None]
    return (weights * parts[..., :-1]).sum(0) / weights.sum(0).clip(1)
