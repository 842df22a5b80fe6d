"""Run a benchmark or a tool: python jobs/run.py [--dry-run] JOB [ARGUMENT...]

  random [RANKS [SEED]]       random plans against a dense float64 computation, by Hypothesis
  net COMMIT                  differences to another commit in bits of results, bytes and messages
  speed COMMIT PLACE          seconds of calls with another commit and with the files here
  study FOLDER [PART...]      grids and rings on emulated clusters, side by side (docs/study.md)
  scale FOLDER [PART...]      64 to 4096 ranks of three machines, simulated (docs/study.md)
  wire FOLDER errors|seconds  errors of narrow formats, or seconds on 16 emulated nodes
  train [FOLDER [OPTION...]]  a Llama on the New Testament, and a text of it; options of train.py
  figures FOLDER              all figures of the documentation; the committed are data/figures
  docs                        the pages of docs/ and of the public names, in build/docs
  gpu local|bench|test [OPTION...]      main job, benchmarks or tests on the GPUs of this machine

The job prints each command before it runs it, and stops at the first command that fails, with its
exit code.  --dry-run only prints the commands.  They are lines of bash: use_env, run_mpi, use_gpu
and with_mps are functions of jobs/env.sh and jobs/gpu.sh, which tell how to take a Python and an
MPI of your own (A2D_MPI_ENV=active).  Paths are relative to the repository's root.

The study takes 80 minutes on two cores.  Its parts crossover (40 minutes), masks, triangle, nodes,
train and decode run only if they are named.  Each cluster has a profile, which is measured first.
What a file holds already is not run again.  Places of speed are local, and the emulated clusters
16x1, 64x1 and 16x4.  LAUNCHES=7 is its number of launches of each commit.
"""

import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from shlex import quote

ROOT = Path(__file__).absolute().parents[1]
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

# A table has a row for each command.  An indented line continues a row.  A row with words like a|b
# stands for a row with the first of each, a row with the second of each, and so on.  A row begins
# with the job, or with its part.  Words in braces are of NAMES, or the folder, or the options.
COMMANDS = """
docs use_env any docs docs .venv-docs
docs python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs

train use_env any torch torch .venv-torch
train mkdir -p {folder}
train run_mpi 4 3600 python drivers/train.py llama-tiny data/new_testament.txt
    --seqlen 1024 --steps 1000 --validate 0.05 --set learning_rate=4e-3 --set warmup_steps=50
    --set lr_scheduler_type=cosine --set weight_decay=0.1 --set save_steps=50
    --set save_total_limit=2 --rows 2 --cols 2 --folder {folder}/checkpoints --resume
    --output {folder}/training.h5
    {options}
train run_mpi 4 600 python drivers/generate.py {folder}/checkpoints --rows 2 --cols 2 --tokens 300
    --temperature 0.5 --prompt "And Jesus said unto them, "
"""

GPU = """
test bash jobs/test.sh gpu {options}
local|bench use_gpu
local|bench mkdir -p results
local run_mpi 4 600 python drivers/attention.py data/minilm_l3_1536.h5 --device gpu --rows 2
    --cols 2 --mask causal --backward --dtype bfloat16 --check full --trials 5
    --output results/gpu_local.h5 {options}
# The smoke test; kernels beside PyTorch's, if .venv-gpu has it; a grid and a ring of 4 ranks on a
# GPU, against 1 rank; rates of MPI.
bench read_libraries
bench run_mpi 1 100 python tests/gpu/gpu_smoke.py
bench run_mpi 1 600 python drivers/bench.py kernels --device gpu {options}
bench with_mps run_mpi 4 600 {gpu_plan},ring
bench run_mpi 1 600 {gpu_plan}
bench run_mpi 4 300 python tests/gpu/gpu_transfers.py
"""

WIRE = """
errors|seconds use_env any "" numba
errors|seconds mkdir -p {folder}
errors python -c {logits_50} {sample} {folder}/logits50.h5
errors {wire} {sample} --output {folder}/sample-none.h5
errors {wire} {folder}/logits50.h5 --output {folder}/logits50-none.h5
errors {wire} {sample} --wire bfloat16|mxfp8|mxfp4
    --output {folder}/sample-bfloat16.h5|{folder}/sample-mxfp8.h5|{folder}/sample-mxfp4.h5
errors {wire} {folder}/logits50.h5 --wire bfloat16|mxfp8|mxfp4
    --output {folder}/logits50-bfloat16.h5|{folder}/logits50-mxfp8.h5|{folder}/logits50-mxfp4.h5
seconds bash jobs/emulate.sh 16 1 10mbit -- python drivers/bench.py --output {folder}/16x1.h5
    --resume --plans attention2d:4x4,ring --seqlens 2048 --nheads 8 --headdim 64 --masks full
    --backward --wire none,bfloat16,mxfp8,mxfp4 --trials 3
"""

FIGURES = """
use_env any plot numba,plot
mkdir -p {folder}/partitions
python drivers/plot.py grid {folder}/grid.png --rows 2 --cols 3
python drivers/plot.py masks {folder}/masks.png --distribution balanced
{plot_schedule}/schedules.png --plans attention2d:4x4,ring,double_ring:4x4
    --profile {a100} --ranks 16 --seqlen 32K --nheads 32 --nheads-kv 8 --mask causal
{plot_schedule}/slices.png --plans attention2d:2x2*1,attention2d:2x2*4
    --profile {single} --ranks 4 --seqlen 32K --nheads 8 --mask causal
# Partitions, for problems for which the planner predicts them to be the fastest.
{plot_schedule}/partitions/triangle.png --plans triangle:10x1,attention2d:2x5
    --profile {single} --ranks 10 --seqlen 48K --nheads 7 --mask causal
{plot_schedule}/partitions/node_aware.png --plans node_aware:8x2@rcu/4x1,attention2d:4x4@cru
    --profile {one_nic} --ranks 16 --seqlen 32K --nheads 9 --mask full
{plot_schedule}/partitions/heads.png --plans attention2d:1x1x12,attention2d:4x3@cru
    --profile {one_nic} --ranks 12 --seqlen 24K --nheads 24 --mask full
{plot_results}/tiles.h5 {folder}/kernels.png --what kernels
{plot_results}/crossover {folder}/crossover.png --what crossover
"""

# Where to start @, "python jobs/measure.py calls FILE", and its sizes, trials and plans.
SPEED = """
local run_mpi 4 300 @ 1536,12,32 9 attention2d:2x2x1 ring:4x1x1
local run_mpi 2 300 @ 24,2,8 500 attention2d:2x1x1
16x1 bash jobs/emulate.sh 16 1 10mbit -- @
    768,16,16 3 attention2d:1x1x16 attention2d:4x4x1 ring:16x1x1
64x1 bash jobs/emulate.sh 64 1 2.5mbit -- @
    768,16,16 1 attention2d:2x2x16 attention2d:8x8x1 ring:64x1x1
16x4 bash jobs/emulate.sh 16 4 10mbit -- @
    768,16,16 1 attention2d:8x8x1 node_aware:4x16x1 node_aware:8x8x1:2x2
"""

# Cluster, NODESxRANKS_PER_NODE; rate of a link; cores of a node, or -;
# file of results, where * is the cluster; program.  The rates are so low that two cores can carry
# all messages, and that transfers decide.
STUDY = """
16x1|64x1 16x1|64x1 10mbit|2.5mbit - * {both} --backward --masks full
    --plans {on_16x1}|{on_64x1}
# The striped ring differs for causal masks only.
16x1|64x1 16x1|64x1 10mbit|2.5mbit - * {both} --backward --masks causal
    --plans {on_16x1},striped_ring|{on_64x1},striped_ring
16x1|64x1 16x1|64x1 10mbit|2.5mbit - * {both} --masks full,causal
    --plans {picks},attention2d:4x4|{picks},attention2d:8x8
# Gathering all keys or queries takes very long.
16x4 16x4 5mbit - * {both} --backward --masks full
    --plans {on_16x4},attention2d:64x1,attention2d:1x64
16x4 16x4 5mbit - * {both} --backward --masks causal --plans {on_16x4},striped_ring
16x4 16x4 5mbit - * {both} --masks full,causal --plans {picks},attention2d:8x8
# Only the square grid and the ring, with more trials.
ratio 16x1|64x1 10mbit|2.5mbit - ratio {seven} --masks full,causal --plans attention2d,ring
# Links so slow that computing does not count.
scaling 4x1|16x1|64x1 1mbit - scaling {bench} --seqlens 512 --masks full --backward
    --plans attention2d,ring
# One workload, from links that decide everything to links that hardly count.
crossover 16x1 1gbit|300mbit|100mbit|30mbit|10mbit 0.05|0.05|0.05|0.05|0.1
    crossover/1gbit/*|crossover/300mbit/*|crossover/100mbit/*|crossover/30mbit/*|crossover/10mbit/*
    {bench} --nheads 8 --headdim 64 --seqlens 8K --masks causal --backward
    --plans auto,attention2d:4x4,ring:4x1x4,ring
# The best grids, the ring and the planner's pick beside the triangle.
triangle 6x1 10mbit - * {triangle},attention2d:2x3,triangle:6x1x1,ring
triangle 10x1 10mbit - * {triangle},attention2d:2x5,triangle:10x1x1,ring
triangle 15x1 10mbit - * {triangle},attention2d:3x5,triangle:15x1x1,ring
triangle 28x1 5mbit - * {triangle},attention2d:4x7,triangle:28x1x1,ring
triangle 12x1 10mbit - * {triangle},attention2d:2x3x2,triangle:6x1x2,ring
triangle 24x1 5mbit - * {triangle},attention2d:2x3x4,triangle:6x1x4,ring
# Node-aware grids beside the best plain ones.
nodes 16x4 5mbit - nodes {seven} --nheads-kv 16,2 --masks causal|full
    --plans auto,attention2d:8x8,node_aware:8x8@rcu/2x2,node_aware:16x2x2@rcu/2x2,ring
# Two heads only.  First transfers decide, then computing decides.
masks 16x1|16x1 10mbit|500mbit -|0.1 * {masks},attention2d:4x4,ring --seqlens 2K|8K
masks 64x1|64x1 2.5mbit|200mbit -|0.03 * {masks},attention2d:8x8,ring --seqlens 2K|8K
# Models of transformers: a layer with GPT-3's ratio of length to width at 128K, and tokens.
train 16x1 10mbit - train/*-2x2x4|train/*-4x4|train/*-ring {layer} --method
    attention2d|attention2d|ring --head-ranks 4|1|1 --rows 2|4|16
decode 4x1 100mbit - decode/*-1K|decode/*-4K|decode/*-16K drivers/generate.py llama-tiny
    --tokens 18 --prompt "$(head -c 1024|4096|16384 data/new_testament.txt)"
"""
STUDIED = "16x1", "64x1", "16x4", "ratio", "scaling"  # if no part is named

# The plans have no head axis, 8 ranks that share the heads, or 32.
SCALE = """
64 {scale} 64 --seqlens {tokens} --nheads-kv 8,32 {three} --plans ring,ring:8x1x8,double_ring:16x4,
    double_ring:2x4x8,attention2d:8x8,attention2d:2x4x8,node_aware:8x8,node_aware:2x4x8
64 {scale} 64 --seqlens {tokens} --nheads-kv 32 {three}
    --plans ring:2x1x32,attention2d:1x2x32,attention2d:2x1x32
256 {scale} 256 --seqlens {tokens} --nheads-kv 8,32 {three} --plans ring,ring:32x1x8,
    double_ring:64x4,double_ring:8x4x8,attention2d:16x16,attention2d:4x8x8,node_aware:16x16,
    node_aware:4x8x8
256 {scale} 256 --seqlens {tokens} --nheads-kv 32 {three}
    --plans ring:8x1x32,double_ring:2x4x32,attention2d:2x4x32
1024 {scale} 1024 --seqlens {tokens} --nheads-kv 32 {three}
    --plans ring:32x1x32,attention2d:4x8x32,ring:128x1x8,attention2d:8x16x8
1024 {scale} 1024 --seqlens 64K,256K,1M,4M|64K,1M --nheads-kv 32|8 {three}
    --plans ring:128x1x8,attention2d:32x32,attention2d:8x16x8,node_aware:32x32
# The best by the model, or nearly the best.
4096 {scale} 4096 --seqlens 256K,1M,4M --profile {a100},{h100}
    --plans ring:128x1x32,double_ring:32x4x32@ruc,attention2d:8x16x32@cur
4096 {scale} 4096 --profile {one_nic} --seqlens 1M,4M|1M --plans ring:128x1x32@cur,
    attention2d:8x16x32@cur|double_ring:64x2x32@urc,double_ring:32x4x32@ruc
# Exact to six in a thousand, because they take long.
gathers {scale} 64 --seqlens 64K,256K,1M,4M --nheads-kv 32 {three}
    --plans attention2d:64x1,attention2d:1x64,attention2d:8x1x8
gathers {scale} 256 --seqlens 64K,1M --nheads-kv 32 {three}
    --plans attention2d:256x1,attention2d:1x256,attention2d:32x1x8
# The planner's pick of each method.
picks {scale} 64|256|1024 --seqlens 64K,256K,1M,4M --nheads-kv 8,32|8,32|32 {three}
    --plans auto:each
# Networks that are worse than one switch.
networks {networks} --networks switch,fat_tree,fat_tree:2,fat_tree:4,dragonfly
# A ring of 4096 ranks has 50 million messages.
links {links} --ranks 64,256,1024,4096 --plans attention2d,ring --profile {single}
links {links} --ranks 64,256,1024 --plans attention2d,ring,node_aware --profile {a100}
links {links} --ranks 4096 --plans attention2d,node_aware --profile {a100}
"""

# Each may have names before it, and the folder.
NAMES = {
    "a100": "data/machines/a100-16x4.toml",
    "one_nic": "data/machines/a100-4-1nic.toml",
    "h100": "data/machines/h100-8.toml",
    "single": "data/machines/h100-64x1.toml",
    "sample": "data/minilm_l3_1536.h5",
    # Multiplies q by a number, so that the largest causal logit is 50.
    "logits_50": quote("""
import sys, h5py, numpy as np
with h5py.File(sys.argv[1]) as given, h5py.File(sys.argv[2], "w") as to:
    to.attrs.update(given.attrs)
    q, k = (given[x][:].astype("f4") for x in "qk")
    logits = np.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    to["q"] = q * (50 / np.abs(np.tril(logits)).max())
    to["k"], to["v"] = k, given["v"][:].astype("f4")
"""),
    "wire": "run_mpi 4 300 python drivers/attention.py --rows 2 --cols 2 --backward --check full"
    " --trials 1",
    "gpu_plan": "python drivers/bench.py --device gpu --seqlens 16K --nheads 16 --headdim 128"
    " --dtypes bfloat16 --backward --resume --output"
    f" results/gpu-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}.h5 --plans attention2d",
    "plot_schedule": "python drivers/plot.py schedule {folder}",
    "plot_results": "python drivers/plot.py results data/results",
    "bench": "drivers/bench.py --nheads 16 --headdim 16 --seqlens 768 --trials 3 --resume",
    "both": "{bench} --nheads-kv 16,2",
    "seven": "{bench} --trials 7 --backward",
    "triangle": "{seven} --masks causal --seqlens 960 --plans auto:2",
    "masks": "{bench} --nheads 2 --headdim 64 --backward --masks causal,"
    "causal_document,share_question,sliding_window_causal --plans auto:2,auto:each",
    "layer": "drivers/train.py gpt3-175b-layer data/new_testament.txt --separator '' --seqlen 2K"
    " --steps 6 --kernel numpy",
    "picks": "auto:4,auto:each,ring",
    "on_16x1": "{picks},attention2d:4x4,attention2d:16x1,attention2d:1x16,attention2d:1x1x16,"
    "attention2d:2x2x4,ring:4x1x4,double_ring:4x4,double_ring:2x2x4",
    "on_64x1": "{picks},attention2d:8x8,attention2d:64x1,attention2d:1x64,attention2d:4x4x4,"
    "attention2d:2x2x16,ring:4x1x16,double_ring:8x8,double_ring:2x2x16",
    # Also with each axis inside a node.
    "on_16x4": "{picks},attention2d:8x8,attention2d:4x4x4,attention2d:2x2x16@urc,"
    "ring:4x1x16@urc,double_ring:16x4,double_ring:2x2x16@urc",
    "tokens": "64K,256K,1M,4M,16M",
    "three": "--profile {a100},{one_nic},{h100}",
    "nets": "python drivers/plan.py simulate --resume --backward --nheads 32 --output {folder}",
    "scale": "{nets}/scale.h5 --ranks",
    "networks": "{nets}/networks.h5 --ranks 256 --seqlens 64K,1M --profile {a100},{h100} --plans"
    " ring,ring:32x1x8,double_ring:64x4,attention2d:16x16,attention2d:4x8x8,node_aware:16x16",
    "links": "{nets}/links.h5 --seqlens 1M --links-alone",
}


class Refused(Exception):
    """Bad arguments; without a message, the job's usage is printed."""


def lines_of(table, folder="", options=()):
    """Return the rows of a table as single lines, with all names filled in."""
    names = {"folder": quote(folder), "options": shlex.join(options)}
    for name, value in NAMES.items():
        names[name] = value.format(**names)
    text = re.sub(r"^#.*\n", "", table, flags=re.MULTILINE)
    text = re.sub(r"\n +", " ", re.sub(r",\n +", ",", text))
    lines = []
    for row in filter(None, text.splitlines()):
        for i in range(max(word.count("|") for word in row.split()) + 1):
            line = re.sub(r"\S*\|\S*", lambda several: several[0].split("|")[i], row)  # noqa: B023
            lines.append(line.format(**names).strip())
    return lines


def parts_of(table, parts=(), folder="", options=()):
    """Return the lines of the parts that are named, or all, without the names of the parts."""
    lines = [line.split(" ", 1) for line in lines_of(table, folder, options)]
    known = list(dict.fromkeys(part for part, _ in lines))
    for part in parts:
        if part not in known:
            raise Refused(f"no {part!r}: must be of {', '.join(known)}")
    return [line for part in parts or known for name, line in lines if name == part]


def random(ranks="4", seed="0"):
    """Yield the commands of a search; all ranks draw the same cases from the seed."""
    yield "use_env any pytest test"
    options = f"--with-mpi --hypothesis-seed {quote(seed)} -k float64"
    yield f"run_mpi {quote(ranks)} 900 python -m pytest -q tests/ranks/test_random.py {options}"


def compare(commit, program, lines, launches=1):
    """Yield lines for another commit and for the files here, in turn; @ is the program there."""
    folder = tempfile.mkdtemp()
    trees = {"then": f"{folder}/then", "now": str(ROOT)}
    try:
        yield 'use_env any "" numba'
        yield f"git worktree add --quiet --detach {trees['then']} {quote(commit)}"
        for i, (name, tree) in product(range(launches), trees.items()):
            path = f"PYTHONPATH={tree}/src${{PYTHONPATH:+:$PYTHONPATH}}"
            for j, line in enumerate(lines):
                run_program = f"python {program} {folder}/{name}.{i}.{j}.json"
                yield f"{path} {line.replace('@', run_program)}"
        yield f"python {program.split()[0]} --compare {folder}"
    finally:
        if os.path.exists(trees["then"]):
            remove = "git", "worktree", "remove", "--force", trees["then"]
            subprocess.run(remove, cwd=ROOT, check=False)
        shutil.rmtree(folder)


def study(folder, *parts):
    """Yield the commands that measure parts of the study."""
    made, lines = set(), parts_of(STUDY, parts or STUDIED)
    models = {"train", "decode"} & {*parts}  # these need PyTorch
    yield "use_env mpich " + ("torch numba,torch .venv-torch" if models else '"" numba')
    for line in lines:
        cluster, rate, cores, file, command = line.split(" ", 4)
        # A limit that the user has set for all of it is in the files' names, too.
        cores = os.environ.get("EMULATE_CORES", "") if cores == "-" else cores
        stem = f"{cluster}-{cores}" if cores else cluster
        output = Path(folder, file.replace("*", stem) + ".h5")
        if output.parent not in made:
            yield f"mkdir -p {quote(str(output.parent))}"
        start = f"bash jobs/emulate.sh {cluster.replace('x', ' ')} {rate} --"
        start = f"{f'EMULATE_CORES={cores} ' if cores else ''}EMULATE_TIMEOUT=3000 {start}"
        start = f"{'A2D_MPI_ENV=active ' * bool(models)}{start}"
        options = f"--output {quote(str(output))}"
        if "auto" in command:  # the planner needs a profile
            profile = output.with_name(f"{stem}.toml")
            if profile not in made and not (ROOT / profile).exists():
                name = f"{cluster} emulated, {rate}{f', {cores} cores a node' * bool(cores)}"
                written = f"--output {quote(str(profile))} --name {quote(name)}"
                yield f"{start} python drivers/calibrate.py {written} --dtypes float32"
            made.add(profile)
            options += f" --profile {quote(str(profile))}"
        made.add(output.parent)
        yield f"{start} python {command} {options}"


JOBS = {
    "random": random,
    "net": lambda commit: compare(commit, "tests/tools/net.py", ["run_mpi 6 300 @"]),
    "speed": lambda commit, place: compare(
        commit, "jobs/measure.py calls", parts_of(SPEED, [place]),
        int(os.environ.get("LAUNCHES", 7))),
    "study": study,
    "scale": lambda folder, *parts: [
        'use_env any "" numba', f"mkdir -p {quote(folder)}", *parts_of(SCALE, parts, folder)],
    "wire": lambda folder, what: parts_of(WIRE, [what], folder),
    "train": lambda folder="results/training", *options: parts_of(
        COMMANDS, ["train"], folder, options),
    "figures": lambda folder: lines_of(FIGURES, folder),
    "docs": lambda: parts_of(COMMANDS, ["docs"]),
    "gpu": lambda what, *options: parts_of(GPU, [what], options=options),
}  # fmt: skip


def run(line, env):
    """Run a line of bash; return the environment for the next line, which use_... changes."""
    changes = line.startswith("use_")
    script = f"source jobs/env.sh; source jobs/gpu.sh; {line}"
    if changes:
        script += " >&2 && python -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    # A session of its own, to end all of it: Ctrl-C of a terminal reaches only this process.
    shell = subprocess.Popen(
        ["bash", "-c", script], cwd=ROOT, env=env, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if changes else None,
    )  # fmt: skip
    try:
        printed, _ = shell.communicate()
    except SystemExit:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(shell.pid, signal.SIGINT)
            shell.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        raise
    if shell.returncode:
        sys.exit(shell.returncode if shell.returncode > 0 else 128 - shell.returncode)
    return json.loads(printed) if changes else env


def stop(number, _):
    """End the job at the first signal; later ones would disturb its end."""
    for x in SIGNALS:
        signal.signal(x, signal.SIG_IGN)
    sys.exit(128 + number)


def main(words):
    """Run a job, or print its commands or the help."""
    dry = words[:1] == ["--dry-run"]
    name, *words = words[dry:] or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__.strip())
        return
    env = dict(os.environ)
    try:
        if name not in JOBS:
            raise Refused(f"no job {name!r}: {', '.join(JOBS)}")
        try:
            inspect.signature(JOBS[name]).bind(*words)
        except TypeError:
            raise Refused from None
        with closing(line for line in JOBS[name](*words)) as lines:
            for line in lines:
                print("+", line, flush=True)
                if not dry:
                    env = run(line, env)
    except Refused as error:
        usage = " or ".join(re.findall(rf"^  ({name}\b.*?)(?:  .*)?$", __doc__, re.MULTILINE))
        print(f"run.py: {str(error) or f'usage: {usage}'}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    for x in SIGNALS:
        signal.signal(x, stop)
    main(sys.argv[1:])
