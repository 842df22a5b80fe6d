"""Arithmetic of arrays: done by NumPy when the stream gets there."""

from __future__ import annotations

import operator
from functools import partial

import numpy as np

from . import cuda

OPERATORS = ("add", "sub", "mul", "truediv", "pow", "matmul", "ge", "ne", "neg")
METHODS = ("astype", "copy", "max", "mean", "sum")
VIEWS = ("swapaxes", "transpose")
FUNCTIONS = ("argsort", "concatenate", "cos", "exp", "log", "sin", "stack", "tanh")
MADE = ("arange", "ones", "zeros", "empty_like", "zeros_like")


class Arithmetic:
    """Operators and methods of an array whose NumPy array is `_host`."""

    __array_ufunc__ = None  # NumPy's numbers leave operators to this class

    T = property(lambda self: type(self)(self._host.T))

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __float__(self):
        cuda.drain()
        return float(self._host)

    def __getitem__(self, index):
        index = _index(index)
        if any(isinstance(x, np.ndarray) for x in index):
            return lazy(type(self), lambda x: x[index], self)
        return type(self)(self._host[index])

    def __setitem__(self, index, value):
        index, value = _index(index), _known(value)
        _queue(lambda: operator.setitem(self._host, index, value))


def lazy(cls, f, *args, **options):
    """An array that will hold what `f` returns."""
    args = [_known(x) for x in args]

    def compute():
        with np.errstate(all="ignore"):
            return np.asarray(f(*args, **options))

    like = compute()  # of whatever is there by now: its shape and dtype
    found = garbage(like.shape, like.dtype)
    _queue(lambda: np.copyto(found, compute()))
    return cls(found)


def garbage(shape, dtype):
    """Memory that nobody has written: not the zeros that a fresh page holds."""
    found = np.empty(shape, dtype)
    found.reshape(-1).view(np.uint8).fill(0xFF)
    return found


def functions(cls):
    """The functions of the module, by name."""

    def made(name):
        def function(*args, **options):
            found = getattr(np, name)(*map(_known, args), **options)
            return cls(garbage(found.shape, found.dtype) if name == "empty_like" else found)

        return function

    def computed(name):
        def function(first, out=None, **options):
            many = isinstance(first, (list, tuple))
            f = getattr(np, name)
            call = (lambda *x: f(x, **options)) if many else partial(f, **options)
            found = lazy(cls, call, *(first if many else [first]))
            if out is None:
                return found
            out[...] = found
            return out

        return function

    def flatnonzero(x):  # its length is known when everything before it is done
        cuda.drain()
        return cls(np.flatnonzero(x._host))

    class add:
        @staticmethod
        def reduceat(x, indices, axis=0):
            return lazy(cls, lambda *both: np.add.reduceat(*both, axis=axis), x, indices)

    return (
        {x: made(x) for x in MADE}
        | {x: computed(x) for x in FUNCTIONS}
        | {"flatnonzero": flatnonzero, "add": add}
    )


def _known(x):
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}")  # as CuPy
    return getattr(x, "_host", x)


def _index(index):
    index = tuple(_known(x) for x in (index if isinstance(index, tuple) else (index,)))
    assert not any(isinstance(x, np.ndarray) and x.dtype == bool for x in index), "no masks"
    # With an ellipsis NumPy gives a view also of a single element.
    return index if any(x is Ellipsis for x in index) else (*index, Ellipsis)


def _queue(action):
    cuda.get_current_stream()._enqueue(action)


def _operator(name):
    f = getattr(operator, name)
    return lambda self, *other: lazy(type(self), f, self, *other)


def _reflected(name):
    f = getattr(operator, name)
    return lambda self, other: lazy(type(self), lambda a, b: f(b, a), self, other)


def _in_place(name):
    f = getattr(operator, f"i{name}")

    def function(self, other):
        other = _known(other)
        _queue(lambda: f(self._host, other))
        return self

    return function


def _method(name):
    f = getattr(np.ndarray, name)
    return lambda self, *args, **options: lazy(type(self), lambda x: f(x, *args, **options), self)


def _view(name):
    return lambda self, *args: type(self)(getattr(self._host, name)(*args))


for _name in OPERATORS:
    setattr(Arithmetic, f"__{_name}__", _operator(_name))
for _name in OPERATORS[:5]:
    setattr(Arithmetic, f"__r{_name}__", _reflected(_name))
    setattr(Arithmetic, f"__i{_name}__", _in_place(_name))
for _name in METHODS:
    setattr(Arithmetic, _name, _method(_name))
for _name in VIEWS:
    setattr(Arithmetic, _name, _view(_name))
