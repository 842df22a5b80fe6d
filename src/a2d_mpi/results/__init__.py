"""Files of results: HDF5, inputs, tables."""
