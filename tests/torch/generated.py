"""Tokens that models generate over ranks, beside those of one process.

    mpiexec -n 4 python tests/torch/generated.py [--prompts 7,301,4096] [--tokens 200] [NAME ...]

They are sampled in float32 with one seed, of rank 0.  Prints a line for each model and prompt.
Exit code 1: a token differs.  Needs the extra `torch`, and is not part of the suite.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import ContextParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import test_generation as suite

# Models at which nobody looked when generation was written.
OTHERS = {
    "Olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "Cohere2": ("Cohere2ForCausalLM", "Cohere2Config", suite.MODELS["Gemma 3"][2]),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", {"attention_multiplier": 0.3}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "SmolLM3": ("SmolLM3ForCausalLM", "SmolLM3Config", {}),
    "StableLm": ("StableLmForCausalLM", "StableLmConfig", {}),
}


def main(comm):
    """Compare all models; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[*suite.MODELS, *OTHERS])
    parser.add_argument("--prompts", default="7,301,4096")
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    suite.MODELS.update(OTHERS)
    torch.set_num_threads(1)
    rows, wrong = 2 if comm.size % 2 == 0 else 1, 0
    grid = ProcessGrid(comm, rows, comm.size // rows)
    for name in args.names:
        for n in map(int, args.prompts.split(",")):
            start, sampled = time.perf_counter(), {"max_new_tokens": args.tokens, **suite.SAMPLED}
            model, ids = suite.made(name, max_position_embeddings=5000), suite.prompt(n)
            expected = comm.bcast(suite.one(comm, model, ids, **sampled))
            cp = ContextParallel(grid, model, seqlen=max(40, comm.size))
            found = suite.spread(cp, ids, **sampled)
            equal = comm.allreduce(torch.equal(found, expected), MPI.LAND)
            cp.free()
            wrong += not equal
            if comm.rank == 0:
                told = f"{'equal' if equal else 'WRONG'}, {time.perf_counter() - start:.0f} s"
                print(f"{name}, prompt {n}, {comm.size} ranks: {told}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(MPI.COMM_WORLD))
