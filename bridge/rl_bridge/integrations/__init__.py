"""rl-fn inside other people's libraries. Each module names the versions it was checked with."""
