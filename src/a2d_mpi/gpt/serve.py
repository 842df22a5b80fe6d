"""Requests that come and go, as many at once as there is room for, and what is drawn for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from a2d_mpi.gpt.decode import Decoder


def sample(
    logits: np.ndarray,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: Sequence[int] = (),
) -> int:
    """Draw a token: the likeliest at temperature 0, else one of the `top_k` likeliest."""
    if temperature == 0:
        return int(np.argmax(logits))
    x = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # 1e300 times less likely is never drawn
        x = (x - x.max()) / temperature
    if top_k is not None and top_k < len(x):
        x[x < np.partition(x, -top_k)[-top_k]] = -np.inf
    p = np.exp(x)
    return int(np.random.default_rng(seed).choice(len(p), p=p / p.sum()))


class Service:
    """Requests, of which as many are answered at once as there is room for.

    Parameters
    ----------
    prompts : dict of int to (n,) int64
    new : dict of int to int
        Tokens to generate for each request, at least one.
    choose : callable
        ``choose(request, length, logits)`` is the next token; the first rank's counts.
    arrive : dict of int to int, optional
        Step, from 0, at which each request comes.  Default: all are there at the start.

    Attributes
    ----------
    unanswered : list of int
        Requests in the order in which they come.  Requests without room wait.
    """

    def __init__(
        self,
        prompts: Mapping[int, np.ndarray],
        new: Mapping[int, int],
        choose: Callable[[int, int, np.ndarray], int],
        arrive: Mapping[int, int] | None = None,
    ) -> None:
        self._decoder: Decoder | None = None
        self._prompts, self._new, self._choose = prompts, new, choose
        self._comes = arrive or dict.fromkeys(prompts, 0)
        self.unanswered = sorted(prompts, key=self._comes.__getitem__)
        self._tokens: dict[int, list[int]] = {name: [] for name in prompts}  # new ones so far
        self._running: dict[int, int] = {}  # the latest token of each
        self._step = 0

    def use(self, decoder: Decoder) -> None:
        """Use a decoder: at first, or in place of another one.

        It computes all keys and values anew, from the prompts and the new tokens so far.
        """
        self._decoder, self._running = decoder, {}

    def step(self) -> list[tuple[int, np.ndarray | ValueError]]:
        """Add a token to each request that there is room for.  Collective.

        Returns
        -------
        list
            Requests that are done with this step, each with its new tokens, or with the error
            that refused it.

        Raises
        ------
        RanksLost
            On all ranks that are left, if a rank died.  The step did not happen.
        """
        decoder, done = self._decoder, []
        waiting = [name for name in self.unanswered if name not in self._running]
        if not self._running:  # nobody waits for a step that has nothing to do
            self._step = max(self._step, self._comes[waiting[0]])
        taken: dict[int, np.ndarray] = {}
        for name in waiting:
            prompt, tokens = self._prompts[name], self._tokens[name]
            most = len(prompt) + self._new[name] - 1  # the last token is not looked at again
            if self._comes[name] > self._step:
                break
            try:
                if not decoder.admit(name, len(prompt) + len(tokens), most):
                    break  # in order: none overtakes another
                taken[name] = np.append(prompt, tokens).astype(prompt.dtype)
            except ValueError as error:
                done.append((name, error))
        with decoder.all_or_none():
            logits = {}
            if self._running:
                logits = dict(zip(self._running, decoder.step(self._running)))
            if taken:
                logits |= dict(zip(taken, decoder.prefill(taken)))
            chosen = {x: self._choose(x, len(self._tokens[x]), y) for x, y in logits.items()}
            self._running = decoder.agreed(chosen)
        self._step += 1
        for name, token in list(self._running.items()):
            self._tokens[name].append(token)
            if len(self._tokens[name]) == self._new[name]:
                decoder.release(name)
                del self._running[name]
                done.append((name, np.array(self._tokens[name])))
        for name, _ in done:
            self.unanswered.remove(name)
        return done


def serve(
    decoder: Decoder,
    prompts: Mapping[int, np.ndarray],
    new: Mapping[int, int],
    choose: Callable[[int, int, np.ndarray], int],
    arrive: Mapping[int, int] | None = None,
) -> Iterator[tuple[int, np.ndarray | ValueError]]:
    """Yield each request of a `Service` with its answer when it is done.  Collective."""
    service = Service(prompts, new, choose, arrive)
    service.use(decoder)
    while service.unanswered:
        yield from service.step()
