"""What a method needs on a machine: bytes, memory, seconds.  No module here imports MPI."""
