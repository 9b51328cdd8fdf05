"""The formulas of the algorithms, as pure functions of torch tensors. docs/algorithms.md lists them."""
