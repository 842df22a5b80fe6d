"""Train a model of transformers on texts, its sequence spread over the ranks."""

from a2d_mpi.__main__ import start

start("train")
