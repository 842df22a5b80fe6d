"""Input and result files from strangers: refused in one line, or all numbers are their own."""

import os
import socket
from argparse import Namespace

import h5py
import numpy as np
import pytest
from helpers import assert_all_refused
from test_results import SHAPES, error_of, make_result, write_input

from a2d_mpi.core.distribution import Distribution
from a2d_mpi.experiments.benchmark import add_results, read_benchmark
from a2d_mpi.experiments.files import files_read
from a2d_mpi.experiments.hdf5 import sources
from a2d_mpi.experiments.results import (
    SMALLER,
    inspect_input,
    read_result,
    read_shard,
    write_result,
)

SHAPE = SHAPES["k"]
WHOLE = Distribution("contiguous", SHAPE[0], 1)
HUGE = (10**12, 2, 4)


def external(file, name="k"):
    """Numbers that are the bytes of any file of this machine."""
    file.create_dataset(name, SHAPE, "f4", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])


def virtual(file, *sources, shape=SHAPE, **options):
    """`sources`: selection of k, path, name and shape of the source, selection of it."""
    layout = h5py.VirtualLayout(shape, "f4", **options)
    for target, path, name, size, chosen in sources:
        layout[target] = h5py.VirtualSource(path, name, size, "f4")[chosen]
    file.create_virtual_dataset("k", layout, fillvalue=0)


def endless(file, name="k", path="source.h5"):
    """A virtual dataset that has as many tokens as its source."""
    more = (h5py.h5s.UNLIMITED, *SHAPE[1:])
    spaces = [h5py.h5s.create_simple((n, *SHAPE[1:]), more) for n in (0, SHAPE[0])]
    for space, n in zip(spaces, (more[0], 1 if "%" in path else more[0])):
        space.select_hyperslab((0, 0, 0), (n, 1, 1), (1, 1, 1), (1, *SHAPE[1:]))
    options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    options.set_virtual(spaces[0], path.encode(), b"k", spaces[1])
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.NATIVE_FLOAT, spaces[0], options)


def linked(file, link):
    file["k"] = link


def of(path, name="k", shape=SHAPE, chosen=np.s_[:]):
    """A virtual dataset with one source."""
    return lambda file: virtual(file, (np.s_[:], path, name, shape, chosen))


BAD = {
    "external storage": (external, "the numbers of k are in other files (external storage)"),
    "external link": (lambda f: linked(f, h5py.ExternalLink("source.h5", "/k")), "k is a link"),
    "link to a pipe": (lambda f: linked(f, h5py.ExternalLink("pipe", "/k")), "k is a link"),
    "soft link": (lambda f: linked(f, h5py.SoftLink("/v")), "k is a link to another place"),
    "never written": (
        lambda f: f.create_dataset("k", SHAPE, "f4"),
        "k has 0 of the 928 bytes of its shape (29, 2, 4)",
    ),
    "partly written": (
        lambda f: f.create_dataset("k", SHAPE, "f4", chunks=(8, 2, 4)).write_direct(
            np.ones(SHAPE, "f4"), np.s_[8:], np.s_[8:]
        ),
        "k has 3 of the 4 chunks of its shape (29, 2, 4)",
    ),
    "huge": (lambda f: f.create_dataset("k", HUGE, "f4"), "k has 0 of the 32000000000000 bytes"),
    "huge chunks": (
        lambda f: f.create_dataset("k", HUGE, "f4", chunks=(1, 2, 4)),
        "k has 0 of the 1000000000000 chunks",
    ),
    "source missing": (of("none.h5"), "made of k in none.h5, which cannot be read: No such file"),
    "source of text": (of("text"), "made of k in text, which cannot be read: "),
    "source a pipe": (of("pipe"), "which cannot be read: it is not a regular file"),
    "endless, a pipe": (lambda f: endless(f, path="pipe"), "it is not a regular file"),
    "source without it": (of("source.h5", "x"), "made of x in source.h5, which cannot be read"),
    "source a group": (of("source.h5", "group"), "made of group in source.h5, which cannot"),
    "source elsewhere": (of("/etc/passwd"), "k in /etc/passwd: must be in this folder"),
    "source above": (of("../source.h5"), "k in ../source.h5: must be in this folder"),
    "numbered": (lambda f: endless(f, path="source%b.h5"), "k in source%b.h5: must be in this"),
    "source external": (of("source.h5", "external"), "of external are in other files"),
    "source virtual": (of("source.h5", "virtual"), "virtual is a virtual dataset itself"),
    "source unwritten": (of("source.h5", "unwritten"), "unwritten has 0 of the 928 bytes"),
    "made of itself": (of("."), "k is a virtual dataset itself"),
    "beyond the source": (
        of("source.h5", shape=(58, 2, 4), chosen=np.s_[29:]),
        "needs more of k in source.h5 than its (29, 2, 4)",
    ),
    "a gap": (
        lambda f: virtual(f, (np.s_[:28], "source.h5", "k", SHAPE, np.s_[:28])),
        "its sources are 224 of 232 numbers",
    ),
    "a gap and twice the same": (
        lambda f: virtual(
            f, *((np.s_[i : i + 28], "source.h5", "k", SHAPE, np.s_[:28]) for i in (1, 1))
        ),
        "its sources are 224 of 232 numbers",
    ),
    "no source": (virtual, "its sources are 0 of 232 numbers"),
    "endless": (endless, "k is virtual and grows with its sources"),
}


@pytest.fixture
def folder(tmp_path):
    """With a good source file, a pipe and a text."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("k")
    write_input(tmp_path / "source.h5")
    with h5py.File(tmp_path / "source.h5", "a") as file:
        external(file, "external")
        endless(file, "virtual", path=".")
        file.create_dataset("unwritten", SHAPE, "f4")
        file.create_group("group")
    return tmp_path


def test_refuses_numbers_that_are_elsewhere_or_nowhere(folder):
    path = folder / "input.h5"
    for name, (spoil, text) in BAD.items():
        write_input(path, k=None)
        with h5py.File(path, "a") as file:
            spoil(file)
        found = error_of(lambda: inspect_input(path), OSError)
        assert found.startswith(f"cannot read {path} as HDF5: ") and text in found, (name, found)


def test_takes_a_virtual_dataset_whose_sources_are_there(folder):
    path = folder / "input.h5"
    k = write_input(path)["k"]
    made = (
        lambda f: virtual(f, (np.s_[:], "source.h5", "k", SHAPE, np.s_[:])),
        lambda f: virtual(
            f, *((x, y, "k", SHAPE, x) for x, y in ((np.s_[1::2], "source.h5"), (np.s_[::2], "b")))
        ),
    )
    write_input(folder / "b")
    for make in made:
        write_input(path, k=None)
        with h5py.File(path, "a") as file:
            make(file)
        info = inspect_input(path)
        read = files_read(Namespace(input=path))  # none is an output
        assert {str(path), str(folder / "source.h5")} <= set(read)
        assert sources(path, ["k"]) == sources(path) and not sources(path, ["q", "none"])
        found = read_shard(info, "k", WHOLE, 0, "f4")
        assert np.array_equal(found, k)


def test_refuses_what_is_no_file(folder):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
    loop = folder / "loop"
    loop.symlink_to("loop")
    cases = {folder / "pipe": "it is not a regular file", folder / "socket": "it is not a regular",
             "/dev/zero": "it is not a regular file", loop: "Too many levels"}  # fmt: skip
    for path, text in cases.items():
        for read in (inspect_input, read_result, read_benchmark):
            assert text in error_of(lambda path=path, read=read: read(path), OSError)


def test_refuses_sizes_that_cannot_be(folder):
    path = folder / "input.h5"
    with h5py.File(path, "w") as file:
        file.attrs.update({"schema": "a2d_mpi input", "schema_version": 1})
        for name in "qkv":
            file.create_dataset(name, (1, 1, 1 << 20), "f4", np.zeros((1, 1, 1 << 20)), **SMALLER)
    assert "headdim must be at most 65536" in error_of(lambda: inspect_input(path), ValueError)


def test_a_filter_that_is_missing(folder):
    path = folder / "input.h5"
    write_input(path, k=None)
    with h5py.File(path, "a") as file:
        options = {"chunks": SHAPE, "compression": 999, "allow_unknown_filter": True}
        data = file.create_dataset("k", SHAPE, "f4", **options)
        data.id.write_direct_chunk((0, 0, 0), b"packed by a program that nobody has")
    text = error_of(lambda: read_shard(inspect_input(path), "k", WHOLE, 0, "f4"), OSError)
    assert "filter" in text


def test_result_files_of_strangers(folder):
    result, bench = folder / "result.h5", folder / "bench.h5"
    other = h5py.ExternalLink("source.h5", "/")
    for spoil, text in {
        "timings": "timings is a link to another place",
        "checks": "checks is a link",
        "timings/forward/total": "",
        "area": "external storage",
    }.items():
        write_result(result, make_result())
        with h5py.File(result, "a") as file:
            del file[spoil]
            if spoil == "area":
                external(file, spoil)
            elif spoil.count("/"):
                external(file, spoil)
                text = "the numbers of forward/total are in other files"
            else:
                file[spoil] = other
        assert text in error_of(lambda: read_result(result), OSError)
    add_results(bench, {}, {"one": make_result()})
    with h5py.File(bench, "a") as file:
        file["runs/two"] = other
    assert "runs/two is a link" in error_of(lambda: read_benchmark(bench), OSError)


def test_drivers_refuse_them_at_once(folder):
    path = folder / "input.h5"
    write_input(path, k=None)
    with h5py.File(path, "a") as file:
        file.create_dataset("k", HUGE, "f4")
    assert_all_refused("attention.py", 2, [
        ([folder / "pipe"], [], f"cannot read {folder / 'pipe'} as HDF5: it is not a regular"),
        ([path], [], "k has 0 of the 32000000000000 bytes of its shape"),
    ])  # fmt: skip
