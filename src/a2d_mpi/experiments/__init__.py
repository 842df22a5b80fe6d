"""The programs of drivers/: measurement, checks, result files, command line."""
