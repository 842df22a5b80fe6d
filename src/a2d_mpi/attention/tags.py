"""Tags of the messages of a program, for MPI."""

from a2d_mpi.schedules.slices import ALIVE
from a2d_mpi.schedules.steps import KINDS

_TENSORS = 4  # most tensors of a kind that is no parcel; each tensor has a tag of its own
_TAGS = {kind: _TENSORS * i for i, kind in enumerate(KINDS)}
_STRIDE = _TENSORS * len(KINDS)
_OF_TURN = 8  # tags from one turn to the next
_TURNS = 32000 // _STRIDE // ALIVE // _OF_TURN * _OF_TURN  # MPI guarantees tags up to 32767


def mpi_tag(kind: str, tag: int, turn: int, slice_: int) -> int:
    """Return MPI's tag for the first tensor of a message; its other tensors have the next tags.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    tag, turn : int
        As of a `a2d_mpi.schedules.steps.Message`.
    slice_ : int
        Slice of the heads.

    Notes
    -----
    Messages with other arguments may overtake this one.  `ALIVE` slices travel at once.  Sums of
    different tags and turns do not clash: several turns have only rings, with one tag, and lines
    of two ranks, where a rank sends rows of one owner.

    Examples
    --------
    Keys and values of owner 2 have the tags of one slice, and of the next slice:

    >>> mpi_tag("kv", 2, 0, slice_=0), mpi_tag("kv", 2, 0, slice_=1)
    (88, 10648)
    """
    place = slice_ % ALIVE * _TURNS + (tag + _OF_TURN * turn) % _TURNS
    return _TAGS[kind] + _STRIDE * place
