"""Modules that an engine's workers hold: models that score, and models that train."""
