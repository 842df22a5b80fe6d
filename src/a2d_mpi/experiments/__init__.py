"""The bodies of the programs in drivers/: measurement, checks, result files, command line."""
