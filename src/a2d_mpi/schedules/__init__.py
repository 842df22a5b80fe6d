"""Methods of distributed attention: each one writes the program of a rank, as data.

Read `steps` first, for the vocabulary, then `program`, `line` and `attention2d`.
"""
