"""Needs of a method on a machine: bytes, memory, seconds.  No module here imports MPI."""
