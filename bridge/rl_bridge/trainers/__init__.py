"""Algorithms and the modules that they train. An algorithm holds engines and knows nothing of processes."""
