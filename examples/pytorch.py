"""Train a model of transformers over the ranks: mpiexec -n 4 python examples/pytorch.py"""

import torch
from mpi4py import MPI
from transformers import LlamaConfig, LlamaForCausalLM

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import ContextParallel

comm = MPI.COMM_WORLD
torch.manual_seed(0)  # the same weights on all ranks
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)).train()
cp = ContextParallel(ProcessGrid(comm, comm.size, 1), model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

text = torch.arange(400)[None] % 7  # (1, 400), the same on all ranks
for step in range(5):
    loss = model(input_ids=text, labels=text).loss  # the whole loss, on every rank
    loss.backward()  # every rank has the whole gradient
    optimizer.step(), optimizer.zero_grad()
    print(f"rank {comm.rank}, step {step}: loss {loss.item():.4f}")
