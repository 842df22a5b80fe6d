"""Continuous batching of requests as far as the cache has room, and sampling of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from a2d_mpi.gpt.decode import Decoder


def sample(logits: np.ndarray, temperature: float = 0.0, seed: Sequence[int] = ()) -> int:
    """Draw a token of `logits`, (V,).

    Parameters
    ----------
    logits : (V,) array
    temperature : float
        Divisor of the logits; 0: the likeliest token.
    seed : sequence of int
        Seed of the draw.

    Returns
    -------
    int
        The token.
    """
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # an overflow to -inf is right: such tokens are never drawn
        scaled = (scaled - scaled.max()) / temperature
    p = np.exp(scaled)
    return int(np.random.default_rng(seed).choice(len(p), p=p / p.sum()))


class Service:
    """A queue of requests; they are answered together as far as the cache has room.

    Parameters
    ----------
    prompts : dict of int to (n,) int64
        Tokens of each request.
    new : dict of int to int
        Tokens to generate for each request, at least one.
    choose : callable
        ``choose(request, length, logits)`` returns the next token.  It is called on one rank, the
        first that has the logits, and must not communicate.

    Attributes
    ----------
    unanswered : list of int
        Requests in their order.  Requests that do not fit wait.
    """

    def __init__(
        self,
        prompts: Mapping[int, np.ndarray],
        new: Mapping[int, int],
        choose: Callable[[int, int, np.ndarray], int],
    ) -> None:
        self._decoder: Decoder | None = None
        self._prompts, self._new, self._choose = prompts, new, choose
        self.unanswered = list(prompts)
        self._tokens: dict[int, list[int]] = {name: [] for name in prompts}  # generated so far
        self._running: dict[int, int] = {}  # latest token of each running request

    def use(self, decoder: Decoder) -> None:
        """Use this decoder from now on.

        The decoder computes all keys and values anew, from the prompts and the generated tokens.
        """
        self._decoder, self._running = decoder, {}

    def step(self) -> list[tuple[int, np.ndarray | ValueError]]:
        """Generate one token for each running request, and admit waiting ones.  Collective.

        Returns
        -------
        list
            Requests that end with this step, each with its generated tokens, or with the error
            that refused it.

        Raises
        ------
        ValueError
            On all ranks, if `choose` raises an error.  No request has changed.  To go on, `use`
            another decoder.
        RanksLost
            On all surviving ranks, if a rank died.  No request has changed.
        """
        decoder, done = self._decoder, []
        waiting = [name for name in self.unanswered if name not in self._running]
        taken: dict[int, np.ndarray] = {}
        for name in waiting:
            prompt, tokens = self._prompts[name], self._tokens[name]
            max_tokens = len(prompt) + self._new[name] - 1  # the last token is not cached
            try:
                if not decoder.admit(name, len(prompt) + len(tokens), max_tokens):
                    break  # requests are admitted in order
                taken[name] = np.append(prompt, tokens).astype(prompt.dtype)
            except ValueError as error:
                done.append((name, error))
        with decoder.all_or_none():
            logits = {}
            if self._running:
                logits = dict(zip(self._running, decoder.step(self._running)))
            if taken:
                logits |= dict(zip(taken, decoder.prefill(taken)))
            self._running = decoder.decide(lambda: self._chosen(logits))
        for name, token in list(self._running.items()):
            self._tokens[name].append(token)
            if len(self._tokens[name]) == self._new[name]:
                decoder.release(name)
                del self._running[name]
                done.append((name, np.array(self._tokens[name])))
        for name, _ in done:
            self.unanswered.remove(name)
        return done

    def _chosen(self, logits: Mapping[int, np.ndarray]) -> dict[int, int]:
        """Return the next token of each request."""
        return {x: self._choose(x, len(self._tokens[x]), y) for x, y in logits.items()}
