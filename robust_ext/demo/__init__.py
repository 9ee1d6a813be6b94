"""The demonstration: an embedded network, and attacks that pass and fail on it."""
