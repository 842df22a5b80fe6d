"""Decoding with a GPT: the cache, its blocks, and the tokens of the whole context."""

from functools import cache, partial

import h5py
import numpy as np
import pytest
from helpers import assert_all, drive
from hypothesis import given
from hypothesis import strategies as st
from test_gpt import alone, shaken

from a2d_mpi import Causal
from a2d_mpi.gpt.cache import BlockTable, Cache
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.model import GPT
from a2d_mpi.gpt.serve import sample, serve
from a2d_mpi.gpt.steps import step_traffic

pytestmark = pytest.mark.grids

CONFIG = GPTConfig(23, 2, 24, 6, 256, nheads_kv=2, positions="rotary")
LENGTHS, NEW = (1, 5, 40), 60


@cache
def prompts():
    rng = np.random.default_rng(3)
    return {i: rng.integers(0, CONFIG.vocab, n) for i, n in enumerate(LENGTHS)}


def continued(config, prompt, new, choose):
    """Tokens after a prompt, the whole context computed again at each step, on one rank."""
    weights, tokens = shaken(config), list(prompt)
    for i in range(new):
        model = GPT(weights, alone(config, Causal(), len(tokens)))
        tokens.append(choose(i, model.logits(model.hidden(np.array(tokens))[-1:])[0]))
    return tokens[len(prompt) :]


@cache
def greedy(name, new):
    return continued(CONFIG, prompts()[name], new, partial(likeliest, name))


def other_tokens(found, wanted):
    """Requests that were refused, or whose tokens are others, in words."""
    return [
        f"request {name}: {x}, not {wanted[name]}"
        for name, x in found.items()
        if isinstance(x, ValueError) or x.tolist() != wanted[name]
    ]


@pytest.fixture
def decoder(comm, grid_of):
    """Make a decoder on all ranks; it is freed after the test."""
    made = []

    def make(rooms=None, **options):
        grid = grid_of(1, comm.size)
        made.append(Decoder(grid, shaken(CONFIG), rooms or [1000] * comm.size, **options))
        return made[-1]

    yield make
    for x in made:
        x.free()


def likeliest(name, length, logits):
    return int(logits.argmax())


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("method", ["attention2d", "ring"])
def test_same_tokens(comm, decoder, method):
    """Greedy tokens of ragged prompts are those of the whole context."""
    count = NEW if method == "attention2d" and comm.size == 4 else 20
    needed = sum(-(-(n + count - 1) // 8) for n in LENGTHS)
    rooms = [needed // comm.size // 3, *[needed] * (comm.size - 1)] if comm.size > 1 else [needed]
    whole = decoder(rooms, block=8, method=method)
    found = dict(serve(whole, prompts(), dict.fromkeys(prompts(), count), likeliest))
    bad = other_tokens(found, {x: greedy(x, count) for x in prompts()})
    if whole.cache.nbytes or whole.table.free != rooms:
        bad.append(f"{whole.cache.nbytes} bytes are left, room {whole.table.free}")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_requests_come_and_go(comm, decoder):
    """Requests wait for room, are refused if they never fit, and do not stop others."""
    whole = decoder([4] * comm.size, block=4)
    new = {0: 3, 1: 16 * comm.size, 2: 5}  # request 1 has 5 tokens, and no place anywhere
    order = list(serve(whole, prompts(), new, likeliest))
    found, bad = dict(order), []
    for name in (0, 2):
        fits = -(-(LENGTHS[name] + new[name] - 1) // 4) <= 4 * comm.size
        if fits != (not isinstance(found[name], ValueError)):
            bad.append(f"request {name}: {found[name]}")
        elif fits and found[name].tolist() != greedy(name, new[name]):
            bad.append(f"request {name}: {found[name]}, not {greedy(name, new[name])}")
    if f"have room for {4 * comm.size}" not in str(found[1]):
        bad.append(f"request 1: {found[1]}")
    with pytest.raises(ValueError, match="request 9 has a prompt of 0 tokens"):
        whole.admit(9, 0, 2)
    if whole.table.requests or whole.cache.nbytes:
        bad.append("something is left")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
def test_bytes(comm, decoder):
    """Counted bytes of a step are the predicted ones, for short and long contexts."""
    whole = decoder(block=8)
    assert all(whole.admit(x, LENGTHS[x], 250) for x in (0, 2))
    whole.prefill({0: prompts()[0], 2: prompts()[2]})
    sent, expected = set(), step_traffic(CONFIG, comm.size, 1, 2, 8)
    for _ in range(60):
        before = whole.sent
        whole.step({0: 1, 2: 2})
        sent.add(tuple(b - a for a, b in zip(before, whole.sent)))
    assert_all(comm, sent == {expected}, f"{sent}, not {expected}")
    held = [sum(x.held[p] for x in whole.table.requests.values()) for p in range(comm.size)]
    assert max(held) - min(held) <= 2 * 8, held  # a block of each request
    token = CONFIG.layers * 2 * CONFIG.nheads_kv * CONFIG.headdim * 8
    most = 2 * 8 * (-(-250 // 8 // comm.size) + 1)  # of both, in blocks
    assert_all(comm, whole.cache.nbytes <= most * token, f"{whole.cache.nbytes}, not {most}")
    whole.release(0)
    whole.release(2)


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_head_axis(comm, grid_of):
    """A head axis gives the same tokens; each rank keeps and sends its share of the heads."""
    bad, traffic, group = [], {}, CONFIG.nheads // CONFIG.nheads_kv
    for heads in (x for x in range(1, comm.size + 1) if comm.size % x == 0):
        positions = comm.size // heads
        grid = grid_of(1, positions, heads)
        if CONFIG.nheads % heads or ((own := CONFIG.nheads // heads) % group and group % own):
            with pytest.raises(ValueError, match=f"a head axis of {heads} ranks"):
                Decoder(grid, shaken(CONFIG), [1000] * positions)
            continue
        whole = Decoder(grid, shaken(CONFIG), [1000] * positions, block=4)
        assert all(whole.admit(x, LENGTHS[x], 60) for x in prompts())
        tokens = whole.prefill(prompts()).argmax(axis=1)
        found, before = [tokens], whole.sent
        for _ in range(5):
            tokens = whole.step(dict(zip(prompts(), tokens.tolist()))).argmax(axis=1)
            found.append(tokens)
        if np.array(found).T.tolist() != [greedy(name, 6) for name in prompts()]:
            bad.append(f"{grid}: {found}")
        traffic[heads] = tuple((b - a) / 5 for a, b in zip(before, whole.sent))
        if traffic[heads] != step_traffic(CONFIG, positions, heads, len(LENGTHS), 8):
            bad.append(f"{grid}: {traffic[heads]} bytes and messages")
        layers, _, heads_kv, *_ = whole.cache.get(0, 2).base.shape
        if (layers, heads_kv) != (CONFIG.layers, max(1, CONFIG.nheads_kv // heads)):
            bad.append(f"{grid}: {heads_kv} heads are kept")
        whole.free()
    if comm.size in (4, 6) and not traffic[2] < traffic[1]:
        bad.append(f"more with a head axis: {traffic}")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_later_requests(comm, decoder):
    """Requests that arrive later get the tokens that they get alone."""
    whole = decoder(block=4)
    new, taken, steps = {0: 9, 1: 4, 2: 3}, [], []
    prefill, step = whole.prefill, whole.step
    whole.prefill = lambda new: taken.append((len(steps), [*new])) or prefill(new)
    whole.step = lambda tokens: steps.append(tokens) or step(tokens)
    found = dict(serve(whole, prompts(), new, likeliest, {0: 0, 1: 30, 2: 4}))
    bad = other_tokens(found, {x: greedy(x, new[x]) for x in prompts()})
    # Request 0 takes eight steps after its prompt.
    if taken != [(0, [0]), (4, [2]), (8, [1])]:
        bad.append(f"taken in after so many steps: {taken}")
    assert_all(comm, not bad, "; ".join(bad))


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
        with pytest.raises(ValueError, match="was admitted for"):
            table.append(name, 1)
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
    drawn = [sample(logits, 1.0, 2, (i,)) for i in range(400)]
    assert set(drawn) == {1, 2}
    assert drawn.count(1) / 400 == pytest.approx(1 / (1 + np.exp(-0.1)), abs=0.08)
    assert drawn == [sample(logits, 1.0, 2, (i,)) for i in range(400)]
    assert {sample(logits, 50.0, None, (i,)) for i in range(100)} == {0, 1, 2, 3}
    assert {sample(logits, 1e-320, None, (i,)) for i in range(10)} == {1}  # x / 1e-320 is inf


@pytest.mark.launches
def test_driver(tmp_path):
    sizes = ["--layers", 1, "--width", 8, "--nheads", 2, "--seqlen", 64, "--steps", 3]
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be " * 20)
    drive("train.py gpt", 2, text, "--folder", tmp_path / "run", *sizes, "--separator", "")
    options = ["--prompt", "to be", "--prompt", "or", "--tokens", 20, "--kv-block", 4]
    shown = []
    for ranks in (1, 2):
        done = drive("generate.py", ranks, tmp_path / "run", *options)
        shown.append(sorted(done.stdout.splitlines()[:2]))
    assert shown[0] == shown[1] and shown[0][0].startswith("0: 'to be")
    done = drive("generate.py", 2, tmp_path / "run", *options, "--room", "3,2", code=1)
    assert "have room for 5" in done.stdout, done.stderr
    done = drive("generate.py", 2, tmp_path / "run", *options, "--room", "3", code=2)
    assert "a number for each of the 2 positions" in done.stderr


@pytest.mark.launches
def test_bench(tmp_path):
    """The benchmark reports a wrong result."""
    sizes = ["--layers", 1, "--width", 16, "--nheads", 4, "--contexts", "40,90", "--trials", 2]
    output = tmp_path / "decode.h5"
    drive("bench.py", 2, "decode", *sizes, "--output", output)
    with h5py.File(output) as file:
        runs = {x: [dict(y.attrs) for y in of.values()] for x, of in file["runs"].items()}
        assert file["runs/2/90/seconds"].shape == (2, 2, 5)
    assert list(runs) == ["1", "2"] and [x["sent_bytes"] for x in runs["1"]] == [0, 0]
    sent = {x["sent_bytes"] for x in runs["2"]} | {x["predicted_bytes"] for x in runs["2"]}
    assert sent == {4 * 2 * (2 * 4 + 1) * 4}  # requests, heads, elements of out, lse and out
    wrong = """
import a2d_mpi.gpt.steps as steps
right = steps.attention
steps.attention = lambda q, k, v: tuple(1.001 * x for x in right(q, k, v))
"""
    done = drive("bench.py", 2, "decode", *sizes, sabotage=wrong, code=1)
    assert "FAILED 2 ranks, 90 tokens, out" in done.stdout, done.stderr
    done = drive("bench.py", 2, "decode", *sizes, "--ranks", 3, code=2)
    assert "at most 2, got [3]" in done.stderr
