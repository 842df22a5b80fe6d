"""Errors that all ranks raise together."""

from __future__ import annotations

from collections.abc import Mapping

from mpi4py import MPI


class CollectiveError(ValueError):
    """An error that all ranks of a communicator raise together, with the same message."""


def agree(comm: MPI.Intracomm, problem: str | None, config: Mapping[str, object] = {}) -> None:
    """Raise the same error on all ranks if any has a problem or they disagree.

    Collective over `comm`, and to be called before the first message that depends on `config`.

    Parameters
    ----------
    comm : Intracomm
    problem : str or None
        The error of this rank.
    config : mapping
        Values that must be the same on all ranks; they are compared by their text.

    Raises
    ------
    CollectiveError
        With the first rank's problem, or with the first value that differs, by rank.
    """
    everyone = comm.allgather((problem, {key: _text(value) for key, value in config.items()}))
    problems = [(rank, p) for rank, (p, _) in enumerate(everyone) if p is not None]
    if problems:
        rank, text = problems[0]
        ranks = [r for r, p in problems if p == text]
        where = f"rank {rank}" if len(ranks) == 1 else f"{len(ranks)} of {comm.size} ranks"
        raise CollectiveError(text if len(ranks) == comm.size else f"{text} (on {where})")
    for key, value in everyone[0][1].items():
        for rank, (_, other) in enumerate(everyone):
            if other.get(key) != value:
                raise CollectiveError(
                    f"ranks disagree on {key}: {value} on rank 0, {other.get(key)} on rank {rank}"
                )


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # a number of too many digits, or any other object of a caller
        return f"{type(value).__name__} ({error})"
