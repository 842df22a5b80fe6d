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
    answers : dict of int to (n,) int64 or ValueError
        Of each request that has ended its generated tokens, or the error that refused it.
    """

    def __init__(
        self,
        prompts: Mapping[int, np.ndarray],
        new: Mapping[int, int],
        choose: Callable[[int, int, np.ndarray], int],
    ) -> None:
        self._decoder: Decoder | None = None
        self._prompts, self._new, self._choose = prompts, new, choose
        self.answers: dict[int, np.ndarray | ValueError] = {}
        self._tokens: dict[int, list[int]] = {name: [] for name in prompts}  # generated so far
        self._running: dict[int, int] = {}  # latest token of each running request

    @property
    def unanswered(self) -> list[int]:
        """Requests that have not ended, in their order.  Requests that do not fit wait."""
        return [name for name in self._prompts if name not in self.answers]

    def use(self, decoder: Decoder) -> None:
        """Use this decoder from now on.

        The decoder computes all keys and values anew, from the prompts and the generated tokens.
        """
        self._decoder, self._running = decoder, {}

    def step(self) -> list[int]:
        """Generate one token for each running request, and admit waiting ones.  Collective.

        Returns
        -------
        list of int
            Requests that end with this step.

        Raises
        ------
        ValueError
            On all ranks, if `choose` raises an error.  No request has changed.  To go on, `use`
            another decoder.
        RanksLost
            On all surviving ranks, if a rank died.  No request has changed.
        """
        decoder, ended = self._decoder, {}
        taken: dict[int, np.ndarray] = {}
        for name in (x for x in self.unanswered if x not in self._running):
            prompt, tokens = self._prompts[name], self._tokens[name]
            max_tokens = len(prompt) + self._new[name] - 1  # the last token is not cached
            try:
                if not decoder.admit(name, len(prompt) + len(tokens), max_tokens):
                    break  # requests are admitted in order
                taken[name] = np.append(prompt, tokens).astype(prompt.dtype)
            except ValueError as error:
                ended[name] = error
        with decoder.all_or_none():
            logits = {}
            if self._running:
                logits = dict(zip(self._running, decoder.step(self._running)))
            if taken:
                logits |= dict(zip(taken, decoder.prefill(taken)))
            self._running = decoder.decide(
                lambda: {x: self._choose(x, len(self._tokens[x]), y) for x, y in logits.items()}
            )
        for name, token in list(self._running.items()):
            self._tokens[name].append(token)
            if len(self._tokens[name]) == self._new[name]:
                decoder.release(name)
                del self._running[name]
                ended[name] = np.array(self._tokens[name])
        self.answers |= ended
        return list(ended)
