"""Masks by name: ``sliding_window:256``, ``full_document:seed=3``, ``full_document:0,100,400``.

The fourteen patterns come from LongCA-bench (arXiv:2510.17896), see `a2d_mpi.masks.longca`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module

from a2d_mpi.core.sizes import parse_count
from a2d_mpi.masks.mask import Causal, Full, Mask

# Patterns of `a2d_mpi.masks.longca`, by the names of its functions.
_OF_LONGCA = (
    "full_document", "causal_document", "share_question", "causal_blockwise", "prefix_lm_causal",
    "prefix_lm_document", "sliding_window", "sliding_window_causal", "global_sliding_window",
    "block_causal_document", "full_document_long", "causal_document_long",
)  # fmt: skip

# A pattern's function by its name, or the module of the function, which is imported when the
# pattern is first used.  The function takes the length of the sequence and the arguments of the
# pattern.
PATTERNS: dict[str, Callable[..., Mask] | str] = {
    "full": lambda seqlen: Full(),
    "causal": lambda seqlen: Causal(),
    **dict.fromkeys(_OF_LONGCA, "a2d_mpi.masks.longca"),
}


def _maker(name: str) -> Callable[..., Mask]:
    """Return the function that makes the mask of a name."""
    maker = PATTERNS[name]
    return getattr(import_module(maker), name) if isinstance(maker, str) else maker


def parse_mask(text: str) -> tuple[str, list[int], dict[str, int]]:
    """Split the text of a mask into its name and arguments.

    Parameters
    ----------
    text : str
        ``NAME``, or ``NAME:ARGUMENTS`` with integers and ``name=integer``, separated by commas.
        4K is 4096.

    Returns
    -------
    name : str
        One of `PATTERNS`.
    arguments : list of int
    named : dict of str to int

    Raises
    ------
    ValueError
        If there is no mask of this name, or it does not take these arguments.
    """
    name, colon, rest = (x.strip() for x in text.partition(":"))
    if name not in PATTERNS:
        raise ValueError(f"mask must be one of {', '.join(PATTERNS)}, got {text[:40]!r}")
    arguments, named = [], {}
    for item in rest.split(",") if colon else ():
        key, number = re.fullmatch(r"(?:\s*(\w+)\s*=)?(.*)", item, re.DOTALL).groups()
        try:
            value = parse_count(number)
        except ValueError:
            raise ValueError(f"mask {name}: {item[:40]!r} is not a whole number") from None
        if key is None and not named:
            arguments.append(value)
        elif key is None or key in named:
            raise ValueError(f"mask {name}: {item[:40]!r} is one argument too many")
        else:
            named[key] = value
    try:
        inspect.signature(_maker(name)).bind(None, *arguments, **named)
    except TypeError:
        raise ValueError(f"mask must be {usage(name)}, got {text[:60]!r}") from None
    for key, number in named.items():
        if number < 0:
            raise ValueError(f"mask {name}: {key} must be at least 0, got {number}")
    return name, arguments, named


def make_mask(text: str, seqlen: int, seqlen_kv: int | None = None) -> Mask:
    """Make a mask from its name and arguments, for a sequence of `seqlen` tokens.

    Parameters
    ----------
    text : str
        As in `parse_mask`: "causal", "sliding_window_causal:256", "causal_document:0,100,400".
    seqlen : int
        Number of queries.  Default sizes of a pattern follow from it.
    seqlen_kv : int, optional
        Number of keys.  The last query is aligned with the last key.  Default: `seqlen`.

    Returns
    -------
    Mask

    Raises
    ------
    ValueError
        If there is no mask of this name, it does not take these arguments, or it does not fit the
        sequence.
    """
    name, arguments, named = parse_mask(text)
    try:
        mask = _maker(name)(seqlen, *arguments, **named)
        return mask.aligned(seqlen, seqlen if seqlen_kv is None else seqlen_kv)
    except ValueError as error:
        raise ValueError(f"mask {name}: {error}") from None


def split_masks(text: str) -> list[str]:
    """Split a list of masks that are separated by commas; "all" is every name of `PATTERNS`.

    An integer, or ``name=integer``, belongs to the mask before it.  So
    ``"full,sliding_window:8,4,causal_document:seed=1"`` names three masks.
    """
    masks: list[str] = []
    for item in filter(None, (x.strip() for x in text.split(","))):
        if masks and ":" in masks[-1] and re.fullmatch(r"[+-]?\d+[KMG]?|\w+\s*=.*", item):
            masks[-1] += f",{item}"
        else:
            masks.extend(PATTERNS if item == "all" else [item])
    return masks


def usage(name: str) -> str:
    """Return the name of a mask with the names of its arguments: "sliding_window[:left,right]"."""
    arguments = []
    for x in list(inspect.signature(_maker(name)).parameters.values())[1:]:
        several = x.kind is x.VAR_POSITIONAL
        arguments.append(f"{x.name},..." if several else x.name + "=" * (x.kind is x.KEYWORD_ONLY))
    return name + (f"[:{','.join(arguments)}]" if arguments else "")
