"""The checklist of an update on the double: its order, a failure of each step, and of the engines that come after."""

import pytest
import torch

from rl_bridge.algorithms.policy_setup import PolicyEngines, Replaced
from rl_bridge.engines import TrainEngine
from rl_bridge.executors import LocalExecutor
from rl_bridge.rollout.inside_vllm.held_weights import Held
from rl_bridge.rollout.vllm.weight_probe import Tolerance
from rl_bridge.rollout.vllm.weight_updates import REPLACEMENTS, UpdateFailed
from rl_bridge.weights import WeightSyncError
from tests.bridge.rollout.vllm import double
from tests.bridge.rollout.vllm.double import DoubleEngine, open_double
from tests.bridge.rollout.vllm.policies import (
    draw,
    ends_of,
    gap,
    make_model,
    rollout,
    start_request,
    trainer,
    worker_of,
)

ORDER = ["generate", "pause", "start", "update", "finish", "version", "held", "reset_prefix_cache", "generate"]


@pytest.fixture
def begun(tmp_path):
    """A policy at version 1, and an engine that has taken nothing yet."""
    model, executor = make_model(tied=True), LocalExecutor("cpu")
    model.save_pretrained(tmp_path / "model")
    engine, worker = rollout(open_double, tmp_path / "model", executor, copies=tmp_path / "copies")
    policy = trainer(model, executor)
    policy.advance()
    yield policy, engine, worker
    worker.updated.receiver.copies.close()


@pytest.fixture
def world(begun):
    """A policy at version 2, its proved copy of version 1 in the engine, and a request that runs."""
    policy, engine, worker = begun
    policy.sync_weights(engine)
    start_request(worker.client, "running")
    policy.advance()
    return begun


def model_of(policy):
    return worker_of(policy).model


def failing(name):
    def fail(*args, **options):
        raise ConnectionError(f"{name} failed")

    return fail


def test_the_order_of_an_update(world, monkeypatch):
    policy, engine, worker = world
    calls = []
    for name in {*ORDER, "resume"}:
        call = getattr(worker.client, name)

        def noted(*args, name=name, call=call, **options):
            calls.append(name)
            return call(*args, **options)

        monkeypatch.setattr(worker.client, name, noted)
    scores = type(worker_of(policy)).token_logprobs

    def scored(self, batch):
        calls.append("scores")
        assert worker.client._core.is_scheduler_paused() and worker.updated._version is None
        with pytest.raises(ValueError, match="no proof"):
            worker.updated.version()
        return scores(self, batch)

    monkeypatch.setattr(type(worker_of(policy)), "token_logprobs", scored)
    policy.sync_weights(engine)
    assert calls == [*ORDER, "scores", "resume"]
    [ended] = ends_of(worker.client)
    assert [span.version for span in ended.outputs[0].weight_versions] == ["1", "2"]


@pytest.mark.parametrize("name", ["generate", "pause", "start", "update", "finish", "reset_prefix_cache"])
def test_a_step_that_fails_replaces_the_engine_and_the_run_goes_on(world, monkeypatch, caplog, name):
    policy, engine, worker = world
    old = worker.client.engine
    call, left = getattr(worker.client, name), [1]

    def once(*args, **options):
        return failing(name)() if left and left.pop() else call(*args, **options)

    monkeypatch.setattr(worker.client, name, once)
    assert policy.sync_weights(engine) == engine.weights_version == 2, "the update has happened, and is proved"
    assert old.closed and worker.updated.replaced == policy.replaced_engines == 1
    [why] = policy.last_sync.replaced
    assert why.startswith("worker 0: update to version 2, step ") and f"{name} failed" in why
    assert f"version 2: the engine was replaced by one with these weights, proved\n{why}" in caplog.text
    assert gap(draw(worker.client), model_of(policy)) < 1e-4
    [ended] = ends_of(worker.client)
    assert [span.version for span in ended.outputs[0].weight_versions] == ["2"]


def test_an_engine_that_does_not_open_from_the_new_weights_goes_back_to_the_proved_ones(world, monkeypatch):
    policy, engine, worker = world
    at_one = draw(worker.client)
    monkeypatch.setattr(worker.client, "update", failing("update"))
    opened = DoubleEngine.__init__

    def refuse(self, folder):
        if folder == worker.updated._copy.folder:
            raise OSError("out of memory")
        opened(self, folder)

    monkeypatch.setattr(DoubleEngine, "__init__", refuse)
    with pytest.raises(WeightSyncError, match="update failed; a fresh engine from the same weights: out of memory"):
        policy.sync_weights(engine)
    assert (engine.weights_version, worker.updated.replaced) == (1, 2)
    again = draw(worker.client)
    assert (again.tokens, again.logprobs, again.version) == (at_one.tokens, at_one.logprobs, "1")
    assert len(ends_of(worker.client)) == 1


def test_more_fresh_engines_in_a_row_than_may_stop_the_run(world, monkeypatch):
    policy, engine, worker = world
    with monkeypatch.context() as patch:
        patch.setattr(worker.client, "update", failing("update"))
        for _ in range(REPLACEMENTS):
            policy.sync_weights(engine)
            policy.advance()
    policy.sync_weights(engine)  # an engine that takes weights: the count begins anew
    monkeypatch.setattr(worker.client, "update", failing("update"))
    for _ in range(REPLACEMENTS):
        policy.advance()
        assert policy.sync_weights(engine) == engine.weights_version
    policy.advance()
    with pytest.raises(WeightSyncError, match=r"4 updates in a row needed a fresh engine, and 3 may.*update failed"):
        policy.sync_weights(engine)
    assert engine.weights_version == policy.weights_version() and gap(draw(worker.client), model_of(policy)) < 1e-4


def test_as_many_fresh_engines_in_a_row_may_be_the_first(begun, monkeypatch):
    policy, engine, worker = begun
    monkeypatch.setattr(worker.client, "update", failing("update"))
    for _ in range(REPLACEMENTS):
        assert policy.sync_weights(engine) == engine.weights_version == policy.weights_version()
        policy.advance()
    with pytest.raises(WeightSyncError, match=r"4 updates in a row needed a fresh engine, and 3 may.*update failed"):
        policy.sync_weights(engine)


def test_a_step_s_record_says_how_many_engines_were_replaced_and_tensors_not_compared(world, monkeypatch):
    policy, engine, worker = world
    counted = Replaced(PolicyEngines(policy=policy, rollout=engine))
    none = {"weights/engine_replaced": 0.0, "weights/not_compared": 0.0}
    assert counted.metrics() == none and counted.warning(0) is None
    with monkeypatch.context() as patch:
        patch.setattr(worker.client, "update", failing("update"))
        policy.sync_weights(engine)
    assert counted.metrics() == none | {"weights/engine_replaced": 1.0}
    assert counted.warning(7).startswith("step 7: 1 engines of the rollout were replaced, and have the new weights")
    policy.advance()
    worker.updated._blind = None  # as before the first update: the engine is looked at
    unknown = {"own.scale": "in no checkpoint", "lm_head.weight": "Head: its layout is not known"}
    monkeypatch.setattr(worker.client, "held", lambda folder, adapter=None: Held(1, {}, unknown))
    for _ in range(2):
        policy.sync_weights(engine)
        assert counted.metrics() == none | {"weights/not_compared": 2.0} and counted.warning(8) is None


def test_without_any_engine_the_worker_refuses_to_be_used(world, monkeypatch):
    policy, engine, worker = world
    monkeypatch.setattr(worker.client, "update", failing("update"))
    monkeypatch.setattr(DoubleEngine, "__init__", failing("opening"))
    with pytest.raises(WeightSyncError, match=r"no engine opens with version 1 either: opening failed"):
        policy.sync_weights(engine)
    with pytest.raises(ValueError, match="has no proof"):
        _ = engine.weights_version
    monkeypatch.undo()
    policy.sync_weights(engine)  # there is no engine to update: a fresh one comes
    assert policy.replaced_engines == 1
    assert engine.weights_version == 2 and gap(draw(worker.client), model_of(policy)) < 1e-4


def test_weights_that_are_not_the_trainers_lead_back_to_the_proved_ones(world, monkeypatch):
    policy, engine, worker = world
    module = worker_of(policy)
    scores = type(module).token_logprobs
    monkeypatch.setattr(type(module), "token_logprobs", lambda self, batch: scores(self, batch) - 0.02)
    with pytest.raises(
        WeightSyncError,
        match=r"version 2: the engine went back to its last proved weights\nworker 0: .*0\.02 nats .* in the mean.*; "
        "a fresh engine from the same weights: the",
    ):
        policy.sync_weights(engine)
    assert (engine.weights_version, worker.updated.replaced) == (1, 2)
    monkeypatch.undo()
    assert policy.sync_weights(engine) == engine.weights_version == 2


def spoil(monkeypatch, updated, size, *, shown=False):
    """From now on an engine that opens from the proved copy has other weights than the copy.

    ``shown``: the engine shows its weights; otherwise its samples speak alone.
    """
    if not shown:
        monkeypatch.setattr(updated.client, "held", lambda folder, adapter=None: Held(1, {}, {}))
    opened = DoubleEngine.__init__

    def other(self, folder):
        opened(self, folder)
        if folder == updated.receiver.copies.proved.folder:
            with torch.no_grad():
                self.model.model.norm.weight.mul_(1 + size)

    monkeypatch.setattr(DoubleEngine, "__init__", other)


@pytest.mark.parametrize(
    ("size", "shown", "why"),
    [
        (0.05, False, "nats from the trainer's"),
        (3.0, False, "with the same seed these weights drew"),
        (1e-6, True, "elements of model.norm.weight are not what was sent"),
    ],
    ids=["the same tokens", "other tokens", "other weights"],
)
def test_an_engine_that_goes_back_is_proved_again(world, monkeypatch, size, shown, why):
    policy, engine, worker = world
    with monkeypatch.context() as patch:
        patch.setattr(worker.client, "update", failing("update"))
        spoil(patch, worker.updated, size, shown=shown)
        scores = type(worker_of(policy)).token_logprobs
        patch.setattr(type(worker_of(policy)), "token_logprobs", lambda self, batch: scores(self, batch) - 0.5)
        with pytest.raises(WeightSyncError, match=f"no engine opens with version 1 either: .*{why}"):
            policy.sync_weights(engine)
        with pytest.raises(ValueError, match="has no proof"):
            _ = engine.weights_version
    policy.sync_weights(engine)
    assert engine.weights_version == 2 and gap(draw(worker.client), model_of(policy)) < 1e-4


def test_an_engine_that_is_started_again_is_proved_again(world, monkeypatch):
    _, engine, worker = world
    worker.updated.restart()
    assert engine.weights_version == 1
    spoil(monkeypatch, worker.updated, 0.05)
    with pytest.raises(UpdateFailed, match=r"no engine opens with version 1 either: .*nats from the trainer's"):
        worker.updated.restart()
    with pytest.raises(ValueError, match="has no proof"):
        _ = engine.weights_version


def test_going_back_reads_nothing_from_a_prefix_cache_and_says_its_version(world, monkeypatch):
    *_, worker = world
    replace = worker.client.replace
    monkeypatch.setattr(worker.client, "replace", lambda folder, version, *more: replace(folder, "7", *more))
    with pytest.raises(UpdateFailed, match="weights of version '7' drew the tokens, not '1'"):
        worker.updated.restart()


def test_nothing_is_drawn_before_its_proof(world, monkeypatch):
    """The request is shorter than the probe, and all its tokens are of proved weights."""
    policy, engine, worker = world
    module = worker_of(policy)
    worker.client.abort_request(["running"])
    start_request(worker.client, "short", count=8)
    scores = type(module).token_logprobs

    def scored(self, batch):
        assert worker.client.step() == []
        return scores(self, batch) + (0.5 if worker.updated.replaced == 0 else 0.0)

    monkeypatch.setattr(type(module), "token_logprobs", scored)
    policy.sync_weights(engine)
    assert "0.5 nats" in policy.last_sync.replaced[0]
    [ended] = ends_of(worker.client)
    assert ended.request_id == "short" and [s.version for s in ended.outputs[0].weight_versions] == ["2"]


def test_what_cannot_be_proved_is_not_sent(world):
    policy, engine, worker = world
    plain = TrainEngine(lambda: torch.nn.Linear(2, 2), executor=policy.executor, name="plain").build()
    with pytest.raises(ValueError, match="has no scoring_config and no token_logprobs; nothing was sent"):
        plain.sync_weights(engine)
    with pytest.raises(ValueError, match="takes adapters merged"):
        list(worker.weight_receiver().outline(adapter=True))
    with pytest.raises(WeightSyncError, match="cannot share the memory"):
        policy.sync_weights(engine, share=True)
    assert engine.weights_version == 1 and worker.updated.replaced == 0
    worker.updated.receiver.version = 3
    with pytest.raises(ValueError, match="weights of version 3 came, and the engine still has 1"):
        _ = engine.weights_version


@pytest.fixture
def rounded(tmp_path):
    """An engine of bfloat16 whose model rounds by more than this precision does otherwise."""
    model, executor = make_model(tied=True), LocalExecutor("cpu")
    model.save_pretrained(tmp_path / "model")
    engine, worker = rollout(open_double, tmp_path / "model", executor, copies=tmp_path / "copies", precision="bf16")
    yield trainer(model, executor), engine, worker
    worker.updated.receiver.copies.close()


def off_by(monkeypatch, policy, gap_of):
    """The trainer's scores of a look at so many tokens are this much from the engine's."""
    module = type(worker_of(policy))
    scores = module.token_logprobs
    monkeypatch.setattr(
        module, "token_logprobs", lambda self, batch: scores(self, batch) + gap_of(int(batch.mask.sum()))
    )


def test_right_updates_of_a_model_with_large_roundings_are_not_refused(rounded, monkeypatch):
    """ROLL-5: 0.055 nats are this model's rounding, 0.05 were allowed; nor is a row of eight unlucky tokens the end."""
    policy, engine, worker = rounded
    for gaps in ({8: 0.055, 32: 0.045}, {8: 0.06, 32: 0.06}, {8: 0.3, 32: 0.05}):
        policy.advance()
        with monkeypatch.context() as patch:
            off_by(patch, policy, gaps.__getitem__)
            policy.sync_weights(engine)
        assert worker.updated.replaced == 0
    policy.advance()
    off_by(monkeypatch, policy, lambda tokens: 0.4)
    with pytest.raises(
        WeightSyncError, match=r"0\.4 nats .* allowed are 0\.18\d* and .*--rollout\.vllm\.proof-tolerance"
    ):
        policy.sync_weights(engine)
    assert engine.weights_version == 3


def test_a_tolerance_that_was_asked_for_is_kept(rounded, monkeypatch):
    policy, engine, worker = rounded
    worker.updated._tolerance = Tolerance.of("bf16", mean=0.05)
    policy.advance()
    off_by(monkeypatch, policy, lambda tokens: 0.06)
    with pytest.raises(WeightSyncError, match=r"allowed are 0\.05 and 0\.5"):
        policy.sync_weights(engine)


def test_an_update_is_proved_at_the_temperature_of_training(world):
    """FINDINGS part 5: only real vLLM caught another one."""
    _, engine, worker = world
    policy = trainer(make_model(tied=True), engine.executor, name="warm", temperature=0.4)
    for _ in range(3):
        policy.advance()
    policy.sync_weights(engine)
    assert worker.updated.replaced == 0 and worker.updated._proof.probe.temperature == 0.4


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
)
def test_a_lost_update_of_one_tensor_is_found(world, monkeypatch, name):
    """ROLL-7: 1e-6 of itself, lost inside the engine; a fresh engine gets it."""
    policy, engine, worker = world
    policy.sync_weights(engine)
    parameter = dict(model_of(policy).named_parameters())[name]
    old = parameter.clone()
    parameter.mul_(1 + 1e-6)
    worker_of(policy).steps += 1
    read = double.mapped
    monkeypatch.setattr(double, "mapped", lambda folder: {**read(folder), name: old})
    policy.sync_weights(engine)
    [said] = policy.last_sync.replaced
    assert f"step 'compare what the engine holds': {name}: " in said
    assert engine.weights_version == 3 and worker.updated.replaced == 1


def test_tensors_in_an_order_of_the_engine_s_own_are_said_once_and_left_to_the_samples(rounded, monkeypatch, caplog):
    """A layout that is not known may not refuse right updates; what was shown once may not be hidden later."""
    policy, engine, worker = rounded
    held, hidden = worker.client.held, {}
    strange = {"model.norm.weight": "3 of 64 elements"}
    monkeypatch.setattr(
        worker.client, "held", lambda folder, adapter=None: Held(1, strange, hidden | held(folder, adapter).unread)
    )
    for _ in range(2):
        policy.advance()
        policy.sync_weights(engine)
    said = [record.message for record in caplog.records if "cannot be compared" in record.message]
    assert len(said) == 1 and "model.norm.weight" in said[0] and worker.updated.replaced == 0
    hidden["lm_head.weight"] = "its layout is not known"
    policy.advance()
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight: its layout is not known"):
        policy.sync_weights(engine)
