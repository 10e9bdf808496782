"""Algorithms: the loops, and the functions that they call: sample, score, advantages, update."""
