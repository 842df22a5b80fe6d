"""Masks: which keys each query sees, as intervals; the fourteen patterns; interval arithmetic."""
