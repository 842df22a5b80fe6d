"""Generation: transformers' own `generate` over a cache that is spread over the ranks.

Plans compute a long prompt without its last token, like a batch of training, and each rank keeps
the keys and values of its own tokens.  Then `generate` runs on all ranks alike.  In each step
every rank attends to the keys that it keeps.  Rank 0 chooses the tokens, and decides when to stop.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import proxy

import numpy as np
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMode, StopStringCriteria

from a2d_mpi.attention.methods import Attention2D
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.agreement import Call, CollectiveError, agree, message_of
from a2d_mpi.masks.documents import Documents
from a2d_mpi.sharding.distribution import Distribution
from a2d_mpi.torch.batches import agreed, check_padding, check_tokens, left_padded
from a2d_mpi.torch.cache import SpreadCache
from a2d_mpi.torch.decoding import Step, Steps
from a2d_mpi.torch.layers import Kind, Masks, attention_of, inputs_of, layers_of, same
from a2d_mpi.torch.recurrent import cut_pieces, pieces_of, seq_idx_of

if TYPE_CHECKING:
    from a2d_mpi.torch.context import ContextParallel

# New tokens that plans compute.  All ranks compute fewer ones alike, in a step, because plans are
# made and agreed on first.  A Llama of 8 layers and 512 elements after 200 tokens, 2 ranks on busy
# cores: 16 tokens take 0.12 s in a step, 0.16 by plans; 64 take 0.27 and 0.23; 256 1.01 and 0.77.
MANY = 64
PROBED = 2, 1, 1  # tokens of the steps of the probe
KEPT = 8  # lengths of prompts whose plans are kept
FAILED = -1  # rank 0 sends it in place of tokens


class Generation:
    """The part of a `ContextParallel` for generation, made at the first call.  Collective.

    Parameters
    ----------
    cp : ContextParallel

    Attributes
    ----------
    steps : Steps
    layers : dict of torch.nn.Module to Kind
        For up to `longest` tokens, which may be more than those of training.
    step, prompt : int
        Numbers of the plans of steps and of prompts, which belong to these layers.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self.cp, self.comm, self.steps = proxy(cp), cp.grid.comm, Steps(cp.grid)
        self.numbers = self.step, self.prompt = next(cp.numbering), next(cp.numbering)
        self._line = cp.grid.in_one_row()
        self._plans: dict[tuple[int, ...], dict[Kind, AttentionPlan]] = {}
        self._probed = False
        self._agreed = False  # whether all ranks are known to have the same tokens
        takes = inspect.signature(cp.model.forward).parameters
        self._named = "cache" if "cache" in takes else "past_key_values"
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.longest = 0
        self._extend(cp.longest, cp.layers)

    def _extend(self, total: int, layers: dict[torch.nn.Module, Kind] | None = None) -> None:
        """Find out what the layers compute among `total` tokens, if more than before."""
        if total <= self.longest:
            return
        model, call, masks = self.cp.model, Call(self.comm), {}
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or total
        longest = max(total, min(2 * self.longest, most))
        with (
            call.checks(text=lambda x: f"{type(model).__name__}, {longest} tokens: {x}"),
            self.cp._rest(),
        ):
            layers = layers or layers_of(model, longest)
            masks = {x.layer_idx: kind.mask for x, kind in layers.items()}
            if any(end[0] > 1 for x in masks.values() for _, end in x.visible(np.arange(1))):
                raise ValueError("a layer sees later tokens, so the model cannot generate")
        call.agree({"layers": layers and [*layers.values()]})
        # Layers that use the keys of other layers have none of their own, and any mask.
        last = max(masks)
        n = model.config.get_text_config().num_hidden_layers if self.cp._recurrent else last + 1
        self.masks = [masks.get(i, masks[last]) for i in range(n)]
        self.layers, self.longest, self._masks = layers, longest, Masks(longest, self.masks)
        self.cp._sets[self.step] = {x: Step(self.steps, x) for x in layers.values()}
        self._plans.clear()

    def begin(self, cache: SpreadCache, given: dict[str, Any]) -> int:
        """Begin a step, before the model is called with some arguments; return its number."""
        ids, mask = given["input_ids"].numpy(force=True), given.get("attention_mask")
        rows, n = ids.shape
        old, counts = np.array(cache.lengths or [0] * rows), np.full(rows, n)
        if not self._agreed:
            with self.cp.grid.failures.translated():
                agree(self.comm, None, {"input_ids": ids.tolist(), "the cache": old.tolist()})
        if len(old) != rows:
            raise CollectiveError(f"the cache has {len(old)} rows, got {rows}")
        if mask is not None:
            mask = mask.numpy(force=True)
            counts = mask[:, -n:].sum(1)
            if (mask.sum(1) != old + counts).any():
                raise CollectiveError(
                    f"attention_mask must show {old.tolist()} tokens of the cache, and new ones"
                )
        self._extend(int((old + counts).max()))
        cache.set_masks(self.masks)
        cache.begin(ids, counts)
        self.steps.cache = cache
        return self.step

    @torch.no_grad()
    def prefill(
        self, input_ids: Any, attention_mask: Any, root: int | None, room: Sequence[int] | None
    ) -> SpreadCache:
        """Compute all tokens but the last of each row; see `ContextParallel.prefill`."""
        *_, ids, mask = self._batch(input_ids, attention_mask, root, room)
        self._extend(int(mask.sum(1).max()))
        self._probe()
        cache, ids, mask = self._new_cache(room), ids[:, :-1], mask[:, :-1]
        self._compute_by_plans(cache, ids, mask)
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
        masked, given, ids, mask = self._batch(input_ids, attention_mask, root, room)
        caches = [options.pop(x, None) for x in ("cache", "past_key_values")]
        cache = next((x for x in caches if x is not None), None) or self._new_cache(room)
        streamer = options.pop("streamer", None)
        with call.checks():
            taken = self._checked(ids, mask if masked else None, cache, options)
            ids, found = taken["input_ids"].numpy(force=True), taken.get("attention_mask")
            mask = np.ones_like(ids) if found is None else found.numpy(force=True)
            _check_old(cache, ids, mask)
            new = taken["generation_config"].max_length - ids.shape[1]
            if streamer is not None and first:
                streamer.put(torch.from_numpy(given))
        call.agree({"new tokens": new})
        cache.room = cache.room if room is None else room
        self._extend(int(mask.sum(1).max()) + new - 1)
        cache.set_masks(self.masks)
        self._probe()
        self._compute_by_plans(cache, ids[:, :-1], mask[:, :-1], new * len(ids))
        criteria = _Decisions(taken.pop("stopping_criteria"), self.steps, streamer)
        if first:
            taken["logits_processor"].insert(0, criteria.begin)
        else:  # it takes the tokens of rank 0
            taken["logits_processor"] = LogitsProcessorList()
            taken["generation_config"].do_sample = False
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
        from a2d_mpi.torch.states import add_states  # older versions of transformers have none

        return add_states(cache, self.cp.model.config)

    def _batch(
        self, input_ids: Any, attention_mask: Any, root: int | None, room: Sequence[int] | None
    ) -> tuple[bool, np.ndarray, np.ndarray, np.ndarray]:
        """Return whether there is a mask, tokens as given, and both with all padding in front."""
        vocabulary, ranks = self.cp.model.get_input_embeddings().num_embeddings, self.comm.size

        def arrange(ids: np.ndarray | None, given: np.ndarray | None) -> tuple:
            if room is not None and (len(room) != ranks or min(room) < 0):
                raise ValueError(f"room must be tokens for each of {ranks} ranks, got {room}")
            check_tokens(ids, vocabulary)
            mask = np.ones_like(ids) if given is None else given
            check_padding(mask, ids.shape)
            return given is not None, ids, *left_padded(ids, mask)

        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        return agreed(self.comm, given, root, arrange)

    def _checked(
        self, ids: np.ndarray, mask: np.ndarray | None, cache: Any, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Let transformers check the options; return what it would pass to its loop.  Local."""
        model, taken = self.cp.model, {}

        def take(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
            taken.update(given, input_ids=input_ids)
            return input_ids

        for name in ("custom_generate", "inputs", "inputs_embeds", "position_ids"):
            if options.get(name) is not None:
                raise ValueError(f"generation over ranks takes no {name}")
        ranks, got = self.comm.size, getattr(cache, "ranks", 1)
        if not isinstance(cache, SpreadCache) or got != ranks:
            got = f"{type(cache).__name__} on {got}"
            raise ValueError(f"the cache must be of `prefill` on {ranks} ranks, got {got}")
        # transformers keeps the tokenizer from a loop that is not its own.
        tokenizer, stop = options.pop("tokenizer", None), options.pop("stop_strings", None)
        given = {"inputs": ids} if mask is None else {"inputs": ids, "attention_mask": mask}
        given = self._tensors(**given) | {self._named: cache, "custom_generate": take}
        model.generate(**given, **options)
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

    def _tensors(self, **arrays: np.ndarray) -> dict[str, torch.Tensor]:
        """Return tensors of arrays, on the device of the model."""
        return {x: torch.from_numpy(y).to(self.cp.model.device) for x, y in arrays.items()}

    def _compute_by_plans(
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
        counts, plans, owners = shown.sum(1), {}, np.empty(0, np.int64)
        old, total = cache.lengths or [0] * len(ids), int(counts.sum())
        if total >= max(least, 2 * ranks):
            plans = self._plans_of(cache, counts)
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
        cache.begin(ids, counts, owners)
        cache.pieces = pieces_of(plans)
        own, positions = owners == self.comm.rank, [*map(np.arange, old, old + counts)]
        given = {"input_ids": ids[shown], "position_ids": np.concatenate(positions)}
        given = self._tensors(**{x: y[own][None] for x, y in given.items()}) | seq_idx_of(plans)
        self.cp._sets[self.prompt] = plans
        with self.cp._within(self.prompt):
            self._call(cache, given)
        cache.pieces = None
        if cache.layers[0].length != cache.length:
            raise CollectiveError("the model did not use the cache: call model.eval()")
        for plan in plans.values():
            plan.free()

    def _compute_in_step(
        self, cache: SpreadCache, ids: np.ndarray, mask: np.ndarray, n: int | None = None
    ) -> torch.Tensor:
        """Compute n new tokens, or all, in a step; return the last logits, (B, V)."""
        begin = cache.length
        end = begin + n if n else ids.shape[1]
        positions = (mask.cumsum(1) - 1).clip(0)[:, begin:end]
        given = {"input_ids": ids[:, begin:end], "position_ids": positions}
        return self._call(cache, self._tensors(**given, attention_mask=mask[:, :end]))

    def _call(self, cache: SpreadCache, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """Call the model; return the logits after the last token, (B, V)."""
        given = given | {self._named: cache, "use_cache": True} | self._last
        self._agreed = True
        try:
            return self.cp.model(**given).logits[:, -1]
        finally:
            self._agreed = False

    def _plans_of(self, cache: SpreadCache, counts: np.ndarray) -> dict[Kind, AttentionPlan]:
        """Make or find the plans of new tokens, given by the number of each row.  Collective."""
        bounds, key = np.append(0, np.cumsum(counts)), tuple(counts)
        if cache.length:
            return self._plans_after(cache, bounds)
        if key not in self._plans:
            ends = bounds if len(counts) > 1 else None
            options = self.cp._options
            self._plans[key] = self.cp._make(self.layers, int(bounds[-1]), ends, {}, **options)
            if len(self._plans) > KEPT:
                del self._plans[next(iter(self._plans))]
        return self._plans[key]

    def _plans_after(self, cache: SpreadCache, bounds: np.ndarray) -> dict[Kind, AttentionPlan]:
        """Make plans of tokens that follow a cache, whose keys stay on their ranks.

        On a grid of one row queries are gathered, and keys are not.
        """
        comm, plans, total = self.comm, {}, int(bounds[-1])
        new = np.split(_owners(Distribution("zigzag", total, comm.size)), bounds[1:-1])
        for kind in dict.fromkeys(self.layers.values()):
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
        return plans

    def _probe(self) -> None:
        """Compare a few decoded steps with the model's own cache.  Collective."""
        if self._probed or not self.cp._probing:
            return
        model, call, cache, expected = self.cp.model, Call(self.comm), None, []
        n = min(self.longest, 4 * self.comm.size + sum(PROBED))
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
            self._compute_by_plans(cache, ids[:, :first], ones[:, :first], least=1)
            if first > cache.length:  # too few for plans
                self._compute_in_step(cache, ids, ones, first)
            steps = [self._compute_in_step(cache, ids, ones, x)[0] for x in sizes]
            if not same(torch.stack(steps), torch.stack(expected[-len(steps) :])):
                raise ValueError("logits of decoded steps are not the same over ranks as on one")
        call.agree()
        self._probed = True


class _Decisions(StoppingCriteriaList):
    """The tokens that rank 0 chooses, and when it stops, in place of those of each rank."""

    def __init__(self, criteria: StoppingCriteriaList, steps: Steps, streamer: Any) -> None:
        super().__init__(criteria)
        self.steps, self.streamer, self.done = steps, streamer, False
        self.awaited = False  # whether the other ranks wait for a token of this one

    def begin(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note that the model has been called: rank 0 chooses tokens now."""
        self.awaited = True
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
    for row, place in np.argwhere(ids[:, :old] != cache.ids):
        raise ValueError(
            f"the prompt has token {ids[row, place]} at {place} of row {row}, but the cache has "
            f"{cache.ids[row, place]}"
        )
    if (mask[:, :old].sum(1) != cache.lengths).any():
        raise ValueError("attention_mask must be that of the cache, and 1 for new tokens")


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
