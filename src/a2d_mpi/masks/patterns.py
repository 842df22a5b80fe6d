"""Masks by name: ``sliding_window:256``, ``full_document:seed=3``, ``full_document:0,100,400``.

The fourteen patterns are those of LongCA-bench (arXiv:2510.17896), see `a2d_mpi.masks.longca`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module

from a2d_mpi.core.sizes import parse_count
from a2d_mpi.masks.mask import Causal, Full, Mask

_LONGCA = "a2d_mpi.masks.longca"

# By name: a function, or the module of a function of that name, which is imported when the mask is
# first asked for.  The function is called with the length of the sequence and the arguments of the
# text.
PATTERNS: dict[str, Callable[..., Mask] | str] = {
    "full": lambda seqlen: Full(),
    "causal": lambda seqlen: Causal(),
    "full_document": _LONGCA,
    "causal_document": _LONGCA,
    "share_question": _LONGCA,
    "causal_blockwise": _LONGCA,
    "prefix_lm_causal": _LONGCA,
    "prefix_lm_document": _LONGCA,
    "sliding_window": _LONGCA,
    "sliding_window_causal": _LONGCA,
    "global_sliding_window": _LONGCA,
    "block_causal_document": _LONGCA,
    "full_document_long": _LONGCA,
    "causal_document_long": _LONGCA,
}


def _maker(name: str) -> Callable[..., Mask]:
    """The function that makes the mask of a name."""
    found = PATTERNS[name]
    return getattr(import_module(found), name) if isinstance(found, str) else found


def register_mask(name: str, make: Callable[..., Mask]) -> None:
    """Give a mask of one's own a name, which `make_mask` and the drivers take.

    Parameters
    ----------
    name : str
        Lower-case letters, digits and underscores, a letter first.
    make : callable
        Called with the length of the sequence, and the whole numbers of the text: those behind the
        colon of ``name:3,window=4`` as positional and keyword arguments.  Returns the mask.

    Raises
    ------
    ValueError
        If the name is taken or no such name, or `make` cannot be called.
    """
    if name in (*PATTERNS, "all", "file"):
        raise ValueError(f"there is a mask {name!r} already")
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(f"a mask's name must be of a-z, 0-9 and _, got {name!r}")
    if not callable(make):
        raise ValueError(f"mask {name!r} must be made by a function, got {make!r}")
    PATTERNS[name] = make


def parse_mask(text: str) -> tuple[str, list[int], dict[str, int]]:
    """Take the text of a mask apart.

    Parameters
    ----------
    text : str
        ``NAME``, or ``NAME:ARGUMENTS``: whole numbers and ``name=number``, with commas; 4K is
        4096.

    Returns
    -------
    name : str
        One of `PATTERNS`.
    arguments : list of int
    named : dict of str to int

    Raises
    ------
    ValueError
        If there is no such mask, or it takes no such arguments.
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
            raise ValueError(f"mask {name}: {item[:40]!r} is no whole number") from None
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
    """The mask of a name with arguments, for a sequence of `seqlen` tokens.

    Parameters
    ----------
    text : str
        As of `parse_mask`: "causal", "sliding_window_causal:256", "causal_document:0,100,400".
    seqlen : int
        Tokens of the sequence, from which sizes that are not given follow.
    seqlen_kv : int, optional
        Keys, with whose end the queries are aligned.  Default: as many as queries.

    Returns
    -------
    Mask

    Raises
    ------
    ValueError
        If there is no such mask, it takes no such arguments, or it does not fit the sequence.
    """
    name, arguments, named = parse_mask(text)
    try:
        mask = _maker(name)(seqlen, *arguments, **named)
        return mask.aligned(seqlen, seqlen if seqlen_kv is None else seqlen_kv)
    except ValueError as error:
        raise ValueError(f"mask {name}: {error}") from None


def split_masks(text: str) -> list[str]:
    """Split texts of masks with commas between them; "all": every name of `PATTERNS`.

    ``"full,sliding_window:8,4,causal_document:seed=1"`` are three: a number, or ``name=number``,
    belongs to the mask before it.
    """
    found: list[str] = []
    for item in filter(None, (x.strip() for x in text.split(","))):
        if found and ":" in found[-1] and re.fullmatch(r"[+-]?\d+[KMG]?|\w+\s*=.*", item):
            found[-1] += f",{item}"
        else:
            found.extend(PATTERNS if item == "all" else [item])
    return found


def usage(name: str) -> str:
    """The text of a mask with the names of its arguments: "sliding_window:left,right"."""
    shown = []
    for x in list(inspect.signature(_maker(name)).parameters.values())[1:]:
        several = x.kind is x.VAR_POSITIONAL
        shown.append(f"{x.name},..." if several else x.name + "=" * (x.kind is x.KEYWORD_ONLY))
    return name + (f"[:{','.join(shown)}]" if shown else "")
