"""Communication between ranks: the process grid, messages with tensors, and collective errors."""
