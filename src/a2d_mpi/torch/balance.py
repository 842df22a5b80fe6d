"""The balance loss of MoE layers, of the tokens of all ranks."""

from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from a2d_mpi.comm.agreement import Call
from a2d_mpi.torch.layers import same

ALONE = (
    "the model computed this number from the tokens of this rank alone: take cp.loss, and for the "
    "balance loss of MoE layers cp.balance_loss(output, batch), of an output with names"
)


class _OfOneRank:
    """A number of this rank's tokens; computing with it is refused."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(ALONE)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("_") else ValueError(ALONE)

    __torch_function__ = classmethod(_refuse)
    __mul__ = __rmul__ = __add__ = __radd__ = __truediv__ = __float__ = _refuse


def hide(output: Any) -> Any:
    """Let nobody compute with a number that a model has made of this rank's tokens."""
    named = isinstance(output, dict)
    for name, x in [*output.items()] if named else enumerate(output):
        if isinstance(x, torch.Tensor) and x.dim() == 0:
            if not named:
                raise ValueError(ALONE)
            output[name] = _OfOneRank(x.detach())
    return output


def balance_loss(output: Any, counted: np.ndarray, comm: MPI.Intracomm) -> torch.Tensor:
    """Return this rank's part of the balance loss of all ranks of `comm`.  Collective.

    For E experts, and n rows, which are the tokens of all layers, it is E times the sum over the
    experts of (rows that chose the expert / n) (sum of its probabilities / n) (arXiv:2101.03961,
    equations 4 to 6).  Choices have no gradient, so with those of all ranks the rest is a sum over
    rows.

    Parameters
    ----------
    output : transformers.utils.ModelOutput
    counted : (n,) bool
        Which tokens count.
    comm : Intracomm

    Raises
    ------
    ValueError
        On all ranks, if the output has no such loss, or the formula does not give the model's own.
    """
    call = Call(comm)
    with call.checks():
        if "aux_loss" not in output:
            raise ValueError("only output_router_logits=True gives the balance loss of MoE layers")
        own, logits = output["aux_loss"].value, output["router_logits"]
        rows = torch.cat([x.flatten(0, -2).to(own.device) for x in logits])  # (layers n, E)
        chances, experts = rows.softmax(1), rows.shape[1]
        wide = chances.to(torch.promote_types(rows.dtype, torch.float32))
        # The loss if a token had one expert, two, ...; the model's own says how many it has.
        losses = experts * wide.mean(0)[chances.topk(experts).indices].mean(0).cumsum(0)
        number = int((losses - own).abs().argmin())
        if not same(own.view(1, 1).to(rows.dtype), losses[number].view(1, 1)):
            raise ValueError("the balance loss of MoE layers has another formula in this model")
        kept = torch.from_numpy(counted).repeat(len(logits)).to(own.device)
        choices = chances[kept].topk(number + 1).indices.flatten().bincount(minlength=experts)
        found = np.append(choices.numpy(force=True), int(kept.sum()))
    call.agree()
    *choices, n = comm.allreduce(found)
    sums = wide[kept].sum(0)
    return sums @ torch.tensor(choices).to(sums) * (experts / n**2)
