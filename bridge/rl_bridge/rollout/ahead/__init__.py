"""Rollouts that run ahead of training: pure state machines, and the driver that lets them work on real engines."""
