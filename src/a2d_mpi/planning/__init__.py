"""Prediction of the bytes, memory and seconds of a method.  No module here imports MPI."""
