"""Files of users: prompts, and Python files of --import with what plans take."""

from __future__ import annotations

import sys
import traceback
from argparse import ArgumentTypeError, Namespace
from functools import cache
from pathlib import Path
from types import ModuleType

from a2d_mpi.core.atomic import read_regular


@cache
def import_file(path: Path) -> Path:
    """Run a user's Python file, once in a process, and return its path.

    Raises
    ------
    OSError
        If the file cannot be read, or is not a regular file.
    ArgumentTypeError
        If the file raises an exception; the message has the line.
    """
    name, source = str(path), read_regular(path)
    module = ModuleType(f"imported {name}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    try:
        exec(compile(source, name, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        calls = traceback.extract_tb(error.__traceback__)
        lines = [x.lineno for x in calls if x.filename == name]
        line = lines[-1] if lines else getattr(error, "lineno", 1)  # a SyntaxError has a lineno
        what = str(error).partition("\n")[0]
        raise ArgumentTypeError(f"{name}, line {line}: {type(error).__name__}: {what}") from None
    return path


def texts_of(args: Namespace) -> list[bytes]:
    """Return the prompts of files, and then those of --prompt; ValueError if one is empty."""
    texts = [(str(x), x.read_bytes()) for x in args.prompt_file]
    texts += [("--prompt", x.encode(errors="surrogateescape")) for x in args.prompt]
    if not texts:
        raise ValueError("give --prompt or --prompt-file")
    for name, text in texts:
        if not text:
            raise ValueError(f"{name} must not be empty")
    return [text for _, text in texts]
