"""Linear and recurrent layers over ranks: hybrid models of transformers are equal to one process.

Needs the extra `torch`: `bash jobs/test.sh torch`.
"""

import sys

import pytest
import torch
import transformers
from helpers import assert_all
from hybrids import build, positions
from refused import assert_raises

from a2d_mpi import ProcessGrid
from a2d_mpi.torch import ContextParallel, recurrent

pytestmark = pytest.mark.mpi(min_size=4)
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
N = 61
STARTS = [0, 1, 3, 6, 23, 24, 57]  # documents of 1, 2, 3 (what a convolution looks back) tokens


def sequence(n, rows=1):
    return torch.randint(3, 53, (rows, n), generator=torch.Generator().manual_seed(n))


def loss_of(logits, ids, starts):
    """Return the mean loss of the next tokens of documents, without those that begin them."""
    labels = ids.clone()
    labels[0, starts] = -100
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.nn.functional.cross_entropy(logits[:-1].to(wide), labels[0, 1:])


def result(model, logits, ids, starts):
    """Return logits, the loss and gradients, in float64."""
    model.zero_grad()
    loss = loss_of(logits, ids, starts)
    loss.backward()
    grads = [x.grad for x in model.parameters() if x.requires_grad]
    return [x.detach().double() for x in (logits, loss, *grads)]


def alone(model, ids, starts=(0,)):
    """Return the result of one process, each document alone."""
    bounds = [*starts, ids.shape[1]]
    parts = [model(input_ids=ids[:, x:y]).logits[0] for x, y in zip(bounds, bounds[1:])]
    return result(model, torch.cat(parts), ids, list(starts))


def spread(model, ids, starts=(0,)):
    """Return the result of all ranks."""
    given = {"position_ids": positions(ids.shape[1], starts)} if len(starts) > 1 else {}
    return result(model, model(input_ids=ids, **given).logits[0] + 0, ids, list(starts))


def distance(found, exact):
    """Return the largest relative distance of tensors that are not of rounding only."""
    least = 1e-6 * max(float(y.norm()) for y in exact[2:])
    return max(float((x - y).norm() / (y.norm() + least)) for x, y in zip(found, exact))


def assert_near(comm, found, exact, bound=1e-9):
    far = distance(found, exact)
    assert_all(comm, far <= bound, f"off by {far}, more than {bound}")


@pytest.fixture(scope="module")
def grid(comm):
    rows = 2 if comm.size % 2 == 0 else 1
    grid = ProcessGrid(comm, rows, comm.size // rows)
    yield grid
    grid.free()


@pytest.fixture
def parallel(grid):
    """Make a `ContextParallel` on the grid; it is freed after the test."""
    made = []

    def make(model, **options):
        made.append(ContextParallel(grid, model, longest=N, **options))
        return made[-1]

    yield make
    for x in made:
        x.free()


@pytest.mark.parametrize("name, distribution", [
    ("Qwen3Next", "zigzag"), ("KimiLinear", "contiguous"), ("Bamba", "zigzag"),
    ("NemotronH", "contiguous"), ("FalconH1", "zigzag"), ("Lfm2", "zigzag"),
    ("GraniteMoeHybrid", "zigzag"),
])  # fmt: skip
def test_equal_to_one_process(comm, parallel, name, distribution):
    """Logits, loss and all gradients are those of one process in float64, also of documents."""
    model, one = build(name), build(name)
    parallel(model, distribution=distribution)
    for n, starts in ((N, [0]), (N, STARTS), (5, [0]), (5, [0, 1, 3])):
        ids = sequence(n)
        first, again = spread(model, ids, starts), spread(model, ids, starts)
        assert_near(comm, first, alone(one, ids, starts))
        same = all(torch.equal(x, y) for x, y in zip(first, again))
        assert_all(comm, same, "a second run has other bits")


@pytest.mark.parametrize("reentrant", [False, True])
def test_computed_again(comm, parallel, reentrant):
    """Layers that are computed again, in the backward pass, have the pieces of their call."""
    model, one = build("Qwen3Next"), build("Qwen3Next")
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    parallel(model)
    other, ids = sequence(40), sequence(N)
    kept = model(input_ids=other).logits  # another call with other pieces, whose layers come later
    assert_near(comm, spread(model, ids, STARTS), alone(one.train(), ids, STARTS))
    model.zero_grad()
    assert_near(comm, result(model, kept[0] + 0, other, [0]), alone(one, other))


@pytest.mark.parametrize("name", ["Qwen3Next", "Bamba"])
@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_low_precision(comm, parallel, name, kind):
    """The error is at most twice that of one process; states are float32 or wider."""
    ids, exact = sequence(N), alone(build(name), sequence(N))
    model, one = build(name, exact=False), build(name, exact=False)
    if kind == "bfloat16":
        model, one = model.bfloat16(), one.bfloat16()
    cp = parallel(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        found, theirs = spread(model, ids), alone(one, ids)
    norms = [(float((x - z).norm()), float((y - z).norm()), float(z.norm()))
             for x, y, z in zip(found, theirs, exact)]  # fmt: skip
    ours, their = (max(x[i] / (x[2] + 1e-3) for x in norms) for i in (0, 1))
    assert_all(comm, ours <= 2 * their + 1e-3, f"off by {ours}, one process by {their}")
    sent = sum(x.traffic.bytes.get(("forward", "states"), [0])[0] for x in cp.plans.values())
    assert_all(comm, sent > 0, "no state was counted")


def test_lora(comm, parallel):
    """Adapters of a model whose own weights are frozen get their gradients."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["out_proj", "q_proj"], init_lora_weights=False)
    found = []
    for make in (lambda model: None, parallel):
        model = build("Qwen3Next")
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, config).double()
        make(adapted)
        found.append((adapted, spread if make is parallel else alone))
    exact, ours = (function(model, sequence(N)) for model, function in found)
    assert_near(comm, ours, exact)


def test_compiled(comm, parallel):
    """A compiled model computes its recurrent layers outside of its graphs."""
    model, one, ids = build("Lfm2"), build("Lfm2"), sequence(N)
    parallel(model)
    torch._dynamo.reset()
    found = spread(torch.compile(model, backend="eager"), ids, STARTS)
    assert_near(comm, found, alone(one, ids, STARTS))
    compiled = torch._dynamo.utils.counters["frames"]["ok"]
    assert_all(comm, compiled > 0, "nothing was compiled")
    torch._dynamo.reset()


def test_what_travels(comm, parallel):
    """A rank sends a state for each piece that goes on elsewhere, and nothing for documents."""
    model, ids, n = build("Qwen3Next"), sequence(64), 64 // comm.size
    cp = parallel(model, distribution="contiguous")

    def sent(starts):
        model(input_ids=ids, position_ids=positions(64, starts))
        (plan,) = cp.plans.values()
        return plan.traffic.bytes.get(("forward", "states"), [0])[0]

    heads, dk, dv, columns, width = 4, 8, 6, 3, 56
    state = 8 * (comm.size - 1) * (heads * dk * (dk + dv) + columns * width)
    goes_on = comm.rank < comm.size - 1
    assert_all(comm, sent([0]) == state * goes_on, "other bytes")
    assert_all(comm, sent([*range(0, 64, n)]) == 0, "documents of one rank have sent states")


def test_refused(comm, parallel, monkeypatch):
    """Steps between tokens, and functions with other arguments, are refused."""
    assert_raises(comm, "need runs of consecutive tokens", parallel, build("Lfm2"),
                  distribution="striped")  # fmt: skip
    model = build("Bamba")
    file = sys.modules[type(model).__module__]
    known = file.mamba2_chunk_scan
    known = getattr(known, "a2d_mpi", known)

    def renamed(x, steps, *args, **kwargs):
        return known(x, steps, *args, **kwargs)

    monkeypatch.setattr(file, "mamba2_chunk_scan", renamed)
    assert_raises(comm, "mamba2_chunk_scan takes x, steps, args, kwargs", parallel, model)


COMPOSE, CUT, JOIN = recurrent.Pieces.compose, recurrent.Pieces.__init__, recurrent._recurrence


def wrong_transition(*args):
    return JOIN(*args[:6], lambda transition, state: state)


def other_document(pieces, *args):
    CUT(pieces, *args)
    last = len(pieces.listed) - 1
    pieces.listed = [
        x._replace(begins=i == 0, ends=i == last) for i, x in enumerate(pieces.listed)
    ]


def other_order(pieces, whole, initial, step):
    first, second, *others = whole
    return COMPOSE(pieces, [second, first, *others], initial, step)


def left_out(pieces, whole, initial, step):
    seen = iter(range(len(whole)))
    skip = lambda state, x: state if next(seen) == 1 else step(state, x)  # noqa: E731
    return COMPOSE(pieces, whole, initial, skip)


@pytest.mark.parametrize("owner, name, wrong", [
    (recurrent, "_recurrence", wrong_transition), (recurrent.Pieces, "__init__", other_document),
    (recurrent.Pieces, "compose", other_order), (recurrent.Pieces, "compose", left_out),
])  # fmt: skip
@pytest.mark.parametrize("model", ["Qwen3Next", "Bamba"])
def test_sabotage(comm, parallel, monkeypatch, model, owner, name, wrong):
    """Wrong states and columns are far from one process."""
    ids, starts, made = sequence(N), [0, 40], build(model)
    exact = alone(build(model), ids, starts)
    parallel(made, probe=False, distribution="zigzag")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrong)
        assert_all(comm, distance(spread(made, ids, starts), exact) > 1e-4, "nobody sees it")


@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear", "Bamba"])
def test_probe(comm, parallel, monkeypatch, name):
    """The probe refuses transitions that are wrong by a tenth.

    States decay fast, and layers add little to their inputs, as in large models.
    """
    model = build(name, exact=False)
    with torch.no_grad():
        for x, parameter in model.named_parameters():
            parameter.add_(3 * x.endswith("A_log"))
            parameter.mul_(1e-3 if x.endswith(("o_proj.weight", "out_proj.weight")) else 1)

    def wrong(*args):
        apply = args[6] if len(args) > 6 else torch.mul
        return JOIN(*args[:6], lambda transition, state: 0.9 * apply(transition, state))

    with monkeypatch.context() as patch:
        patch.setattr(recurrent, "_recurrence", wrong)
        for distribution in ("contiguous", "zigzag"):
            assert_raises(comm, "is not the same over ranks", parallel, model,
                          distribution=distribution)  # fmt: skip
    parallel(model)


@pytest.mark.parametrize("name", ["Qwen3Next", "Bamba", "NemotronH", "Lfm2"])
def test_generate(comm, parallel, name):
    """Tokens and logits of prompts, padded rows and second turns are those of one process."""
    model, one = build(name).eval(), build(name).eval()
    cp = parallel(model)
    options = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    for rows, n in ((1, 1), (1, 7), (1, 301), (3, 90)):
        ids, caches = sequence(n, rows), [{}, {}]
        mask = torch.ones_like(ids)
        if rows > 1:
            mask[1, :5], mask[2, : n - 1] = 0, 0
            ids = ids * mask
        for turn in range(2):
            answers = []
            for function, cache in zip((one.generate, cp.generate), caches):
                torch.manual_seed(turn)
                answers.append(function(ids, attention_mask=mask, **cache, **options))
            first, second = (torch.stack(x.logits).double() for x in answers)
            far = float((first - second).norm() / first.norm())
            same = torch.equal(*(x.sequences for x in answers)) and far < 1e-5
            assert_all(comm, same, f"{rows} x {n}, turn {turn}: other tokens, or off by {far}")
            ids = torch.cat([answers[0].sequences, sequence(70, rows)], 1)
            mask = torch.cat([mask, mask.new_ones(rows, ids.shape[1] - mask.shape[1])], 1)
            caches = [{"past_key_values": x.past_key_values} for x in answers]
    assert_raises(comm, "cannot go back", caches[1]["past_key_values"].crop, -1)
