"""Tune a model by LoRA, with TRL and PEFT, over the ranks: mpiexec -n 4 python examples/lora.py"""

from pathlib import Path

from datasets import Dataset
from mpi4py import MPI
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import ContextParallel

comm = MPI.COMM_WORLD
set_seed(0)  # the same weights on all ranks, of the adapter, too

# A small random model and a tokenizer of the text; take yours by `from_pretrained`.
text = (Path(__file__).parents[1] / "data" / "new_testament.txt").read_text()[:200_000]
words = Tokenizer(models.BPE())
words.pre_tokenizer = pre_tokenizers.ByteLevel()
words.train_from_iterator([text], trainers.BpeTrainer(vocab_size=500, show_progress=False))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="!", pad_token="!")
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=500, num_attention_heads=4, **sizes))

texts = [text[i : i + 4000] for i in range(0, 40_000, 4000)]
cp = ContextParallel(ProcessGrid(comm, 1, comm.size), model)  # before SFTConfig
arguments = SFTConfig(
    "lora", max_steps=5, max_length=1024, per_device_train_batch_size=1, learning_rate=2e-2,
    logging_steps=1, use_cpu=True, bf16=False, report_to=[],
)  # fmt: skip
adapter = LoraConfig(r=8, modules_to_save=["lm_head"])  # the head is random, so it is trained, too
data = Dataset.from_dict({"text": texts})
trainer = SFTTrainer(model, arguments, None, data, processing_class=tokenizer, peft_config=adapter)
cp.attach(trainer)  # rank 0 alone saves, logs and shows bars
trainer.train()
trainer.save_model("lora")  # the adapter
