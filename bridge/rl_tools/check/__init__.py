"""rl_fn and its dialects against the installed libraries themselves: `rl-fn check LIBRARY`."""
