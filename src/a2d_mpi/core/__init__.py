"""The problem itself: masks, distributions, sizes, merges, and the dense reference.

No module here imports MPI or knows a device.  `atomic` is here because all rooms above may write
files.
"""
