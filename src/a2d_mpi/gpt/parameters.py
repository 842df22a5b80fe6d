"""Parameters of a GPT: one flat array, and views of it by name."""

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
    """Named views of one flat array: weights, their gradients, or an optimizer's moments.

    Parameters
    ----------
    config : GPTConfig
    flat : (config.parameters,) array
        NumPy or CuPy.
    shapes : dict of str to tuple of int, optional
        Names and shapes of the views, in their order.  Default: `config.shapes`.

    Attributes
    ----------
    named : dict of str to array
        Views by the names of `GPTConfig.shapes`.
    by_layer : list of dict of str to array
        Views of each layer, by their names without ``h{i}.``.

    Raises
    ------
    ValueError
        If `flat` has the wrong number of elements.
    """

    def __init__(
        self, config: GPTConfig, flat: Array, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        shapes = config.shapes if shapes is None else shapes
        if flat.shape != (total := sum(map(math.prod, shapes.values())),):
            raise ValueError(f"flat must have shape ({total},), got {flat.shape}")
        self.config, self.flat, self.named = config, flat, {}
        self.by_layer = [{} for _ in range(config.layers)]
        begin = 0
        for name, shape in shapes.items():
            end = begin + math.prod(shape)
            self.named[name] = flat[begin:end].reshape(shape)
            begin = end
            layer, _, inner = name.partition(".")
            if layer[1:].isdigit():  # h0, h1, ...
                self.by_layer[int(layer[1:])][inner] = self.named[name]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies with the names and layouts of `torch.nn.Module.state_dict`.

        Layer i is ``h.{i}``.  ``wte`` and ``wpe`` are ``torch.nn.Embedding``.  All others are
        ``torch.nn.LayerNorm`` or ``torch.nn.Linear``, whose weights are (outputs, inputs).  Called
        on gradients, it returns the ``grad`` of each weight.

        Returns
        -------
        dict of str to ndarray
            Copies on the host.
        """
        state = {}
        for name, view in self.named.items():
            x = device_of(view).download(view)
            if name in ("wte", "wpe"):
                name += ".weight"
            elif x.ndim == 2:
                x = x.T
            state[re.sub(r"^h(\d+)", r"h.\1", name)] = np.array(x, order="C")
        return state

    def buckets(self) -> Iterator[slice]:
        """Yield slices of the flat array in the order in which a backward pass finishes gradients.

        The first slice is the last layer with the final LayerNorm.  The layers before it follow,
        and then the embeddings.
        """
        size, end = self.config.of_layer, len(self.flat)
        begin = end - 2 * self.config.width  # begin of the final LayerNorm
        for _ in range(self.config.layers):
            begin -= size
            yield slice(begin, end)
            end = begin
        yield slice(0, end)


def initial(config: GPTConfig, seed: int, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Draw initial weights as GPT-2, flat and the same for any number of ranks.

    Weights are normal with a standard deviation of 0.02.  For the last matrix before the residual
    stream it is 0.02 / sqrt(2 layers).  Biases are 0, the weights of LayerNorms are 1.

    Parameters
    ----------
    config : GPTConfig
    seed : int
    dtype : dtype

    Returns
    -------
    (config.parameters,) ndarray of `dtype`
    """
    flat = np.zeros(config.parameters, dtype)
    rng = np.random.default_rng(seed)
    for name, view in Parameters(config, flat).named.items():
        if name.endswith("bias"):
            continue
        if ".ln" in name or name.startswith("ln"):
            view[:] = 1
            continue
        residual = name.endswith(("proj.weight", "out.weight"))
        spread = SPREAD / math.sqrt(2 * config.layers) if residual else SPREAD
        view[:] = spread * rng.standard_normal(view.shape)
    return flat
