"""The mathematics: pure functions of torch tensors. docs/algorithms.md lists formulas, papers and flags."""
