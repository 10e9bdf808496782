"""Algorithms, one loop a file; `modules` has what they train. A loop holds engines and knows nothing of processes."""
