"""Checkpoints of a training run: folders of transformers that are complete or not there.

Each folder ``step-000000020`` is one that anybody's ``from_pretrained`` loads.  Beside the model
lie the state of the optimizer and `RUN`, a JSON of the run with the checksums of all files.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from a2d_mpi.core.atomic import new_folder, remove_folder
from a2d_mpi.experiments.options import reason
from a2d_mpi.experiments.origin import sha256

RUN = "training.json"
KEPT = 2  # checkpoints of a run that are kept: the latest, and one more in case it is damaged


@dataclass
class State:
    """The history of a training run.

    Attributes
    ----------
    run : dict
        Options that must be the same when the run is resumed.
    losses : list of float
        Loss of every step so far.
    seconds : list of list of float
        Seconds of every step so far, by part.
    ranges : list of dict
        Settings that may change the bits of results (grid, kernel, BLAS, ...), one dict for each
        range of steps from "begin" to "end".
    """

    run: dict[str, object]
    losses: list[float] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    ranges: list[dict[str, object]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Updates so far."""
        return len(self.losses)

    def add_step(self, loss: float, seconds: list[float], settings: Mapping[str, object]) -> None:
        """Count a step that was computed with these settings."""
        if not self.ranges or differences(self.ranges[-1], settings):
            self.ranges.append({"begin": self.step, "end": self.step, **settings})
        self.losses.append(loss)
        self.seconds.append(seconds)
        self.ranges[-1]["end"] = self.step


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:09}"


def save(folder: Path, state: State, write: Callable[[Path], None]) -> None:
    """Write a checkpoint, and remove earlier ones except the latest.

    Folders of other runs, of later steps, and damaged ones are not removed.

    Parameters
    ----------
    folder : Path
    state : State
    write : callable
        ``write(folder)`` writes the files of model and optimizer.

    Raises
    ------
    OSError
        If it cannot be written; earlier checkpoints are kept.
    """
    path = path_of(folder, state.step)
    if not path.exists():  # a rank that died since may have written it
        with new_folder(path) as temporary:
            write(Path(temporary))
            paths = (x for x in sorted(Path(temporary).rglob("*")) if x.is_file())
            files = {str(x.relative_to(temporary)): sha256(x) for x in paths}
            tree = {**asdict(state), "files": files}
            text = json.dumps({**tree, "sha256": _digest(tree)})
            Path(temporary, RUN).write_text(text)
    earlier = [x for x in _paths(folder) if x.name < path.name and _run_of(x) == state.run]
    for old in earlier[KEPT - 1 :]:
        remove_folder(old)


def load(path: Path) -> State:
    """Read the history of a checkpoint, and check all its files.

    Raises
    ------
    OSError
        If a file cannot be read, or is damaged.
    """
    try:
        tree = json.loads((path / RUN).read_text())
        wrong = [RUN] * (tree.pop("sha256") != _digest(tree))
        wrong += [x for x, digest in tree.pop("files").items() if sha256(path / x) != digest]
        if not wrong:
            return State(**tree)
        why = f"the checksum of {wrong[0]} does not match"
    except PermissionError:
        raise
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = reason(error)
    raise OSError(f"{path} is damaged: {why}")


def latest(folder: Path) -> tuple[Path | None, State | None, dict[Path, str]]:
    """Return the latest undamaged checkpoint of a folder, and why later ones were refused.

    Parameters
    ----------
    folder : Path

    Returns
    -------
    Path, State : None
        None if the folder has no undamaged checkpoint.
    dict of Path to str
        The reason for each later checkpoint that was refused.

    Raises
    ------
    PermissionError
        If this process may not read a later checkpoint, which might be undamaged.
    """
    refused: dict[Path, str] = {}
    for path in _paths(folder):
        try:
            return path, load(path), refused
        except PermissionError:
            raise
        except OSError as error:
            if not path.exists():  # a running job has removed it, and written a later one
                return latest(folder)
            refused[path] = str(error)
    return None, None, refused


def resumed(
    folder: Path, run: Mapping[str, object], resume: bool
) -> tuple[Path | None, State | None]:
    """Return the checkpoint from which a run resumes; None if the folder has no checkpoints.

    Damaged checkpoints of later steps are renamed, with a line on stderr for each.

    Raises
    ------
    ValueError
        If there are checkpoints and `resume` is false, or all are damaged, or the latest belongs
        to another run.
    PermissionError
        If this process may not read a checkpoint.
    """
    if not _paths(folder, "*"):
        return None, None
    if not resume:
        raise ValueError(
            f"{folder} has checkpoints; --resume continues from the latest, "
            "another --folder begins anew"
        )
    found, state, refused = latest(folder)
    if state is None:
        why = "; ".join(refused.values()) or "damaged ones were renamed"
        raise ValueError(f"{folder} has no complete checkpoint: {why}")
    if changes := differences(state.run, run):
        anew = "; a longer run takes a checkpoint as MODEL, and another --folder"
        raise ValueError(
            f"the run in {folder} has other options: {changes}" + anew * ("steps was" in changes)
        )
    for path, why in refused.items():
        aside = path.with_name(f"{path.name}.damaged")
        path.rename(aside)
        print(f"renamed to {aside.name}, because {why}", file=sys.stderr, flush=True)
    return found, state


def differences(was: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return a text that says which values differ; it is empty if none differs."""
    return "; ".join(
        f"{name} was {was.get(name)}, now {x}" for name, x in now.items() if was.get(name) != x
    )


def _digest(tree: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


def _run_of(path: Path) -> object:
    """Return the options of a checkpoint; None if they cannot be read."""
    try:
        return json.loads((path / RUN).read_text())["run"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _paths(folder: Path, end: str = "") -> list[Path]:
    """List checkpoints, the latest first; with the end "*" also renamed damaged ones."""
    return sorted(folder.glob(f"step-{'[0-9]' * 9}{end}"), reverse=True)
