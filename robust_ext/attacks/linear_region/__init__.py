"""The linear-region attack: piecewise affine networks, searched one region at a time."""
