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


def serve(
    decoder: Decoder,
    prompts: Mapping[int, np.ndarray],
    new: Mapping[int, int],
    choose: Callable[[int, int, np.ndarray], int],
    arrive: Mapping[int, int] | None = None,
) -> Iterator[tuple[int, np.ndarray | ValueError]]:
    """Generate the tokens of requests, as many at once as there is room for.  Collective.

    Parameters
    ----------
    decoder : Decoder
    prompts : dict of int to (n,) int64
    new : dict of int to int
        Tokens to generate for each request, at least one.
    choose : callable
        ``choose(request, length, logits)`` is the next token; the first rank's counts.
    arrive : dict of int to int, optional
        Step, from 0, at which each request comes.  Default: all are there at the start.

    Yields
    ------
    Each request when it is done, with its new tokens, or with the error that refused it; those
    that there is no room for yet wait.
    """
    comes = arrive or dict.fromkeys(prompts, 0)
    waiting, running, found, step = sorted(prompts, key=comes.__getitem__), {}, {}, 0
    while waiting or running:
        if not running:  # nobody waits for a step that has nothing to do
            step = max(step, comes[waiting[0]])
        taken: list[int] = []
        while waiting and comes[waiting[0]] <= step:
            name = waiting[0]
            most = len(prompts[name]) + new[name] - 1  # the last token is not looked at again
            try:
                if not decoder.admit(name, len(prompts[name]), most):
                    break  # in order: none overtakes another
                taken.append(name)
            except ValueError as error:
                yield name, error
            waiting.remove(name)
        step += 1
        logits = {}
        if running:
            logits = dict(zip(running, decoder.step(running)))
        if taken:
            after = decoder.prefill({x: prompts[x] for x in taken})
            logits |= dict(zip(taken, after))
        for name in taken:
            found[name] = []
        running = decoder.agreed({x: choose(x, len(found[x]), y) for x, y in logits.items()})
        for name, token in list(running.items()):
            found[name].append(token)
            if len(found[name]) == new[name]:
                decoder.release(name)
                del running[name]
                yield name, np.array(found.pop(name))
