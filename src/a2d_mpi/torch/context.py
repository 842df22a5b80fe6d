"""Models of transformers whose sequence is spread over ranks."""

from __future__ import annotations

import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mpi4py import MPI

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import Call, CollectiveError, agree
from a2d_mpi.comm.channel import Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.masks.compiled import compile_mask
from a2d_mpi.masks.documents import Documents
from a2d_mpi.masks.mask import Mask
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.sharding.choice import predict_times
from a2d_mpi.torch.attention import IGNORED
from a2d_mpi.torch.calls import CHANGES, Arranged, enter, later, leave
from a2d_mpi.torch.decoding import Step
from a2d_mpi.torch.entry import (
    MASKS,
    Plans,
    Running,
    functions,
    give_back,
    own_attention,
    owners,
)
from a2d_mpi.torch.gradients import add_gradients
from a2d_mpi.torch.layers import (
    NUMBERS,
    Fingerprint,
    Kind,
    NoRows,
    attention_of,
    has_loss_function,
    inputs_of,
    is_random,
    layers_of,
    register,
    replaced,
    run,
    same,
)
from a2d_mpi.torch.masks import Masks, known_mask, number_of
from a2d_mpi.torch.recurrent import FUNCTIONS, cut_pieces, install, seq_idx_of, trial
from a2d_mpi.torch.tensors import check_range
from a2d_mpi.torch.trainers import hide_launcher
from a2d_mpi.torch.whole import total

if TYPE_CHECKING:  # they load all of transformers
    from transformers import Trainer
    from transformers.generation.utils import GenerateOutput

    from a2d_mpi.torch.cache import SpreadCache
    from a2d_mpi.torch.generation import Generation

PROBED = 16  # tokens of a rank in the probe
TRIED = 1024  # tokens of a document in the first trial
KEPT = 2, 8  # sizes of batches whose plans are kept, and sets of documents of each size
ENDS: weakref.WeakKeyDictionary[torch.nn.Module, weakref.finalize] = weakref.WeakKeyDictionary()
ENTRY = "a layer was called alone: call the model, and do not change its attention implementation"


class Planned(dict):
    """The plans of a batch, by kinds of layers.

    Attributes
    ----------
    number : int
        What travels to the layers.
    tokens : list of (n,) int64
        The tokens of each rank.
    """


class ContextParallel:
    """A model of transformers whose sequence is spread over the ranks of a grid.

    ::

        cp = ContextParallel(grid, model)
        loss = model(input_ids=ids, labels=ids).loss  # every rank passes the whole batch
        loss.backward()  # every rank has the whole gradient

    The model stays the same function of the same arguments, on every rank.  Results with a row for
    each token are whole, too, and gathered when somebody computes with them (`Whole`).  Every rank
    computes the whole loss, and gradients are averaged over ranks when ``backward()`` ends.  So
    what all ranks compute alike stays right.  `total` puts parts of ranks together.

    It finds out what each attention layer computes.  Then a few tokens go through the model with
    its own attention, and through plans; the outputs of all layers must be the same.  A model that
    plans cannot compute is refused.  This is repeated if the model's modules or hooks change.
    Making it, calls of the model and ``backward()`` are collective over ``grid.comm``.

    Parameters
    ----------
    grid : ProcessGrid
    model : transformers.PreTrainedModel
        The same on all ranks; also a model of PEFT.
    seqlen : int, optional
        Most tokens of a call, without padding.  Default: no limit but memory.
    longest : int, optional
        Tokens of a document with which the model is tried first.  Default: `seqlen`, or 1024.
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    probe : bool
        Whether to compare the model with its own attention.
    replicas : Intracomm, optional
        All ranks that share a step, if other grids compute other batches in it.  Gradients are
        then those of the mean of the grids' losses.  Default: the ranks of the grid.  They are in
        ``grid.failures.others`` until `free`.
    average : bool
        Whether to average gradients when ``backward()`` ends.  False: something else does it over
        all ranks that share a step, as DDP and FSDP do.
    **options
        Other arguments of plans.  Default of `distribution`: the one with the least predicted time
        for all layers together.  Default of `dtype`: the model's, or autocast's.

    Attributes
    ----------
    layers : dict of torch.nn.Module to Kind
    plans : dict of Kind to AttentionPlan
        Plans of the latest call.
    rows : (n,) int64 tensor
        Places of this rank's rows of the latest call among its B N tokens.

    Raises
    ------
    ValueError
        On all ranks, with the name of the layer, if plans cannot compute it, or the probe finds a
        difference.  Calls raise it if arguments are wrong or differ between ranks.
    RanksLost
        On all surviving ranks, if a rank died and MPI continues, also from ``backward()``.
        Weights are as they were.  `free` this object, and make another one of the model on the
        grid of `ProcessGrid.shrink`.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        model: torch.nn.Module,
        *,
        seqlen: int | None = None,
        longest: int | None = None,
        method: str = "attention2d",
        probe: bool = True,
        replicas: MPI.Intracomm | None = None,
        average: bool = True,
        **options: Any,
    ) -> None:
        if hasattr(model, "get_base_model"):  # of PEFT
            model = model.get_base_model()
        self.grid, self.model, self.seqlen, self.method = grid, model, seqlen, method
        self.replicas, self.average, self._options = replicas or grid.comm, average, options
        self._probing, self._freed, self._refused = probe, False, 0
        self._generation: Generation | None = None
        self._generates = False
        if average and not torch.distributed.is_initialized():
            hide_launcher()  # for accelerate each rank is one process
        self._sets: dict[int, Plans] = {}
        self._entries, self._task, self._draws = set(), -1, False
        self._running, self._counted, self.rows = Running(), False, None
        self._loss_later, self._losses = later(self._running), set()
        owner = next(NUMBERS)
        self._name = f"a2d_mpi_{owner}"
        if model in ENDS:  # another object, which this one takes the place of
            ENDS.pop(model)()
        if hasattr(model, "set_attn_implementation"):
            _undo(model, own_attention, {})  # of a copy
        owners[owner] = self
        register(self._name, *functions(owner, f"_{self._name}", self._running))
        self._find_out(longest or seqlen or min(TRIED, self._limit or TRIED))
        self._factor = self.replicas.size / self.replicas.allreduce(int(grid.comm.rank == 0))
        self._others = [] if self.replicas is grid.comm else [self.replicas]
        grid.failures.others.extend(self._others)
        self._attach(owner)
        self._print = Fingerprint(model)
        self._end = weakref.finalize(self, _undo, model, [self._name], self._sets)
        self._end.atexit, ENDS[model] = False, self._end

    @property
    def _limit(self) -> int | None:
        """The positions that the model has, if it says so."""
        config = getattr(self.model, "config", None)
        return getattr(config and config.get_text_config(), "max_position_embeddings", None)

    def _find_out(self, longest: int) -> None:
        """Find out what layers compute, if a document has up to `longest` tokens.  Collective."""
        model, call, core, has_loss = self.model, Call(self.grid.comm), self.model, False
        found: dict[torch.nn.Module, Kind] = {}
        with (
            call.checks(text=lambda x: f"{type(model).__name__}, {longest} tokens: {x}"),
            self._rest(),
        ):
            self._recurrent, _ = install(model)
            try:
                found = layers_of(model, longest)
            except NoRows:  # a head that pools tokens takes whole results
                core = model.base_model
                if core is model:
                    raise
                found = layers_of(core, longest)
            has_loss = core is model and has_loss_function(core, longest)
            if MPI.Group.Difference(self.grid.comm.Get_group(), self.replicas.Get_group()).size:
                raise ValueError("replicas must have all ranks that share a step, as this grid's")
        kinds = [*found.values()]
        with self.grid.failures.translated():
            call.agree(
                {"seqlen": self.seqlen, "longest": longest, "layers": kinds, "loss": has_loss}
            )
        for x in model.modules():
            vars(x).pop(f"_{self._name}", None)
        self.layers, self._core, self._losses = found, core, {core} if has_loss else set()
        sees = (x.mask.visible(np.zeros(1, int)) for x in kinds)  # the first token
        self._causal = all(int(end[0]) == 1 for ((_, end), *_) in sees)
        self._masks, kinds = Masks(longest, [x.mask for x in kinds]), [*dict.fromkeys(kinds)]
        self._firsts = [next(x for x, y in found.items() if y == kind) for kind in kinds]
        for module, kind in found.items():
            setattr(module, f"_{self._name}", kinds.index(kind))
        self._paths = {x: name for name, x in model.named_modules()}
        self._files = {type(x).__module__ for x in model.modules()}
        # Of a proxy: the plans that are kept would keep this object.
        self._sets_of = lru_cache(KEPT[0])(partial(_sets_of, weakref.proxy(self)))
        self.plans, self._trains = Planned(), False
        self.longest = 0  # if the probe fails, the next call tries again
        if self._probing:
            with self.grid.failures.translated():
                self._probe(longest, PROBED)
                if self._recurrent:  # pieces of one token: states have not decayed yet
                    self._probe(longest, 2)
        self.longest, self._print = longest, Fingerprint(model)

    def _prepare(self, most: int, changed: bool, training: bool = False) -> None:
        """Repeat trials, if the model has changed or documents are longer.  Collective.

        `changed` is what all ranks have agreed on.
        """
        if changed:
            self._generation = None
            self._find_out(max(most, self.longest))
        if most > self.longest:
            self._find_out_more(most)
        if training and not self._trains:
            call = Call(self.grid.comm)
            with call.checks(text=lambda x: f"{type(self.model).__name__}: {x}"), self._rest():
                self._draws = is_random(self._core, self.longest)
            call.agree({"dropout": self._draws})
            self._trains, self._print = True, Fingerprint(self.model)

    def _find_out_more(self, most: int) -> None:
        """Repeat the trials for `most` tokens or more, which are more than before.  Collective."""
        # Many at once, so that steps of generation seldom come here.  A trial may refuse so many.
        more = min(2 * self.longest, self._limit or most)
        if self._refused:
            more = (most + self._refused) // 2
        for longest in sorted({most, max(most, more)}, reverse=True):
            try:
                return self._find_out(longest)
            except CollectiveError:
                self._refused = longest
                if longest == most:
                    raise

    def _check_tokens(self, ids: torch.Tensor | None, batch: Arranged) -> None:
        """Raise ValueError if tokens or labels do not exist, or are too many."""
        kept, embeddings = batch.places[batch.places >= 0], self.model.get_input_embeddings()
        if self.seqlen is not None and len(kept) > self.seqlen:
            raise ValueError(f"the batch has {len(kept)} tokens, but seqlen is {self.seqlen}")
        if ids is not None:
            ids = ids.numpy(force=True).reshape(-1)[kept]
            check_range(getattr(embeddings, "num_embeddings", np.inf) - 1, input_ids=ids)
        head = self.model.get_output_embeddings()
        if batch.targets is not None and head is not None:
            labels = np.where(batch.targets == IGNORED, 0, batch.targets)
            check_range(getattr(head, "out_features", np.inf) - 1, labels=labels)

    def _plans_of(self, seqlen: int, ends: tuple[int, ...] | None) -> Planned:
        """Make or find the plans of documents.  Collective."""
        kind = self.model.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.plans = self._sets_of(seqlen, cast)(ends)
        return self.plans

    def _numbered(self, made: Plans) -> Planned:
        """Give plans a number, by which layers find them as long as somebody keeps the result.

        A backward pass that is still to come keeps the plans of its call.
        """
        plans = Planned(made)
        plans.number, one = next(NUMBERS), next(iter(made.values())).distribution
        plans.tokens = [one.tokens(x) for x in range(self.grid.comm.size)]
        self._sets[plans.number] = made
        weakref.finalize(plans, self._sets.pop, plans.number, None).atexit = False
        return plans

    @contextmanager
    def _within(self, number: int) -> Iterator[None]:
        """Let calls of the model in this context have the plans of a number."""
        running, outer = self._running, self._running.get()
        running.set(torch.tensor(number))
        try:
            yield
        finally:
            running.set(outer)

    def _rest(self) -> AbstractContextManager:
        """Let the model be called without plans in this context."""
        return replaced(self._running, "resting", True)

    def _mask(self, mask_function: Callable, attention_mask: torch.Tensor | None) -> int:
        """Return the number of the mask that a function shows."""
        self._refuse({ENTRY: self._running.get() is None}, None)
        number = int(self._running.get())
        is_step = self._generation is not None and number == self._generation.step
        if is_step and attention_mask is not None:  # with padding before the tokens of a row
            mask_function = _after(mask_function, int(attention_mask[0].int().argmax()))
        return self._masks.number_of(mask_function)

    def _plan_for(
        self,
        module: torch.nn.Module | None,
        within: torch.Tensor | None,
        mask: torch.Tensor | None,
        asked: tuple,
    ) -> AttentionPlan | Step:
        """Return the plan of a layer, or raise ValueError on all ranks.

        `within` is the number of the plans of the call that it is in.  A layer that is computed
        again, in the backward pass, has its mask only.  `asked` is what it asks for besides, and
        why no plan can compute it, if so.
        """
        rows, scaling, softcap, window, causal, problem = asked
        running = None if within is None else int(within)
        tagged = None if mask is None else number_of(mask)
        number, shown = (running, None) if tagged is None else divmod(tagged, MASKS)
        problems = {
            "ContextParallel does not know a layer: it is of a copy, or was added in this call": (
                module not in self.layers
            ),
            "a layer has a mask of its own": mask is not None and tagged is None,
            "a layer has the mask of another batch": running not in (None, number),
            ENTRY: number not in self._sets,
        }
        self._refuse(problems, running)
        kind, where = self.layers[module], self._paths[module]
        plan = self._sets[number][kind]
        try:
            seen = known_mask(where, shown, window, causal, self._masks.found, self.longest)
        except ValueError as error:
            plan.refuse(str(error))
        # Each step of generation comes here in each layer: no message is written for nothing.
        if seen != kind.mask:
            plan.refuse(f"{where} asks for {seen} in this call, but its plan has {kind.mask}")
        if rows != 1 and not isinstance(plan, Step):
            plan.refuse(f"the batch must be one sequence, got {rows}")
        if problem:
            plan.refuse(problem)
        if not math.isclose(scaling, scale := kind.softmax_scale):
            plan.refuse(f"the model scales logits by {scaling}, but the plan by {scale}")
        if softcap != (cap := kind.logit_softcap):
            plan.refuse(f"the model has the soft-cap {softcap}, but the plan has {cap}")
        return plan

    def _refuse(self, problems: dict[str, bool], number: int | None) -> None:
        """If there is a problem, raise ValueError on all ranks, which call the first layer's plan.

        `number` is that of the plans that the other ranks call, if it is known.
        """
        for problem in (x for x, is_there in problems.items() if is_there):
            plans = self._sets.get(number) or self.plans
            if not plans:
                raise ValueError(problem)
            next(iter(plans.values())).refuse(problem)

    def _make(
        self,
        seqlen: int,
        cu_seqlens: np.ndarray | None,
        bases: dict[tuple[str | None, Kind], AttentionPlan],
        **options: Any,
    ) -> Planned:
        """Make a plan for each kind of layer, all on one distribution.  Collective.

        `bases` has the first plan of each distribution and kind; later ones share its buffers.
        """
        kinds, plans = Counter(self.layers.values()), {}
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
                "least one token: name another distribution"
            )
        if len({x.distribution for x in plans.values()}) > 1:
            raise ValueError("the layers need plans of one distribution; name another one")
        if self._recurrent:
            cut_pieces(plans, cu_seqlens)
        return self._numbered(plans)

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
            seen = compile_mask(masks[kind], seqlen, seqlen)
            times, _ = predict_times(seen, *method.even_tiles(layout), itemsize)
            for name in total:
                total[name] += layers * kind.nheads * kind.headdim * times.get(name, 0)
        return min(total, key=total.get)

    def _probe(self, longest: int, each: int) -> None:
        """Compare all layers with the model's own for a few tokens of each rank.  Collective."""
        n = min(longest, each * self.grid.comm.size)
        positions = torch.from_numpy(np.linspace(0, longest - 1, n).round().astype(np.int64))
        exact = {x: y for x, y in self._options.items() if x not in ("dtype", "wire")}
        plans = self._make(n, None, {}, **exact)
        tokens = plans.tokens[self.grid.comm.rank]
        whole, expected, problems = inputs_of(self._core, positions[None]), [], []
        call = Call(self.grid.comm)

        def note(name: str, x: torch.Tensor) -> None:
            expected.append((name, x))

        with call.checks(), self._rest(), attention_of(self._core, "eager"), trial(note):
            run(self._core, whole, note, every=False)
        call.agree()
        rest = iter(expected)

        def compare(name: str, x: torch.Tensor) -> torch.Tensor:
            other, y = next(rest, (None, x))
            if name != other or not same(x, y[tokens], every=name in FUNCTIONS):
                problems.append(f"{name} is not the same over ranks as on one")
            return y[tokens] if name == other else x

        own = {name: x[:, tokens] for name, x in whole.items()} | seq_idx_of(plans)
        with attention_of(self._core, self._name), self._within(plans.number), trial(compare):
            run(self._core, own, compare, every=False)
        agree(self.grid.comm, next(iter(problems), None))
        for plan in plans.values():
            plan.free()

    @property
    def _generator(self) -> Generation:
        """The part for generation, made at the first call; making it is collective."""
        if self._generation is None:
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
        with self.grid.failures.translated(), self._generating():
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
            The rank of ``grid.comm`` that passes the tensors.  Default: all do.
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
        with self.grid.failures.translated(), self._generating():
            return self._generator.generate(input_ids, attention_mask, root, room, options)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks of the grid, in their order.  Collective.

        Each rank makes its part of its own rows, as of ``output.logits.own``.

        Parameters
        ----------
        part : tensor
            Of one shape on all ranks.

        Returns
        -------
        tensor
            The same on all ranks, with gradients of the whole sum.
        """
        return total(part, self)

    def attach(self, trainer: Trainer) -> None:
        """Let rank 0 alone save, log and report for a trainer; see `a2d_mpi.torch.trainers`."""
        from a2d_mpi.torch.trainers import attach

        attach(self, trainer)

    def _average_at_end(self) -> float:
        """Average gradients when this backward pass ends; return the factor of own parts."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._before = task, self._gradients_now()
            torch.autograd.Variable._execution_engine.queue_callback(self._average)
        return self._factor

    def _gradients_now(self) -> list:
        """Return what changes when a gradient does."""
        every = [x.grad for x in self.model.parameters() if x.requires_grad]
        return [None if x is None else (id(x), x._version) for x in every]

    def _average(self) -> None:
        """Average gradients over all ranks that share a step.  Collective over them."""
        if not self.average or not self._before:  # all parameters are frozen
            return
        problem = None
        if self._gradients_now() == self._before:
            problem = (
                "backward reached no parameter: torch.autograd.grad would give gradients of this "
                "rank's tokens, so call backward(), or freeze the model for gradients of inputs"
            )
        comm, failures = self.replicas, self.grid.failures
        add_gradients(self.model, comm, failures, comm.size, problem)

    def _attach(self, owner: int) -> None:
        """Let the model and the models in it compute over ranks."""
        from transformers import PreTrainedModel

        model, get = self.model, partial(owners.get, owner)
        own_attention[self._name] = model.config._attn_implementation
        model.set_attn_implementation(self._name)
        # A model in the model may be called alone, and adapters call `forward`, without hooks.
        for x in self._core.modules():
            if (
                isinstance(x, PreTrainedModel)
                and "position_ids" in inspect.signature(x.forward).parameters
            ):
                self._entries.add(x)
                enter(x, get, self._running)
        if hasattr(model, "generate"):
            model.generate = MethodType(_generate(get, type(model).generate), model)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Let ``model.generate`` be transformers' own; first try a model that has changed."""
        agree(self.grid.comm, None, {CHANGES: (changed := self._print.changed())})
        self._prepare(0, changed)
        with replaced(self, "_generates", True):
            yield

    def free(self) -> None:
        """Give the model its own attention back, and release all buffers.  Collective."""
        while self._others:
            self.grid.failures.others.remove(self._others.pop())
        self._freed = True
        self._end()


def _sets_of(cp: ContextParallel, seqlen: int, cast: torch.dtype | None) -> Callable:
    """Return what makes the plans of documents with so many tokens, given their ends."""
    options = {"dtype": str(cast).removeprefix("torch.")} if cast else {}
    bases: dict[tuple[str | None, Kind], AttentionPlan] = {}

    @lru_cache(KEPT[1])
    def made(ends: tuple[int, ...] | None) -> Planned:
        bounds = None if ends is None else np.array(ends)
        return cp._make(seqlen, bounds, bases, **options | cp._options)

    return made


def _after(mask_function: Callable, padding: int) -> Callable:
    """Return a mask function that counts tokens without the padding before them."""
    return lambda b, h, q, k: mask_function(b, h, q + padding, k + padding)


def _inside(mask: Mask, seqlen: int, cu_seqlens: np.ndarray | None) -> Mask:
    """Return the mask of documents, or of one document, that may be shorter than the mask."""
    if cu_seqlens is None and not isinstance(mask, Documents):
        return mask
    return Documents(np.array([0, seqlen]) if cu_seqlens is None else cu_seqlens, inside=mask)


def _generate(owner: Callable[[], ContextParallel | None], original: Callable) -> Callable:
    """Return ``model.generate`` over the ranks of a `ContextParallel`."""

    @wraps(original)
    def generate(model: Any, inputs: Any = None, **options: Any) -> Any:
        cp = owner()
        if cp is None or cp._freed or model is not cp.model or cp._generates:
            return original(model, inputs, **options)
        inputs = options.pop("input_ids", None) if inputs is None else inputs
        found = cp.generate(inputs, options.pop("attention_mask", None), **options)
        # Rank 0 has sampled, so only its random numbers have gone on.
        torch.set_rng_state(cp.grid.comm.bcast(torch.get_rng_state()))
        return found

    return generate


def _undo(model: torch.nn.Module, names: Collection[str], sets: dict[int, Plans]) -> None:
    """Undo what `ContextParallel` did to a model."""
    if model.config._attn_implementation in names:
        give_back(model)
    for x in model.modules():
        for name in names:
            vars(x).pop(f"_{name}", None)
        leave(x)
    vars(model).pop("generate", None)
    for plan in (x for plans in sets.values() for x in plans.values()):
        plan.free()
