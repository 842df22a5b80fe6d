"""Tokens that models generate over ranks, beside those of one process.

    mpiexec -n 4 python tests/torch/generated.py [--prompts 7,301,4096] [--tokens 200] \
        [--kept FOLDER] [NAME ...]

They are sampled in float32 with one seed.  Prints a line for each model and prompt, with
the largest error of logits, against float64, beside that of one process.  Exit code 1: a token
differs, or the error is more than twice as large.  `--kept` keeps what one process computes, for
other numbers of ranks.  Needs the extra `torch`, and is not part of the suite.
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


def made(name, dtype=torch.float32):
    """Return a model for all prompts."""
    return suite.made(name, dtype, max_position_embeddings=5000)


def alone(name, ids, file, options):
    """Return tokens of one process, their logits in float64, and its error."""
    if file is None or not file.exists():
        found = suite.one(MPI.COMM_SELF, made(name), ids, **options)
        tokens, n = found.sequences, options["max_new_tokens"]
        with torch.no_grad():
            exact = made(name, torch.float64)(tokens[:, :-1], logits_to_keep=n).logits[0]
        kept = tokens, exact, error(found, exact)
        if file is None:
            return kept
        torch.save(kept, file)
    return torch.load(file)


def error(found, exact):
    """Return the largest relative error of the logits of a token."""
    logits = torch.cat(found.logits).double()
    return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).max())


def main(comm):
    """Compare all models; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[*suite.MODELS, *OTHERS])
    parser.add_argument("--prompts", default="7,301,4096")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--kept", type=Path)
    args = parser.parse_args()
    suite.MODELS.update(OTHERS)
    torch.set_num_threads(1)
    rows, wrong = 2 if comm.size % 2 == 0 else 1, 0
    grid = ProcessGrid(comm, rows, comm.size // rows)
    options = {"max_new_tokens": args.tokens, **suite.SAMPLED}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    for name in args.names:
        for n in map(int, args.prompts.split(",")):
            start, ids = time.perf_counter(), suite.prompt(n)
            file = args.kept and args.kept / f"{name}-{n}-{args.tokens}.pt"
            kept = alone(name, ids, file, options) if comm.rank == 0 else None
            tokens, exact, usual = comm.bcast(kept)
            cp = ContextParallel(grid, made(name), seqlen=max(40, comm.size))
            found = suite.spread(cp, ids, **options)
            equal = comm.allreduce(torch.equal(found.sequences, tokens), MPI.LAND)
            far = comm.allreduce(error(found, exact), MPI.MAX)
            cp.free()
            good = equal and far <= 2 * usual
            wrong += not good
            if comm.rank == 0:
                print(
                    f"{'good' if good else 'WRONG'}: {name}, prompt {n}, {comm.size} ranks: "
                    f"tokens {'equal' if equal else 'differ'}, error {far:.1e}, one process "
                    f"{usual:.1e}, {time.perf_counter() - start:.0f} s",
                    flush=True,
                )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(MPI.COMM_WORLD))
