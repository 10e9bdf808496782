"""The memory of a run while it goes on."""
