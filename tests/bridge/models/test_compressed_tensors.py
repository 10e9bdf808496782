"""The files of a quantised checkpoint."""

import json

import pytest
import torch

from rl_bridge.models.compressed_tensors import write_checkpoint
from rl_bridge.models.model_source import PretrainedSource, StateSource
from rl_bridge.models.stored_tensors import SafetensorsFolder
from rl_bridge.weights.source import LAYOUTS, Cast


def stored(folder):
    files = SafetensorsFolder.of_folder(folder)
    return {name: files.read(name, ()) for name in files.shapes}


@pytest.mark.parametrize("precision", [*LAYOUTS, "bf16"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 3000], ids=["one", "several"])
def test_files_hold_what_a_sync_sends(new_model, tmp_path, precision, shard_bytes):
    model = new_model(seed=3).requires_grad_(False)
    send = write_checkpoint(StateSource(model), tmp_path, precision, dtype=torch.bfloat16, shard_bytes=shard_bytes)
    wanted = {n: t for name, tensor in model.named_parameters() for n, t in send(name, tensor)}
    got = stored(tmp_path)
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), wanted[name].contiguous().view(torch.uint8)), name
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 3) == (shard_bytes == 3000)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert ("quantization_config" in config) == (precision != "bf16") == (send != Cast(torch.bfloat16))
    assert config.get("quantization_config", {"ignore": ["lm_head"]})["ignore"] == ["lm_head"]


def test_a_folder_is_read_as_a_model_in_hand_is(new_model, tmp_path):
    model = new_model(seed=3)
    model.save_pretrained(tmp_path / "model")
    for name, source in (("folder", PretrainedSource(str(tmp_path / "model"))), ("hand", StateSource(model))):
        write_checkpoint(source, tmp_path / name, "int8")
    folder, hand = stored(tmp_path / "folder"), stored(tmp_path / "hand")
    assert folder.keys() == hand.keys()
    assert all(torch.equal(folder[name], hand[name]) for name in hand)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("folder", "hand")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
