"""The commands of ``python -m a2d_mpi``: the options of each, and the function that they are for.

A module has ``build``, or ``COMMANDS`` and ``DEFAULT`` of its subcommands: functions that add
options to a parser and return the body of the program.  The docstring is the help.
"""
