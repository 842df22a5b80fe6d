"""Decoding with a GPT, on equal ranks or with MLPs on ranks of their own: tokens, cache, bytes."""

import h5py
import numpy as np
import pytest
from gpts import CONFIG, LENGTHS, alone, continued, likeliest, other_tokens, prompts, serve, shaken
from helpers import SECONDS, assert_all, deeper, distance, drive
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from refused import assert_raises

from a2d_mpi import Causal, ProcessGrid
from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.gpt.apart import attention_grid, open_apart, step_traffic_apart, weights_of_rank
from a2d_mpi.gpt.cache import BlockTable, Cache, step_traffic
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.serve import Service, sample

pytestmark = pytest.mark.grids

# Rows and columns that no number of ranks divides; MFA's shapes.
CONFIGS = {
    "rotary": CONFIG,
    "grouped": GPTConfig(23, 2, 18, 6, 120, nheads_kv=2),
    "mfa": GPTConfig(29, 2, 10, 4, 120, nheads_kv=1, positions="rotary", headdim=14),
}
SIZE = MPI.COMM_WORLD.size
# Numbers of attention ranks and FFN ranks.  Without FFN ranks all ranks are equal.
EQUAL = SIZE, 0
SPLITS = sorted({(SIZE - 1, 1), (1, SIZE - 1), (-(-SIZE // 2), SIZE // 2)} - {(0, 1), (1, 0)})
BOTH = [EQUAL, *SPLITS[-1:]]


def apart(test):
    return pytest.mark.mpi(pytest.mark.multirank(test))


@pytest.fixture
def decoder(comm):
    """Make a decoder on all ranks; FFN ranks have no grid.  All are freed after the test."""
    made = []

    def make(split=EQUAL, config=CONFIG, rooms=None, heads=1, **options):
        ranks, ffn_ranks = split
        rooms = rooms or [1000] * (ranks // heads)
        if ffn_ranks:
            grid = attention_grid(comm, split, (1, ranks // heads, heads))
            made.extend([grid] if grid else [])
            weights = Parameters(config, *weights_of_rank(shaken(config), comm.rank, split))
            new = open_apart(comm, grid, split, weights, rooms, **options)
        else:
            made.append(grid := ProcessGrid(comm, 1, ranks // heads, heads))
            new = Decoder(grid, shaken(config), rooms, **options)
        made.append(new)
        return new

    yield make
    for x in reversed(made):
        x.free()


def drawn(request, length, logits):
    return sample(logits, 0.8, (5, request, length))


def wrong_tokens(found, config, new, choose=likeliest):
    return other_tokens(found, {x: continued(config, x, new[x], choose) for x in found})


@pytest.mark.mpi
@pytest.mark.parametrize("split, name, options", [
    (EQUAL, "rotary", {}), (EQUAL, "rotary", {"method": "ring"}),
    *((x, name, {}) for x in SPLITS for name in ("grouped", "mfa")),
])  # fmt: skip
def test_same_tokens(comm, decoder, split, name, options):
    """Tokens are those of the whole context, also with fewer requests than micro-batches."""
    config, new = CONFIGS[name], {0: 40, 1: 3, 2: 17, 3: 1}
    needed = sum(-(-(n + new[x] - 1) // 4) for x, n in enumerate(LENGTHS))
    rooms = [needed // split[0] // 3 * (split[0] > 1), *[needed] * (split[0] - 1)]
    rooms[0] += needed * (split[0] == 1)
    whole = decoder(split, config, rooms, block=4, **options)
    bad = wrong_tokens(dict(serve(whole, prompts(), new, drawn)), config, new, drawn)
    if comm.rank < split[0] and whole.cache.nbytes:
        bad.append(f"{whole.cache.nbytes} bytes are left")
    if whole.table.free != rooms:
        bad.append(f"room {whole.table.free} is left")
    assert_all(comm, not bad, f"{split}: {'; '.join(bad)}")


@apart
def test_logits(comm, decoder):
    """Logits of every step equal float64 logits, for 1 to 7 micro-batches."""
    config, names = CONFIGS["grouped"], list(prompts())
    for micro_batches in (1, 2, 7):
        whole = decoder(SPLITS[0], config, micro_batches=micro_batches)
        assert all(whole.admit(x, LENGTHS[x], 60) for x in names)
        found = [whole.prefill(prompts())]
        for i in range(2):
            found.append(whole.step({x: continued(config, x, 2)[i] for x in names}))
        bad = []
        for x in names if len(found[0]) else ():
            tokens = np.array([*prompts()[x], *continued(config, x, 2)])
            model = GPT(shaken(config), alone(config, Causal(), len(tokens)))
            exact = model.logits(model.hidden(tokens))[LENGTHS[x] - 1 :]
            error = distance(exact, [y[x] for y in found])
            bad += [f"request {x}: {error}"] * bool(error > 1e-11)
        if len(found[0]) != len(names) * (comm.rank == SPLITS[0][0]):
            bad.append(f"{len(found[0])} rows of logits")
        assert_all(comm, not bad, f"{micro_batches}: {'; '.join(bad)}")


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("split", BOTH)
def test_requests_come_and_go(comm, decoder, split):
    """Requests wait for room, and are refused if they never fit."""
    config, room = CONFIGS["mfa"], 16 * split[0]
    whole = decoder(split, config, [4] * split[0], block=4)
    new, bad = {0: 3, 1: 2 + room, 2: 4, 3: 5}, []
    found = dict(serve(whole, prompts(), new, likeliest))
    for x in (1, 2):
        if LENGTHS[x] + new[x] - 1 > room:
            refused = found.pop(x)
            if f"have room for {4 * split[0]}" not in str(refused):
                bad.append(f"request {x}: {refused}")
    bad += wrong_tokens(found, config, new)
    with pytest.raises(ValueError, match="request 9 has a prompt of 0 tokens"):
        whole.admit(9, 0, 2)
    if whole.table.requests or whole.table.free != [4] * split[0]:
        bad.append(f"something is left: {whole.table.free}")
    assert_all(comm, 1 not in found and not bad, "; ".join(bad))


@apart
@pytest.mark.parametrize("split", SPLITS)
def test_bytes_apart(comm, decoder, split):
    """Counted bytes of a step are predicted, also with fewer requests than micro-batches."""
    config, bad = CONFIGS["grouped"], []
    heads = 2 if split[0] % 2 == 0 else 1
    whole = decoder(split, config, heads=heads)
    assert all(whole.admit(x, LENGTHS[x], 60) for x in prompts())
    whole.prefill(prompts())
    for count in (4, 2, 1):
        before = whole.sent
        whole.step(dict.fromkeys(range(count), 1))
        sent = tuple(b - a for a, b in zip(before, whole.sent))
        shape = split[0] // heads, heads
        predicted = step_traffic_apart(config, comm.rank, shape, split[1], count, 3, 8)
        if sent != predicted:
            bad.append(f"{count} requests: {sent}, not {predicted}")
    assert_all(comm, not bad, f"{split}: {'; '.join(bad)}")


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_head_axis(comm, decoder):
    """A head axis gives the same tokens; each rank keeps and sends its share of the heads."""
    bad, traffic, group = [], {}, CONFIG.nheads // CONFIG.nheads_kv
    for heads in (x for x in range(1, comm.size + 1) if comm.size % x == 0):
        if CONFIG.nheads % heads or ((own := CONFIG.nheads // heads) % group and group % own):
            with pytest.raises(ValueError, match=f"a head axis of {heads} ranks"):
                decoder(heads=heads)
            continue
        whole = decoder(heads=heads, block=4)
        assert all(whole.admit(x, LENGTHS[x], 60) for x in prompts())
        tokens = whole.prefill(prompts()).argmax(axis=1)
        found, before = [tokens], whole.sent
        for _ in range(5):
            tokens = whole.step(dict(zip(prompts(), tokens.tolist()))).argmax(axis=1)
            found.append(tokens)
        if np.array(found).T.tolist() != [continued(CONFIG, name, 6) for name in prompts()]:
            bad.append(f"{heads}: {found}")
        traffic[heads] = tuple((b - a) / 5 for a, b in zip(before, whole.sent))
        if traffic[heads] != step_traffic(CONFIG, comm.size // heads, heads, len(LENGTHS), 8):
            bad.append(f"{heads}: {traffic[heads]} bytes and messages")
        layers, _, heads_kv, *_ = whole.cache.get(0, 2).base.shape
        if (layers, heads_kv) != (CONFIG.layers, max(1, CONFIG.nheads_kv // heads)):
            bad.append(f"{heads}: {heads_kv} heads are kept")
    if comm.size in (4, 6) and not traffic[2] < traffic[1]:
        bad.append(f"more with a head axis: {traffic}")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.parametrize("name", ["grouped", "mfa"])
def test_weights_apart(name):
    """Ranks of different kinds share no weight, and FFN ranks divide theirs evenly."""
    whole = shaken(CONFIGS[name])
    for split in ((1, 1), (2, 3), (3, 5)):
        parts = [weights_of_rank(whole, x, split) for x in range(sum(split))]
        held = [Parameters(whole.config, *x) for x in parts]
        attention, ffn = held[: split[0]], held[split[0] :]
        names = [{y for x in kind for y in x.named} for kind in (attention, ffn)]
        assert not names[0] & names[1] and names[0] | names[1] == set(whole.named)
        nbytes = [sum(whole.named[x].nbytes for x in kind) for kind in names]
        assert all(x.flat.nbytes == nbytes[0] for x in attention)
        assert sum(x.flat.nbytes for x in ffn) == nbytes[1]
        assert max(x.flat.nbytes for x in ffn) < 1.2 * nbytes[1] / split[1]
        assert all(x.flat.base is None for x in held)  # not a view of all


@apart
def test_refusals(comm, decoder):
    """Bad arguments, on all ranks or on the last one, are one error on all ranks."""
    n, config = comm.size, CONFIGS["mfa"]
    for split, cols, told in (
        ((n, 1), n, f"{n} attention ranks and 1 FFN ranks must be the {n} ranks of the job"),
        ((n, 0), n, f"{n} attention ranks and 0 FFN ranks"),
        ((n - 1, 1), n, f"a 1 x {n} grid does not fit {n - 1} ranks"),
    ):
        with pytest.raises(ValueError, match=told):
            attention_grid(comm, split, (1, cols, 1))
    most, first, last = (n - 1, 1), [9] * (n - 1), comm.rank == n - 1
    for split, options, wrong, told in (
        ((1, n - 1), {"rooms": [3, 4]}, {}, "a number for each of the 1 positions, got"),
        ((1, n - 1), {"micro_batches": 0}, {}, "micro_batches must be at least 1, got 0"),
        (most, {"rooms": first}, {"rooms": [*first, 1]}, "ranks disagree on room"),
        (most, {"rooms": first}, {"block": 8}, "ranks disagree on block"),
        (most, {"rooms": first}, {"micro_batches": 4}, "ranks disagree on micro_batche"),
        (EQUAL, {}, {"block": 8}, "ranks disagree on block"),
        (EQUAL, {}, {"rooms": 5}, "has no len"),
        (EQUAL, {}, {"block": "x"}, "not supported between"),
    ):
        with pytest.raises(CollectiveError if wrong else ValueError, match=told):
            decoder(split, config, **(options | wrong if last else options))


@apart
@pytest.mark.parametrize("split", BOTH)
def test_wrong_requests(comm, decoder, split):
    """One error on all ranks, before anything changes: the decoder goes on to the right tokens."""
    config, p = CONFIGS["grouped"], prompts()
    whole = decoder(split, config)
    assert whole.admit(0, 1, 3) and whole.admit(1, 5, 6)
    for wrong, told in (
        ({}, "no requests"),
        ({0: p[0], 7: p[1]}, "request 7 was not admitted"),
        ({0: p[0], 1: p[2]}, f"request 1 has room for 6 more tokens, got {LENGTHS[2]}"),
        ({0: p[0][:0]}, "request 0 has room for 3 more tokens, got 0"),
        ({0: p[0], 1: p[1] + 23}, "request 1: tokens must be from 0 to 22, got "),
        ({0: p[0] - 23}, "request 0: tokens must be from 0 to 22, got -"),
    ):
        assert_raises(comm, told, whole.prefill, wrong)
    whole.prefill({x: p[x] for x in (0, 1)})
    whole.step({x: continued(config, x, 1)[0] for x in (0, 1)})
    for wrong, told in (
        ({}, "no requests"),
        ({0: 1, 1: 1}, "request 1 has room for 0 more tokens, got 1"),
        ({0: 23}, "request 0: tokens must be from 0 to 22, got 23"),
    ):
        assert_raises(comm, told, whole.step, wrong)
    wanted = continued(config, 0, 3)
    logits = whole.step({0: wanted[1]})
    found = comm.allgather([int(x.argmax()) for x in logits])
    right = any(found) and all(x in ([], [wanted[2]]) for x in found)
    assert_all(comm, right, f"{found}, not {wanted}")


@apart
@pytest.mark.parametrize("error", [ValueError("no such token"), ZeroDivisionError()])
@pytest.mark.parametrize("split", BOTH)
def test_a_choice_that_fails(comm, decoder, split, error):
    """All ranks raise the error of one rank; another decoder goes on from the tokens so far."""
    config, called = CONFIGS["grouped"], []

    def choose(request, length, logits):
        called.append(length)
        if length == 2 and called.count(2) == 1:
            raise error
        return likeliest(request, length, logits)

    service = Service({1: prompts()[1]}, {1: 4}, choose)
    service.use(decoder(split, config))
    service.step()
    service.step()
    assert_raises(comm, str(error) or "ZeroDivisionError", service.step)
    service.use(decoder(split, config))
    while service.unanswered:
        service.step()
    bad = wrong_tokens(service.answers, config, {1: 4})
    ranks = sum(comm.allgather(bool(called)))
    assert_all(comm, ranks == 1 and not bad, f"{ranks} ranks chose; {'; '.join(bad)}")


# Parts.


@given(st.data())
def test_table(data):
    """Blocks are dealt evenly while there is room, and no block is lost."""
    rooms = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    block = data.draw(st.integers(1, 4))
    table, kept = BlockTable(rooms, block), {}
    for name in range(data.draw(st.integers(1, 12))):
        if kept and data.draw(st.booleans()):
            table.release(gone := data.draw(st.sampled_from(sorted(kept))))
            del kept[gone]
        most, before = data.draw(st.integers(1, 12)), sum(table.free)
        if -(-most // block) > sum(rooms):
            with pytest.raises(ValueError, match="ranks together have room for"):
                table.admit(name, most)
            continue
        assert table.admit(name, most) == (-(-most // block) <= before)
        if name not in table.requests:
            assert sum(table.free) == before
            continue
        kept[name] = []
        for part in (1, most - 1):
            kept[name] += table.append(name, part)
        assert all(len(set(kept[name][i : i + block])) == 1 for i in range(0, most, block))
    used = [sum(x.owners.count(p) for x in table.requests.values()) for p in range(len(rooms))]
    assert [a + b for a, b in zip(used, table.free)] == rooms and min(table.free) >= 0
    for name in list(kept):
        table.release(name)
    assert table.free == rooms


def test_blocks_are_dealt_in_turn():
    table = BlockTable([100] * 4, 2)
    for name in range(2):
        table.admit(name, 20)
        table.append(name, 20)
    assert table.requests[0].owners == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert table.requests[1].owners == [1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    with pytest.raises(ValueError, match="exists already"):
        table.admit(0, 1)
    with pytest.raises(ValueError, match="block must be at least 1"):
        BlockTable([1], 0)


def test_cache():
    """The cache returns what was put in, and its memory is that of its blocks."""
    table = BlockTable([10], 4)
    table.admit(7, 11)
    held, rng = Cache(table, 0, (2, 3, 5), np.zeros(0, "float32")), np.random.default_rng(0)
    assert held.get(0, 7).shape == (2, 3, 0, 5)
    both = rng.standard_normal((2, 11, 3, 5)).astype("float32")
    for begin, end in ((0, 6), (6, 11)):
        table.append(7, end - begin)
        held.put(1, 7, *both[:, begin:end])
    assert (held.get(1, 7) == both.swapaxes(1, 2)).all()
    assert not held.get(0, 7).any()
    assert held.nbytes == 3 * 4 * 2 * 2 * 15 * 4
    held.release(7)
    assert held.nbytes == 0


def test_sample():
    logits = np.array([0.0, 3.0, 2.9, -1.0])
    assert sample(logits) == 1
    found = [sample(logits, 1.0, (i,)) for i in range(400)]
    share = np.exp(logits) / np.exp(logits).sum()
    assert found.count(1) / 400 == pytest.approx(share[1], abs=0.08)
    assert found == [sample(logits, 1.0, (i,)) for i in range(400)]
    assert {sample(logits, 50.0, (i,)) for i in range(100)} == {0, 1, 2, 3}
    assert {sample(logits, 1e-320, (i,)) for i in range(10)} == {1}  # x / 1e-320 is inf


# Drivers.

# One rank of three raises an error: rank 2 is the FFN rank.  With the line on stderr.
FAILING = {
    # All attention ranks, but no FFN rank, raise this one.
    "attention": ("a2d_mpi.devices.host", "Host.contiguous", 1, 5, MemoryError,
                  "error: no memory (on rank 1)", 2),
    "ffn": ("a2d_mpi.gpt.apart", "FFNRank._embedded", 2, 3, MemoryError, "rank 2 failed", 70),
    "cache": ("a2d_mpi.gpt.cache", "Cache._array", 1, 1, MemoryError, "rank 1 failed", 70),
    "Ctrl-C": ("a2d_mpi.gpt.cache", "SpreadAttention.attend", 0, 2, KeyboardInterrupt,
               "rank 0 interrupted", 130),
    "choice": ("a2d_mpi.experiments.generate", "sample", 2, 2, ValueError,
               "error: no memory", 2),
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
APART = ["--ffn-ranks", 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a small trained model."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").write_bytes(b"to be or not to be " * 20)
    sizes = ["--preset", "mfa-tiny", "--layers", 2, "--seqlen", 64, "--steps", 3]
    drive("train.py gpt", 2, folder / "text", "--folder", folder, *sizes, "--separator", "")
    return folder


@pytest.mark.launches
@pytest.mark.parametrize("name", deeper(FAILING, ["attention", "choice"]))
def test_an_error_on_some_ranks(model, name):
    """An error on any rank ends the job, and no rank waits for good."""
    *place, line, code = FAILING[name]
    options = ["--prompt", "to be", "--prompt", "or", "--tokens", 9, *APART]
    done = drive("generate.py", 3, model, *options, sabotage=FAIL.format(*place), code=None)
    assert done.seconds < SECONDS and f"generate.py: {line}" in done.stderr, done.stderr
    # Open MPI's launcher passes on the code of another rank, which it has ended.
    assert done.returncode == code or (done.returncode and "Open MPI" in MPI.get_vendor())


def test_generate(model):
    """The driver prints the tokens of one rank, also of requests that wait for room."""
    options = ["--prompt", "to be", "--prompt", "or", "--prompt", "not ", "--tokens", 20]
    options += ["--kv-block", 4, "--temperature", 0.7]
    shown = []
    for ranks, more in (
        (1, ["--room", 15]),
        (2, []),
        (3, ["--room", 15, "--ffn-ranks", 2]),
        (3, ["--room", "9,6", *APART, "--micro-batches", 2]),
    ):
        done = drive("generate.py", ranks, model, *options, *more)
        shown.append(sorted(done.stdout.splitlines()[:3]))
    assert shown.count(shown[0]) == 4 and shown[0][2].startswith("2: 'not ")
    done = drive("generate.py", 2, model, *options, "--room", "3,2", code=1)
    assert "have room for 5" in done.stdout, done.stderr


def test_bench(tmp_path):
    """The table has ranks of two kinds, and reports wrong results and bytes."""
    sizes = ["--layers", 1, "--width", 16, "--nheads", 4, "--nheads-kv", 1, "--headdim", 10]
    sizes += ["--contexts", "40,90", "--trials", 2, "--ranks", "1,2", "--apart", "1+1,1+2"]
    output = tmp_path / "decode.h5"
    drive("bench.py decode", 3, *sizes, "--output", output)
    with h5py.File(output) as file:
        assert list(file["runs"]) == ["1", "1+1", "1+2", "2"]
        seconds = file["runs/1+2/40/seconds"][:]
        sent = {x: [y.attrs["sent_bytes"] for y in runs.values()]
                for x, runs in file["runs"].items()}  # fmt: skip
        assert all(x.attrs["passed"] for runs in file["runs"].values() for x in runs.values())
    assert seconds.shape == (2, 3, 3) and not seconds[:, 1:, :2].any()
    # Requests: heads, elements of out, lse and out; or embedding and MLP, half of the logits.
    assert sent["1"] == [0, 0] and sent["2"] == [4 * 2 * (2 * 10 + 1) * 4] * 2
    assert sent["1+2"] == [4 * 4 * (2 * 16 + 128)] * 2
    wrong = """
import a2d_mpi.gpt.apart as apart, a2d_mpi.gpt.cache as cache
right, attention = apart.step_traffic_apart, cache.attention
apart.step_traffic_apart = lambda *of: (right(*of)[0] + 1, right(*of)[1])
cache.attention = lambda q, k, v: tuple(1.001 * x for x in attention(q, k, v))
"""
    done = drive("bench.py decode", 3, *sizes, sabotage=wrong, code=1)
    assert "FAILED 1+1/40, traffic" in done.stdout
    assert "FAILED 2/90, out" in done.stdout, done.stderr
