"""Checks against float64, measurements and traces."""
