"""What can go wrong with a checkpoint after it was asked for."""


class CheckpointError(RuntimeError):
    """A checkpoint was not written. Those that were whole before are whole still."""
