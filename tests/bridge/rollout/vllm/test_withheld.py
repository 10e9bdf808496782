"""What an update withholds, over the double: unproved tokens, draws that prove nothing, weights that are old or NaN.

Later checks would find most of these faults too, and at the price of a fresh engine; each test is for one check.
"""

from types import SimpleNamespace

import pytest

from rl_bridge.executors import LocalExecutor
from rl_bridge.rollout.rollout_worker import Generating
from rl_bridge.rollout.vllm.weight_updates import UpdateFailed
from rl_bridge.weights import WeightSyncError
from tests.bridge.rollout.vllm.double import SEATS, open_double
from tests.bridge.rollout.vllm.faults import poisoned
from tests.bridge.rollout.vllm.policies import (
    RUNNING,
    draw,
    gap,
    make_model,
    request,
    rollout,
    trainer,
    worker_of,
)

EQUAL = 1e-4


@pytest.fixture
def world(tmp_path):
    """A trainer whose first update is proved, the engine, and its worker."""
    model, executor = make_model(tied=True), LocalExecutor("cpu")
    model.save_pretrained(tmp_path)
    engine, worker = rollout(open_double, tmp_path, executor)
    policy = trainer(model, executor)
    policy.advance()
    policy.sync_weights(engine)
    yield policy, engine, worker
    worker.client.close()


def start_short(client, name):
    """A request that ends while the next probe is drawn."""
    client.add_request(name, {"prompt_token_ids": list(RUNNING)}, request(client, 4))


def given_out(client, steps=20):
    """The requests that have ended: more steps than a request has tokens, so that a second answer would come too."""
    return [output.request_id for _ in range(steps) for output in client.step() if output.finished]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": "0"}, "weights of version '0' drew the tokens, not '2'"),
        ({"version": None}, "weights of version None drew the tokens, not '2'"),
        ({"cached": 32}, "32 tokens of the prompt came from the prefix cache"),
    ],
)
def test_right_log_probabilities_of_the_wrong_draw_are_no_probe(world, monkeypatch, changed, said):
    policy, engine, worker = world
    client, generate, left = worker.client, worker.client.generate, [changed]

    def drawn(prompt, *, count, **how):
        """Wrong once, where the probe is drawn: the draw of one token before only fills the cache."""
        made = generate(prompt, count=count, **how)
        return made._replace(**left.pop()) if left and count > 1 else made

    monkeypatch.setattr(client, "generate", drawn)
    policy.advance()
    assert policy.sync_weights(engine) == engine.weights_version == 2
    [found] = policy.last_sync.replaced
    assert said in found and worker.updated.replaced == 1
    assert gap(draw(client), worker_of(policy).model) < EQUAL


def test_weights_do_not_go_back_in_time(world):
    """A sync refuses older ones itself, unless the last stream failed: then the receiver has no version."""
    policy, engine, worker = world
    late = trainer(make_model(tied=True), engine.executor, name="late")
    late.advance()
    policy.advance()
    assert policy.sync_weights(engine) == 2
    before = draw(worker.client)
    with pytest.raises(ValueError, match="version 1 came after version 2"):
        late.sync_weights(engine)
    policy.advance()
    with pytest.raises(WeightSyncError, match="no numbers"):
        policy.sync_weights(engine, through=poisoned)
    with pytest.raises(UpdateFailed, match="weights of version 1 came after those of version 2"):
        late.sync_weights(engine)
    assert engine.weights_version == 2 and worker.updated.replaced == 0
    assert draw(worker.client).tokens == before.tokens
    assert policy.sync_weights(engine) == engine.weights_version == 3


def test_weights_with_a_nan_do_not_reach_the_engine(world):
    policy, engine, worker = world
    policy.advance()
    with pytest.raises(WeightSyncError, match=r"down_proj.weight' has 1 values that are no numbers"):
        policy.sync_weights(engine, through=poisoned)
    assert engine.weights_version == 1 and worker.updated.replaced == 0


def test_what_ended_beside_an_update_is_given_out_once_and_after_the_proof(world):
    _, _, worker = world
    client = worker.client
    start_short(client, "before")
    draw(client)
    client.pause()
    start_short(client, "beside")
    assert given_out(client) == []
    draw(client)
    assert given_out(client) == []
    client.resume()
    assert given_out(client) == ["before", "beside"] and not client.has_unfinished_requests()


@pytest.mark.parametrize("rows", [0, SEATS, 3 * SEATS])
def test_an_update_waits_for_no_row_however_many_there_are(world, rows):
    """All are longer than the probe: one that waited for a seat, or behind them, would step the engine 20 times."""
    policy, engine, worker = world
    client, core = worker.client, worker.client._core
    for row in range(rows):
        client.add_request(f"row-{row}", {"prompt_token_ids": list(RUNNING)}, request(client, 20, seed=row))
    assert given_out(client, steps=3) == []
    policy.advance()
    before, drawn = core.steps, [len(row.tokens) for row in (core.running | core.waiting).values()]
    assert policy.sync_weights(engine) == 2 and worker.updated.replaced == 0
    probe = worker.updated._probe
    assert core.steps - before == 1 + probe.count and [len(row.tokens) for row in core.waiting.values()] == drawn
    assert sorted(given_out(client, steps=100)) == [f"row-{row}" for row in range(rows)]


@pytest.fixture
def interrupted(world, monkeypatch):
    """Ctrl-C between an update and its proof, beside a request that ends with the probe."""
    policy, engine, worker = world
    policy.advance()
    start_short(worker.client, "beside")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("rl_bridge.engines.train._scores", interrupt)
        policy.sync_weights(engine)
    assert given_out(worker.client) == []
    return world


def interrupt(*given):
    raise KeyboardInterrupt


def test_a_request_that_ended_beside_an_update_without_proof_begins_again_with_the_next_one(interrupted):
    policy, engine, worker = interrupted
    for _ in range(2):
        assert policy.sync_weights(engine) == 2 and worker.updated.replaced == 0
    assert given_out(worker.client) == ["beside"] and not worker.client.has_unfinished_requests()


def test_a_stream_says_why_it_has_nothing_behind_an_update_without_proof(interrupted):
    *_, worker = interrupted
    left = iter([{}])
    worker._streams = {1: SimpleNamespace(left=1, step=lambda: next(left))}
    with pytest.raises(ValueError, match=r"has no proof: engine.sync_weights brings one"):
        Generating.next_completions(worker, 1)


def test_a_fresh_engine_answers_what_had_not_ended_and_nothing_else(world, tmp_path):
    _, _, worker = world
    client = worker.client
    start_short(client, "before")
    draw(client)
    client.pause()
    start_short(client, "beside")
    draw(client)
    client.replace(tmp_path, "1")
    assert given_out(client) == []
    client.resume()
    assert given_out(client) == ["before", "beside"] and not client.has_unfinished_requests()
