"""Tokens that models generate over ranks, beside those of one process.

    mpiexec -n 4 python tests/torch/generated.py [--prompts 7,301,4096,90+7+61] [--tokens 200] \
        [--turns 2] [--kept FOLDER] [NAME ...]

They are sampled in float32 with one seed.  90+7+61 are three rows, which are padded before, and
then behind their tokens.  Later turns have 70 more tokens each, after the cache of the answer.
Prints a line for each, with the largest error of logits, against float64, beside that of one
process.  One process begins a turn without a cache; if tokens differ, it begins it again after its
own cache, as a few models give other results then.  Exit code 1: a token differs from both, or the
error is more than twice as large.  `--kept` keeps what one process computes without a cache, for
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


def alone(name, turns, options):
    """Return tokens of one process, their logits in float64, and its error, for the last turn.

    `turns` are prompts and masks.  Each turn begins after the cache of the one before.
    """
    model, exact, n = made(name), made(name, torch.float64), options["max_new_tokens"]
    cache, exact_cache, done = None, None, 0
    for ids, mask in turns:
        found = suite.one(MPI.COMM_SELF, model, ids, mask, past_key_values=cache, **options)
        cache, tokens = found.past_key_values, found.sequences
        mask = torch.cat([mask, mask.new_ones(len(ids), n - 1)], 1)
        places, logits = (mask.cumsum(1) - 1).clamp(0), []
        # In float64 the same calls, if there is a cache, and else one call.
        steps = [ids.shape[1] - done] + [1] * (n - 1) if len(turns) > 1 else [ids.shape[1] + n - 1]
        for step in steps:
            part = slice(done, done + step)
            given = {"attention_mask": mask[:, : part.stop], "position_ids": places[:, part]}
            given |= {"past_key_values": exact_cache, "use_cache": len(turns) > 1}
            with torch.no_grad():
                keep = n if len(turns) == 1 else 1
                result = exact(tokens[:, part], logits_to_keep=keep, **given)
            exact_cache, done = result.past_key_values, part.stop
            logits.append(result.logits)
    logits = torch.cat(logits, 1)
    return tokens, logits, error(found, logits)


def kept(file, *arguments):
    """Return what `alone` returned before, if it is kept in a file."""
    if file is None:
        return alone(*arguments)
    if not file.exists():
        torch.save(alone(*arguments), file)
    return torch.load(file)


def error(found, exact):
    """Return the largest relative error of the logits of a token."""
    logits = torch.stack(found.logits, 1).double()
    return float(((logits - exact).norm(dim=2) / exact.norm(dim=2)).max())


def judged(comm, found, tokens, exact, usual):
    """Return whether tokens are equal and logits as near to `exact`, and the error of logits."""
    equal = comm.allreduce(torch.equal(found.sequences, tokens), MPI.LAND)
    far = comm.allreduce(error(found, exact), MPI.MAX)
    return equal and far <= 2 * usual, far


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
            start, cache, turns = time.perf_counter(), None, []
            ids, mask = suite.padded([*map(int, lengths.split("+"))])
            # The last one is padded behind.
            for turn in [*range(args.turns)] + [-1] * (len(ids) > 1):
                if turn > 0:
                    ids = torch.cat([ids, suite.prompt(70, len(ids), seed=turn)], 1)
                    mask = torch.cat([mask, mask.new_ones(ids.shape)], 1)[:, : ids.shape[1]]
                elif turn < 0:
                    (ids, mask), cache = turns[0], None
                turns.append((ids, mask))
                case = f"{name}-{lengths}-{max(turn, 0)}-{args.tokens}"
                file = args.kept and args.kept / f"{case}.pt"
                one = kept(file, name, turns[-1:], options) if comm.rank == 0 else None
                tokens, exact, usual = comm.bcast(one)
                expected = tokens.clone()
                if turn < 0:
                    ids, mask = behind(ids, mask), behind(mask, mask)
                    expected[:, : ids.shape[1]] = ids
                given = {"attention_mask": mask, "past_key_values": cache}
                found = suite.spread(cp, ids, **given, **options)
                good, far = judged(comm, found, expected, exact, usual)
                after = "no cache"
                if not good and turn > 0:
                    one = alone(name, turns, options) if comm.rank == 0 else None
                    expected, exact, usual = comm.bcast(one)
                    good, far = judged(comm, found, expected, exact, usual)
                    after = "its own cache"
                cache, ids = found.past_key_values, found.sequences
                wrong += not good
                if comm.rank == 0:
                    print(
                        f"{'good' if good else 'WRONG'}: {name}, prompt {lengths}, turn {turn}, "
                        f"{comm.size} ranks: error {far:.1e}, one process after {after} "
                        f"{usual:.1e}, {time.perf_counter() - start:.0f} s",
                        flush=True,
                    )
        cp.free()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(MPI.COMM_WORLD))
