"""What operations share: arguments, row states, blocks, matrix products, scaling, masks of allowed tokens."""
