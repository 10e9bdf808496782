"""The public API of loops of your own: a few lines over engines, which ``rl_bridge`` gives by name."""
