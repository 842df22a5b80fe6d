"""cuDNN builds graphs for four kinds of GPUs without any: `bash jobs/test.sh cudnn`."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path

import pytest
from deviceless import GPUS

from a2d_mpi.kernels.graphs import Block, supported

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory):
    """Return a folder with a libcuda that has all names which cuDNN looks up."""
    try:
        found = [version(f"nvidia-{x}") for x in ("cudnn-frontend", "cudnn-cu13")]
    except PackageNotFoundError as error:
        pytest.skip(f"no GPU packages: {error.name} is not installed")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no GPU emulation: cc is not installed")
    print("cuDNN's frontend and cuDNN:", *found)
    folder, source = tmp_path_factory.mktemp("libcuda"), HERE / "libcuda.c"
    libraries = [Path(x) / "cudnn/lib" for x in find_spec("nvidia").submodule_search_locations]
    names = {
        name
        for library in chain.from_iterable(x.glob("libcudnn*.so.9") for x in libraries)
        for name in re.findall(rb"\0(cu[A-Z]\w*)(?=\0)", library.read_bytes())
    }
    own = re.findall(r"\bcu[A-Z]\w+", source.read_text())
    rest = {x.decode() for x in names} - set(own)
    (folder / "names.h").write_text("".join(f"STUB({x})\n" for x in sorted(rest)))
    command = [compiler, "-shared", "-fPIC", "-I", folder, source, "-o", folder / "libcuda.so.1"]
    subprocess.run(command, check=True, timeout=60)
    return folder


def built(libcuda, sm, work, *options):
    """Build the graphs of blocks in a new process; return the reason of each that has none."""
    env = os.environ | {"LD_LIBRARY_PATH": str(libcuda)}
    done = subprocess.run(
        [sys.executable, HERE / "deviceless.py", str(sm), *options],
        input="".join(json.dumps([backward, asdict(block)]) + "\n" for backward, block in work),
        env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for (backward, block), (seconds, reason) in zip(work, found, strict=True):
        kind = f"{block.headdim}/{block.headdim_v} {block.shape}" + ", padded" * block.padded
        kind += f", soft-cap {block.softcap}" if block.softcap else ""
        pass_ = "backward" if backward else "forward"
        print(f"sm_{sm} {kind}, {pass_}: {seconds} s{f', {reason}' if reason else ''}")
    return [reason for _, reason in found]


CASES = {
    f"{d}-{e}{'-cap' * bool(cap)}": (d, e, cap)
    for (d, e), cap in product([(128, 128), (192, 128), (24, 16)], (None, 30.0))
}


def block_of(case, shape, backward, padded=False):
    d, e, cap = CASES[case]
    # The kernel repeats shared heads before the backward pass.
    return Block(
        "float16" if d == 24 else "bfloat16", 8, 8 if backward else 2, d, e, 1024, 2048, shape,
        d**-0.5, 512 if shape == "band" else 0, padded, cap,
    )  # fmt: skip


def refused(case, shape, backward, padded, sm):
    """What cuDNN has no graph for, or what is left to the plain kernel."""
    d, _, cap = CASES[case]
    if cap and (padded or shape not in ("full", "general")):  # with a soft-cap runs are general
        return True
    if shape == "general" and padded:
        return True
    return bool(backward and sm in (80, 120) and (shape == "general" or cap or d > 128))


SHAPES = "full", "causal", "anti-causal", "band", "general"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("backward", [False, True])
def test_graphs_are_built(libcuda, sm, case, backward):
    """In a process that has loaded nothing of CUDA before; `supported` knows what is refused."""
    work, shapes = [], SHAPES if case == "128-128" else ("full", "causal", "general")
    for shape, padded in product(shapes, (False, True)):
        block = block_of(case, shape, backward, padded)
        reason = supported(block, (sm // 10, 0), backward)
        assert bool(reason) == refused(case, shape, backward, padded, sm), reason
        if reason is None:
            work.append((backward, block))
    assert built(libcuda, sm, work) == [None] * len(work)


def test_what_is_refused_has_no_graph(libcuda):
    """cuDNN itself refuses what `supported` says that it refuses: soft-caps and widths."""
    work = [(False, block_of("128-128-cap", "causal", False))]
    work += [(True, block_of(x, "full", True)) for x in ("128-128-cap", "192-128")]
    assert all(built(libcuda, 80, work))


def test_nvrtc_of_cuda_13_0_must_be_loaded(libcuda):
    """Otherwise cuDNN refuses every graph; a later NVRTC need not be loaded."""
    work = [(False, block_of("128-128", "full", False))]
    assert built(libcuda, 90, work) == [None]
    (reason,) = built(libcuda, 90, work, "without-nvrtc")
    if version("nvidia-cuda-nvrtc").startswith("13.0."):
        assert "plans built" in reason
    else:
        assert reason is None
