"""Imports between folders, names of methods, parts that work without MPI, protocols of folders."""

import ast
import inspect
import shutil
import sys
from pathlib import Path

from helpers import ROOT, execute, launch

import a2d_mpi
from a2d_mpi.comm.device_transport import DeviceTransport
from a2d_mpi.comm.transport import Transport
from a2d_mpi.devices.host import Host
from a2d_mpi.devices.protocol import Device
from a2d_mpi.kernels.numpy import NumpyKernel
from a2d_mpi.kernels.protocol import Kernel


def lint(root):
    """Return what `lint-imports` says of a source tree with a pyproject.toml."""
    command = Path(sys.executable).with_name("lint-imports"), "--no-cache"
    env = {"PYTHONPATH": str(root / "src")}
    return execute(*command, cwd=root, env=env, code=None)


def test_imports_run_one_way(tmp_path):
    done = lint(ROOT)
    assert done.returncode == 0 and " 0 broken" in done.stdout, done.stdout
    # Every contract is one that can be broken.
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, line in (
        ("core/merge.py", "import a2d_mpi.devices.host"),
        ("planning/cost.py", "from mpi4py import MPI"),
        ("kernels/blocks.py", "from mpi4py import MPI"),
        ("comm/transport.py", "import a2d_mpi.comm.channel"),
        ("linear/linear_attention.py", "import torch"),
    ):
        with open(tmp_path / "src" / "a2d_mpi" / module, "a") as file:
            file.write(line + "\n")
    done = lint(tmp_path)
    assert done.returncode == 1 and " 0 kept" in done.stdout, done.stdout


NO_MPI = """core.atomic core.dtypes core.merge core.reference core.sizes devices kernels
    schedules.attention2d sharding.pairs planning.calibration planning.cost planning.memory
    planning.model planning.planner cli.options cli.workloads results.tables
    figures.plots figures.schedule_plots commands.plan commands.plot __main__"""


def test_these_need_no_mpi():
    code = f"""
import importlib, sys
sys.modules["mpi4py"] = None  # importing it fails
from a2d_mpi import Causal, Distribution, Full, IntervalMask
for name in {NO_MPI.split()}:
    importlib.import_module(f"a2d_mpi.{{name}}")
import a2d_mpi
try:
    a2d_mpi.Attention2D
except ImportError:
    print("as it must")
"""
    assert launch(0, "-c", code, cwd=ROOT).stdout == "as it must\n"


# What few runs need, and what other drivers share.
UNUSED = """
cli.subcommands cli.survivors cli.user_files cli.workloads results.tables
"""


def test_main_job_loads_what_it_uses():
    """The driver imports no planner, models or figures, nor what a plain run leaves out."""
    code = "import sys, a2d_mpi.__main__ as x; x.build_parser('attention'); print(*sys.modules)"
    modules = {*launch(0, "-c", code, cwd=ROOT).stdout.split()}
    loaded = {x for x in modules if x.startswith("a2d_mpi.")}
    assert "a2d_mpi.commands.attention" in loaded
    folders = {x.split(".")[1] for x in loaded}
    assert not folders & {"linear", "figures", "torch"}
    assert not {"torch", "transformers"} & modules
    unused = {
        *(f"a2d_mpi.planning.{x}" for x in ("planner", "simulator", "profile", "survey")),
        *(f"a2d_mpi.{x}" for x in UNUSED.split()),
        *(f"a2d_mpi.comm.{x}" for x in ("failures", "gpus", "device_transport")),
        "a2d_mpi.core.wire",
        "a2d_mpi.comm.shards",
        "a2d_mpi.masks.validity",
        *(f"a2d_mpi.schedules.{x}" for x in ("attention2d", "pipeline", "ring", "triangle")),
    }
    assert not loaded & unused
    assert len(loaded) < 100  # of more than 160


# What an import may not change, except by packages of others, which are imported first.
STATE = """
import importlib, os, pkgutil, signal, sys, threading, warnings
def state():
    hooks = sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook
    handlers = [signal.getsignal(x) for x in sorted(signal.valid_signals())]
    return [*hooks, handlers, dict(os.environ), [*warnings.filters], [*sys.path]]
"""
BARE = f"""{STATE}
os.environ.pop("OPENBLAS_CORETYPE", None)
before = state()
import a2d_mpi
os.environ.pop("OPENBLAS_CORETYPE", None)  # which NumPy must see before it loads
print("numpy" in sys.modules, state() == before)
"""
ALL = f"""{STATE}
import h5py, mpi4py.MPI, numpy, threadpoolctl
before, changed, loaded = state(), [], 0
import a2d_mpi
from a2d_mpi import *
for module in pkgutil.walk_packages(a2d_mpi.__path__, "a2d_mpi."):
    try:
        importlib.import_module(module.name)
        loaded += 1
    except ImportError:  # of PyTorch or CuPy
        continue
    if state() != before:
        changed.append(module.name)
        before = state()
print(loaded > 100, changed)
"""


def test_imports_change_nothing():
    """Neither error handling, signals, the environment, warnings nor the path of modules."""
    assert launch(0, "-c", BARE).stdout == "False True\n"
    assert launch(0, "-c", ALL).stdout == "True []\n"


def misses(kind, protocol):
    """Return the methods of a protocol that `kind` lacks or defines differently."""

    def takes(cls, name):
        found = inspect.signature(getattr(cls, name)).parameters
        if protocol is Kernel:  # each kernel has options of its own, and ignores others
            named = inspect.Parameter.POSITIONAL_OR_KEYWORD
            found = [x.name for x in found.values() if (x.kind, x.default) == (named, x.empty)]
        return found

    names = [x for x, member in vars(protocol).items() if x[0] != "_" and callable(member)]
    return [x for x in names if not hasattr(kind, x) or takes(kind, x) != takes(protocol, x)]


def test_protocols(cupy):
    from a2d_mpi.devices.cuda import Cuda
    from a2d_mpi.kernels.cudnn import CudnnKernel
    from a2d_mpi.kernels.cupy import CupyKernel

    for protocol, kinds in {
        Transport: (DeviceTransport,),
        Device: (Host, Cuda),
        Kernel: (NumpyKernel, CupyKernel, CudnnKernel),
    }.items():
        assert [misses(kind, protocol) for kind in kinds] == [[]] * len(kinds)


def test_editors_see_the_public_names():
    """The stub, whose imports `__init__.py` reads, says the same names in `__all__`."""
    named = ast.parse((ROOT / "src/a2d_mpi/__init__.pyi").read_text()).body[-1].value
    assert ast.literal_eval(named) == a2d_mpi.__all__
