"""Which torch functions can be followed: by a rule, or because they do not touch values."""

from __future__ import annotations

from robust_ext.attacks.linear_region import arithmetic_rules, gate_rules, shape_rules, winner_rules

# Functions that tell about a tensor without its values.
QUERIES = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("dtype", "device", "layout", "is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse", "is_quantized", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_leaf", "requires_grad", "requires_grad_", "grad_fn"),
    *("register_hook", "__len__", "__repr__", "__format__", "__hash__"),
}
# Functions that take no more than the shape of their input.
CONSTANT_RESULTS = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
}
RULES = {**arithmetic_rules.RULES, **gate_rules.RULES, **winner_rules.RULES, **shape_rules.RULES}
