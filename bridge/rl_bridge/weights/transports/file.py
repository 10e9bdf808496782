"""Weights through a folder that both ends see: safetensors files, whole or not there at all."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_bridge.atomic import replacing, write_json
from rl_bridge.weights.bits import checksum
from rl_bridge.weights.buckets import Bucket, Claim
from rl_bridge.weights.ends import Sender, Taker
from rl_bridge.weights.parts import whole
from rl_bridge.weights.peers import Peers
from rl_bridge.weights.receiver import Arrival

_METADATA = "rl_bridge"


def carry_in_files(
    folder: Path,
    version: int,
    peers: Peers,
    writer: int,
    buckets: tuple[Bucket, ...],
    sender: Sender | None,
    taker: Taker | None,
) -> None:
    """Slot ``writer`` writes ``folder/version-N`` in Hugging Face's layout, and removes it when all have read it."""
    path = folder / f"version-{version}"
    try:
        if sender is not None and peers.slot == writer:
            _write(path, version, buckets, sender)
        elif sender is not None:
            for bucket in buckets:
                sender.walk(bucket.entries)
        if peers.any_failed(sender is not None and sender.failure is not None, f"that {path} is written"):
            return
        if taker is not None:
            for bucket in buckets:
                taker.attempt(lambda bucket=bucket: _read(path / _name(bucket, buckets), version, bucket, taker))
        peers.any_failed(False, f"that {path} is read")
    finally:
        if peers.slot == writer and path.is_dir():
            shutil.rmtree(path)


def _name(bucket: Bucket, buckets: tuple[Bucket, ...]) -> str:
    return f"model-{bucket.number + 1:05d}-of-{len(buckets):05d}.safetensors"


def _write(path: Path, version: int, buckets: tuple[Bucket, ...], sender: Sender) -> None:
    try:
        with replacing(path) as temporary:
            temporary.mkdir()
            places: dict[str, str] = {}
            for bucket in buckets:
                tensors: dict[str, torch.Tensor] = {}
                for entry in bucket.entries:
                    given = sender.take(entry)
                    if given is not None:
                        tensors[entry.name] = given[0].contiguous().cpu()
                # A failed source still gathers with its other workers, but writes no more.
                if sender.failure is None:
                    claims = {"version": version, "checksums": {name: checksum(t) for name, t in tensors.items()}}
                    metadata = {"format": "pt", _METADATA: json.dumps(claims)}
                    save_file(tensors, temporary / _name(bucket, buckets), metadata)
                    places |= dict.fromkeys(tensors, _name(bucket, buckets))
            if sender.failure is not None:
                raise sender.failure
            write_json(temporary / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    except Exception as error:
        sender.failure = sender.failure or error


def _read(path: Path, version: int, bucket: Bucket, taker: Taker) -> None:
    try:
        _take(path, version, bucket, taker)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} was damaged on the way, or cannot be read: {error}") from error


def _take(path: Path, version: int, bucket: Bucket, taker: Taker) -> None:
    with safe_open(path, framework="pt") as file:
        claims = json.loads(file.metadata()[_METADATA])
        if claims["version"] != version:
            raise ValueError(f"{path} is of version {claims['version']}, not {version}")
        for entry in bucket.entries:
            part = whole(entry.spec.shape)
            claim = Claim(part, claims["checksums"][entry.name])
            taker.take([Arrival(entry.name, file.get_tensor(entry.name), part, [claim])])
