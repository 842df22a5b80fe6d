"""Configuration, dtypes, sizes, merging of partial results, and the dense reference.

No module here imports MPI or knows a device.  `atomic` is here because every package above this
one may write files.
"""
