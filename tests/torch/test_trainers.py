"""Trainers of others, unmodified, over ranks: losses, logs and weights are those of one process.

Needs the extras `torch` and `trainers`: `bash jobs/test.sh torch`.
"""

import shutil
from functools import partial
from zlib import crc32

import pytest
import torch
import trl
from accelerate import Accelerator
from datasets import Dataset, disable_progress_bars
from helpers import assert_all
from peft import LoraConfig, get_peft_model
from test_calls import KINDS
from test_context import EQUAL, VOCAB, build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorWithFlattening,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore")]
BASE = {
    "max_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
    "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "seed": 3,
    "disable_tqdm": True, "log_level": "error", "lr_scheduler_type": "cosine", "warmup_steps": 1,
    "max_grad_norm": 0.5, "use_cpu": True, "bf16": False,
}  # fmt: skip
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
LORA = LoraConfig(
    r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
)
WORDS = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCAB)}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Hide mpiexec from accelerate, which would share batches among the ranks."""
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(PrinterCallback, "on_log", lambda *_, **__: None)
    disable_progress_bars()


def drawn(count, seed, low=9, high=31):
    """Return lists of tokens."""
    made = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=made).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=made).tolist() for n in lengths]


def rows(count, seed):
    return [{"input_ids": x} for x in drawn(count, seed)]


def padded(features, side="right"):
    """Return a batch that is padded behind its rows, or before them."""
    ids = [torch.tensor(x["input_ids"]) for x in features]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
    labels = [x.index_fill(0, torch.tensor(0), -100) if side == "left" else x for x in ids]
    mask = pad([torch.ones_like(x) for x in ids])
    labels = pad(labels, padding_value=-100)
    return {"input_ids": pad(ids), "attention_mask": mask, "labels": labels}


def plain(kind="Llama", collator=padded, wrap=None, trainer=Trainer, config=TrainingArguments,
          callbacks=None, metrics=None, **options):  # fmt: skip
    """Return a function that makes a Trainer of transformers in a folder."""

    def make(folder):
        model = build(*KINDS[kind])
        given = {"train_dataset": rows(24, 1), "eval_dataset": rows(5, 2)}
        return trainer(
            wrap(model) if wrap else model, config(str(folder), **BASE | options), **given,
            data_collator=collator, callbacks=callbacks and callbacks(), compute_metrics=metrics,
        )  # fmt: skip

    return make


def texts(*columns, count=24, seed=1, low=4, high=12, **more):
    """Return a data set of random words."""
    made = {
        name: ["".join(f"w{i} " for i in x) for x in drawn(count, seed + 10 * turn, low, high)]
        for turn, name in enumerate(columns)
    }
    return Dataset.from_dict(made | more)


def of_trl(name, *columns, kind="Llama", data=None, peft=None, other=False, trainer=None,
           **options):  # fmt: skip
    """Return a function that makes a trainer of TRL in a folder."""

    def make(folder):
        words = Tokenizer(models.WordLevel(WORDS, unk_token="w3"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
        given = {"train_dataset": texts(*columns, **data or {})} | (trainer or {})
        given["eval_dataset"] = given["train_dataset"].select(range(5))
        given |= {"ref_model": build(*EQUAL["Llama"])} if other else {}
        return getattr(trl, f"{name}Trainer")(
            build(*KINDS[kind]), args=getattr(trl, f"{name}Config")(str(folder), **BASE | options),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **special), **given,
            peft_config=peft,
        )  # fmt: skip

    return make


def adapted(model):
    torch.manual_seed(5)
    return get_peft_model(model, LORA)


def accuracy(given):
    guess, labels = given.predictions[:, :-1].argmax(-1), given.label_ids[:, 1:]
    return {"right": float((guess == labels)[labels != -100].mean())}


def length(completions, **_):
    """Reward long completions of GRPO."""
    return [float(sum(map(ord, x)) % 17) for x in completions]


# What makes a trainer in a folder.
TRAINERS = {
    "padding and accumulation": plain(gradient_accumulation_steps=3),
    "documents": plain("GPT-2", DataCollatorWithFlattening(), gradient_accumulation_steps=2),
    "checkpoints of layers": plain("Qwen3", gradient_checkpointing=True),
    "reentrant checkpoints": plain(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
    "label smoothing": plain(label_smoothing_factor=0.1, gradient_accumulation_steps=2),
    "evaluation and metrics": plain("GPT-2", metrics=accuracy, **EVALUATED),
    "experts": plain("Mixtral", gradient_accumulation_steps=2),
    "an adapter": plain(wrap=adapted, gradient_accumulation_steps=2),
    "the compiler": plain(torch_compile=True, torch_compile_backend="aot_eager"),
    "generation in evaluation": plain(
        collator=partial(padded, side="left"), trainer=Seq2SeqTrainer,
        config=Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=40,
        metrics=lambda x: {"sum": int(x.predictions.sum())},
        **EVALUATED),
    "SFT": of_trl("SFT", "text", gradient_accumulation_steps=2, **EVALUATED),
    "SFT, packed": of_trl("SFT", "text", packing=True, padding_free=True, max_length=40,
                          **EVALUATED),
    "SFT of completions, with an adapter": of_trl(
        "SFT", "prompt", "completion", completion_only_loss=True, peft=LORA),
    # Many gradients of DPO are rounding, which AdamW would blow up.
    "DPO": of_trl("DPO", "prompt", "chosen", "rejected", other=True, optim="sgd"),
    "DPO with an adapter": of_trl("DPO", "prompt", "chosen", "rejected", peft=LORA),
    "KTO": of_trl("KTO", "prompt", "completion", other=True,
                  data={"label": [True, False, False] * 8}),
    "reward": of_trl("Reward", "chosen", "rejected", kind="reward"),
    "GRPO": of_trl("GRPO", "prompt", trainer={"reward_funcs": length}, num_generations=2,
                   max_completion_length=6),
}  # fmt: skip
KINDS["reward"] = ("LlamaForSequenceClassification", "LlamaConfig", {"num_labels": 1})
SECONDS = "runtime", "per_second", "time", "total_flos"


def trained(trainer, **options):
    """Return the logs of a training without seconds, and the weights."""
    trainer.train(**options)
    logs = [
        {x: y for x, y in line.items() if not any(z in x for z in SECONDS)}
        for line in trainer.state.log_history
    ]
    return logs, torch.cat([x.detach().double().flatten() for x in trainer.model.parameters()])


def assert_equal(comm, found, exact):
    """Assert that logs and weights are near those of one process, and the same on all ranks."""
    pairs = [
        (name, x.get(name), y[name])
        for x, y in zip(found[0], exact[0], strict=True) for name in y
    ]  # fmt: skip
    wrong = [x for x in pairs if x[1] is None or abs(x[1] - x[2]) > 1e-5 * abs(x[2]) + 1e-8]
    far = float((found[1] - exact[1]).abs().max())
    assert_all(comm, not wrong and far < 1e-6, f"{wrong}, weights off by {far}")
    bits = comm.allgather(crc32(found[1].numpy()))
    assert_all(comm, len({*bits}) == 1, "ranks have other weights")


@pytest.mark.parametrize("name", TRAINERS)
def test_equal_to_one_process(comm, parallel, tmp_path, name):
    folder = comm.bcast(tmp_path)
    exact = trained(TRAINERS[name](folder / "one")) if comm.rank == 0 else None
    trainer = TRAINERS[name](folder / "ranks")
    parallel(trainer.model).attach(trainer)
    assert_equal(comm, trained(trainer), comm.bcast(exact))


def test_the_best_model_and_a_later_start(comm, parallel, tmp_path):
    """All ranks stop early, load the best model, and go on from a checkpoint with equal bits."""
    folder = comm.bcast(tmp_path)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    make = plain(max_steps=12, learning_rate=0.1, save_strategy="steps", save_steps=2, **best,
                 callbacks=lambda: [EarlyStoppingCallback(2)], **EVALUATED)  # fmt: skip
    exact = trained(make(folder / "one")) if comm.rank == 0 else None
    found = []
    for turn in range(2):
        trainer = make(folder / "ranks")
        cp = parallel(trainer.model)
        cp.attach(trainer)
        found.append(trained(trainer, resume_from_checkpoint=turn > 0))
        cp.free(), comm.Barrier()
        if comm.rank == 0 and turn == 0:
            written = {x.name for x in (folder / "one").iterdir()}
            assert {x.name for x in (folder / "ranks").iterdir()} == written
            shutil.rmtree(folder / "ranks" / f"checkpoint-{trainer.state.global_step}")
        comm.Barrier()
    assert_equal(comm, found[0], comm.bcast(exact))
    same = found[0][0][:-1] == found[1][0][:-1]  # the last one has a mean of the steps computed
    assert_all(comm, same and torch.equal(*(x[1] for x in found)), "other bits")


def test_accelerate(comm, parallel):
    """A loop with `accumulate` and clipping of accelerate."""
    found = []
    for spread in (False, True):
        model, accelerator = build(*KINDS["Qwen3"]), Accelerator(gradient_accumulation_steps=2)
        if spread:
            parallel(model)
        data = torch.utils.data.DataLoader(rows(12, 1), 2, collate_fn=padded)
        optimizer, logs = torch.optim.AdamW(model.parameters(), 1e-2), []
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    logs.append({"loss": loss.item(), "norm": norm.item()})
                optimizer.step(), optimizer.zero_grad()
        weights = [x.detach().double().flatten() for x in model.parameters()]
        found.append((logs, torch.cat(weights)))
    assert_equal(comm, found[1], found[0])
