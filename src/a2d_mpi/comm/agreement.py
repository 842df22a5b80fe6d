"""Steps of all ranks together: they agree, or all raise the same error.

A rank checks its arguments, and then agrees with all other ranks.  Only then it sends messages of
the call.  So an error of one rank is an error of all ranks, and no rank waits for another rank
that has failed.  `a2d_mpi.comm.calls` has the calls of plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from mpi4py import MPI


class CollectiveError(ValueError):
    """An error that all ranks of a communicator raise together, with the same message."""


def agree(comm: MPI.Intracomm, problem: str | None, config: Mapping[str, object] = {}) -> None:
    """Raise the same error on all ranks if any rank has a problem or ranks disagree.

    Collective over `comm`.  Call it before the first message that depends on `config`.

    Parameters
    ----------
    comm : Intracomm
    problem : str or None
        The error of this rank.
    config : mapping
        Values that must be the same on all ranks; their texts are compared.

    Raises
    ------
    CollectiveError
        If a rank has a problem, or values differ.  The message has the problem of the first rank
        with a problem, or the first value that differs, and names the ranks.
    """
    everyone = comm.allgather((problem, {key: str(value) for key, value in config.items()}))
    problems = [(rank, p) for rank, (p, _) in enumerate(everyone) if p is not None]
    if problems:
        rank, text = problems[0]
        ranks = [r for r, p in problems if p == text]
        where = f"rank {rank}" if len(ranks) == 1 else f"{len(ranks)} of {comm.size} ranks"
        raise CollectiveError(text if len(ranks) == comm.size else f"{text} (on {where})")
    for key in dict.fromkeys(x for _, values in everyone for x in values):
        first, *others = (values.get(key) for _, values in everyone)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise CollectiveError(
                    f"ranks disagree on {key}: {first} on rank 0, {other} on rank {rank}"
                )


def message_of(error: BaseException) -> str:
    """Return the message of an error, or its type if the message is empty."""
    return str(error) or type(error).__name__


class Call:
    """Something that all ranks of a communicator do together, or no rank does it::

        call = Call(comm)
        with call.checks():
            ...  # work of this rank alone, without communication
        call.agree()

    If a rank fails in its checks, all ranks raise its error in `agree`.

    Attributes
    ----------
    problem : str or None
        The error of this rank.

    Raises
    ------
    ValueError
        On this rank, if `comm` is no communicator of MPI.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        if not isinstance(comm, MPI.Comm):  # which users of torch.distributed take for one
            raise ValueError(
                f"comm must be an MPI communicator, got {type(comm).__name__}: pass for example "
                "MPI.COMM_WORLD; a2d_mpi.torch.init_process_group(comm) sets up torch.distributed "
                "on the same ranks"
            )
        self.comm, self.problem = comm, None

    @contextmanager
    def checks(
        self,
        kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
        text: Callable[[Exception], str] = message_of,
    ) -> Iterator[None]:
        """Keep an exception of these kinds as the problem of this rank, in the words of `text`.

        The context ends without an exception.  `agree` then raises a `CollectiveError` on all
        ranks.
        """
        try:
            yield
        except kinds as error:
            self.problem = self.problem or text(error)

    def agree(self, same: Mapping[str, object] = {}) -> object:
        """Call `agree` with the problem of this rank and values that must be the same."""
        agree(self.comm, self.problem, same)
