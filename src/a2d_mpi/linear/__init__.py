"""Linear attention on a sequence that is spread over ranks: see docs/linear.md."""
