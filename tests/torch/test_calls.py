"""What belongs to a call of a model in `ContextParallel` comes with the call, or it is refused.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

# ruff: noqa: F401, F811  the fixtures grid and parallel

import copy
import gc
import pickle
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import assert_all
from refused import assert_raises
from test_context import (
    BERT,
    ENDS,
    EQUAL,
    EXPERTS,
    LOCAL,
    OWN,
    N,
    assert_near,
    build,
    gradients,
    grid,
    parallel,
    sequence,
    spread_step,
    step,
)
from torch.utils.checkpoint import checkpoint

from a2d_mpi.torch import ContextParallel

pytestmark = pytest.mark.mpi(min_size=4)
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
PACKED = [ENDS, np.array([0, 30, N])]  # of two batches
ON = pytest.mark.parametrize("grid", ["all", "three"], indirect=True)


def logits_of(model, hidden):
    return model.lm_head(hidden.last_hidden_state)


def in_a_thread(call):
    """Return what a call returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


# Ways to compute the logits of a batch.
WAYS = {
    "call": lambda model, given: model(**given).logits,
    "submodel": lambda model, given: logits_of(model, model.model(**given)),
    "forward": lambda model, given: model.forward(**given).logits,
    "forward of the submodel": lambda model, given: logits_of(model, model.model.forward(**given)),
    "positional": lambda model, given: (
        model(given["input_ids"], None, given["position_ids"]).logits
    ),
    "embeddings": lambda model, given: (
        model(
            inputs_embeds=model.model.embed_tokens(given["input_ids"]),
            position_ids=given["position_ids"],
        ).logits
    ),
    "thread": lambda model, given: in_a_thread(lambda: model(**given).logits),
    "functional": lambda model, given: (
        torch.func.functional_call(model, dict(model.named_parameters()), (), dict(given)).logits
    ),
    "checkpoint": lambda model, given: checkpoint(
        lambda: model(**given).logits, use_reentrant=False
    ),
    "compiled": lambda model, given: torch.compile(model, backend="eager")(**given).logits,
}


def two_steps(cp, way, passes=2):
    """Return the sum of two losses and its gradients; the first batch is computed last."""
    cp.model.zero_grad()
    ids = sequence(N)
    batches = [cp.shard(ids, cu_seqlens=x) for x in PACKED]
    losses = [cp.loss(way(cp.model, dict(x.inputs)), x) for x in batches]
    sum(losses).backward()
    cp.sum_gradients()
    return sum(cp.grid.comm.allgather(sum(losses).item())), gradients(cp.model)


def two_exact(name):
    one = [step(build(*EQUAL[name]), *[sequence(N)] * 2, x) for x in PACKED]
    return sum(x[0] for x in one), [x + y for x, y in zip(one[0][1], one[1][1])]


@ON
def test_two_batches(comm, grid, parallel):
    """Two packed batches are sharded before the first is computed, in any way to call a model."""
    model = build(*EQUAL["Llama"])
    cp, exact = parallel(model), two_exact("Llama")
    for name, way in WAYS.items():
        if comm.rank == 0:
            print(name, flush=True)
        assert_near(comm, two_steps(cp, way), exact)
