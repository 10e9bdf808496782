"""Whole pipelines: a config in, a run folder out. What the command line and the experiments call."""
