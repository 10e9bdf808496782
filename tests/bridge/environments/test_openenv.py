import pickle
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rl_bridge.environments import load_environment
from rl_bridge.environments.environment import Session
from rl_bridge.environments.environment_calls import ThreadedSteps
from rl_bridge.environments.factories import OpenEnv
from rl_bridge.models.small import character_tokenizer
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rollout.conversations import Conversations, Limits, Opening
from tests.support.simulated_sampler import SimulatedSampler

pytestmark = pytest.mark.openenv
TOKENIZER = character_tokenizer("0123456789+-=?\n")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server of this test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("openenv_server.py")
    # A file, as the server would wait for somebody to read a pipe.
    log = tmp_path_factory.mktemp("openenv") / "log"
    with log.open("w") as errors, subprocess.Popen([sys.executable, script, str(port)], stderr=errors) as server:
        try:
            deadline = time.monotonic() + 60
            while True:
                assert server.poll() is None, log.read_text()
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                        break
                except OSError:
                    assert time.monotonic() < deadline, "the server did not answer within 60 s"
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def converse(factory, count, *, max_turns=6, row=None):
    row = {"prompt": "1+1", "reset": {"target": 12}} if row is None else row
    openings = [
        (Opening(request_id=(0, i), seed=i, row={**row, "_where": f"row {i}"}), Session(factory)) for i in range(count)
    ]
    sampler = SimulatedSampler(range(2, 11), TOKENIZER.eos_token_id)
    with ThreadedSteps(limit=60) as steps:
        limits = Limits(max_turns=max_turns, turn_tokens=6)
        return Conversations(sampler, steps, TurnTemplate(TOKENIZER), limits).run(openings)


def test_many_sessions_of_one_server_are_conversations_of_their_own(url):
    found = converse(pickle.loads(pickle.dumps(OpenEnv(url=url))), 16)
    assert {t.finish_reason for t in found} >= {"stop"} and len({t.tokens for t in found}) > 8
    for t in found:
        assert t.messages[0] == {"role": "user", "content": "1+1\n12?"}
        totals, total = [], 0
        for said, heard in zip(t.messages[1::2], t.messages[2::2], strict=False):
            total += sum(map(int, said["content"]))
            totals.append(total)
            assert heard == {"role": "user", "content": f"={total}"}
        rewards = [float(total == 12) for total in totals]
        assert list(t.turn_rewards[: len(rewards)]) == rewards
        assert t.finish_reason != "stop" or totals[-1] >= 12
    assert converse(OpenEnv(url=url), 16) == found


def test_the_address_names_the_environment(url):
    assert load_environment(url) == OpenEnv(url=url)
    (t,) = converse(load_environment(url), 1, row={"prompt": [{"role": "system", "content": "1+1"}]})
    assert [m["role"] for m in t.messages[:3]] == ["system", "user", "assistant"]
    assert t.messages[1]["content"] == "20?"


def test_an_error_of_the_server_is_the_trajectory_s(url, caplog):
    with pytest.raises(ValueError, match=r"all 1 conversations; row 0, turn 1: RuntimeError: Server error: nine"):
        converse(OpenEnv(url=url, action=lambda text: {"message": "9"}), 1)
    with pytest.raises(ValueError, match=r"turn 1: RuntimeError: Server error: .*VALIDATION_ERROR"):
        converse(OpenEnv(url=url, action=lambda text: {"lacks": text}), 1)


def test_a_server_that_is_not_there():
    with pytest.raises(ValueError, match=r"turn 0: ConnectionError: Failed to connect to ws://127.0.0.1:9/ws"):
        converse(OpenEnv(url="http://127.0.0.1:9"), 2)
