"""What drivers refuse: exit code 2, one line from rank 0, within seconds; and no file changes.

A new refusal is a row of a table.  What files may hold is in tests/unit.
"""

import os
import re
import shlex
import shutil
from collections import Counter

import h5py
import numpy as np
import pytest
from helpers import DRIVERS, ROOT, SAMPLE, assert_each_refused, assert_refused, drive, parsers_of
from pages import blocks

from a2d_mpi import Distribution

# Driver, options, in brackets more options on rank 1, and the text.  {names} are of `places`.
ON_RANKS = r"""
attention.py {sample} --check rows:0 | --check must be none, sample, full or rows:N, got 'rows:0'
attention.py {sample} --rows 3 | 3 x 1 grid does not fit 2 ranks
attention.py {sample} --rows 2 --cols 2 | 2 x 2 grid does not fit 2 ranks
attention.py {sample} --rows 2 --head-ranks 2 | 2 x 1 x 2 grid does not fit 2 ranks
attention.py {sample} --method triple_ring | must be one of attention2d, ring, striped ring, double
attention.py {sample} --method triangle --mask full | a triangle needs a causal mask
attention.py {sample} --method "striped ring" --distribution zigzag | needs the striped distribut
attention.py {sample} --seqlen 1537 | 1536 tokens
attention.py {sample} --trials many | --trials must be a whole number from 1 to 1000000, got 'many'
attention.py {sample} --mask sparse | sparse
attention.py {sample} --no-such-option | --no-such-option
attention.py {sample} --save-outputs | --output
attention.py {sample} [--mask full] | ranks disagree on --mask: causal on rank 0, full on rank 1
attention.py {sample} [--trials x] | from 1 to 1000000, got 'x' (see --help) (on rank 1)
attention.py {sample} [--help] | ranks disagree on --help: False on rank 0, True on rank 1
attention.py {tmp}/missing.h5 | No such file
attention.py {tmp}/nan.h5 | k has 2 elements that are NaN or infinite: nothing can be checked
attention.py {tmp}/good.h5 --output {tmp}/none/run.h5 | cannot write {tmp}/none/run.h5:
attention.py {tmp}/good.h5 --output {tmp}/folder/../good.h5 | good.h5, another kind of file
attention.py {sample} --trace {tmp}/a.txt | a.txt must end with .json
attention.py {sample} --trace {tmp}/other.json | other.json, another kind of file
attention.py {tmp}/pipe | cannot read {tmp}/pipe as HDF5: it is not a regular
attention.py {tmp}/loop | cannot read {tmp}/loop as HDF5: Too many levels
attention.py {tmp} | cannot read {tmp} as HDF5: Is a directory
attention.py {text}/x.h5 | cannot read {text}/x.h5 as HDF5: Not a directory
attention.py {text} | (file signature not found)
attention.py {sample} --output {tmp} | cannot write {tmp}: it is not a regular file
attention.py {sample} --output {tmp}/pipe | cannot write {tmp}/pipe: it is not a regular file
attention.py {sample} --output {text}/x.h5 | cannot write {text}/x.h5: Not a directory
attention.py {sample} --rank-block 2 | --rank-block must be ROWSxCOLUMNS, got '2'
attention.py {sample} --rank-block 3x1 | 3x1 blocks do not divide a grid of 1 x 2
attention.py {sample} --rank-block 1x2 [--rank-block 1x1] | disagree on --rank-block
attention.py {sample} --profile {profile} --rank-block 1x2 | chooses --rows, --cols, --head-ranks
attention.py {sample} --mask full_document:0,2000 | ends at 2000, the sequence at 1536
attention.py {forty} --import {tmp}/name.py | line 3: ValueError: the name 'numpy' of a kernel
attention.py {forty} --import {tmp}/syntax.py | line 1: SyntaxError: invalid syntax
attention.py {forty} --import {tmp}/error.py | line 2: KeyError: 'two
attention.py {forty} --import {tmp}/exit.py | line 2: SystemExit: 3
attention.py {forty} --import {tmp}/kernel.py --kernel mine | kernel 'mine': Mine has no method
attention.py {forty} --import {tmp}/mask.py --mask uneven | ranks disagree on mask
attention.py {forty} --import {tmp}/hangs.py --method hangs --backward | 'hangs': 2 of 2 ranks wait
bench.py --output {new} --backward --import {tmp}/hangs.py --plans hangs | 2 of 2 ranks wait
attention.py {forty} --import {tmp}/none.py | No such file or directory
attention.py {forty} --import | argument --import: expected one
attention.py {forty} --import "" | --import must be a path, got ''
attention.py {forty} --import {tmp} | is not a regular file
attention.py {forty} [--import {tmp}/kernel.py] | ranks disagree on --import
attention.py {forty} [--import={tmp}/none.py] | none.py: No such file or
attention.py {forty} --output {text} | another kind of file
attention.py {forty} --output {other} | another kind of file
attention.py {forty} --output {tmp}/binary | another kind of file
attention.py {forty} --profile {text} | text
attention.py {forty} --profile {wide} | float32
attention.py {forty} --profile {tmp}/pipe | is not a regular file
attention.py {forty} --profile {tmp} | is not a regular file
calibrate.py --output {text} | another kind of file
calibrate.py --output /nowhere/here.toml --seconds 1 | cannot write
calibrate.py --output {new} --seconds 1 --dtypes int8 | --dtypes must be one of float16
bench.py --output {new} --plans ring:3 | 'ring:3': must be METHOD[:RxC[xU]][@order][/RxC][*F[xB
bench.py --output {new} --plans ring:1x2 | 'ring:1x2': a ring must be 2x1x1
bench.py --output {new} --plans star | 'star': must be one of attention2d,
bench.py --output {new} --plans attention2d:2x2 | 'attention2d:2x2': 2x2x1 does not have 2 ranks
bench.py --output {new} --plans attention2d:1x1x2 --nheads 3 | 2 does not divide 3 heads
bench.py --output {new} --plans attention2d@xyz | order must be a permutation
bench.py --output {new} --plans ring:2x1/2x2 | 2x2 blocks do not divide a grid of 2 x 1
bench.py --output {new} --plans attention2d:2x1*0 | must be like 4 or 2x4, got '0'
bench.py --output {new} --plans attention2d:2x1*3 --nheads 4 | into 3 slices of whole KV heads
bench.py --output {new} --plans auto | auto needs --profile
bench.py --output {new} --plans , | --plans must name a plan, got ','
bench.py --output {new} --masks causal,none | --masks must be one of
bench.py --output {new} --masks , | --masks must name a mask, got ','
bench.py --output {new} --dtypes int8 | --dtypes must be one of float16,
bench.py --output {new} --seqlens 64,2G | 2147483648 tokens on 2 ranks: q, k and v of one rank take
bench.py --output {new} --nheads-kv 3 | nheads_kv must divide nheads
bench.py --output {new} --kernel cudnn | cudnn
bench.py --output {new} --device gpu | --device gpu
bench.py --output {new} --profile /none.toml | /none.toml
bench.py --output /none/bench.h5 | cannot write /none/bench.h5
bench.py --output {bench} {sizes} | exists: give --resume to add to it
bench.py --output {bench} {sizes} --resume --trials 3 | was made with trials 2, but now it is 3
bench.py --output {bench} {sizes} --resume --seed 1 | was made with seed 0, but now it is 1
bench.py --output {bench} {sizes} --resume --profile {profile} | was made with machine none
"""
OF_ONE_PROCESS = r"""
bench.py kernels --shapes 1x2 | got '1x2'
bench.py kernels --kernels cupy | kernel 'cupy' does not take NumPy arrays
bench.py kernels --kernels cheese | got 'cheese'
bench.py kernels --nheads-kv 3 | nheads_kv must divide nheads
plan.py --ranks 4 --seqlen 8K --profile {h100} | give --nheads, or --model
plan.py {plan} --seqlen 99999999999G | (65536 or 64K) from 1 to 2147483648, got '999999999
plan.py {plan} --nheads 99999999999 | nheads must be a whole number from 1 to 65536, got
plan.py {plan} --nheads-kv 5 | nheads_kv must divide nheads
plan.py {plan} --dtype float64 | kernels for ['bfloat16', 'float16'], but not for float64
plan.py {plan} --profile /nowhere.toml | /nowhere.toml
plan.py {plan} --profile {tmp}/alone.toml | has no link.between, which 64 ranks need, 1 per node
plot.py nonsense | argument COMMAND: invalid choice: 'nonsense'
plot.py masks {png} --masks sparse | --masks must be one of full, causal
plot.py masks {png} --masks causal_document:0,99 | ends at 99, the sequence at 96
plot.py masks {png} --rows 3 --cols 3 | must be 1 to 8 ranks, got 3 x 3
plot.py results {bench} {png} --what pie | argument --what: invalid choice: 'pie'
plot.py results {bench} {png} --what kernels | figures is missing
plot.py results {bench} {png} --workload mine | no workload 'mine': causal-n64
plot.py results {bench} {png} --ranks 3 | was not run on 3 ranks
plot.py results {bench} /proc/none.png | cannot write /proc/none.png
plot.py results {sample} {png} | must be 'a2d_mpi benchmark' and 2
plot.py results {tmp}/folder {png} --what crossover | has no file */*.h5
plot.py schedule {tmp}/a.gif {drawn} --ranks 4 | a.gif must end with .png, .svg, .pdf
plot.py schedule /nowhere/a.png {drawn} --ranks 4 | cannot write /nowhere/a.png
plot.py schedule {png} {drawn} --ranks 65 | --ranks must be a whole number from 1 to 64, got '65'
plot.py schedule {png} {drawn} --ranks 16 --plans all | --plans must be 1 to 8 plans, got
plot.py study {tmp}/none.h5 | none.h5
../data/make_sample.py | arguments are required: output
../data/make_sample.py {new} --tokens many | must be a number of tokens
../data/make_sample.py {new} --dtype int8 | invalid choice
../data/make_sample.py /nowhere/sample.h5 | cannot write /nowhere/sample.h5
../data/make_sample.py {tmp}/folder | it is not a regular file
../data/make_sample.py {text} --text {text} --model {tmp} | text, another kind of file
../data/make_sample.py {new} --model {tmp} | make_sample.py: error:
../data/make_text.py /nowhere/text | cannot write /nowhere/text
"""
IMPORTED = {  # files of a user
    "name": "from a2d_mpi import register_kernel\n\nregister_kernel('numpy', print)",
    "syntax": "def f(:",
    "error": "def f():\n    raise KeyError('two\\nlines')\nf()",
    "exit": "import sys\nsys.exit(3)",
    "kernel": "from a2d_mpi import register_kernel\nclass Mine:\n"
              "    def __init__(self, *given, **others): pass\nregister_kernel('mine', Mine)",
    "mask": "import numpy as np\nfrom mpi4py import MPI\nimport a2d_mpi\n"
            "ends = lambda n: np.arange(n) + MPI.COMM_WORLD.rank\na2d_mpi.register_mask("
            "'uneven', lambda n: a2d_mpi.IntervalMask(np.zeros(n, int), ends(n)))",
    # The example of the documentation, without what the backward pass waits for.
    "hangs": "".join(blocks("docs/extending.md", "python")[:2])
             .replace("    kv.finish(dkv)\n", "").replace("gather kv", "hangs"),
}  # fmt: skip
H100 = ROOT / "data/machines/h100-64x1.toml"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Make good and bad files; return their folder, and what the names in the tables mean."""
    tmp = tmp_path_factory.mktemp("files")
    for name in ("good", "nan"):
        shutil.copy(SAMPLE, tmp / f"{name}.h5")
    with h5py.File(tmp / "nan.h5", "a") as file:
        file["k"][Distribution("zigzag", 1536, 2).tokens(1)[5], 3, :2] = np.nan, np.inf
    (tmp / "folder").mkdir()
    (tmp / "config.json").touch()
    (tmp / "text").write_bytes((ROOT / "LICENSE").read_bytes())
    (tmp / "binary").write_bytes(b"\xff\x00\n\x80")
    for name, code in IMPORTED.items():
        (tmp / f"{name}.py").write_text(code)
    h5py.File(tmp / "other.h5", "w").close()
    (tmp / "other.json").write_text('{"kept": true}')
    os.mkfifo(tmp / "pipe")
    (tmp / "loop").symlink_to("loop")
    shutil.copy(ROOT / "data/results/16x1.toml", tmp / "machine.toml")
    wide = (tmp / "machine.toml").read_text().replace("float32", "bfloat16")
    (tmp / "wide.toml").write_text(wide)
    (tmp / "alone.toml").write_text(re.sub(r"\[link[^[]*", "", H100.read_text()))
    sizes = "--nheads 4 --headdim 8 --trials 2"
    bench = ["--output", tmp / "bench.h5", *sizes.split(), "--seqlens", 64, "--plans", "ring"]
    drive("bench.py", 2, *bench)
    named = {"tmp": tmp, "sample": SAMPLE, "new": tmp / "new", "png": tmp / "a.png",
             "bench": tmp / "bench.h5", "sizes": sizes, "h100": H100,
             "profile": tmp / "machine.toml", "wide": tmp / "wide.toml",
             "text": tmp / "text",
             "other": tmp / "other.h5", "forty": f"{SAMPLE} --seqlen 40",
             "plan": f"--profile {H100} --ranks 64 --seqlen 64K --nheads 96",
             "drawn": f"--profile {H100} --seqlen 1000 --nheads 4"}  # fmt: skip
    return tmp, named


def rows_of(table, named):
    """Return driver, options, options of rank 1 and text of each row."""
    rows = []
    for line in table.strip("\n").splitlines():
        line = re.sub(r"\{(\w+)\}", lambda x: str(named[x[1]]), line)
        command, text = line.split(" | ")
        common, _, more = command.partition(" [")
        driver, *words = shlex.split(common)
        rows.append((driver, words, shlex.split(more.rstrip("]")), text))
    return rows


def state_of(folder):
    files = (x for x in folder.rglob("*") if not x.is_dir())
    return sorted((str(x), x.lstat().st_ino, x.lstat().st_mtime) for x in files)


@pytest.mark.parametrize("ranks, table", [(2, ON_RANKS), (0, OF_ONE_PROCESS)], ids=[2, 0])
def test_refusals(places, ranks, table):
    folder, named = places
    before = state_of(folder)
    assert_each_refused(rows_of(table, named), ranks)
    assert state_of(folder) == before


def numbers_of(parser):
    """Return the options of a parser that are numbers, or lists of them."""
    for action in (
        x for x in parser._actions if x.option_strings and x.type and x.dest != "import"
    ):
        with pytest.raises(ValueError) as error:
            parser.parse_args([action.option_strings[-1], "x", "--no-such-option"])
        if re.search(r"must be a (whole )?number", str(error.value)):
            yield action.option_strings[-1]


def test_numbers_are_bounded():
    """All options that are numbers refuse other texts, NaN, and numbers beyond their bounds."""
    found = Counter()
    for path in sorted(DRIVERS.glob("*.py")):
        for parser in parsers_of(f"drivers/{path.name}"):
            for name in numbers_of(parser):
                found[name] += 1
                for text in ("x", "", "nan", "-1e30", "1e400", "9" * 40, "9" * 5000):
                    with pytest.raises(ValueError, match=f"^{name} must be ") as error:
                        parser.parse_args([f"{name}={text}"])
                    assert len(str(error.value)) < 150
    assert len(found) > 20 and found["--trials"] > 2


@pytest.mark.launches
def test_an_input_that_is_missing_on_one_rank():
    sabotage = "sys.argv[1] = '/none/q.h5' if rank == 1 else sys.argv[1]"
    assert_refused(drive("attention.py", 2, SAMPLE, sabotage=sabotage, code=2), "/none/q.h5")
