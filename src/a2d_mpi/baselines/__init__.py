"""Other methods behind the interface of `Attention2D`, on the same kernels."""
