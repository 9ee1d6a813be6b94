"""Piecewise affine networks: recorded as they run, and their affine map in the linear region of each point."""
