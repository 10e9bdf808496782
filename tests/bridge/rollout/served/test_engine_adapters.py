"""A served engine on the fake server has the adapter that was proved last, whatever dies."""

import os
import signal

import pytest

from tests.bridge.rollout.served.running import added, finish, weights
from tests.support.processes import gone


@pytest.mark.long
def test_a_server_that_is_started_again_begins_with_the_proved_adapter(engine_of, tmp_path):
    def tokens_of(engine, *, dies=False):
        decoder = added(engine)
        if dies:
            os.kill(engine.server.process.pid, signal.SIGKILL)
        return {key: drawn.tokens for key, drawn in finish(decoder).items()}

    engine = engine_of(weights(tmp_path / "w", delay=0.01))
    without = tokens_of(engine)
    for version, offset in (("1", 3), ("2", 5)):
        engine.pause()
        engine.adopt(weights(tmp_path / version, offset=offset), version)
        engine.resume()
    proved = tokens_of(engine)
    assert proved != without and tokens_of(engine, dies=True) == proved and engine.version() == "2"
    engine.replace(tmp_path / "w", "2", tmp_path / "2")
    engine.resume()
    assert tokens_of(engine) == proved and tokens_of(engine, dies=True) == proved
    engine.replace(tmp_path / "w", "3")
    engine.resume()
    assert tokens_of(engine, dies=True) == without and engine.version() == "3"


def test_an_adapter_that_is_not_the_only_one_leaves_no_server_behind(engine_of, tmp_path):
    engine = engine_of(weights(tmp_path / "w"))
    opened, wrong = [], weights(tmp_path / "wrong", act="two adapters")
    start = engine._open
    engine._open = lambda folder: opened.append(start(folder)) or opened[-1]
    with pytest.raises(RuntimeError, match=r"workers have adapters \[\[1, 2\]\] and not the one"):
        engine.replace(wrong, "1", wrong)
    assert gone(opened[0].process.pid)
