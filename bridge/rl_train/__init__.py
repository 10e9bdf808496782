"""Recipes: one algorithm a file, built and looped in sight of the objects that a loop of one's own has, too."""
