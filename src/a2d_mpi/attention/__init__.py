"""The plan that users hold, and the executor of programs."""
