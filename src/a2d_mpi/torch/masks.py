"""The masks that mask functions of transformers show, and numbers that travel in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FunctionType
from typing import Any

import numpy as np
import torch

from a2d_mpi.masks.documents import Documents
from a2d_mpi.masks.mask import Causal, Full, Mask
from a2d_mpi.masks.windows import SlidingWindow

NAN = 0x7FF8 << 48  # the bits of a NaN in float64
PAIRS = 4096  # random queries for which a mask is compared
SMALL = 16  # most elements of a tensor by which mask functions are told apart


def known_mask(
    where: str,
    number: int | None,
    window: int | None,
    causal: bool | None,
    masks: list[Mask | None],
    seqlen: int,
) -> Mask:
    """Return the mask of a layer, the one of a number or none; ValueError if no plan has it.

    `window` and `causal` are what transformers passes to attention, and the layer has.
    """
    mask = Full() if number is None else masks[number]
    if number is None and causal in (None, True):
        raise ValueError(f"{where} is causal, but gets no mask")
    if mask is None:
        raise ValueError(f"{where} has a mask that is no window, chunk, causal or full")
    if window is not None and window < seqlen and mask in (Causal(), Full()):
        raise ValueError(f"{where} passes sliding_window={window}, but its mask has none")
    if causal is not None and mask in (Causal(), Full()) and bool(causal) != (mask == Causal()):
        raise ValueError(f"{where} has is_causal={causal}, but its mask is {mask}")
    return mask


def causal_of(module: torch.nn.Module, others: dict[str, Any]) -> bool | None:
    """Return whether a call of a layer is causal, if it or the layer says so."""
    causal = others.get("is_causal")
    return getattr(module, "is_causal", None) if causal is None else causal


class Masks:
    """The masks that a model's mask functions show.

    Attributes
    ----------
    found : list of Mask or None
        None: a mask that no plan has.
    """

    def __init__(self, seqlen: int, found: Iterable[Mask]) -> None:
        self._seqlen, self.found = seqlen, [None, *dict.fromkeys(found)]
        self._numbers: dict[tuple, int] = {}

    def number_of(self, mask_function: Callable) -> int:
        """Return where in `found` the mask of a function is.

        A function of the same code with the same arguments shows the same mask.  Any other one is
        called for many pairs of tokens.
        """
        key = None
        with suppress(TypeError):
            key = arguments_of(mask_function)
        number = self._numbers.get(key)
        if number is None:
            mask = None
            with suppress(IndexError, RuntimeError):  # of PyTorch: there are no such tokens
                mask = mask_of(mask_function, self._seqlen)
            if mask not in self.found:
                self.found.append(mask)
            number = self.found.index(mask)
            if key is not None:
                self._numbers[key] = number
        return number


def arguments_of(x: Any) -> Any:
    """Return the code of a function with all that it holds; TypeError if that may change."""
    if isinstance(x, FunctionType):
        cells = [y.cell_contents for y in x.__closure__ or ()]
        return x.__code__, *map(arguments_of, (x.__defaults__, x.__kwdefaults__, *cells))
    if isinstance(x, tuple):
        return tuple(map(arguments_of, x))
    if isinstance(x, torch.Tensor) and x.numel() <= SMALL:
        return tuple(x.shape), tuple(x.flatten().tolist())
    if isinstance(x, (int, float, str, type(None))):
        return x
    raise TypeError(f"{type(x).__name__} may change")


def mask_of(mask_function: Callable, seqlen: int) -> Mask | None:
    """Return the mask that a mask function of transformers shows; None if there is none.

    It is causal, full or a window, in one document or in several.  The bounds are read off, and
    then the mask is compared at all bounds and for random pairs.
    """
    zero, tokens = torch.tensor(0), np.arange(seqlen)

    def shows(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        shown = mask_function(zero, zero, torch.from_numpy(queries), torch.from_numpy(keys))
        return torch.as_tensor(shown).expand(len(queries)).numpy(force=True)

    cuts = np.flatnonzero(~shows(tokens[1:], tokens[:-1])) + 1
    cuts = np.array([0, *cuts, seqlen])
    longest = int(np.diff(cuts).argmax())
    inside = tokens[cuts[longest] : cuts[longest + 1]]
    most = len(inside) - 1
    left, right = (int(shows(np.full_like(inside, inside[i]), inside).sum()) - 1 for i in (-1, 0))
    if left == most and right in (0, most):
        mask: Mask = Full() if right else Causal()
    else:
        mask = SlidingWindow(max(left, 0), max(right, 0))
    if len(cuts) > 2:
        mask = Documents(cuts, inside=mask)
    random = np.random.default_rng(0)
    near = (cuts[:, None] + [-1, 0, left, left + 1, -right, -right - 1]).ravel()
    q = np.concatenate([near, random.integers(seqlen, size=PAIRS)]).clip(0, seqlen - 1)
    ((begin, end),) = mask.visible(q)
    keys = [begin - 1, begin, end - 1, end, q - 1, q, q + 1]
    keys += [random.integers(seqlen, size=len(q)) for _ in range(8)]
    k, q = np.concatenate(keys).clip(0, seqlen - 1), np.tile(q, len(keys))
    ((begin, end),) = mask.visible(q)
    return mask if np.array_equal(shows(q, k), (begin <= k) & (k < end)) else None


def tag(number: int | torch.Tensor) -> torch.Tensor:
    """Return a number as a mask, which models pass on to their attention.

    It is NaN, with the number in its fraction, so that no other attention takes it for a mask.
    """
    number = torch.as_tensor(number, device="cpu") | NAN
    return number.view(torch.float64).view(1, 1, 1, 1)


def number_of(mask: torch.Tensor | None) -> int | None:
    """Return the number of a `tag`; None if the model has changed it, or there is none."""
    is_tag = mask is not None and mask.shape == (1, 1, 1, 1) and mask.dtype == torch.float64
    return int(mask.view(torch.int64)) & ~NAN if is_tag else None
