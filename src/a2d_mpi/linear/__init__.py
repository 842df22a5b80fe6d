"""Linear attention over sequence shards: see docs/linear.md."""
