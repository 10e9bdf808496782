"""The Gluon kernels of the forward, a file an architecture, and what they share."""
