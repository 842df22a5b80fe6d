"""Generation: transformers' own `generate` over a cache that is spread over the ranks.

Plans compute a long prompt without its last token, like a batch of training, and each rank keeps
the keys and values of its own tokens.  Then `generate` runs on all ranks alike.  In each step
every rank attends to the keys that it keeps.  Rank 0 chooses the tokens, and decides when to stop.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import proxy

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMode, StopStringCriteria

from a2d_mpi.attention.methods import Attention2D
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import Call, CollectiveError, agree, message_of
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.masks.documents import Documents
from a2d_mpi.sharding.distribution import Distribution
from a2d_mpi.torch.batches import agreed, check_padding, check_tokens, left_padded
from a2d_mpi.torch.cache import SpreadCache
from a2d_mpi.torch.decoding import Step, Steps
from a2d_mpi.torch.layers import Kind, Masks, attention_of, inputs_of, layers_of, same

if TYPE_CHECKING:
    from a2d_mpi.torch.context import ContextParallel

MANY = 64  # new tokens that plans compute; fewer go through decoding steps
PROBED = 2, 1, 1  # tokens of the steps of the probe
KEPT = 8  # lengths of prompts whose plans are kept
FAILED = -1  # rank 0 sends it in place of tokens


class Generation:
    """What a `ContextParallel` needs for generation, made at the first call.  Collective.

    Parameters
    ----------
    cp : ContextParallel

    Attributes
    ----------
    steps : Steps
    layers : dict of torch.nn.Module to Kind
        For up to `longest` tokens, which may be more than those of training.
    numbers : set of int
        Numbers of plans that belong to these layers; `step` is that of steps.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self.cp, self.comm, self.steps = proxy(cp), cp.grid.comm, Steps(cp.grid)
        self.step = next(cp.numbering)
        self.numbers = {self.step}
        self._line: ProcessGrid | None = None
        self._plans: dict[tuple[int, ...], dict[Kind, AttentionPlan]] = {}
        self._probed, self._alike = False, False  # `_alike`: all ranks have the tokens of rank 0
        takes = inspect.signature(cp.model.forward).parameters
        self._named = "cache" if "cache" in takes else "past_key_values"
        self._options = {"use_cache": True}
        self._options |= {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._take(cp.layers, cp.longest)

    def _take(self, layers: dict[torch.nn.Module, Kind], longest: int) -> None:
        """Use these kinds of layers for up to `longest` tokens."""
        call, masks = Call(self.comm), {}
        with call.checks():
            for module, kind in layers.items():
                masks[module.layer_idx] = kind.mask
                if any(end[0] > 1 for _, end in kind.mask.visible(np.arange(1))):
                    raise ValueError("a layer sees later tokens, so the model cannot generate")
        call.agree({"layers": [*layers.values()]})
        # Layers that use the keys of other layers have none of their own, and any mask.
        last = max(masks)
        self.masks = [masks.get(i, masks[last]) for i in range(last + 1)]
        self.layers, self.longest = layers, longest
        self._masks = Masks(longest, self.masks)
        self.cp._sets[self.step] = {x: Step(self.steps, x) for x in layers.values()}

    def _extend(self, total: int) -> None:
        """Find out what the layers compute among `total` tokens, if more than before."""
        if total <= self.longest:
            return
        model, call = self.cp.model, Call(self.comm)
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or total
        layers, longest = {}, max(total, min(2 * self.longest, most))
        with (
            call.checks(text=lambda x: f"{type(model).__name__}, {longest} tokens: {x}"),
            self.cp._rest(),
        ):
            layers = layers_of(model, longest)
        call.agree()
        self._take(layers, longest)
        self._plans.clear()

    def new_cache(self, room: Sequence[int] | None = None) -> SpreadCache:
        """Return an empty cache."""
        ranks = self.comm.size
        if room is not None and (len(room) != ranks or min(room) < 0):
            raise CollectiveError(f"room must be tokens for each of {ranks} ranks, got {room}")
        return SpreadCache(self.masks, self.comm.rank, ranks, room)

    def begin(self, cache: SpreadCache, given: dict[str, Any]) -> int:
        """Begin a step, before the model is called with some arguments; return its number."""
        ids, positions = given["input_ids"].numpy(force=True), given.get("position_ids")
        (rows, n), mask = ids.shape, given.get("attention_mask")
        lengths, counts = np.array(cache.lengths or [0] * rows), np.full(rows, n)
        if len(lengths) != rows:
            raise CollectiveError(f"the cache has {len(lengths)} rows, got {rows}")
        if mask is not None:
            if mask.shape != (rows, cache.length + n):
                shape = rows, cache.length + n
                raise CollectiveError(f"attention_mask must be {shape}, got {tuple(mask.shape)}")
            counts = mask[:, -n:].sum(1).numpy(force=True)
        if not self._alike:
            agree(self.comm, None, {"input_ids": ids.tolist(), "lengths": lengths.tolist()})
        wanted = (lengths + counts)[:, None] - np.arange(n, 0, -1)  # below 0 for padding
        if positions is None and (lengths < cache.length).any():
            raise CollectiveError("position_ids must be given: the model would count padding")
        if (
            positions is not None
            and ((positions.numpy(force=True) != wanted) & (wanted >= 0)).any()
        ):
            raise CollectiveError(f"position_ids must begin with {lengths.tolist()}")
        self._extend(int((lengths + counts).max()))
        cache.set_masks(self.masks)
        cache.begin_step(ids, counts.tolist())
        self.steps.cache = cache
        return self.step

    @torch.no_grad()
    def prefill(
        self, input_ids: Any, attention_mask: Any, root: int | None, room: Sequence[int] | None
    ) -> SpreadCache:
        """Compute all tokens but the last of each row; see `ContextParallel.prefill`."""
        _, ids, mask = self._batch(input_ids, attention_mask, root)
        self._extend(int(mask.sum(1).max()))
        self._probe()
        cache = self.new_cache(room)
        self._compute(cache, ids[:, :-1], mask[:, :-1])
        self._compute_rest(cache, ids[:, :-1], mask[:, :-1])
        return cache

    @torch.no_grad()
    def generate(
        self,
        input_ids: Any,
        attention_mask: Any,
        root: int | None,
        room: Sequence[int] | None,
        options: dict[str, Any],
    ) -> Any:
        """Generate tokens; see `ContextParallel.generate`."""
        model, first, call = self.cp.model, self.comm.rank == 0, Call(self.comm)
        given, ids, mask = self._batch(input_ids, attention_mask, root)
        caches = [options.pop(x, None) for x in ("cache", "past_key_values")]
        cache = next((x for x in caches if x is not None), None) or self.new_cache(room)
        streamer, taken, new = options.pop("streamer", None), {}, 0
        with call.checks():
            shown = None if attention_mask is None and root is None else mask
            taken = self._prepared(ids, shown, cache, options)
            found = taken.get("attention_mask")  # with as many rows as sequences that are returned
            ids = taken["input_ids"].numpy(force=True)
            mask = np.ones_like(ids) if found is None else found.numpy(force=True)
            _check_old(cache, ids, mask)
            new = taken["generation_config"].max_length - ids.shape[1]
            if streamer is not None and first:
                streamer.put(torch.from_numpy(given))
        call.agree({"new tokens": new})
        if room is not None:
            cache.room = room
        self._extend(int(mask.sum(1).max()) + new - 1)
        cache.set_masks(self.masks)
        self._probe()
        self._compute(cache, ids[:, :-1], mask[:, :-1], new * len(ids))
        criteria = _Decisions(taken.pop("stopping_criteria"), self.steps, streamer)
        config, processors = taken.pop("generation_config"), taken.pop("logits_processor")
        if not first:
            config.do_sample = False
            processors = processors if config.output_scores else LogitsProcessorList()
        processors.insert(0, _Wait(criteria))
        self._alike = True
        try:
            found = model._sample(taken.pop("input_ids"), processors, criteria, config, **taken)
        except Exception as error:
            criteria.fail(error)
            raise
        finally:
            self._alike = False
        if streamer is not None and first:
            streamer.end()
        tokens = found if isinstance(found, torch.Tensor) else found.sequences
        given = given.repeat(len(ids) // len(given), 0)
        tokens[:, : ids.shape[1]] = torch.from_numpy(given)  # padded where it was
        return found

    def _batch(
        self, input_ids: Any, attention_mask: Any, root: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens as given, and tokens and mask, (B, n), with all padding in front."""
        vocabulary = self.cp.model.get_input_embeddings().num_embeddings

        def arrange(ids: np.ndarray | None, mask: np.ndarray | None) -> tuple[np.ndarray, ...]:
            check_tokens(ids, vocabulary)
            if mask is None:
                mask = np.ones_like(ids)
            check_padding(mask, ids.shape)
            return ids, *left_padded(ids, mask)

        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        return agreed(self.comm, given, root, arrange)

    def _prepared(
        self, ids: np.ndarray, mask: np.ndarray | None, cache: Any, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Let transformers check the options; return what its loop gets.  Local."""
        model, taken = self.cp.model, {}

        def take(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
            taken.update(given, input_ids=input_ids)
            return input_ids

        for name in ("custom_generate", "inputs", "inputs_embeds", "position_ids"):
            if options.get(name) is not None:
                raise ValueError(f"generation over ranks takes no {name}")
        if not isinstance(cache, SpreadCache):
            name = type(cache).__name__
            raise ValueError(f"the cache must be one of ContextParallel.prefill, got {name}")
        tokenizer, stop = options.pop("tokenizer", None), options.pop("stop_strings", None)
        given = {self._named: cache, "custom_generate": take, **options}
        if mask is not None:
            given["attention_mask"] = torch.from_numpy(mask).to(model.device)
        model.generate(torch.from_numpy(ids).to(model.device), **given)
        if stop is not None:
            taken["stopping_criteria"].append(StopStringCriteria(tokenizer, stop))
        config = taken["generation_config"]
        mode = config.get_generation_mode(options.get("assistant_model"))
        problems = {
            f"over ranks there are greedy search and sampling, no {mode.value}": (
                mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            ),
            "use_cache must be true": not taken["use_cache"],
            "guidance_scale needs a second prompt": config.guidance_scale not in (None, 1),
            "output_attentions and output_hidden_states must be false": (
                config.output_attentions or config.output_hidden_states
            ),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise ValueError(problem)
        return taken

    def _compute(
        self,
        cache: SpreadCache,
        ids: np.ndarray,
        mask: np.ndarray,
        later: int = 0,
        least: int = MANY,
    ) -> None:
        """Let plans compute the new tokens of a batch, if there are at least `least`.

        Before that, check that the cache has room for them, and for `later` tokens of steps.
        """
        ids, shown, ranks = ids[:, cache.length :], mask[:, cache.length :] > 0, self.comm.size
        lengths, owners = shown.sum(1), np.empty(0, np.int64)
        old, total = cache.lengths or [0] * len(ids), int(lengths.sum())
        if total >= max(least, 2 * ranks):
            plans = self._plans_of(cache, lengths)
            owners = _owners(next(iter(plans.values())).distribution)
        if cache.room is not None:
            free, more = cache.free, later + total - len(owners)
            left = free - np.bincount(owners, minlength=ranks)
            if left.min() < 0 or left.sum() < more:
                raise CollectiveError(
                    f"{total} tokens of prompts, of which ranks would keep "
                    f"{(free - left).tolist()}, and {more} that follow do not fit: there is room "
                    f"for {free.tolist()}"
                )
        if not len(owners):
            return
        cache.begin_plan(ids, np.split(owners, np.cumsum(lengths)[:-1]))
        positions = np.concatenate([x + np.arange(n) for x, n in zip(old, lengths)])
        inputs = {"input_ids": ids[shown], "position_ids": positions}
        own = {x: torch.from_numpy(y[owners == self.comm.rank])[None] for x, y in inputs.items()}
        own = {x: y.to(self.cp.model.device) for x, y in own.items()}
        number = next(self.cp.numbering)
        self.numbers.add(number)
        self.cp._sets[number] = plans
        with self.cp._within(number):
            self.cp.model(**own, **{self._named: cache}, **self._options)
        del self.cp._sets[number]
        self.numbers.remove(number)
        if cache.layers[0].length != cache.length:
            raise CollectiveError("the model did not use the cache: call model.eval()")
        for plan in plans.values():
            plan.free()

    def _compute_rest(self, cache: SpreadCache, ids: np.ndarray, mask: np.ndarray) -> None:
        """Compute the new tokens of a batch in steps."""
        while cache.length < ids.shape[1]:
            self._step(cache, ids, mask, MANY)

    def _step(self, cache: SpreadCache, ids: np.ndarray, mask: np.ndarray, n: int) -> torch.Tensor:
        """Compute at most `n` new tokens; return the logits after the last one, (B, V)."""
        begin, end = cache.length, min(cache.length + n, ids.shape[1])
        positions = (mask.cumsum(1) - 1).clip(0)
        given = {
            "input_ids": ids[:, begin:end],
            "position_ids": positions[:, begin:end],
            "attention_mask": mask[:, :end],
        }
        given = {x: torch.from_numpy(y).to(self.cp.model.device) for x, y in given.items()}
        alike, self._alike = self._alike, True
        try:
            found = self.cp.model(**given, **{self._named: cache}, **self._options)
        finally:
            self._alike = alike
        return found.logits[:, -1]

    def _plans_of(self, cache: SpreadCache, lengths: np.ndarray) -> dict[Kind, AttentionPlan]:
        """Make or find the plans of new tokens, given by the number of each row.  Collective."""
        bounds = np.append(0, np.cumsum(lengths))
        if cache.length:
            return self._plans_after(cache, lengths, bounds)
        key = tuple(lengths)
        if key not in self._plans:
            ends = bounds if len(lengths) > 1 else None
            made = self.layers, int(bounds[-1]), ends, {}
            self._plans[key] = self.cp._make(*made, **self.cp._options)
            if len(self._plans) > KEPT:
                del self._plans[next(iter(self._plans))]
        return self._plans[key]

    def _plans_after(
        self, cache: SpreadCache, lengths: np.ndarray, bounds: np.ndarray
    ) -> dict[Kind, AttentionPlan]:
        """Make plans of tokens that follow a cache, whose keys stay on their ranks.

        On a grid of one row queries are gathered, and keys are not.
        """
        comm, plans, total = self.comm, {}, int(bounds[-1])
        self._line = self._line or ProcessGrid(comm, 1, comm.size)
        new = np.split(_owners(Distribution("zigzag", total, comm.size)), bounds[1:-1])
        for kind in dict.fromkeys(self.layers.values()):
            kept = cache.kept[kind.mask]
            floors = [max(x, kept.floor(len(y))) for x, y in zip(kept.floors, cache.owners)]
            rows = [np.append(x[y:], z) for x, y, z in zip(cache.owners, floors, new)]
            ends, keys = np.cumsum([0, *map(len, rows)]), _dealt(np.concatenate(rows), comm.size)
            mask = Documents(bounds, inside=kind.mask, cu_seqlens_kv=ends)
            options = kind._asdict() | self.cp._options | {"distribution": ("zigzag", keys)}
            sizes = {"seqlen": total, "seqlen_kv": int(ends[-1])}
            plans[kind] = Attention2D(self._line, **options | sizes | {"mask": mask})
        return plans

    def _probe(self) -> None:
        """Compare a few decoded steps with the model's own cache.  Collective."""
        if self._probed or not self.cp._probing:
            return
        model, call, expected = self.cp.model, Call(self.comm), []
        n = min(self.longest, 4 * self.comm.size + sum(PROBED))
        sizes = [n - sum(PROBED), *PROBED] if n > sum(PROBED) else [1] * n
        ids = inputs_of(model, torch.arange(n)[None])["input_ids"]
        with call.checks(), self.cp._rest(), attention_of(model, "eager"):
            cache = None
            for part in ids.split(sizes, 1):
                found = model(part, use_cache=True, **{self._named: cache})
                cache = getattr(found, self._named)
                expected.append(found.logits[0, -1])
        call.agree()
        cache, ids = self.new_cache(), ids.numpy(force=True)
        with call.checks(), attention_of(model, model.config._attn_implementation):
            self._compute(cache, ids[:, : sizes[0]], np.ones_like(ids[:, : sizes[0]]), least=1)
            steps = [
                self._step(cache, ids, np.ones_like(ids), x)[0] for x in sizes[-len(PROBED) :]
            ]
            if not same(torch.stack(steps), torch.stack(expected[-len(steps) :])):
                raise ValueError("logits of decoded steps are not the same over ranks as on one")
        call.agree()
        self._probed = True


class _Decisions(StoppingCriteriaList):
    """The tokens that rank 0 chooses, and when it stops, in place of those of each rank."""

    def __init__(self, criteria: StoppingCriteriaList, steps: Steps, streamer: Any) -> None:
        super().__init__(criteria)
        self.steps, self.streamer, self.awaited = steps, streamer, False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        """Send the last tokens and whether rows are done; overwrite the tokens of other ranks."""
        decided = np.empty((2, len(input_ids)), np.int64)
        if self.steps.comm.rank == 0:
            decided[:] = (
                input_ids[:, -1].cpu(),
                super().__call__(input_ids, scores, **others).cpu(),
            )
            if self.streamer is not None:
                self.streamer.put(input_ids[:, -1].cpu())
        self.steps.choose(decided)
        self.awaited = False
        if decided[0, 0] == FAILED:
            raise CollectiveError(self.steps.comm.bcast(None))
        input_ids[:, -1] = torch.from_numpy(decided[0])
        return torch.from_numpy(decided[1] == 1).to(input_ids.device)

    def fail(self, error: Exception) -> None:
        """Raise an error of rank 0 on all ranks, if they wait for its tokens."""
        if self.awaited and self.steps.comm.rank == 0:
            problem = f"rank 0 could not choose a token: {message_of(error)}"
            self.steps.choose(np.full((2, self.rows), FAILED))
            raise CollectiveError(self.steps.comm.bcast(problem)) from error


class _Wait(LogitsProcessor):
    """Notes that the other ranks wait for a token of rank 0 from now on."""

    def __init__(self, decisions: _Decisions) -> None:
        self.decisions = decisions

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.decisions.awaited, self.decisions.rows = True, len(input_ids)
        return scores


def _check_old(cache: SpreadCache, ids: np.ndarray, mask: np.ndarray) -> None:
    """Raise ValueError unless a batch continues the tokens of a cache."""
    check_padding(mask, ids.shape)
    old = cache.length
    if not mask[:, -1].all():
        raise ValueError("tokens of padding end the prompt: give attention_mask")
    if not old:
        return
    if len(ids) != len(cache.ids) or ids.shape[1] <= old:
        raise ValueError(
            f"the cache has {len(cache.ids)} rows of {old} tokens, and the prompt {len(ids)} of "
            f"{ids.shape[1]}: it must begin with those tokens, and have more"
        )
    if len(other := np.argwhere(ids[:, :old] != cache.ids)):
        row, place = other[0]
        raise ValueError(
            f"the prompt has token {ids[row, place]} at {place} of row {row}, but the cache has "
            f"{cache.ids[row, place]}"
        )
    if (mask[:, :old].sum(1) != cache.lengths).any() or not mask[:, old:].all():
        raise ValueError("attention_mask must be that of the cache, and 1 for new tokens")


def _owners(distribution: Distribution) -> np.ndarray:
    """Return the rank of each token."""
    owners = np.empty(distribution.seqlen, np.int64)
    for rank in range(distribution.nshards):
        owners[distribution.tokens(rank)] = rank
    return owners


def _dealt(owners: np.ndarray, ranks: int) -> Distribution:
    """Return the distribution of tokens, given by the rank of each one."""
    listed = []
    for rank in range(ranks):
        own = np.flatnonzero(owners == rank)
        runs = np.split(own, np.flatnonzero(np.diff(own) > 1) + 1)
        listed.append(tuple(range(int(x[0]), int(x[-1]) + 1) for x in runs if len(x)))
    return Distribution("balanced", len(owners), ranks, listed=tuple(listed))
