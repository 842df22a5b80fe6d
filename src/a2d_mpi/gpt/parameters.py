"""Parameters of a GPT: one flat array, and its parts by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from a2d_mpi.devices import device_of
from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.config import GPTConfig

SPREAD = 0.02  # standard deviation of initial weights, as GPT-2


class Parameters:
    """Named parts of one flat array: weights, their gradients, or an optimizer's moments.

    Parameters
    ----------
    config : GPTConfig
    flat : (config.parameters,) array
        NumPy or CuPy; the parts are views of it.
    shapes : dict of str to tuple of int, optional
        Of the parts, in their order.  Default: those of `config`, which are all.

    Attributes
    ----------
    named : dict of str to array
        By the names of `GPTConfig.shapes`.
    blocks : list of dict of str to array
        Of each block, by their names in it.
    """

    def __init__(
        self,
        config: GPTConfig,
        flat: Array,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        shapes = config.shapes if shapes is None else shapes
        if flat.shape != (total := sum(map(math.prod, shapes.values())),):
            raise ValueError(f"{flat.shape} elements for {total} parameters")
        self.config, self.flat, self.named = config, flat, {}
        self.blocks = [{} for _ in range(config.layers)]
        begin = 0
        for name, shape in shapes.items():
            end = begin + math.prod(shape)
            self.named[name] = flat[begin:end].reshape(shape)
            begin = end
            block, _, inner = name.partition(".")
            if block[1:].isdigit():  # h0, h1, ...
                self.blocks[int(block[1:])][inner] = self.named[name]

    def state_dict(self) -> dict[str, np.ndarray]:
        """The parts as `torch.nn.Module.state_dict` has them: its names, its layouts.

        Block i is ``h.{i}``, ``wte`` and ``wpe`` are ``torch.nn.Embedding``, the others
        ``torch.nn.LayerNorm`` and ``torch.nn.Linear``, whose weights are (outputs, inputs).  Of
        gradients it gives the ``grad`` of each.

        Returns
        -------
        dict of str to ndarray
            Copies, on the host.
        """
        state = {}
        for name, part in self.named.items():
            x = device_of(part).download(part)
            if name in ("wte", "wpe"):
                name += ".weight"
            elif x.ndim == 2:
                x = x.T
            state[re.sub(r"^h(\d+)", r"h.\1", name)] = np.array(x, order="C")
        return state

    def buckets(self) -> Iterator[slice]:
        """Parts of the flat array in the order in which a backward pass finishes their gradients.

        The last block with the final LayerNorm, the blocks before it, the embeddings.
        """
        size, end = self.config.of_block, len(self.flat)
        begin = end - 2 * self.config.width  # of the final LayerNorm
        for _ in range(self.config.layers):
            begin -= size
            yield slice(begin, end)
            end = begin
        yield slice(0, end)


def initial(config: GPTConfig, seed: int, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Draw the initial weights of GPT-2, flat: the same for any number of ranks.

    Weights are normal with a standard deviation of 0.02, those that add to the residual stream
    with 0.02 / sqrt(2 layers); biases are 0, LayerNorms 1.
    """
    flat = np.zeros(config.parameters, dtype)
    rng = np.random.default_rng(seed)
    for name, part in Parameters(config, flat).named.items():
        if name.endswith("bias"):
            continue
        if ".ln" in name or name.startswith("ln"):
            part[:] = 1
            continue
        residual = name.endswith(("proj.weight", "out.weight"))
        spread = SPREAD / math.sqrt(2 * config.layers) if residual else SPREAD
        part[:] = spread * rng.standard_normal(part.shape)
    return flat
