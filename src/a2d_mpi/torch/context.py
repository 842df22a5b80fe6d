"""Models of transformers whose sequence is spread over ranks."""

from __future__ import annotations

import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import Call, agree
from a2d_mpi.comm.channel import Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.sizes import check_range
from a2d_mpi.masks.documents import Documents, positions_in
from a2d_mpi.masks.mask import Mask
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.sharding.choice import predict_times
from a2d_mpi.torch.attention import IGNORED
from a2d_mpi.torch.balance import balance_loss
from a2d_mpi.torch.batches import agreed, packed
from a2d_mpi.torch.entry import (
    COPY,
    IMPLEMENTATION,
    MASKS,
    Plans,
    Running,
    cache_of,
    enter,
    functions,
    give_back,
    own_attention,
    owners,
    undo,
    wrong_arguments,
)
from a2d_mpi.torch.gradients import sum_gradients
from a2d_mpi.torch.recurrent import Pieces, install
from a2d_mpi.torch.layers import (
    NUMBERS,
    Kind,
    Masks,
    attention_of,
    inputs_of,
    known_mask,
    layers_of,
    number_of,
    register,
    run,
    same,
)

if TYPE_CHECKING:  # they load all of transformers
    from transformers.generation.utils import GenerateOutput

    from a2d_mpi.torch.cache import SpreadCache
    from a2d_mpi.torch.decoding import Step
    from a2d_mpi.torch.generation import Generation

PROBED = 16  # tokens of a rank in the probe
KEPT = 8  # sets of documents whose plans are kept
GENERATES = "transformers>=5.0"  # for generation; the oldest in which all tried models are right
SWITCHES = "training", "gradient_checkpointing"  # attributes of modules that may change
ENTRY = "call the model with **batch.inputs of a new batch = cp.shard(...), not a layer alone"
PADDING = "a plan takes no padding mask: pack sequences as documents"


class _Ticket(NamedTuple):
    """A mark that the positions of a batch carry to the model; copies of positions get none.

    It keeps the `ContextParallel`: without it the model would attend to this rank's tokens only.
    """

    owner: ContextParallel
    plans: int  # their number
    version: int  # of the positions

    def __reduce__(self) -> tuple:
        return type(None), ()


@dataclass(frozen=True)
class Batch:
    """One rank's part of a sequence.

    Attributes
    ----------
    inputs : dict of str to (1, n) int64 tensor
        `input_ids` and `position_ids`.  The plans belong to this tensor of positions, not to a
        copy.
    labels : (1, n) int64 tensor
        Label of each token, or -100.
    nlabels : int
        Labels of all ranks, also of other replicas, that are not -100.
    tokens : (n,) int64
        Sorted global indices of this rank's tokens.
    length : int
        Tokens of the sequence without padding.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    nlabels: int
    tokens: np.ndarray
    length: int


class ContextParallel:
    """A model of transformers whose sequence is spread over the ranks of a grid.

    ::

        cp = ContextParallel(grid, model, seqlen=N)
        batch = cp.shard(input_ids)  # every rank passes the whole sequence
        loss = cp.loss(model(**batch.inputs).logits, batch)
        loss.backward()
        cp.sum_gradients()

    It finds out what each attention layer computes, and makes a plan for each kind of layer, all
    on one distribution.  Then a few tokens go through the model with its own attention, and
    through plans; the outputs of all layers must be the same.  A model that plans cannot compute
    is refused.  Making it, `shard`, `sum_gradients` and calls of the model are collective over
    ``grid.comm``.

    The plans of a batch travel with its positions.  Each call of the model, or of a model in it,
    takes them from there, and passes them on to its layers as their mask, with the mask that the
    model asks for in this call.  `free` gives the model its own attention back, and so does a
    `ContextParallel` that neither the caller nor a batch keeps.  Another one of the same model
    takes its place.

    Parameters
    ----------
    grid : ProcessGrid
    model : transformers.PreTrainedModel
        The same on all ranks, not in a wrapper.  If it will be trained, in training mode.
    seqlen : int
        N, tokens of the sequence.
    longest : int, optional
        Most tokens of a document.  A model with learned positions needs no more of them.  Default:
        `seqlen`.
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    probe : bool
        Whether to compare the model with its own attention.
    replicas : Intracomm, optional
        All ranks that share a step, if other grids compute other sequences in it.  Then `shard`
        and `sum_gradients` are collective over these ranks.  Default: the ranks of the grid.
        They are in ``grid.failures.others`` until `free`.
    **options
        Other arguments of plans.  Default of `distribution`: the one with the least predicted time
        for all layers together.  Default of `dtype`: the model's; under autocast pass its dtype.

    Attributes
    ----------
    layers : dict of torch.nn.Module to Kind
    plans : dict of Kind to AttentionPlan
        Plans of the latest batch.

    Raises
    ------
    ValueError
        On all ranks, with the name of the layer, if plans cannot compute it, or the probe finds a
        difference.  Also as of plans.
    RanksLost
        On all surviving ranks, if a rank died and MPI continues.  All other collective calls raise
        it, too, also the model's and ``backward()``.  Weights are as they were.  `free` this
        object, and make another one of the model on the grid of `ProcessGrid.shrink`.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        model: torch.nn.Module,
        *,
        seqlen: int,
        longest: int | None = None,
        method: str = "attention2d",
        probe: bool = True,
        replicas: MPI.Intracomm | None = None,
        **options: Any,
    ) -> None:
        from transformers import PreTrainedModel

        self.grid, self.model, self.seqlen, self.method = grid, model, seqlen, method
        self.longest = min(longest or seqlen, seqlen)
        self.replicas = replicas or grid.comm
        self.layers: dict[torch.nn.Module, Kind] = {}
        call = Call(grid.comm)
        with call.checks(text=lambda x: f"{type(model).__name__}: {x}"):
            if isinstance(model, PreTrainedModel):
                undo(model, own_attention, {})
                self._recurrent, _ = install(model)
            self.layers = layers_of(model, self.longest)
            if MPI.Group.Difference(grid.comm.Get_group(), self.replicas.Get_group()).size:
                raise ValueError("replicas must have all ranks that share a step, as this grid's")
        kinds = [*self.layers.values()]
        with grid.failures.translated():
            call.agree({"seqlen": seqlen, "longest": self.longest, "layers": kinds})
        self._masks = Masks(self.longest, [x.mask for x in kinds])
        self._numbers: dict[bytes, int] = {}  # of plans, by their documents
        self._sets: dict[int, Plans] = {}
        self._bases: dict[tuple[str | None, Kind], AttentionPlan] = {}
        self._latest = -1
        self._paths = {x: name for name, x in model.named_modules()}
        self._generation: Generation | None = None
        self.numbering, self._probing = NUMBERS, probe
        owner, kinds = next(NUMBERS), [*dict.fromkeys(kinds)]
        owners[owner], self._running, self._name = self, Running([]), f"a2d_mpi_{owner}"
        register(self._name, *functions(owner, f"_{self._name}", self._running))
        self._firsts = [next(x for x, y in self.layers.items() if y == kind) for kind in kinds]
        for module, kind in self.layers.items():
            setattr(module, f"_{self._name}", kinds.index(kind))
        self._options, self._training = options, model.training
        with grid.failures.translated():
            if probe:
                self._probe()
            self._plans_of(None)
        self._running.dtypes += [getattr(torch, self.plans[x].dtype.name) for x in kinds]
        own_attention[self._name] = model.config._attn_implementation
        model.set_attn_implementation(self._name)
        # A model in the model may be called alone, and adapters call `forward`, without hooks.
        self._entries = set()
        self._state: dict[torch.nn.Module, dict[str, Any]] = {}  # what no call should change
        for x in model.modules():
            if not isinstance(x, PreTrainedModel):
                self._state[x] = _state_of(x)
                continue
            names = [*inspect.signature(x.forward).parameters]
            if "position_ids" in names:
                enter(x, owner, self._name, self._running, names)
                self._entries.add(x)
        self._freed = False
        self._others = [] if self.replicas is grid.comm else [self.replicas]
        grid.failures.others.extend(self._others)
        self._end = weakref.finalize(self, undo, model, [self._name], self._sets)
        self._end.atexit = False

    @contextmanager
    def _within(self, number: int) -> Iterator[None]:
        """Let calls of the model in this context have the plans of a number."""
        outer = self._running.get()
        self._running.set(torch.tensor(number))
        try:
            yield
        finally:
            self._running.set(outer)

    @contextmanager
    def _rest(self) -> Iterator[None]:
        """Let the model be called without plans in this context."""
        self._running.resting = True
        try:
            yield
        finally:
            self._running.resting = False

    def _known(self, number: int | None) -> ContextParallel | Generation:
        """Return what has the kinds of layers and the masks of the plans of a number."""
        other = self._generation
        return other if other is not None and number in other.numbers else self

    def _mask(self, mask_function: Callable, attention_mask: torch.Tensor | None) -> int:
        """Return the number of the mask that a function shows."""
        self._refuse({ENTRY: self._running.get() is None}, None)
        number = int(self._running.get())
        is_step = self._generation is not None and number == self._generation.step
        if is_step and attention_mask is not None:  # with padding before the tokens of a row
            mask_function = _after(mask_function, int(attention_mask[0].int().argmax()))
        return self._known(number)._masks.number_of(mask_function)

    def _plan_for(
        self,
        module: torch.nn.Module | None,
        within: torch.Tensor | None,
        mask: torch.Tensor | None,
        rows: int,
        scaling: float,
        softcap: float | None,
        window: int | None,
        causal: bool | None,
        problem: str,
    ) -> AttentionPlan | Step:
        """Return the plan of a layer, or raise ValueError on all ranks.

        `within` is the number of the plans of the call that it is in.  A layer that is computed
        again, in the backward pass, has its mask only.
        """
        running = None if within is None else int(within)
        tagged = None if mask is None else number_of(mask)
        number, shown = (running, None) if tagged is None else divmod(tagged, MASKS)
        problems = {
            f"ContextParallel does not know a layer: {COPY}": module not in self.layers,
            "a layer has a mask of its own": mask is not None and tagged is None,
            "a layer has the mask of another batch": running not in (None, number),
            ENTRY: number not in self._sets,
        }
        self._refuse(problems, running)
        known, where = self._known(number), self._paths[module]
        kind, found = known.layers[module], known._masks.found
        plan = self._sets[number][kind]
        try:
            asked = known_mask(where, shown, window, causal, found, known.longest)
        except ValueError as error:
            plan.refuse(str(error))
        # Each step of generation comes here in each layer: no message is written for nothing.
        if asked != kind.mask:
            plan.refuse(f"{where} asks for {asked} in this call, but its plan has {kind.mask}")
        if rows != 1 and not hasattr(plan, "attend"):
            plan.refuse(f"the batch must be one sequence, got {rows}")
        if problem:
            plan.refuse(problem)
        theirs = plan.softmax_scale
        if not math.isclose(scaling, theirs):
            plan.refuse(f"the model scales logits by {scaling}, but the plan by {theirs}")
        cap = plan.logit_softcap
        if softcap != cap:
            plan.refuse(f"the model has the soft-cap {softcap}, but the plan has {cap}")
        return plan

    def _refuse(self, problems: dict[str, bool], number: int | None) -> None:
        """If there is a problem, raise ValueError on all ranks, which call the first layer's plan.

        `number` is that of the plans that the other ranks call, if it is known.
        """
        for problem in (x for x, is_there in problems.items() if is_there):
            plans = self._sets.get(number) or self.plans
            next(iter(plans.values())).refuse(problem)

    def _begin(self, module: torch.nn.Module, given: dict[str, Any]) -> int | None:
        """Return the number of the plans of a call of a model, which are in its arguments."""
        positions, cache = given.get("position_ids"), cache_of(given)
        number = self._begun(module, given)
        pieces = getattr(next(iter(self._sets[number].values())), "pieces", None)
        if pieces is not None:
            given["seq_idx"] = pieces.tag
        return number

    def _begun(self, module, given):
        positions, cache = given.get("position_ids"), cache_of(given)
        ticket = getattr(positions, "a2d_mpi", None)
        if ticket is None and cache is not None:
            number = self._generator.begin(cache, given)
            problem = wrong_arguments(given)
            return self._checked(number, module.training, {problem: bool(problem)})
        return self._number(
            positions, given.get("attention_mask"), module.training, wrong_arguments(given)
        )

    def _number(
        self,
        positions: torch.Tensor | None,
        mask: torch.Tensor | None,
        training: bool,
        problem: str,
    ) -> int:
        """Return the number of the plans of a batch's positions; ValueError if it is none."""
        ticket = getattr(positions, "a2d_mpi", None)
        number = ticket.plans if ticket is not None and ticket.owner is self else None
        is_padded = isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.all())
        problems = {
            ENTRY: number not in self._sets,
            "the positions of the batch have changed": (
                ticket is not None and ticket.version != positions._version
            ),
            PADDING: is_padded,
            problem: bool(problem),
        }
        return self._checked(number, training, problems)

    def _checked(self, number: int | None, training: bool, problems: dict[str, bool]) -> int:
        """Return the number of plans, or raise ValueError on all ranks if there is a problem."""
        others = {x.config._attn_implementation for x in self.layers} - {self._name}
        problems = problems | {
            IMPLEMENTATION: bool(others),
            "call model.train() before ContextParallel, which then looks for dropout": (
                training and not self._training
            ),
        }
        for x, was in self._state.items():
            now = {y: vars(x).get(y) for y in was}
            for y in was if now != was else ():
                what = f"{self._paths[x]}.{y} was {was[y]} and is {now[y]}"
                problems[f"{what}: make a new ContextParallel"] = was[y] != now[y]
        self._refuse(problems, number)
        return number

    def _plans_of(self, cu_seqlens: np.ndarray | None) -> None:
        """Make or find the plans of documents, and use them.  Collective."""
        key = b"" if cu_seqlens is None else cu_seqlens.tobytes()
        if key not in self._numbers:
            made = self.layers, self.seqlen, cu_seqlens, self._bases
            plans = self._make(*made, **self._options)
            self._numbers[key] = number = next(NUMBERS)
            self._sets[number] = plans
            if len(self._numbers) > KEPT:
                oldest = [*self._numbers][1]  # after the one without documents
                del self._sets[self._numbers.pop(oldest)]
        elif key:  # the latest come last
            self._numbers[key] = self._numbers.pop(key)
        self._latest = self._numbers[key]

    def _make(
        self,
        layers: dict[torch.nn.Module, Kind],
        seqlen: int,
        cu_seqlens: np.ndarray | None,
        bases: dict[tuple[str | None, Kind], AttentionPlan],
        **options: Any,
    ) -> Plans:
        """Make a plan for each kind of layer, all on one distribution.  Collective.

        `bases` has the first plan of each distribution and kind; later ones share its buffers.
        """
        kinds, plans = Counter(layers.values()), {}
        masks = {x: _inside(x.mask, seqlen, cu_seqlens) for x in kinds}
        name = self._chosen(kinds, masks, seqlen)
        for kind, mask in masks.items():
            if base := bases.get((name, kind)):
                plans[kind] = base.with_mask(mask)
            else:
                sizes = kind._asdict() | {"seqlen": seqlen, "distribution": name} | options
                del sizes["mask"]
                plans[kind] = bases[name, kind] = make_plan(self.method, self.grid, mask, **sizes)
        if 0 in (counts := next(iter(plans.values())).problem.queries.counts):
            raise ValueError(
                f"rank {counts.index(0)} has none of the {seqlen} tokens, but models need at "
                "least one token"
            )
        if len({x.distribution for x in plans.values()}) > 1:
            raise ValueError("the layers need plans of one distribution; name another one")
        self._cut(plans, cu_seqlens)
        return plans

    def _cut(self, plans: Plans, cu_seqlens: np.ndarray | None) -> None:
        """Cut the tokens of plans into pieces, if the model has recurrent layers.  Collective."""
        if self._recurrent:
            first = next(iter(plans.values()))
            first.pieces = Pieces(first, cu_seqlens)

    def _chosen(self, kinds: Counter, masks: dict[Kind, Mask], seqlen: int) -> str | None:
        """Return the distribution with the least predicted time of all layers, or None.

        None leaves the choice to the plans, which all make the same one.
        """
        layout, method = self.grid.layout, METHODS[self.method]
        if len(set(masks.values())) == 1 or method.distribution or layout.distribution:
            return None
        total = {"contiguous": 0.0, "zigzag": 0.0}
        for kind, layers in kinds.items():
            itemsize = torch.finfo(getattr(torch, kind.dtype)).bits // 8
            times, _ = predict_times(masks[kind], seqlen, *method.even_tiles(layout), itemsize)
            for name in total:
                total[name] += layers * kind.nheads * kind.headdim * times.get(name, 0)
        return min(total, key=total.get)

    def _probe(self) -> None:
        """Compare all layers with the model's own attention for a few tokens.  Collective."""
        n = min(self.longest, PROBED * self.grid.comm.size)
        positions = torch.from_numpy(np.linspace(0, self.longest - 1, n).round().astype(np.int64))
        number = next(NUMBERS)
        plans = self._sets[number] = self._make(self.layers, n, None, {})
        tokens = next(iter(plans.values())).tokens
        whole, expected, problems = inputs_of(self.model, positions[None]), [], []
        call = Call(self.grid.comm)
        with call.checks(), attention_of(self.model, "eager"):
            run(self.model, whole, lambda *x: expected.append(x), every=False)
        call.agree()
        rest = iter(expected)

        def compare(name: str, x: torch.Tensor) -> torch.Tensor:
            other, y = next(rest, (None, x))
            if name != other or not same(x, y[tokens]):
                problems.append(f"{name} is not the same over ranks as on one")
            return y[tokens] if name == other else x

        own = {name: x[:, tokens] for name, x in whole.items()}
        if self._recurrent:
            own["seq_idx"] = next(iter(plans.values())).pieces.tag
        with attention_of(self.model, self._name), self._within(number):
            run(self.model, own, compare, every=False)
        agree(self.grid.comm, next(iter(problems), None))
        for plan in plans.values():
            plan.free()
        del self._sets[number]

    @property
    def _generator(self) -> Generation:
        """The part for generation, made at the first call; making it is collective."""
        if self._generation is None:
            from transformers.utils.versions import require_version

            call = Call(self.grid.comm)
            with call.checks():
                require_version(GENERATES)
            call.agree()
            from a2d_mpi.torch.generation import Generation

            self._generation = Generation(self)
        return self._generation

    @property
    def decoding_traffic(self) -> Traffic:
        """Bytes and messages of this rank in decoding steps so far; collective at the first call.

        The keys are ("decode", "all") for partial results and ("decode", "tokens") for the tokens
        that rank 0 chooses.
        """
        return self._generator.steps.traffic

    def prefill(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        root: int | None = None,
        room: Sequence[int] | None = None,
    ) -> SpreadCache:
        """Compute prompts without their last tokens.  Collective.

        Parameters
        ----------
        input_ids, attention_mask, root, room
            As of `generate`.

        Returns
        -------
        SpreadCache
            A cache of transformers whose tokens stay on the ranks that computed them, for
            `generate`, or for ``model.generate`` on all ranks, with the same seeds.

        Raises
        ------
        ValueError
            On all ranks, as of `generate`.
        """
        with self.grid.failures.translated():
            return self._generator.prefill(input_ids, attention_mask, root, room)

    def generate(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        root: int | None = None,
        room: Sequence[int] | None = None,
        **options: Any,
    ) -> torch.Tensor | GenerateOutput:
        """Generate tokens over a cache that is spread over the ranks.  Collective.

        It gives what ``model.generate`` gives on one process.  Rank 0 samples, with its own random
        state, and decides when to stop.

        Parameters
        ----------
        input_ids : (B, N) or (N,) integer tensor
            Prompts, the same on all ranks, or only on rank `root`.
        attention_mask : tensor like `input_ids`, optional
            0 for padding, before or behind the tokens of a prompt.  Default: as transformers'.
        root : int, optional
            The rank of ``grid.comm`` that passes the two tensors.  Default: all do.
        room : sequence of int, optional
            Most tokens that each rank may keep, of all prompts together.  A new token then goes to
            the rank with the most room.  Default: new tokens go to the ranks in turn.
        **options
            Of ``model.generate``, the same on all ranks.  ``past_key_values`` (or ``cache``) is
            the cache of `prefill` or of an earlier result, whose tokens begin the prompts: only
            what is new is computed.  Only rank 0 calls ``streamer``, processors and criteria.

        Returns
        -------
        (B, n) tensor or GenerateOutput
            As of ``model.generate``, on all ranks.

        Raises
        ------
        ValueError
            On all ranks, before anything is computed: if an argument is wrong, the tokens do not
            fit in the room, or an option is none of greedy search and sampling.  Also if the
            model cannot generate, or the first decoded steps are not those of one process.  Later,
            if a processor, a criterion or ``streamer`` fails on rank 0.
        """
        with self.grid.failures.translated():
            return self._generator.generate(input_ids, attention_mask, root, room, options)

    @torch.inference_mode(False)  # PyTorch then counts the changes of positions
    def shard(
        self,
        input_ids: torch.Tensor | None,
        labels: torch.Tensor | None = None,
        cu_seqlens: np.ndarray | torch.Tensor | None = None,
        root: int | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> Batch:
        """Return this rank's part of a sequence.  Collective.

        Parameters
        ----------
        input_ids : (1, N) or (N,) integer tensor
            The same on all ranks, or only on rank `root`.  Or a batch, (B, N / B): its rows are
            packed as documents, without their padding, and positions are columns.
        labels : tensor like `input_ids`, optional
            -100 where there is none.  A causal model predicts the label of the next token of the
            same document.  Another model predicts the label of the token.  Default: `input_ids`
            for a causal model, otherwise none.
        cu_seqlens : (documents + 1,) integers, optional
            First token of each document, and the end of the last one.  Documents do not see each
            other, and each one is computed as if it were alone: its positions begin with 0.
            Tokens after the last document are padding, which counts as a document.
        root : int, optional
            The rank of ``grid.comm`` that passes the other arguments.  Default: all do.
        attention_mask : tensor like `input_ids`, optional
            0 for padding, before or behind the tokens of a row.  It has no labels.

        Returns
        -------
        Batch

        Raises
        ------
        ValueError
            On all ranks, also of other replicas, if shapes or dtypes are wrong, or ranks of a grid
            pass different tensors.
        """
        call = Call(self.replicas)
        with self.grid.failures.translated():
            with call.checks():
                batch = self._shard(input_ids, labels, cu_seqlens, root, attention_mask)
            call.agree()
            return replace(batch, nlabels=self.replicas.allreduce(batch.nlabels))

    def _shard(
        self, input_ids: Any, labels: Any, cu_seqlens: Any, root: int | None, attention_mask: Any
    ) -> Batch:
        """Return the part of this grid's sequence, with all labels on its first rank."""

        def arrange(*whole: np.ndarray | None) -> tuple:
            sequence, places = packed(*whole)
            return *sequence, places, self._check(*sequence)

        given = {"input_ids": input_ids, "labels": labels, "cu_seqlens": cu_seqlens}
        given |= {"attention_mask": attention_mask}
        ids, targets, ends, places, bounds = agreed(self.grid.comm, given, root, arrange)
        self._plans_of(ends)
        tokens = next(iter(self.plans.values())).tokens
        ahead = [x.mask.dense(np.array([0]), np.array([1])).any() for x in self.layers.values()]
        if not any(ahead):  # no layer sees the next token
            targets = np.append((ids if targets is None else targets)[1:], IGNORED)
            targets[bounds[1:] - 1] = IGNORED
        elif targets is None:
            targets = np.full_like(ids, IGNORED)
        if ends is not None:
            targets[ends[-1] :] = IGNORED
        places = positions_in(bounds) if places is None else places
        nlabels = int((targets != IGNORED).sum()) * (self.grid.comm.rank == 0)
        own = (torch.from_numpy(x[tokens])[None] for x in (ids, places, targets))
        inputs, positions, labels = (x.to(self.model.device) for x in own)
        positions.a2d_mpi = _Ticket(self, self._latest, positions._version)
        return Batch(
            {"input_ids": inputs, "position_ids": positions},
            labels,
            nlabels,
            tokens,
            self.seqlen if ends is None else int(ends[-1]),
        )

    @property
    def plans(self) -> Plans:
        """See the attributes of the class."""
        return self._sets[self._latest]

    def _check(self, ids: Any, labels: Any, cu_seqlens: Any) -> np.ndarray:
        """Return the bounds of documents and padding; ValueError if arguments are wrong."""
        if ids is None or ids.shape != (self.seqlen,):
            got = "none" if ids is None else f"{len(ids)} tokens"
            raise ValueError(f"input_ids must be one sequence of {self.seqlen} tokens, got {got}")
        if labels is not None and labels.shape != ids.shape:
            raise ValueError(f"labels must be {len(ids)} numbers, got {len(labels)}")
        embeddings, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        check_range(getattr(embeddings, "num_embeddings", np.inf) - 1, input_ids=ids)
        if labels is not None:
            classes = getattr(head, "out_features", getattr(self.model, "num_labels", np.inf))
            check_range(classes - 1, labels=np.where(labels == IGNORED, 0, labels))
        if cu_seqlens is not None:
            Documents(cu_seqlens).check(self.seqlen)
        bounds = np.unique([0, self.seqlen] if cu_seqlens is None else [*cu_seqlens, self.seqlen])
        if (most := np.diff(bounds).max()) > self.longest:
            raise ValueError(f"documents must have at most {self.longest} tokens, got {most}")
        return bounds

    def loss(
        self, logits: torch.Tensor, batch: Batch, averaged_over: int | None = None
    ) -> torch.Tensor:
        """Return this rank's part of the cross-entropy.

        The sum over all ranks that share a step is the mean over all their labels.

        Parameters
        ----------
        logits : (1, n, vocabulary) tensor
            Of the model, for `batch`.  Computed in float32 or wider.
        batch : Batch
        averaged_over : int, optional
            Number of ranks over which something averages gradients, as DDP and FSDP do: the loss
            is that many times as large.  Leave out `sum_gradients` then.  Default: 1, if
            torch.distributed is not set up.

        Raises
        ------
        ValueError
            If the logits are not those of a batch, or `averaged_over` must be said, or is more
            than the ranks that share a step.
        """
        factor = self._factor(averaged_over)
        if logits.shape[:2] != batch.labels.shape:
            raise ValueError(
                f"logits must be (1, {len(batch.tokens)}, vocabulary), got {tuple(logits.shape)}"
            )
        logits = logits[0].to(torch.promote_types(logits.dtype, torch.float32))
        labels = batch.labels[0].to(logits.device)
        total = torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="sum"
        )
        return total * (factor / max(1, batch.nlabels))

    def balance_loss(
        self, output: Any, batch: Batch, averaged_over: int | None = None
    ) -> torch.Tensor:
        """Return this rank's part of the balance loss of MoE layers.  Collective.

        The sum over ranks is what transformers calls `aux_loss`, of all tokens but padding.
        Multiply it by the model's coefficient, and add it to `loss`.

        Parameters
        ----------
        output : transformers.utils.ModelOutput
            Of the model, called with ``output_router_logits=True``.
        batch, averaged_over
            As of `loss`.

        Raises
        ------
        ValueError
            On all ranks, if the output has no balance loss, or one by another formula.
        """
        with self.grid.failures.translated():
            part = balance_loss(output, batch.tokens < batch.length, self.replicas)
        return self._factor(averaged_over) * part

    def _factor(self, averaged_over: int | None) -> int:
        """Return `averaged_over` or 1; ValueError if it must be said, or does not fit."""
        default = None if dist.is_available() and dist.is_initialized() else 1
        over = default if averaged_over is None else averaged_over
        if over not in range(1, self.replicas.size + 1):
            raise ValueError(
                f"{self.replicas.size} ranks share a step (replicas= of ContextParallel): give "
                "averaged_over=, the number of those over which DDP or FSDP averages gradients, "
                f"or 1 if nothing does, got {averaged_over}"
            )
        return over

    def sum_gradients(self) -> None:
        """Sum the gradients of the model over all ranks that share a step.  Collective."""
        sum_gradients(self.model, self.replicas, self.grid.failures)

    def free(self) -> None:
        """Give the model its own attention back, and release all buffers.  Local.

        As long as there is this object, or a batch of it, the model refuses its batches.
        """
        while self._others:
            self.grid.failures.others.remove(self._others.pop())
        self._freed = True
        give_back(self.model, [self._name], self._sets)


def _after(mask_function: Callable, padding: int) -> Callable:
    """Return a mask function that counts tokens without the padding before them."""
    return lambda b, h, q, k: mask_function(b, h, q + padding, k + padding)


def _inside(mask: Mask, seqlen: int, cu_seqlens: np.ndarray | None) -> Mask:
    """Return the mask of documents, or of one document, that may be shorter than the mask."""
    if cu_seqlens is None and not isinstance(mask, Documents):
        return mask
    return Documents(np.array([0, seqlen]) if cu_seqlens is None else cu_seqlens, inside=mask)


def _state_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the numbers, texts and switches of a module that no call should change."""
    plain = {x: y for x, y in vars(module).items() if isinstance(y, (bool, int, float, str))}
    return {x: y for x, y in plain.items() if x[0] != "_" and x not in SWITCHES}
