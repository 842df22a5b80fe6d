"""Many architectures of transformers in `ContextParallel`: equal to one process, or refused.

    mpiexec -n 4 python tests/torch/architectures.py [all | hybrids [LENGTH ...]] [NAME ...]

Prints a line for each: the error against one process in float64, or why it is refused.  all: also
all other causal and masked models that the installed transformers can build in a tiny size.
hybrids: only these, the largest error of logits, loss and gradients for one to many pieces of a
rank, sequences of some lengths, one document and many.  Exit code 1: one is neither equal nor
refused.  Needs the extra `torch`, and is not part of the suite.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import transformers
from mpi4py import MPI

from a2d_mpi import Full, ProcessGrid
from a2d_mpi.torch import ContextParallel
from a2d_mpi.torch.recurrent import pieces_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import hybrids
import test_recurrent
from hybrids import HYBRIDS
from test_context import EXPERTS, LOCAL, MLA, SIZES, N, build, distance, sequence, step

GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
BERT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "embedding_size": 32}
MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
GEMMA4 = LOCAL | {
    "vocab_size_per_layer_input": SIZES["vocab_size"], "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0, "global_head_dim": 8,
}  # fmt: skip
# Options of causal models, by the first part of the names of their classes.
CAUSAL = {
    "Phi3": {}, "Phi": {"resid_pdrop": 0, "embd_pdrop": 0}, "Olmo": {}, "Olmo2": {},
    "Olmo3": LOCAL, "Granite": {"attention_multiplier": 0.3},
    "Starcoder2": {"residual_dropout": 0, "embedding_dropout": 0, "sliding_window": 9},
    "Cohere": {}, "Cohere2": LOCAL, "Exaone4": LOCAL, "SmolLM3": {}, "Glm": {}, "Glm4": {},
    "Nemotron": {}, "StableLm": {}, "Persimmon": {}, "GPTNeoX": {}, "GPTBigCode": GPT,
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0},
    "GPTJ": GPT | {"rotary_dim": 4}, "CodeGen": GPT | {"rotary_dim": 4, "n_ctx": 128},
    "DeepseekV2": MLA, "DeepseekV3": MLA, "DeepseekV32": MLA, "Mixtral": EXPERTS,
    "Qwen2Moe": MOE, "Qwen3Moe": MOE, "Gemma": {}, "VaultGemma": {}, "Ministral": LOCAL,
    "Ministral3": {}, "DiffLlama": {}, "BitNet": {}, "Ernie4_5": {}, "HunYuanDenseV1": {},
    "SeedOss": {"attention_dropout": 0, "residual_dropout": 0}, "Apertus": {}, "Arcee": {},
    "Helium": {}, "Jais2": {},
    "NanoChat": {}, "Cwm": {}, "Doge": {}, "BioGpt": BERT, "Mamba": {}, "FalconMamba": {},
    "Mamba2": {"num_heads": 8, "n_groups": 1, "state_size": 8},
    "Rwkv": {"attention_hidden_size": 32}, "Jamba": {"mamba_d_state": 4, "mamba_dt_rank": 4},
    "RecurrentGemma": {"lru_width": 32}, "MiniMax": EXPERTS, **HYBRIDS,
}  # fmt: skip
OTHERS = [
    ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4),
    ("DistilBertForMaskedLM", "DistilBertConfig", {"dim": 32, "n_heads": 4, "n_layers": 2,
     "hidden_dim": 48, "attention_dropout": 0, "dropout": 0}),
    *((f"{x}ForMaskedLM", f"{x}Config", BERT) for x in
      ("Roberta", "Electra", "Albert", "EuroBert", "Deberta", "DebertaV2", "BigBird")),
    ("FalconForCausalLM", "FalconConfig", {"alibi": True}),
    ("BloomForCausalLM", "BloomConfig", {"n_head": 4, "n_layer": 2}),
    ("MptForCausalLM", "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    ("RoFormerForMaskedLM", "RoFormerConfig", {}),
    ("T5ForConditionalGeneration", "T5Config", {}),
    ("BertForSequenceClassification", "BertConfig", BERT),
]  # fmt: skip


TINY = SIZES | GPT | MOE | MLA | HYBRIDS["FalconH1"] | EXPERTS
LARGEST = 10**6  # parameters of a tiny model
LENGTHS = 5, 61, 257, 1009


def tiny_models() -> list[tuple[str, str, dict]]:
    """Return class, config and options of all models that can be built in a tiny size."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    found = []
    for name, kind in (x for y in tables for x in y.items()):
        try:
            config = CONFIG_MAPPING[name]
            known = config().to_dict() | dict.fromkeys(config.attribute_map)
            options = {x: y for x, y in TINY.items() if x in known and x not in SIZES}
            options |= {x: 0.0 for x, y in known.items() if "drop" in x and isinstance(y, float)}
            with torch.device("meta"):
                model = build(kind, config.__name__, options)
            if model.num_parameters() <= LARGEST:
                found.append((kind, config.__name__, options))
        except Exception:  # of any kind: it needs other sizes
            continue
    return found


def line_of(grid: ProcessGrid, kind: str, config: str, options: dict) -> str:
    """Return what becomes of a model."""
    try:
        name, make = kind.removesuffix("ForCausalLM"), partial(build, kind, config, options)
        if name in HYBRIDS:  # whose recurrent layers compute in float32
            make = partial(hybrids.build, name)
        model, one = make(), make()
        one.config.use_cache = False  # tiny Dory uses the slots of its cache twice
    except Exception as error:  # of another version of transformers
        return f"not built: {type(error).__name__}: {error}"
    try:
        cp = ContextParallel(grid, model, seqlen=N)
    except ValueError as error:
        return f"refused: {error}"
    ids = sequence(N)
    masked = any(x.mask == Full() for x in cp.layers.values())
    given = {"input_ids": ids, "labels": ids.roll(5) if masked else ids}
    try:
        exact = step(one, given)
    except Exception as error:
        return f"fails on one process: {type(error).__name__}: {error}"
    try:
        far = distance(step(model, given), exact)
    except ValueError as error:
        return f"refused in the call: {error}"
    finally:
        cp.free()
    # Some models compute softmax, sinks or experts in float32.
    return f"{'equal' if far <= 1e-5 else 'WRONG'}: {far:.1e}, {len(cp.plans)} plans"


def hybrid_line_of(grid: ProcessGrid, name: str, lengths: Sequence[int]) -> str:
    """Return the largest errors of a hybrid model, by distribution, and most pieces of a rank."""
    errors, most, one = {}, [], hybrids.build(name)
    many = test_recurrent.STARTS
    cases = [(n, [x for x in y if x < n]) for n in lengths for y in ([0], many)]
    exact = None
    if grid.comm.rank == 0:
        exact = [test_recurrent.alone(one, test_recurrent.sequence(n), x) for n, x in cases]
    exact = grid.comm.bcast(exact)
    for distribution in ("contiguous", "zigzag", "balanced"):
        model = hybrids.build(name)
        cp = ContextParallel(grid, model, longest=max(lengths), distribution=distribution)
        far = []
        for (n, starts), expected in zip(cases, exact):
            found = test_recurrent.spread(model, test_recurrent.sequence(n), starts)
            far.append(test_recurrent.distance(found, expected))
            most += [len(pieces_of(cp.plans).own)] * (len(starts) == 1)
        cp.free()
        errors[distribution] = grid.comm.allreduce(max(far), MPI.MAX)
    text = ", ".join(f"{x} {y:.1e}" for x, y in errors.items())
    text += f", {len(cases)} cases, up to {grid.comm.allreduce(max(most), MPI.MAX)} pieces a rank"
    return f"{'equal' if max(errors.values()) <= 1e-9 else 'WRONG'}: {text}"


def main(names: list[str]) -> int:
    """Print all lines."""
    comm = MPI.COMM_WORLD
    transformers.logging.set_verbosity_error()
    rows = 2 if comm.size % 2 == 0 else 1
    grid = ProcessGrid(comm, rows, comm.size // rows)
    text = {x for x in CAUSAL if hasattr(transformers, f"{x}TextConfig")}
    cases = [(f"{x}ForCausalLM", f"{x}{'Text' * (x in text)}Config", y) for x, y in CAUSAL.items()]
    cases += OTHERS
    line = line_of
    if "hybrids" in names:
        lengths = [int(x) for x in names if x.isdigit()] or LENGTHS
        cases = [(x, lengths) for x in HYBRIDS]
        names = [x for x in names if x != "hybrids" and not x.isdigit()]
        line = hybrid_line_of
    if "all" in names:
        listed, names = {x[0] for x in cases}, [x for x in names if x != "all"]
        cases += [x for x in tiny_models() if x[0] not in listed]
    counts, start = Counter(), time.perf_counter()
    for case in cases:
        if not names or any(x in case[0] for x in names):
            text = line(grid, *case)
            counts[text.split(":")[0]] += 1
            if comm.rank == 0:
                print(f"{case[0]}: {text.splitlines()[0][:200]}", flush=True)
    if comm.rank == 0:
        print(f"{dict(counts)}, {time.perf_counter() - start:.0f} s, {comm.size} ranks")
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
