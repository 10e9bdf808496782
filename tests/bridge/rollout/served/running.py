"""Engines on the fake server: their weights, rows that are drawn to the end."""

import sys
import time
from pathlib import Path

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.served.served_engine import ServedDecoder
from rl_bridge.rollout.served.vllm_server import ServedOptions, VLLMServer
from rl_bridge.rollout.vllm.engine_options import VLLMOptions

FAKE = Path(__file__).with_name("fake_vllm.py")
SAMPLING = SamplingParams(max_new_tokens=12)
OPTIONS, SERVED = VLLMOptions(max_model_len=64, max_num_seqs=8), ServedOptions(start_seconds=30, request_seconds=30)


def weights(folder, offset=0, delay=0.001, act=""):
    """A folder that the fake starts from."""
    folder.mkdir(exist_ok=True)
    for name, value in {"offset": offset, "delay": delay, "act": act, "config.json": '{"vocab_size": 13}'}.items():
        (folder / name).write_text(str(value))
    return folder


def opened(folder, served=SERVED):
    return VLLMServer(folder, OPTIONS, served, [sys.executable, "-S", str(FAKE)])


def added(engine, count=20, limit=12, stop=(0,), sampling=SAMPLING, prepare=lambda decoder: None):
    decoder = ServedDecoder(engine, sampling, stop=stop)
    prepare(decoder)
    for key in range(count):
        decoder.add(key, [1] * (1 + key % 5), seed=key, limit=limit)
    return decoder


def finish(decoder):
    found = []
    deadline = time.monotonic() + 60
    while decoder.running:
        assert time.monotonic() < deadline, f"{decoder.running} rows never ended"
        found += decoder.step()
    assert len({drawn.key for drawn in found}) == len(found), "a row ended twice"
    return {drawn.key: drawn for drawn in found}
