"""The GPT against one written in PyTorch: loss and gradients of equal weights.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_all
from torch import nn

from a2d_mpi import Documents
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.exchange import GradientSum, total
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters, initial

torch.set_num_threads(1)
BOUNDS = {"float32": 1e-5, "float64": 1e-10}
CU_SEQLENS = np.array([0, 5, 60, 61, 103])
LENGTHS = np.diff(CU_SEQLENS)


class Block(nn.Module):
    """A block of `Model`."""

    def __init__(self, c):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv = nn.Linear(c.width, (c.nheads + 2 * c.nheads_kv) * c.headdim)
        self.proj = nn.Linear(c.nheads * c.headdim, c.width)
        self.fc, self.out = nn.Linear(c.width, c.mlp), nn.Linear(c.mlp, c.width)


class Model(nn.Module):
    """A GPT of PyTorch's own layers, whose `state_dict` is `Parameters.state_dict`."""

    def __init__(self, c):
        super().__init__()
        self.wte, self.ln_f = nn.Embedding(c.vocab, c.width), nn.LayerNorm(c.width)
        if c.positions == "learned":
            self.wpe = nn.Embedding(c.seqlen, c.width)
        self.h = nn.ModuleList(Block(c) for _ in range(c.layers))


def torch_loss(config, model, tokens, targets, positions, seen):
    """Return the mean loss; `seen` is (n, n) bool."""
    n, d = len(tokens), config.headdim

    def rotated(x):
        if config.positions == "learned":
            return x
        rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        turns = torch.polar(torch.ones_like(rates), positions[:, None] * rates)  # (n, D / 2)
        z = torch.complex(x[..., : d // 2], x[..., d // 2 :])
        z = z * turns.to(z.dtype)
        return torch.cat([z.real, z.imag], dim=-1)

    x = model.wte(tokens)  # (n, E)
    if config.positions == "learned":
        x = x + model.wpe(positions)
    for block in model.h:
        qkv = block.qkv(block.ln1(x))
        heads = qkv.view(n, -1, d).transpose(0, 1)  # (H + 2 Hkv, n, D)
        q, k, v = heads.split([config.nheads, config.nheads_kv, config.nheads_kv])
        k, v = (y.repeat_interleave(config.nheads // config.nheads_kv, 0) for y in (rotated(k), v))
        out = F.scaled_dot_product_attention(rotated(q), k, v, attn_mask=seen)
        x = x + block.proj(out.transpose(0, 1).reshape(n, -1))
        x = x + block.out(F.gelu(block.fc(block.ln2(x)), approximate="tanh"))
    return F.cross_entropy(F.linear(model.ln_f(x), model.wte.weight), targets, ignore_index=-1)


def sequence(config):
    """Return tokens, targets and positions of packed documents."""
    tokens, targets = np.random.default_rng(5).integers(0, config.vocab, (2, CU_SEQLENS[-1]))
    targets[CU_SEQLENS[1:] - 1] = -1
    return tokens, targets, np.concatenate([np.arange(n) for n in LENGTHS])


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("method", ["attention2d", "ring"])
@pytest.mark.parametrize("dtype, positions, nheads_kv, headdim, checkpoint", [
    ("float32", "learned", 6, None, False), ("float64", "rotary", 2, None, True),
    ("float64", "rotary", 1, 20, False),
])  # fmt: skip
def test_gpt(comm, grid_of, method, dtype, positions, nheads_kv, headdim, checkpoint):
    """Relative errors of the loss, and of the gradients of every parameter."""
    config = GPTConfig(61, 3, 48, 6, 64, nheads_kv, positions, headdim)
    noise = 0.1 * np.random.default_rng(2).standard_normal(config.parameters)
    weights = Parameters(config, initial(config, 1, "float64") + noise)  # biases are not 0
    weights = Parameters(config, weights.flat.astype(dtype))
    rows = 2 if method == "attention2d" else 1
    grid, mask = grid_of(rows, comm.size // rows), Documents(CU_SEQLENS, causal=True)
    data, sizes = sequence(config), {"seqlen": int(CU_SEQLENS[-1]), **config.heads}
    plan = make_plan(method, grid, mask, dtype=dtype, **sizes)
    gradients = Parameters(config, np.empty_like(weights.flat))
    sums = GradientSum(comm, gradients.flat)
    tokens, targets, places = (x[plan.tokens] for x in data)
    model = GPT(weights, plan, places, checkpoint)
    loss = model.loss(tokens, targets, int((data[1] >= 0).sum()), gradients, sums.start)
    sums.finish()
    sums.free()
    loss = total(comm, loss)
    plan.free()

    exact = Model(config).to(getattr(torch, dtype))
    exact.load_state_dict({x: torch.from_numpy(y) for x, y in weights.state_dict().items()})
    document = torch.tensor(np.repeat(np.arange(len(LENGTHS)), LENGTHS))
    seen = torch.tril(document[:, None] == document)
    expected = torch_loss(config, exact, *map(torch.tensor, data), seen)
    expected.backward()
    off, ours = {"loss": abs(loss / expected.item() - 1)}, gradients.state_dict()
    for name, x in exact.named_parameters():
        off[name] = np.linalg.norm(ours[name] - x.grad.numpy()) / np.linalg.norm(x.grad)
    assert_all(comm, all(x <= BOUNDS[dtype] for x in off.values()), f"{off}")
