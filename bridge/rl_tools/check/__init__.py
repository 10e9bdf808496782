"""`rl-fn check`: rl_fn and its dialects against the installed libraries themselves, and a loss against the laws."""
