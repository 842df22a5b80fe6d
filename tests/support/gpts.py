"""Small GPTs: weights, plans and trainers of one rank, and the tokens that a decoder must give."""

from argparse import Namespace
from functools import cache

import numpy as np
from mpi4py import MPI

from a2d_mpi import Causal, ProcessGrid
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.checkpoint import State
from a2d_mpi.experiments.train_gpt import Trainer
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.serve import Service

CONFIG = GPTConfig(23, 2, 24, 6, 256, nheads_kv=2, positions="rotary")
LENGTHS = (1, 5, 40, 2)  # of the prompts


def shaken(config, seed=0):
    """Return weights without special values such as 0 and 1."""
    flat = initial(config, seed, "float64")
    return Parameters(config, flat + 0.3 * np.random.default_rng(seed).standard_normal(len(flat)))


@cache
def lone():
    return ProcessGrid(MPI.COMM_SELF, 1, 1)


def alone(config, mask, seqlen, dtype="float64"):
    """Make a plan of one rank."""
    sizes = {"nheads": config.nheads, "nheads_kv": config.nheads_kv, "headdim": config.headdim}
    return make_plan("attention2d", lone(), mask, seqlen=seqlen, dtype=dtype, **sizes)


def trainer_of(comm, grid, config, text, weights, device=HOST, **options):
    """Make a trainer at its first step; `options`: of drivers/train.py gpt."""
    args = Namespace(**{"rate": 1e-2, "warmup": 5, "steps": 60, "seqlen": config.seqlen, "seed": 0,
                        "separator": b"\n", "method": "attention2d", "dtype": "float64",
                        "threads": 1, "kernel": "auto", "transfers": "auto",
                        "recompute": False, **options})  # fmt: skip
    none, moments = np.zeros(0), np.zeros((2, config.parameters), weights.dtype)
    state = State(config, {}, weights, moments, none, none)
    return Trainer(comm, grid, args, text, state, device)


@cache
def prompts():
    rng = np.random.default_rng(3)
    return {i: rng.integers(0, CONFIG.vocab, n) for i, n in enumerate(LENGTHS)}


def likeliest(request, length, logits):
    return int(logits.argmax())


@cache
def continued(config, request, new, choose=likeliest):
    """Tokens after a prompt, the whole context computed again at each step, on one rank."""
    weights, tokens = shaken(config), list(prompts()[request])
    for i in range(new):
        model = GPT(weights, alone(config, Causal(), len(tokens)))
        tokens.append(choose(request, i, model.logits(model.hidden(np.array(tokens))[-1:])[0]))
    return tokens[LENGTHS[request] :]


def serve(decoder, prompts, new, choose):
    """Yield each request with its answer, or its error, when it is done."""
    service = Service(prompts, new, choose)
    service.use(decoder)
    while service.unanswered:
        yield from ((name, service.answers[name]) for name in service.step())


def other_tokens(found, wanted):
    """Requests that were refused, or whose tokens are others, in words."""
    return [
        f"request {name}: {x}, not {wanted[name]}"
        for name, x in found.items()
        if isinstance(x, ValueError) or x.tolist() != wanted[name]
    ]
