"""What two ranks leave behind, put together and compared."""

import json

import torch
from safetensors.torch import load_file

from rl_bridge.checkpoints.restoring import read_driver
from rl_bridge.common import step_folders
from tests.bridge.checkpoints.modules import names


def assembled(path, engine):
    """The whole tensors of an engine, from the pieces of its ranks; and everything else of its state."""
    index = json.loads((path / engine / "index.json").read_text())
    shards = {file.name: load_file(file) for file in (path / engine).glob("*.safetensors")}
    tensors = {}
    for name, tensor in index["tensors"].items():
        whole = torch.full(tensor["shape"], -7).to(getattr(torch, tensor["dtype"]))
        for piece in tensor["pieces"]:
            place = tuple(slice(a, a + n) for a, n in zip(piece["offsets"], piece["sizes"], strict=True))
            stored = shards[piece["file"].split("/")[1]]
            whole[place] = stored[f"{name}@{','.join(map(str, piece['offsets']))}"]
        tensors[name] = whole
    return tensors, index["structure"]


def assert_same_state(path, other, *engines):
    for engine in engines:
        (ours, plain), (theirs, other_plain) = assembled(path, engine), assembled(other, engine)
        assert plain == other_plain and ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), (path, name)


def assert_goes_on_bit_for_bit(folder):
    assert_same_state(folder / "step-00000004", folder / "step-00000002", "policy")
    losses = [read_driver(folder / f"step-0000000{step}")["state"]["losses"] for step in (2, 4)]
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
    for name in ("slot-00000.json", "slot-00001.json"):
        ours, theirs = (json.loads((folder / f"step-0000000{step}" / "random" / name).read_text()) for step in (2, 4))
        assert ours["torch"] == theirs["torch"]


def assert_errors_named(folder):
    full, opinion, none = json.loads((folder / "messages.json").read_text())
    assert full == (
        "CheckpointError: the checkpoint step-00000001 was not written: writer 1: OSError: [Errno 28] No space left on "
        "device; there is no older one"
    )
    assert "policy: the state of rank 1 differs from that of rank 0" in opinion and "77" in opinion
    assert "rank 1 has no state" in none
    assert names(folder) == ["messages.json", "step-00000002"]
    assert step_folders.damage(folder / "step-00000002") is None


def result(folder):
    """What a run leaves behind that must not depend on interruptions."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    newest = step_folders.checkpoints(folder / "checkpoints")[-1]
    driver = read_driver(newest)
    del driver["state"]["seconds"], driver["state"]["record"]["metrics_bytes"], driver["state"]["record"]["crc32"]
    generators = {file.name: file.read_bytes() for file in (newest / "random").iterdir()}
    own = {"seconds", "time", "attempt", "run"}
    timeless = [{key: value for key, value in record.items() if key not in own} for record in records]
    return newest.name, driver, generators, timeless


def assert_same_result(folder, whole):
    assert result(folder) == result(whole)
    newest = whole / "checkpoints" / result(whole)[0]
    assert_same_state(folder / "checkpoints" / newest.name, newest, "policy", "reference")
    assert not list((folder / "checkpoints").glob("*.tmp"))
