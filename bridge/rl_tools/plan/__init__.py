"""``rl-fn plan``: the memory of a run before it starts."""
