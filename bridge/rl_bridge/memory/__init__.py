"""Memory: what a run will need before it starts, what it has while it goes on, and a token budget that keeps to it."""
