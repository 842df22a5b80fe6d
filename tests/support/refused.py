"""What all ranks are told of a wrong argument."""

from helpers import assert_all

from a2d_mpi.comm.agreement import CollectiveError

GOOD = {"seqlen": 40, "nheads": 4, "headdim": 8}


def message_of(comm, action, kind=CollectiveError):
    """Return the text of the error that `action` raises; it must be the same on all ranks."""
    try:
        action()
        text = None
    except kind as error:
        text = str(error)
    texts = comm.allgather(text)
    assert_all(comm, None not in texts and len(set(texts)) == 1, f"{texts}")
    # All ranks are still in step.
    comm.Barrier()
    return text


def assert_raises(comm, text, call, *args, **options):
    """A call raises one error on all ranks, which says `text`."""
    said = message_of(comm, lambda: call(*args, **options))
    assert_all(comm, text in said, f"{text!r} is not in {said!r}")
