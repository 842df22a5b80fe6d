"""Masks as intervals of visible keys, the fourteen patterns, and interval arithmetic."""
