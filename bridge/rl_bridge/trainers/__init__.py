"""Algorithms and the modules they train. An algorithm sees two engines and no rank."""
