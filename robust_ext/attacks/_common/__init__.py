"""Shared parts of several attacks."""
