"""Raise an error in one function on one rank of a driver, and see whether the job ends.

    nice python tests/tools/raises.py --jobs 100 --seed 0
    nice python tests/tools/raises.py --only apart --errors KeyboardInterrupt

First a driver runs as it is, and each rank lists its calls of functions of the package.  Then the
driver runs again and again.  Each time one rank raises an error at the beginning of one call.  A
line says how the job ended.  The exit code is 1 if a job did not end in time.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import argparse
import atexit
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from helpers import DRIVERS, drive

LIMIT = 20  # seconds beyond twice the usual, after which a job counts as hanging
ROOT = DRIVERS.parent
ERRORS = {x.__name__: x for x in (MemoryError, KeyboardInterrupt, ValueError, RuntimeError)}
MODEL = ["--layers", 1, "--width", 8, "--nheads", 2]
TEXT = [ROOT / "LICENSE", "--separator", "", *MODEL, "--seqlen", 40, "--warmup-steps", 5]
PROMPTS = ["--prompt", "So ", "--prompt", "Or", "--tokens", 3, "--arrive", "0,1"]
SAMPLE = ROOT / "data" / "minilm_l3_1536.h5"
DECODE = ["decode", "--layers", 1, "--width", 16, "--nheads", 2, "--contexts", 20, "--trials", 2]
# Driver, ranks, and options; "{}" is an empty folder, and "{model}" a folder of checkpoints.
CASES = {
    "apart": ("generate.py", 3, ["{model}", *PROMPTS, "--attention-ranks", 2, "--ffn-ranks", 1]),
    "generate": ("generate.py", 2, ["{model}", *PROMPTS]),
    "train": ("train.py gpt", 2, [*TEXT, "--steps", 2, "--folder", "{}", "--output", "{}/log.h5",
                                  "--trace", "{}/trace.json"]),
    "attention": ("attention.py", 2, [SAMPLE, "--seqlen", 64, "--backward", "--trials", 2,
                                      "--output", "{}/out.h5", "--save-outputs"]),
    "bench": ("bench.py", 2, ["--output", "{}/bench.h5", "--nheads", 2, "--headdim", 8,
                              "--trials", 1, "--seqlens", 64, "--plans", "ring,attention2d:1x2"]),
    "decode": ("bench.py", 3, [*DECODE, "--ranks", "1,2", "--apart", "1+1,2+1",
                                   "--output", "{}/decode.h5"]),
    "steps": ("bench.py", 2, ["train", "--output", "{}/runs.h5", *MODEL, "--vocab", 16,
                                  "--seqlen", 32, "--trials", 2, "--plans", "ring"]),
    "linear": ("bench.py", 2, ["linear", "--output", "{}/linear.h5", "--nheads", 2,
                                   "--headdim", 8, "--seqlens", 64, "--trials", 2]),
}  # fmt: skip
SABOTAGE = "sys.path.insert(0, {!r}); import raises; raises.arm(rank, *{!r})"


def arm(rank: int, victim: int, name: str, call: int, error: str, folder: str) -> None:
    """Raise an error on one rank in a call of a function, counted from 1; "": list all calls."""
    calls = Counter()
    if not name:
        atexit.register(lambda: Path(folder, str(rank)).write_text(json.dumps(calls)))
    elif rank != victim:
        return

    def called(frame, event, _):
        code = frame.f_code
        if event == "call" and "/a2d_mpi/" in code.co_filename:
            name_of_code = getattr(code, "co_qualname", code.co_name)  # Python 3.11 and newer
            place = f"{code.co_filename.rpartition('/a2d_mpi/')[2]}:{name_of_code}"
            calls[place] += 1
            if place == name and calls[place] == call:
                sys.setprofile(None)
                Path(folder, "raised").touch()
                raise ERRORS[error]("injected")

    sys.setprofile(called)


def run(case: str, model: Path, timeout: float, *armed: object):
    """Run a driver; the process that ended, or None if it did not, and its folder's files."""
    program, ranks, options = CASES[case]
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as notes:
        options = [str(x).replace("{model}", str(model)).replace("{}", work) for x in options]
        sabotage = SABOTAGE.format(str(Path(__file__).parent), (*armed, notes))
        done = None
        with suppress(subprocess.TimeoutExpired):
            done = drive(program, ranks, *options, sabotage=sabotage, timeout=timeout, code=None)
        return done, {x.name: x.read_text() for x in Path(notes).iterdir()}


def main(argv=None) -> int:
    """Raise errors; a line for each; the exit code."""
    parser = argparse.ArgumentParser("raises.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=100, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--errors", choices=ERRORS, nargs="+", default=list(ERRORS))
    parser.add_argument("--functions", default="", help="only those whose name has this text")
    args = parser.parse_args(argv)
    draw, bad, verdicts = random.Random(args.seed), False, Counter()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        drive("train.py gpt", 1, *TEXT, "--steps", 1, "--folder", model)
        for case in args.only:
            began = time.monotonic()
            done, calls = run(case, model, 100, -1, "", 0, "")
            usual = time.monotonic() - began
            assert done and done.returncode == 0, done and done.stderr
            of_ranks = {int(rank): json.loads(x) for rank, x in calls.items()}
            places = [
                (rank, name, call)
                for rank, x in of_ranks.items()
                for name, number in x.items()
                if args.functions in name
                for call in sorted({1, draw.randint(1, number)})
            ]
            print(f"{case}: {usual:.1f} s, {len(places)} places", flush=True)
            for place in draw.sample(places, min(args.jobs, len(places))):
                error, began = draw.choice(args.errors), time.monotonic()
                done, notes = run(case, model, 2 * usual + LIMIT, *place, error)
                seconds = time.monotonic() - began
                if done is None:
                    verdict = "HANGS"
                elif "raised" not in notes:
                    verdict = "not raised"
                elif done.returncode == 0:
                    verdict = "handled"
                else:
                    verdict = "late" if seconds > usual + LIMIT / 2 else "ends"
                bad |= verdict == "HANGS"
                verdicts[case, verdict] += 1
                code = done.returncode if done else "-"
                lines = [x for x in done.stderr.splitlines() if ".py: " in x] if done else []
                rank, name, call = place
                print(f"{verdict:<10} {case}: {error} on rank {rank} in call {call} of {name}: "
                      f"exit code {code}, {seconds:.1f} s: {' | '.join(lines)[:160]}",
                      flush=True)  # fmt: skip
    for (case, verdict), count in sorted(verdicts.items()):
        print(f"{case}: {count} {verdict}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
