"""Generate text with a model of transformers, with the KV cache spread over the ranks."""

from a2d_mpi.__main__ import start

start("generate")
