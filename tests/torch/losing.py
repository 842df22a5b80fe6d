"""Models whose ranks die; see `dying.lose`.

    mpiexec --with-ft ulfm -n 6 python tests/torch/losing.py lose FOLDER STAGES
    mpiexec -n 6 python tests/torch/losing.py whole OPTIONS TRAININGS

The phases are the methods of `Model`, and "shrink".  The hash is that of the model's weights, its
gradients after a step, and tokens that it generates.  `whole` also trains, see `dying.train`.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import dying
import torch
import transformers

from a2d_mpi.torch import ContextParallel, GradientHooks

IDS = torch.randint(1, 64, (240,), generator=torch.Generator().manual_seed(0))
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "pad_token_id": 0}


class Model:
    """A model on a grid, and what ranks do with it together."""

    def __init__(self, grid):
        self.grid, self.cp, self.hooks = grid, None, None
        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, eos_token_id=None,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config)
        self.making()

    def making(self):
        self.free()
        self.cp = ContextParallel(self.grid, self.model, seqlen=96, kernel="numpy")
        self.hooks = GradientHooks(self.model, self.grid.comm, self.grid.failures)

    def step(self):
        self.model.zero_grad()
        batch = self.cp.shard(IDS[:96])
        self.cp.loss(self.model(**batch.inputs).logits, batch).backward()
        self.hooks.finish()

    def sums(self):
        self.model.zero_grad()
        for x in self.model.parameters():
            x.grad = torch.ones_like(x)
        self.cp.sum_gradients()

    def generate(self):
        torch.manual_seed(0)
        return self.cp.generate(IDS[:80], **SAMPLED)

    def goes_on(self):
        """Generate twice; plans compute what is new in the second prompt."""
        cache = self.cp.prefill(IDS[:80])
        torch.manual_seed(0)
        return self.cp.generate(IDS, past_key_values=cache, **SAMPLED)

    def free(self):
        for x in (self.cp, self.hooks):
            if x is not None:
                x.free()
        assert not self.grid.failures.others
        self.cp = self.hooks = None


def acts(phase, method, grid):
    """Return the action that is repeated in a phase, and what releases its resources after it."""
    model = Model(grid)
    return getattr(model, phase, model.step), model.free


def say_hash(method, grid, *more):
    """Print the hash of weights, gradients and tokens on a grid; collective."""
    model = Model(grid)
    model.step()
    pairs = [(x.detach(), x.grad) for x in model.model.parameters()]
    found = [x.numpy() for pair in pairs for x in pair]
    found += [model.generate().numpy(), model.goes_on().numpy()]
    if grid.comm.rank == 0:
        shape = f"{grid.rows}x{grid.cols}x{grid.heads}"
        dying.say("hash", shape, dying.hash_of(*found), *more)
    model.free()


if __name__ == "__main__":
    dying.faulthandler.dump_traceback_later(240, exit=True)
    kind, *more = sys.argv[1:]
    if kind == "lose":
        dying.lose(more[0], json.loads(more[1]), acts=acts, say_hash=say_hash)
    else:
        dying.whole("attention2d", 1, say_hash)
        dying.train(*map(json.loads, more))
