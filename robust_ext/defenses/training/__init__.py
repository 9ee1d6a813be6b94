"""Trained parts of published defenses: small networks and subspaces, and their files."""
