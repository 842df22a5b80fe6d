"""Attention and FFN on ranks of their own: the same tokens, weights apart, bytes as predicted."""

from functools import cache, partial

import h5py
import numpy as np
import pytest
from helpers import ROOT, assert_all, assert_all_refused, distance, drive
from mpi4py import MPI
from test_gpt import alone, shaken
from test_gpt_decode import continued, likeliest, other_tokens

from a2d_mpi import Causal
from a2d_mpi.experiments.trace import read_trace
from a2d_mpi.gpt import pipe
from a2d_mpi.gpt.apart import (
    attention_grid,
    open_apart,
    step_traffic_apart,
    weights_of_rank,
)
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.serve import sample, serve

pytestmark = pytest.mark.multirank

# Rows and columns that no number of ranks divides; MFA's shapes.
CONFIGS = {
    "grouped": GPTConfig(23, 2, 18, 6, 120, nheads_kv=2),
    "mfa": GPTConfig(29, 2, 10, 4, 120, nheads_kv=1, positions="rotary", headdim=14),
}
LENGTHS = (1, 5, 30, 2)
SIZE = MPI.COMM_WORLD.size
SPLITS = sorted({(SIZE - 1, 1), (1, SIZE - 1), (-(-SIZE // 2), SIZE // 2)} - {(0, 1), (1, 0)})


@cache
def prompts():
    rng = np.random.default_rng(3)
    return {i: rng.integers(0, 23, n) for i, n in enumerate(LENGTHS)}


def opened(comm, split, config, rooms=None, heads=1, **options):
    """A decoder and its grid, which the FFN ranks do not have."""
    grid = attention_grid(comm, split, (1, split[0] // heads, heads))
    weights = Parameters(config, *weights_of_rank(shaken(config), comm.rank, split))
    rooms = rooms or [1000] * (split[0] // heads)
    return open_apart(comm, grid, split, weights, rooms, **options), grid


def closed(decoder, grid):
    decoder.free()
    if grid:
        grid.free()


@cache
def expected(name, request, new, choose=likeliest):
    return continued(CONFIGS[name], prompts()[request], new, partial(choose, request))


def drawn(request, length, logits):
    return sample(logits, 0.8, 7, (5, request, length))


def wrong_tokens(found, name, new, choose=likeliest):
    return other_tokens(found, {x: expected(name, x, new[x], choose) for x in found})


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CONFIGS)
def test_same_tokens(comm, name, split):
    """Drawn with the same seeds, ragged prompts; fewer requests than micro-batches at the end."""
    decoder, grid = opened(comm, split, CONFIGS[name], block=4)
    new = {0: 12, 1: 3, 2: 7, 3: 1}
    found = dict(serve(decoder, prompts(), new, drawn))
    bad = wrong_tokens(found, name, new, drawn)
    if grid and decoder.cache.nbytes:
        bad.append(f"{decoder.cache.nbytes} bytes are left")
    closed(decoder, grid)
    assert_all(comm, not bad, f"{split}: {'; '.join(bad)}")


@pytest.mark.mpi(min_size=2)
def test_logits(comm):
    """In float64, of every step, for 1 to 7 micro-batches."""
    config, names = CONFIGS["grouped"], list(prompts())
    for micro_batches in (1, 2, 7):
        decoder, grid = opened(comm, SPLITS[0], config, micro_batches=micro_batches)
        assert all(decoder.admit(x, LENGTHS[x], 60) for x in names)
        found = [decoder.prefill(prompts())]
        for i in range(2):
            found.append(decoder.step({x: expected("grouped", x, 2)[i] for x in names}))
        bad = []
        for x in names if len(found[0]) else ():
            tokens = np.array([*prompts()[x], *expected("grouped", x, 2)])
            model = GPT(shaken(config), alone(config, Causal(), len(tokens)))
            exact = model.logits(model.hidden(tokens))[LENGTHS[x] - 1 :]
            error = distance(exact, [y[x] for y in found])
            if error > 1e-11:
                bad.append(f"request {x}: {error}")
        first = comm.rank == SPLITS[0][0]
        if len(found[0]) != len(names) * first:
            bad.append(f"{len(found[0])} rows of logits")
        closed(decoder, grid)
        assert_all(comm, not bad, f"{micro_batches}: {'; '.join(bad)}")


@pytest.mark.mpi(min_size=2)
def test_a_missing_part_is_noticed(comm, monkeypatch):
    """A sum without the last FFN rank's part gives other tokens."""
    take, right = pipe.Line.take, []

    def without_last(line):
        line.end()
        line._rows[-1][:] = 0
        return take(line)

    for wrong in (False, True):
        if wrong:
            monkeypatch.setattr(pipe.Line, "take", without_last)
        decoder, grid = opened(comm, (1, comm.size - 1), CONFIGS["mfa"])
        found = dict(serve(decoder, prompts(), dict.fromkeys(prompts(), 6), likeliest))
        closed(decoder, grid)
        right.append(not wrong_tokens(found, "mfa", dict.fromkeys(prompts(), 6)))
    assert right == [True, False]


@pytest.mark.mpi(min_size=2)
@pytest.mark.one_mpi
def test_requests_come_and_go(comm):
    """Little room, a request that fits nowhere, and one that comes when all are done."""
    split = SPLITS[-1]
    decoder, grid = opened(comm, split, CONFIGS["mfa"], [4] * split[0], block=4)
    new = {0: 3, 1: 2 + 16 * split[0], 2: 4, 3: 5}
    found = dict(serve(decoder, prompts(), new, likeliest, {0: 0, 1: 0, 2: 1, 3: 30}))
    bad = []
    for x in (1, 2):
        if LENGTHS[x] + new[x] - 1 > 16 * split[0]:
            refused = found.pop(x)
            if f"have room for {4 * split[0]}" not in str(refused):
                bad.append(f"request {x}: {refused}")
    bad += wrong_tokens(found, "mfa", new)
    if decoder.table.requests or decoder.table.free != [4] * split[0]:
        bad.append(f"something is left: {decoder.table.free}")
    closed(decoder, grid)
    assert_all(comm, 1 not in found and not bad, "; ".join(bad))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("split", SPLITS)
def test_traffic(comm, split):
    """Counted and predicted, for more and fewer requests than micro-batches; batches in turn."""
    config, bad = CONFIGS["grouped"], []
    heads = 2 if split[0] % 2 == 0 else 1
    decoder, grid = opened(comm, split, config, heads=heads)
    assert all(decoder.admit(x, LENGTHS[x], 60) for x in prompts())
    decoder.prefill(prompts())
    for count in (4, 2, 1):
        before, log = decoder.sent, []
        for x in decoder.exchanges:
            x.log = log
        decoder.step(dict.fromkeys(range(count), 1))
        sent = tuple(b - a for a, b in zip(before, decoder.sent))
        shape = split[0] // heads, heads
        predicted = step_traffic_apart(config, comm.rank, shape, split[1], count, 3, 8)
        if sent != predicted:
            bad.append(f"{count} requests: {sent}, not {predicted}")
        batches = [f"batch {x}" for x in range(min(count, 3))]
        if [x for x, *_ in log if x != "wait"] != batches * (config.layers + 1):
            bad.append(f"{count} requests: {log}")
    closed(decoder, grid)
    assert_all(comm, not bad, f"{split}: {'; '.join(bad)}")


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_apart(name):
    """No weight is held by ranks of both kinds; the FFN ranks share theirs out, to the byte."""
    whole = shaken(CONFIGS[name])
    for attention_ranks, ffn_ranks in ((1, 1), (2, 3), (3, 5)):
        split = attention_ranks, ffn_ranks
        parts = [weights_of_rank(whole, x, split) for x in range(sum(split))]
        held = [Parameters(whole.config, *x) for x in parts]
        kinds = held[:attention_ranks], held[attention_ranks:]
        names = [{y for x in kind for y in x.named} for kind in kinds]
        assert not names[0] & names[1] and names[0] | names[1] == set(whole.named)
        assert {x.rpartition(".")[0].partition(".")[2] or x for x in names[0]} == {
            *("ln1", "ln2", "qkv", "proj"),
            *("ln_f.weight", "ln_f.bias"),
        }
        nbytes = {
            x: sum(y.nbytes for name, y in whole.named.items() if name in kind)
            for x, kind in enumerate(names)
        }
        assert all(x.flat.nbytes == nbytes[0] for x in kinds[0])
        assert sum(x.flat.nbytes for x in kinds[1]) == nbytes[1]
        assert max(x.flat.nbytes for x in kinds[1]) < 1.2 * nbytes[1] / ffn_ranks
        assert all(x.flat.base is None for x in held)  # not a view of all


@pytest.mark.mpi(min_size=2)
def test_refusals(comm):
    """On all ranks, with the numbers."""
    n = comm.size
    for split, cols, told in (
        ((n, 1), n, f"{n} attention and 1 FFN ranks are not the {n} ranks of the job"),
        ((n, 0), n, f"{n} attention and 0 FFN ranks"),
        ((n - 1, 1), n, f"a 1 x {n} grid does not fit {n - 1} ranks"),
    ):
        with pytest.raises(ValueError, match=told):
            attention_grid(comm, split, (1, cols, 1))
    with pytest.raises(ValueError, match="a number for each of the 1 positions, got"):
        opened(comm, (1, n - 1), CONFIGS["mfa"], [3, 4])
    with pytest.raises(ValueError, match="micro_batches must be at least 1, got 0"):
        opened(comm, (1, n - 1), CONFIGS["mfa"], [3], micro_batches=0)


@pytest.mark.launches
def test_driver(tmp_path):
    """The tokens of one rank, also for requests that come and go; bad options are refused."""
    text, run = tmp_path / "text", tmp_path / "run"
    text.write_bytes(b"to be or not to be " * 20)
    sizes = ["--preset", "mfa-tiny", "--layers", 2, "--seqlen", 64, "--steps", 3]
    drive("train_gpt.py", 2, text, "--folder", run, *sizes, "--separator", "")
    options = ["--prompt", "to be", "--prompt", "or", "--prompt", "not ", "--tokens", 20]
    options += ["--arrive", "0,0,4", "--kv-block", 4, "--temperature", 0.7, "--top-k", 9]
    shown = []
    for ranks, more in (
        (1, ["--room", 15]),
        (3, ["--room", 15, "--attention-ranks", 1, "--ffn-ranks", 2]),
        (3, ["--room", "9,6", "--attention-ranks", 2, "--ffn-ranks", 1, "--micro-batches", 2]),
    ):
        done = drive("generate.py", ranks, run, *options, *more)
        shown.append(sorted(done.stdout.splitlines()[:3]))
    assert shown[0] == shown[1] == shown[2] and shown[0][2].startswith("2: 'not ")
    options = [run, "--prompt", "x", "--tokens", 5]
    both = ["--attention-ranks", 2, "--ffn-ranks"]
    cases = [
        ([*options, "--ffn-ranks", 2], [], "--attention-ranks and --ffn-ranks need each other"),
        ([*options, "--micro-batches", 2], [], "and --micro-batches both"),
        ([*options, *both, 2], [], "2 attention and 2 FFN ranks are not the 3 ranks"),
        (
            [*options, *both, 1, "--head-ranks", 3],
            [],
            "3 ranks a Ulysses group do not divide 2 ranks",
        ),
        ([*options, *both, 1, "--rows", 2, "--cols", 2], [], "a 2 x 2 grid does not fit 2 ranks"),
        ([*options, *both, 1, "--room", "3"], [], "a number for each of the 2 positions"),
        ([*options, *both, 1, "--method", "triangle"], [], "a triangle needs a causal mask"),
        ([*options, *both, 1, "--kernel", "cupy"], [], "does not take NumPy arrays"),
        ([*options, *both, 1], ["--ffn-ranks", "2"], "ranks disagree on --ffn-ranks"),
    ]
    assert_all_refused("generate.py", 3, cases)


@pytest.mark.launches
def test_bench(tmp_path):
    """Rows of ranks of two kinds, their waits, and a trace; a wrong prediction is told."""
    sizes = ["--layers", 1, "--width", 16, "--nheads", 4, "--nheads-kv", 1, "--headdim", 10]
    sizes += ["--contexts", "40", "--trials", 2, "--ranks", 1, "--apart", "1+1,1+2"]
    output, trace = tmp_path / "decode.h5", tmp_path / "trace.json"
    drive("bench_gpt.py", 3, "decode", *sizes, "--output", output, "--trace", trace)
    with h5py.File(output) as file:
        assert list(file["runs"]) == ["1", "1+1", "1+2"]
        seconds, sent = file["runs/1+2/40/seconds"][:], file["runs/1+2/40"].attrs["sent_bytes"]
    assert seconds.shape == (2, 3, 5) and not seconds[:, 1:, [0, 1, 3]].any()
    assert (seconds[..., 4] > 0).all() and (seconds[..., 4] < seconds[..., :3].sum(axis=2)).all()
    assert sent == 4 * 4 * (2 * 16 + 128)  # requests: embedding and MLP, half of the logits
    slices = [x for x in read_trace(trace) if x["ph"] == "X"]
    found = [{x["name"] for x in slices if x["pid"] == rank} for rank in range(3)]
    batches = {"wait", *(f"batch {i}" for i in range(3))}
    steps = [f"{x} ranks, 40 tokens" for x in ("1", "1+1", "1+2")]
    assert found == [batches | {*steps}, batches | {*steps[1:]}, batches | {steps[2]}]
    wrong = """
import a2d_mpi.gpt.apart as apart
right = apart.step_traffic_apart
apart.step_traffic_apart = lambda *of: (right(*of)[0] + 1, right(*of)[1])
"""
    done = drive("bench_gpt.py", 2, "decode", *sizes[:-1], "1+1", sabotage=wrong, code=1)
    assert "FAILED 1+1 ranks, 40 tokens, traffic" in done.stdout
    done = drive("bench_gpt.py", 2, "decode", *sizes, code=2)
    assert "at most 2 together" in done.stderr
    sizes = ["--nheads", 4, "--head-ranks", 3, "--ranks", 3, "--contexts", "40"]
    done = drive("bench_gpt.py", 4, "decode", *sizes, code=2)
    assert "--head-ranks 3: 3 does not divide 4 heads" in done.stderr


def test_the_committed_runs():
    """That docs/afd.md shows: all checks passed; with equal work for both kinds, both are busy."""
    folder = ROOT / "data" / "results" / "afd"
    waits = {}
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            for ranks, contexts in file["runs"].items():
                for context, run in contexts.items():
                    assert all(x.attrs["passed"] for x in run["checks"].values())
                    seconds = run["seconds"][:]
                    shares = seconds[..., 4] / seconds[..., :3].sum(axis=2)
                    waits[path.stem, ranks, int(context)] = np.median(shares, axis=0)
    assert {x for name, x, _ in waits if name == "4"} == {"4", "2+2", "3+1"}
    assert max(waits["2", "1+1", 1024]) < 0.5
    assert max(waits["2-96", "1+1", 512]) < 0.2
    longest = waits["4", "2+2", 65536]  # attention has most of the work
    assert max(longest[:2]) < 0.5 < min(longest[2:])
