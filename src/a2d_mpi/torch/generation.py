"""Generation: transformers' own `generate` over a cache that is spread over the ranks.

Plans compute a long prompt without its last token, like a batch of training, and each rank keeps
the keys and values of its own tokens.  Then `generate` runs on all ranks alike.  In each step
every rank attends to the keys that it keeps.  Rank 0 chooses the tokens, and decides when to stop.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from gc import get_objects
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import proxy

import numpy as np
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMode, StopStringCriteria

from a2d_mpi.attention.methods import Attention2D
from a2d_mpi.comm.agreement import Call, CollectiveError, agree, message_of
from a2d_mpi.comm.rows import in_one_row
from a2d_mpi.masks.documents import Documents
from a2d_mpi.sharding.distribution import Distribution
from a2d_mpi.torch.batches import (
    check_continues,
    check_padding,
    digest,
    integers,
    kind_of,
    left_padded,
    positions_of,
)
from a2d_mpi.torch.cache import SpreadCache
from a2d_mpi.torch.decoding import Step, Steps
from a2d_mpi.torch.layers import NUMBERS, attention_of, inputs_of, same
from a2d_mpi.torch.recurrent import cut_pieces, pieces_of, seq_idx_of
from a2d_mpi.torch.states import add_states
from a2d_mpi.torch.tensors import check_range

if TYPE_CHECKING:
    from a2d_mpi.torch.context import ContextParallel, Planned

# New tokens that plans compute.  All ranks compute fewer ones alike, in a step, because plans are
# made and agreed on first.  A Llama of 8 layers and 512 elements after 200 tokens, 2 ranks on busy
# cores: 16 tokens take 0.12 s in a step, 0.16 by plans; 64 take 0.27 and 0.23; 256 1.01 and 0.77.
MANY = 64
PROBED = 2, 1, 1  # tokens of the steps of the probe
FAILED = -1  # rank 0 sends it in place of tokens


class Generation:
    """The part of a `ContextParallel` for generation, made at the first call.  Collective.

    Parameters
    ----------
    cp : ContextParallel

    Attributes
    ----------
    steps : Steps
    step : int
        Number of the plans of steps.
    masks : list of Mask
        Of each layer of a cache.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self.cp, self.comm, self.steps = proxy(cp), cp.grid.comm, Steps(cp.grid)
        self.step, self._line = next(NUMBERS), in_one_row(cp.grid)
        self._probed, self._layers = False, None
        self._agreed = False  # whether all ranks are known to have the same tokens
        self._takes = takes = inspect.signature(cp.model.forward).parameters
        self._named = "cache" if "cache" in takes else "past_key_values"
        # Of the last token only, and without a loss of routers, of which no result has anything.
        usual = {"logits_to_keep": 1, "output_router_logits": False}
        self._usual = {x: y for x, y in usual.items() if x in takes}
        self._prepare(1)

    def _prepare(self, most: int) -> None:
        """Let the model be tried for `most` tokens, if it was not.  Collective."""
        training = self.cp.model.training
        self.cp._prepare(most, changed=False, training=training)
        if training and self.cp._draws:
            raise CollectiveError(
                "the model draws random numbers (dropout), other ones on each rank: call "
                "model.eval()"
            )
        if self._layers is (layers := self.cp.layers):
            return
        if not self.cp._causal:
            raise CollectiveError("a layer sees later tokens, so the model cannot generate")
        masks = {x.layer_idx: kind.mask for x, kind in layers.items()}
        # Layers that use the keys of other layers have none of their own, and any mask.
        n, config = max(masks) + 1, self.cp.model.config.get_text_config()
        every = range(config.num_hidden_layers if self.cp._recurrent else n)
        self.masks = [masks.get(i, masks[n - 1]) for i in every]
        self.cp._sets[self.step] = {x: Step(self.steps, x) for x in layers.values()}
        self._layers = layers

    def begin(self, cache: SpreadCache, given: dict[str, Any]) -> int:
        """Begin a step, before the model is called with some arguments; return its number."""
        ids, mask = given["input_ids"].numpy(force=True), given.get("attention_mask")
        rows, n = ids.shape
        old, counts = np.array(cache.lengths or [0] * rows), np.full(rows, n)
        if not self._agreed:
            with self.cp.grid.failures.translated():
                same = {"input_ids": ids.tolist(), "the cache": old.tolist()}
                agree(self.comm, self._problem_of(cache), same)
        if len(old) != rows:
            raise CollectiveError(f"the cache has {len(old)} rows, got {rows}")
        if mask is not None:
            mask = mask.numpy(force=True)
            counts = mask[:, -n:].sum(1)
            if (mask.sum(1) != old + counts).any():
                raise CollectiveError(
                    f"attention_mask must show {old.tolist()} tokens of the cache, and new ones"
                )
        self._prepare(_reach(old + counts, given))
        cache.set_masks(self.masks)
        cache.begin(ids, counts)
        self.steps.cache = cache
        return self.step

    def _problem_of(self, cache: Any) -> str | None:
        """Return why a cache is none of this grid, if so.  Local."""
        found = getattr(cache, "rank", 0), getattr(cache, "ranks", 1)
        if isinstance(cache, SpreadCache) and found == (self.comm.rank, self.comm.size):
            return None
        kind, (rank, ranks) = type(cache).__name__, found
        return (
            f"the cache must be of `prefill` on {self.comm.size} ranks, numbered as here, got "
            f"{kind} of rank {rank} of {ranks} on rank {self.comm.rank}"
        )

    @torch.no_grad()
    def prefill(
        self, input_ids: Any, attention_mask: Any, root: int | None, room: Sequence[int] | None
    ) -> SpreadCache:
        """Compute all tokens but the last of each row; see `ContextParallel.prefill`."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        *_, ids, mask, _ = self._batch(given, root, room, {})
        self._prepare(int(mask.sum(1).max()))
        self._probe()
        cache, ids, mask = self._new_cache(room), ids[:, :-1], mask[:, :-1]
        self._compute_by_plans(cache, ids, mask, self._tensors(position_ids=positions_of(mask)))
        if cache.length < ids.shape[1]:
            self._compute_in_step(cache, ids, mask)
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
        first, call, taken, new = self.comm.rank == 0, Call(self.comm), {}, 0
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        masked, given, ids, mask, others = self._batch(given, root, room, options)
        caches = [options.pop(x, None) for x in ("cache", "past_key_values")]
        cache = next((x for x in caches if x is not None), None) or self._new_cache(room)
        streamer = options.pop("streamer", None)
        with call.checks():
            prompt = {"inputs": ids} | others | ({"attention_mask": mask} if masked else {})
            taken, others = self._checked(prompt, cache, options)
            ids, found = taken["input_ids"].numpy(force=True), taken.get("attention_mask")
            mask = np.ones_like(ids) if found is None else found.numpy(force=True)
            check_continues(cache, ids, mask)
            new = taken["generation_config"].max_length - ids.shape[1]
            if streamer is not None and first:
                streamer.put(torch.from_numpy(given))
        call.agree({"new tokens": new})
        cache.room = cache.room if room is None else room
        self._prepare(_reach(mask.sum(1), others) + new - 1)
        cache.set_masks(self.masks)
        self._probe()
        # Mamba 2 of some models bounds the size of a step, but not in a call with one token.
        last = min(1 + bool(self.cp._recurrent), ids.shape[1] - cache.length)
        begun, later = (x[:, :-last] for x in (ids, mask)), (new + last - 1) * len(ids)
        self._compute_by_plans(cache, *begun, others, later)
        criteria = _Decisions(taken.pop("stopping_criteria"), self.steps, streamer, cache)
        if not first:  # it takes the tokens of rank 0
            taken["logits_processor"] = LogitsProcessorList()
            taken["generation_config"].do_sample = False
        taken["logits_processor"].insert(0, criteria.begin)
        self._agreed = True
        try:
            found = self.cp.model._sample(stopping_criteria=criteria, **taken)
        except Exception as error:  # of any kind
            if criteria.awaited:
                criteria.fail(message_of(error), len(ids))
            raise
        finally:
            self._agreed = False
        if getattr(found, "scores", None):
            found.scores = self.comm.bcast(found.scores)
        tokens = found if isinstance(found, torch.Tensor) else found.sequences
        given = given.repeat(len(ids) // len(given), 0)
        tokens[:, : ids.shape[1]] = torch.from_numpy(given)  # padded where it was
        return found

    def _new_cache(self, room: Sequence[int] | None = None) -> SpreadCache:
        """Return an empty cache."""
        cache = SpreadCache(self.masks, self.comm.rank, self.comm.size, room)
        if not self.cp._recurrent:
            return cache
        return add_states(cache, self.cp.model.config)

    def _batch(self, batch: dict, root: int | None, room: Any, options: dict) -> tuple:
        """Return whether there is a mask, tokens as given, and both with all padding in front.

        Also take the other tensors of the model out of the options, and return them as arrays.
        """
        ranks, call, whole, found = self.comm.size, Call(self.comm), {}, ()
        named = [x for x in options if x in self._takes and isinstance(options[x], torch.Tensor)]
        tensors = batch | {x: options.pop(x) for x in named}
        if root not in (None, *range(ranks)):
            call.problem = f"root must be a rank, got {root}"
        call.agree({"root": root})
        with call.checks():
            whole = {name: integers(name, x) for name, x in tensors.items()}
        if root is not None:
            call.problem, whole = self.comm.bcast((call.problem, whole), root)
        with call.checks():
            found = self._left_padded(room, **whole)
        call.agree({name: digest(x) for name, x in whole.items()})
        return found

    def _left_padded(
        self,
        room: Sequence[int] | None,
        input_ids: np.ndarray | None = None,
        attention_mask: np.ndarray | None = None,
        **others: np.ndarray,
    ) -> tuple:
        """Return what `_batch` does; ValueError if something is wrong.  Local."""
        vocabulary, ranks = self.cp.model.get_input_embeddings().num_embeddings, self.comm.size
        if room is not None and (len(room) != ranks or min(room) < 0):
            raise ValueError(f"room must be tokens for each of {ranks} ranks, got {room}")
        if input_ids is None or not input_ids.size:
            raise ValueError(
                "input_ids must be (B, N) tokens, at least one in each row, got "
                f"{kind_of(input_ids)}"
            )
        check_range(vocabulary - 1, input_ids=input_ids)
        mask = np.ones_like(input_ids) if attention_mask is None else attention_mask
        check_padding(mask, input_ids.shape)
        for name, x in others.items():
            _check_argument(name, x, x.shape == input_ids.shape)
        moved = {name: left_padded(x, mask) for name, x in others.items()}
        ids, masked = input_ids, attention_mask is not None
        return masked, ids, left_padded(ids, mask), left_padded(mask, mask), moved

    def _checked(self, prompt: dict, cache: Any, options: dict) -> tuple[dict, dict]:
        """Let transformers check the options.  Local.

        Return what it would pass to its loop, and the model's arguments for the whole prompt
        besides tokens, mask and cache.
        """
        model, taken = self.cp.model, {}

        def take(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
            taken.update(given, input_ids=input_ids)
            return input_ids

        def asked(name: str) -> Any:
            configs = options.get("generation_config"), model.generation_config
            found = options.get(name), *(getattr(x, name, None) for x in configs)
            return next((x for x in found if x is not None), None)

        if options.get("custom_generate") is not None:
            raise ValueError("generation over ranks takes no custom_generate")
        if problem := self._problem_of(cache):
            raise ValueError(problem)
        if (kind := asked("cache_implementation")) not in (None, "hybrid"):
            raise ValueError(
                f"cache_implementation is {kind!r}, as an option or in the generation config, but "
                "ranks have a cache of their own: set it to None"
            )
        _check_wrappers(model)
        # transformers keeps the tokenizer from a loop that is not its own.
        tokenizer, stop = options.pop("tokenizer", None), asked("stop_strings")
        if own_stop := stop is not None and tokenizer is not None:
            options["stop_strings"] = None
        given = self._tensors(**prompt) | {self._named: cache, "custom_generate": take}
        model.generate(**options | given | self._usual)
        if own_stop:
            taken["stopping_criteria"].append(StopStringCriteria(tokenizer, stop))
        config = taken["generation_config"]
        mode = config.get_generation_mode(options.get("assistant_model"))
        chosen = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
        problems = {
            f"over ranks there are greedy search and sampling, no {mode.value}": mode
            not in chosen,
            "use_cache must be true": not taken["use_cache"],
            "guidance_scale needs a second prompt": config.guidance_scale not in (None, 1),
            "output_attentions and output_hidden_states must be false": (
                config.output_attentions or config.output_hidden_states
            ),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise ValueError(problem)
        return taken, self._arguments(taken)

    def _arguments(self, taken: dict[str, Any]) -> dict[str, Any]:
        """Return what transformers would pass to the model for a whole prompt.  Local."""
        model, cache, ids = self.cp.model, self._new_cache(), taken["input_ids"]
        columns = taken["generation_config"].max_length - 1
        last, ones = (x.new_ones(len(ids), columns) for x in (ids, ids))
        given = {"attention_mask": ones, self._named: cache, "use_cache": True}
        if model.prepare_inputs_for_generation(last, **given).get(self._named) is not cache:
            kind = type(model).__name__
            raise ValueError(f"{kind} drops its cache within {columns} columns, with padding")
        loop = inspect.signature(model._sample).parameters
        given = {x: y for x, y in taken.items() if x not in loop} | {self._named: cache}
        given = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **given)
        known = {"input_ids", "attention_mask", "use_cache", self._named, *self._usual}
        given = {x: y for x, y in given.items() if y is not None and x not in known}
        if not any(x is not None for x in given.get("mm_encoder_outputs", {}).values()):
            given.pop("mm_encoder_outputs", None)  # of a model that sees, without images
        for name, x in given.items():
            of_tokens = getattr(x, "shape", ())[-2:] in ((1, ids.shape[1]), ids.shape)
            _check_argument(name, x, of_tokens or isinstance(x, (bool, int, float, str)))
        return given

    def _tensors(self, **arrays: np.ndarray) -> dict[str, torch.Tensor]:
        """Return tensors of arrays, on the device of the model."""
        return {x: torch.from_numpy(y).to(self.cp.model.device) for x, y in arrays.items()}

    def _compute_by_plans(
        self, cache: SpreadCache, ids: np.ndarray, mask: np.ndarray, others: dict[str, Any],
        later: int = 0, least: int = MANY,
    ) -> None:  # fmt: skip
        """Let plans compute the new tokens of a batch, if there are at least `least`.

        `others` are the model's arguments for all tokens, or more.  Before that, check that the
        cache has room for them, and for `later` tokens of steps.
        """
        begin, (rows, end), ranks = cache.length, ids.shape, self.comm.size
        shown = mask[:, begin:] > 0
        counts, plans, owners = shown.sum(1), {}, np.empty(0, np.int64)
        bounds = np.append(0, np.cumsum(counts))
        total = int(bounds[-1])
        if total >= max(least, 2 * ranks):
            if cache.length:
                plans = self._plans_after(cache, bounds)
            else:
                plans = self.cp._plans_of(total, tuple(bounds.tolist()) if rows > 1 else None)
            owners = _owners(next(iter(plans.values())).distribution)
        if cache.room is not None:
            own, more = np.bincount(owners, minlength=ranks), later + total - len(owners)
            left = cache.free - own
            if left.min() < 0 or left.sum() < more:
                raise CollectiveError(
                    f"{total} tokens of prompts, of which ranks would keep {own.tolist()}, and "
                    f"{more} that follow do not fit: there is room for {cache.free.tolist()}"
                )
        if not plans:
            return
        cache.begin(ids[:, begin:], counts, owners)
        cache.pieces = pieces_of(plans)
        own = np.flatnonzero(shown.reshape(-1))[owners == self.comm.rank]

        def share(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            x = x[..., begin:end].expand(*x.shape[:-2], rows, -1)
            return x.flatten(-2)[..., None, own]  # (..., 1, n)

        given = {x: share(y) for x, y in (self._tensors(input_ids=ids) | others).items()}
        given |= seq_idx_of(plans)
        with self.cp._within(plans.number):
            self._call(cache, given)
        cache.pieces = None
        for plan in plans.values():
            plan.free()

    def _compute_in_step(
        self, cache: SpreadCache, ids: np.ndarray, mask: np.ndarray, n: int | None = None
    ) -> torch.Tensor:
        """Compute n new tokens, or all, in a step; return the last logits, (B, V)."""
        begin = cache.length
        end = begin + n if n else ids.shape[1]
        given = {"input_ids": ids[:, begin:end], "position_ids": positions_of(mask)[:, begin:end]}
        return self._call(cache, self._tensors(**given, attention_mask=mask[:, :end]))

    def _call(self, cache: SpreadCache, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """Call the model; return the logits after the last token, (B, V)."""
        given = given | {self._named: cache, "use_cache": True} | self._usual
        self._agreed = True
        try:
            logits = self.cp.model(**given).logits[:, -1]
        finally:
            self._agreed = False
        cache.check_used(cache.length)
        return logits

    def _plans_after(self, cache: SpreadCache, bounds: np.ndarray) -> Planned:
        """Make plans of tokens that follow a cache, whose keys stay on their ranks.

        On a grid of one row queries are gathered, and keys are not.
        """
        comm, plans, total = self.comm, {}, int(bounds[-1])
        new = np.split(_owners(Distribution("zigzag", total, comm.size)), bounds[1:-1])
        for kind in dict.fromkeys(self._layers.values()):
            kept = cache.kept[kind.mask]
            floors = [max(x, kept.floor(len(y))) for x, y in zip(kept.floors, cache.owners)]
            rows = [np.append(x[y:], z) for x, y, z in zip(cache.owners, floors, new)]
            ends, owners = np.cumsum([0, *map(len, rows)]), np.concatenate(rows)
            mask = Documents(bounds, inside=kind.mask, cu_seqlens_kv=ends)
            options = kind._asdict() | self.cp._options | {"mask": mask}
            options |= {"seqlen": total, "seqlen_kv": int(ends[-1])}
            options["distribution"] = "zigzag", _dealt(owners, comm.size)
            plans[kind] = Attention2D(self._line, **options)
        if self.cp._recurrent:
            cut_pieces(plans, bounds)
        return self.cp._numbered(plans)

    def _probe(self) -> None:
        """Compare a few decoded steps with the model's own cache.  Collective."""
        if self._probed or not self.cp._probing:
            return
        model, call, cache, expected = self.cp.model, Call(self.comm), None, []
        n = min(self.cp.longest, 4 * self.comm.size + sum(PROBED))
        sizes = [n - sum(PROBED), *PROBED] if n > sum(PROBED) else [1] * n
        ids, places, _ = inputs_of(model, torch.arange(n)[None]).values()
        with call.checks(), self.cp._rest(), attention_of(model, "eager"):
            for part in zip(ids.split(sizes, 1), places.split(sizes, 1)):
                part = dict(zip(("input_ids", "position_ids"), part))
                found = model(**part, use_cache=True, **{self._named: cache})
                cache = getattr(found, self._named)
                expected.append(found.logits[0, -1])
        call.agree()
        cache, ids = self._new_cache(), ids.numpy(force=True)
        ones, sizes = np.ones_like(ids), sizes[-len(PROBED) :]
        first = n - sum(sizes)
        with call.checks(), attention_of(model, model.config._attn_implementation):
            positions = self._tensors(position_ids=positions_of(ones))
            self._compute_by_plans(cache, ids[:, :first], ones[:, :first], positions, least=1)
            if first > cache.length:  # too few for plans
                self._compute_in_step(cache, ids, ones, first)
            steps = [self._compute_in_step(cache, ids, ones, x)[0] for x in sizes]
            if not same(torch.stack(steps), torch.stack(expected[-len(steps) :])):
                raise ValueError("logits of decoded steps are not the same over ranks as on one")
        call.agree()
        self._probed = True


class _Decisions(StoppingCriteriaList):
    """The tokens that rank 0 chooses, and when it stops, in place of those of each rank."""

    def __init__(
        self, criteria: StoppingCriteriaList, steps: Steps, streamer: Any, cache: SpreadCache
    ) -> None:
        super().__init__(criteria)
        self.steps, self.streamer, self.cache, self.done = steps, streamer, cache, False
        self.awaited = False  # whether the other ranks wait for a token of this one

    def begin(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Check the call of the model, after which rank 0 chooses tokens."""
        self.cache.check_used(input_ids.shape[1])
        self.awaited = self.steps.comm.rank == 0
        return scores

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        """Send the last tokens and whether rows are done; overwrite the tokens of other ranks."""
        decided = np.empty((2, len(input_ids)), np.int64)
        if self.steps.comm.rank == 0:
            done = super().__call__(input_ids, scores, **others)
            decided[:] = input_ids[:, -1].cpu(), done.cpu()
            self.done |= done
            if self.streamer is not None:
                self.streamer.put(input_ids[:, -1].cpu())
                if self.done.all():
                    self.streamer.end()
        self.awaited = False
        self.steps.choose(decided)
        if decided[0, 0] == FAILED:
            self.fail()
        input_ids[:, -1] = torch.from_numpy(decided[0])
        return torch.from_numpy(decided[1] == 1).to(input_ids.device)

    def fail(self, problem: str = "", rows: int = 0) -> NoReturn:
        """Raise the error of rank 0 on all ranks; rank 0 sends it in place of tokens of rows."""
        if rows:
            self.steps.choose(np.full((2, rows), FAILED))
        problem = self.steps.comm.bcast(problem)
        raise CollectiveError(f"rank 0 could not choose a token: {problem}")


def _check_argument(name: str, x: Any, of_tokens: bool) -> None:
    """Raise ValueError if an argument of the model is not `of_tokens`."""
    if not of_tokens:
        raise ValueError(
            f"generation over ranks takes no {name} that is not a number for each token, got "
            f"{kind_of(x)}"
        )


def _check_wrappers(model: torch.nn.Module) -> None:
    """Raise ValueError if a wrapper of PEFT puts virtual tokens before those of a model."""
    peft = sys.modules.get("peft")
    if peft is None or any(x.requires_grad for x in model.parameters()):
        return  # such wrappers freeze the model, which knows nothing of them
    for x in get_objects():
        is_wrapper = issubclass(type(x), peft.PeftModel) and x.base_model is model
        if is_wrapper and x.active_peft_config.is_prompt_learning:
            kind = x.active_peft_config.peft_type.value
            raise ValueError(
                f"{kind} of PEFT puts virtual tokens before the prompt, which generation over "
                "ranks would leave out"
            )


def _reach(counts: np.ndarray, given: dict[str, Any]) -> int:
    """Return the tokens of the longest row, or more if the positions of a call are further on."""
    positions = given.get("position_ids")
    return max(int(counts.max()), 0 if positions is None else 1 + int(positions.max()))


def _owners(distribution: Distribution) -> np.ndarray:
    """Return the rank of each token."""
    ranks = range(distribution.nshards)
    order = np.argsort(np.concatenate([*map(distribution.tokens, ranks)]))
    return np.repeat(ranks, distribution.counts)[order]


def _dealt(owners: np.ndarray, ranks: int) -> Distribution:
    """Return the distribution of tokens, given by the rank of each one."""
    own = [np.flatnonzero(owners == rank) for rank in range(ranks)]
    runs = [np.split(x, np.flatnonzero(np.diff(x) > 1) + 1) for x in own]
    listed = tuple(tuple(range(x[0], x[-1] + 1) for x in y if len(x)) for y in runs)
    return Distribution("balanced", len(owners), ranks, listed=listed)
