"""What is computed: masks, who owns which token, sizes, merges, and the dense reference.

No module here imports MPI or knows a device.  `atomic` is here because all rooms above may write
files.
"""
