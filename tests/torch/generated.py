"""Tokens that models generate over ranks, beside those of one process.

    mpiexec -n 4 python tests/torch/generated.py [--prompts 7,301,4096,90+7+61] [--tokens 200] \
        [--turns 2] [--kept FOLDER] [NAME ...]

They are sampled in float32 with one seed.  90+7+61 are three rows, which are padded before, and
then behind their tokens.  Later turns have 70 more tokens each, after the cache of the answer.
Prints a line for each, with the largest error of logits, against float64, beside that of one
process, which has no cache.  Exit code 1: a token differs, or the error is more than twice as
large.  `--kept` keeps what one process computes, for other numbers of ranks.  Needs the extra
`torch`, and is not part of the suite.
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
import hybrids
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
LONGEST = {"max_position_embeddings": 5000}


def made(name, dtype=torch.float32):
    """Return a model for all prompts."""
    if name not in hybrids.HYBRIDS:
        return suite.made(name, dtype, **LONGEST)
    model = hybrids.build(name, exact=False, eos_token_id=None, **LONGEST)
    if dtype == torch.float64:  # also where the model computes in float32
        weights = model.state_dict()
        model = hybrids.build(name, eos_token_id=None, **LONGEST)
        model.load_state_dict(weights)
    return model.eval()


def alone(name, ids, mask, file, options):
    """Return tokens of one process, their logits in float64, and its error."""
    if file is None or not file.exists():
        found = suite.one(MPI.COMM_SELF, made(name), ids, mask, **options)
        tokens, n = found.sequences, options["max_new_tokens"]
        mask = torch.cat([mask, mask.new_ones(len(ids), n - 1)], 1)
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
        with torch.no_grad():
            model = made(name, torch.float64)
            exact = model(tokens[:, :-1], logits_to_keep=n, **given).logits
        kept = tokens, exact, error(found, exact)
        if file is None:
            return kept
        torch.save(kept, file)
    return torch.load(file)


def error(found, exact):
    """Return the largest relative error of the logits of a token."""
    logits = torch.stack(found.logits, 1).double()
    return float(((logits - exact).norm(dim=2) / exact.norm(dim=2)).max())


def behind(x, mask):
    """Move padding before the tokens of rows behind them."""
    return torch.stack([row.roll(int(kept.sum()), 0) for row, kept in zip(x, mask)])


def main(comm):
    """Compare all models; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[*suite.MODELS, *OTHERS])
    parser.add_argument("--prompts", default="7,301,4096")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--kept", type=Path)
    args = parser.parse_args()
    suite.MODELS.update(OTHERS)
    torch.set_num_threads(1)
    rows, wrong = 2 if comm.size % 2 == 0 else 1, 0
    grid = ProcessGrid(comm, rows, comm.size // rows)
    options = {"max_new_tokens": args.tokens, **suite.SAMPLED}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    for name in args.names:
        cp = ContextParallel(grid, made(name), seqlen=max(40, comm.size))
        for lengths in args.prompts.split(","):
            start, cache = time.perf_counter(), None
            ids, mask = suite.padded([*map(int, lengths.split("+"))])
            turns = [*range(args.turns)] + [-1] * (len(ids) > 1)  # the last one is padded behind
            first = ids, mask
            for turn in turns:
                if turn > 0:
                    ids = torch.cat([ids, suite.prompt(70, len(ids), seed=turn)], 1)
                    mask = torch.cat([mask, mask.new_ones(ids.shape)], 1)[:, : ids.shape[1]]
                elif turn < 0:
                    (ids, mask), cache = first, None
                case = f"{name}-{lengths}-{max(turn, 0)}-{args.tokens}"
                file = args.kept and args.kept / f"{case}.pt"
                kept = alone(name, ids, mask, file, options) if comm.rank == 0 else None
                tokens, exact, usual = comm.bcast(kept)
                if turn < 0:
                    ids, mask = behind(ids, mask), behind(mask, mask)
                    tokens[:, : ids.shape[1]] = ids
                given = {"attention_mask": mask, "past_key_values": cache}
                found = suite.spread(cp, ids, **given, **options)
                cache, ids = found.past_key_values, tokens
                equal = comm.allreduce(torch.equal(found.sequences, tokens), MPI.LAND)
                far = comm.allreduce(error(found, exact), MPI.MAX)
                good = equal and far <= 2 * usual
                wrong += not good
                if comm.rank == 0:
                    print(
                        f"{'good' if good else 'WRONG'}: {name}, prompt {lengths}, turn {turn}, "
                        f"{comm.size} ranks: tokens {'equal' if equal else 'differ'}, error "
                        f"{far:.1e}, one process {usual:.1e}, {time.perf_counter() - start:.0f} s",
                        flush=True,
                    )
        cp.free()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(MPI.COMM_WORLD))
