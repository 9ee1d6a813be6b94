"""The nearest point of a box that satisfies linear constraints, by dual methods for l2, linf and l1."""
