"""Writes an int8 checkpoint of a model: own_codes.py MODEL FOLDER."""

import sys
from pathlib import Path

from rl_bridge.models.compressed_tensors import write_checkpoint
from rl_bridge.models.model_source import PretrainedSource

if __name__ == "__main__":
    write_checkpoint(PretrainedSource(sys.argv[1]), Path(sys.argv[2]), "int8")
