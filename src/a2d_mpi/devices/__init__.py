"""Where arrays live: in the memory of this process, or on a GPU."""
