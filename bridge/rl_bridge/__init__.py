"""rl_fn in PyTorch: trainers, engines, rollouts."""
