"""Attention ranks and FFN ranks: the same tokens, separate weights, and predicted bytes."""

from functools import cache, partial

import h5py
import numpy as np
import pytest
from helpers import ROOT, SECONDS, assert_all, assert_all_refused, deeper, distance, drive
from mpi4py import MPI
from test_gpt import alone, shaken
from test_gpt_decode import continued, likeliest, other_tokens

from a2d_mpi import Causal, ProcessGrid
from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.experiments.trace import read_trace
from a2d_mpi.gpt import pipe
from a2d_mpi.gpt.apart import (
    attention_grid,
    open_apart,
    step_traffic_apart,
    weights_of_rank,
)
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.serve import Service, sample, serve

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
    """Return a decoder and its grid; FFN ranks have no grid."""
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
    """The same seeds give the same tokens, also with fewer requests than micro-batches."""
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
    """Logits of every step equal float64 logits, for 1 to 7 micro-batches."""
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
    """A sum without the part of the last FFN rank gives other tokens."""
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
    """Requests wait for room, are refused if they never fit, and may arrive after all others."""
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
    """Counted traffic is the predicted traffic, for more and fewer requests than micro-batches."""
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
    """Ranks of different kinds share no weight, and FFN ranks divide theirs exactly."""
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
    """Bad arguments are one error on all ranks, with the numbers."""
    n = comm.size
    for split, cols, told in (
        ((n, 1), n, f"{n} attention ranks and 1 FFN ranks must be the {n} ranks of the job"),
        ((n, 0), n, f"{n} attention ranks and 0 FFN ranks"),
        ((n - 1, 1), n, f"a 1 x {n} grid does not fit {n - 1} ranks"),
    ):
        with pytest.raises(ValueError, match=told):
            attention_grid(comm, split, (1, cols, 1))
    with pytest.raises(ValueError, match="a number for each of the 1 positions, got"):
        opened(comm, (1, n - 1), CONFIGS["mfa"], [3, 4])
    with pytest.raises(ValueError, match="micro_batches must be at least 1, got 0"):
        opened(comm, (1, n - 1), CONFIGS["mfa"], [3], micro_batches=0)


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ(comm):
    """On the last rank only, which is an FFN rank of the first decoder."""
    last, config = comm.rank == comm.size - 1, CONFIGS["mfa"]
    split = (comm.size - 1, 1)
    grid = attention_grid(comm, split, (1, split[0], 1))
    weights = Parameters(config, *weights_of_rank(shaken(config), comm.rank, split))
    alike = ProcessGrid(comm, 1, comm.size)
    for name, right, wrong in (
        ("block", 16, 8),
        ("rooms", [9] * split[0], [9] * split[0] + [1]),
        ("micro_batches", 3, 4),
    ):
        options = {"rooms": [9] * split[0], "block": 16, name: wrong if last else right}
        with pytest.raises(CollectiveError, match=f"ranks disagree on {name.removesuffix('s')}"):
            open_apart(comm, grid, split, weights, **options)
    for rooms, block, told in (
        ([9] * comm.size, 8, "ranks disagree on block"),
        (5, 16, "has no len"),
        ([9] * comm.size, "x", "not supported between"),
    ):
        options = (rooms, block) if last else ([9] * comm.size, 16)
        with pytest.raises(CollectiveError, match=told):
            Decoder(alike, shaken(config), *options)
    for x in (grid, alike):
        if x:
            x.free()


def unlike(found, *texts):
    """What is not one error, the same on all ranks, that has all texts."""
    bad = [] if len(set(found)) == 1 else [f"other errors: {found}"]
    return bad + [f"no {x!r} in {found[0]!r}" for x in texts if x not in str(found[0])]


def error_of(comm, call):
    """The errors of all ranks, as text; the ranks are in step afterwards."""
    try:
        call()
    except ValueError as error:
        return comm.allgather(str(error))
    return comm.allgather(None)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("apart", [True, False])
def test_wrong_requests(comm, apart):
    """One error on all ranks, before anything changes: the decoder goes on to the right tokens."""
    config = CONFIGS["grouped"]
    if apart:
        decoder, grid = opened(comm, SPLITS[-1], config)
    else:
        grid = ProcessGrid(comm, 1, comm.size)
        decoder = Decoder(grid, shaken(config), [1000] * comm.size)
    assert decoder.admit(0, 1, 3) and decoder.admit(1, 5, 6)
    bad = []
    for given, told in (
        ({}, "no requests"),
        ({0: prompts()[0], 7: prompts()[1]}, "request 7 was not admitted"),
        ({0: prompts()[0], 1: prompts()[2]}, "request 1 has room for 6 more tokens, got 30"),
        ({0: prompts()[0][:0]}, "request 0 has room for 3 more tokens, got 0"),
        ({0: prompts()[0], 1: prompts()[1] + 23}, "request 1: tokens must be from 0 to 22, got "),
        ({0: prompts()[0] - 23}, "request 0: tokens must be from 0 to 22, got -"),
    ):
        bad += unlike(error_of(comm, lambda given=given: decoder.prefill(given)), told)
    decoder.prefill({x: prompts()[x] for x in (0, 1)})
    first = {x: expected("grouped", x, 1)[0] for x in (0, 1)}
    decoder.step(first)
    for given, told in (
        ({}, "no requests"),
        ({0: 1, 1: 1}, "request 1 has room for 0 more tokens, got 1"),
        ({0: 23}, "request 0: tokens must be from 0 to 22, got 23"),
    ):
        bad += unlike(error_of(comm, lambda given=given: decoder.step(given)), told)
    logits = decoder.step({0: expected("grouped", 0, 2)[1]})
    found = comm.allgather([int(x.argmax()) for x in logits])
    bad += [f"{x}, not {expected('grouped', 0, 3)}" for x in found
            if x not in ([], [expected("grouped", 0, 3)[2]])]  # fmt: skip
    closed(decoder, grid)
    assert_all(comm, any(found) and not bad, "; ".join(bad))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("error", [ValueError("no such token"), ZeroDivisionError()])
@pytest.mark.parametrize("apart", [True, False])
def test_a_choice_that_fails(comm, apart, error):
    """All ranks raise the error of one rank; another decoder goes on from the tokens so far."""
    config, called = CONFIGS["grouped"], []

    def choose(request, length, logits):
        called.append(length)
        if length == 2 and called.count(2) == 1:
            raise error
        return likeliest(request, length, logits)

    def decoder():
        if apart:
            return opened(comm, SPLITS[-1], config)
        grid = ProcessGrid(comm, 1, comm.size)
        return Decoder(grid, shaken(config), [1000] * comm.size), grid

    service = Service({1: prompts()[1]}, {1: 4}, choose)
    first, grid = decoder()
    service.use(first)
    service.step()
    service.step()
    bad = unlike(error_of(comm, service.step), str(error) or "ZeroDivisionError")
    closed(first, grid)
    second, grid = decoder()
    service.use(second)
    found = []
    while service.unanswered:
        found += service.step()
    bad += wrong_tokens(dict(found), "grouped", {1: 4})
    closed(second, grid)
    ranks = sum(comm.allgather(bool(called)))
    assert_all(comm, ranks == 1 and not bad, f"{ranks} ranks chose; {'; '.join(bad)}")


# One rank of three raises an error: rank 2 is the FFN rank.  With the line on stderr.
FAILING = {
    # All attention ranks, but no FFN rank, raise this one.
    "attention": ("a2d_mpi.devices.host", "Host.contiguous", 1, 5, MemoryError,
                  ["error: no memory (on rank 1)"], 2),
    "ffn": ("a2d_mpi.gpt.apart", "FFNRank._embedded", 2, 3, MemoryError, ["rank 2 failed"], 70),
    "cache": ("a2d_mpi.gpt.cache", "Cache._array", 1, 1, MemoryError, ["rank 1 failed"], 70),
    "Ctrl-C": ("a2d_mpi.gpt.steps", "SpreadAttention.attend", 0, 2, KeyboardInterrupt,
               ["rank 0 interrupted"], 130),
    "choice": ("a2d_mpi.experiments.generate", "_Answers._choose", 2, 2, ValueError,
               ["error: no memory"], 2),
}  # fmt: skip
FAIL = """
import {0} as module
old, calls = module.{1}, []
def fail(*args, **options):
    calls.append(1)
    if len(calls) == {3}:
        raise {4.__name__}("no memory")
    return old(*args, **options)
if rank == {2}:
    module.{1} = fail
"""


@pytest.mark.launches
@pytest.mark.parametrize("name", deeper(FAILING, ["attention", "choice"]))
def test_an_error_on_some_ranks(checkpoints, name):
    """An error on any rank ends the job, and no rank waits for good."""
    *place, lines, code = FAILING[name]
    options = ["--prompt", "to be", "--prompt", "or", "--tokens", 9]
    options += ["--attention-ranks", 2, "--ffn-ranks", 1]
    done = drive("generate.py", 3, checkpoints, *options, sabotage=FAIL.format(*place), code=None)
    assert done.seconds < SECONDS, done.stderr
    for line in lines:
        assert f"generate.py: {line}" in done.stderr, done.stderr
    # Open MPI's launcher passes on the code of another rank, which it has ended.
    assert done.returncode == code or (done.returncode and "Open MPI" in MPI.get_vendor())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with a small trained model."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").write_bytes(b"to be or not to be " * 20)
    sizes = ["--preset", "mfa-tiny", "--layers", 2, "--seqlen", 64, "--steps", 3]
    drive("train.py gpt", 2, folder / "text", "--folder", folder, *sizes, "--separator", "")
    return folder


@pytest.mark.launches
def test_driver(checkpoints):
    """The driver prints the tokens of one rank, also for late requests; it refuses bad options."""
    run = checkpoints
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
        ([*options, "--ffn-ranks", 2], [], "give both of --attention-ranks and --ffn-ranks"),
        ([*options, "--micro-batches", 2], [], "--micro-batches needs them"),
        ([*options, *both, 2], [], "2 attention ranks and 2 FFN ranks must be the 3 ranks"),
        (
            [*options, *both, 1, "--head-ranks", 3],
            [],
            "3 ranks per Ulysses group do not divide 2 ranks",
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
    """The table has ranks of two kinds and their waits, and reports a wrong prediction."""
    sizes = ["--layers", 1, "--width", 16, "--nheads", 4, "--nheads-kv", 1, "--headdim", 10]
    sizes += ["--contexts", "40", "--trials", 2, "--ranks", 1, "--apart", "1+1,1+2"]
    output, trace = tmp_path / "decode.h5", tmp_path / "trace.json"
    drive("bench.py", 3, "decode", *sizes, "--output", output, "--trace", trace)
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
    done = drive("bench.py", 2, "decode", *sizes[:-1], "1+1", sabotage=wrong, code=1)
    assert "FAILED 1+1 ranks, 40 tokens, traffic" in done.stdout
    done = drive("bench.py", 2, "decode", *sizes, code=2)
    assert "at most 2 together" in done.stderr
    sizes = ["--nheads", 4, "--head-ranks", 3, "--ranks", 3, "--contexts", "40"]
    done = drive("bench.py", 4, "decode", *sizes, code=2)
    assert "--head-ranks 3: 3 does not divide 4 heads" in done.stderr


def test_the_committed_runs():
    """The runs of docs/models.md passed all checks, and equal work keeps both kinds busy."""
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
