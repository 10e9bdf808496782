"""Actors of Ray with a rollout that are killed: started again with the current weights, and asked again."""

import os
import signal

import pytest
import torch

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine, TrainEngine
from rl_bridge.engines.dispatch import returns
from rl_bridge.executors import LocalExecutor, WorkerDied
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.ahead.lanes import Lanes

PROMPTS = ["1+1=", "7", "12+34=", "98-76+54="]
SAMPLING = SamplingParams(max_new_tokens=24, n=3, seed=4)
TOKENIZER = character_tokenizer("0123456789+-=")


class Scorer(TokenScorer):
    steps = 0

    @returns("same")
    def weights_version(self):
        return self.steps

    @returns("same")
    @torch.no_grad()
    def advance(self):
        self.steps += 1
        for parameter in self.model.parameters():
            parameter.mul_(1.1)


class Dying(InProcessRollout):
    """Kills its own process in the middle of a call, as often as the file has lines."""

    def __init__(self, source, notes):
        super().__init__(source, TOKENIZER)
        self._notes = notes

    def decoder(self, sampling):
        found = super().decoder(sampling)
        if self._notes.exists() and (lines := self._notes.read_text().splitlines()):
            self._notes.write_text("\n".join(lines[1:]))
            step, left = found.step, iter(range(3))

            def last_steps():
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step()

            found.step = last_steps
        return found


class Silent(Scorer):
    """Does not say that its weights changed."""

    weights_version = None


def engines(executor, tmp_path, model, *, apart=True, scorer=Scorer):
    source = StateSource(model)
    rollout = InferenceEngine(lambda: Dying(source, tmp_path / "deaths"), executor=executor, name="rollout").build()
    policy = TrainEngine(lambda: scorer(source, ScoringConfig()), executor=executor, name="policy")
    return rollout, policy.build(not_colocate_with=[rollout] if apart else [])


def drawn(engine):
    found = engine.generate(PROMPTS, SAMPLING)
    return [(t.request_id, t.tokens, t.logprobs, t.weights_versions) for t in found]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return tiny_qwen2(TOKENIZER, hidden=16, layers=1, heads=1)


def test_what_cannot_come_back_is_not_asked_again(tmp_path, model, monkeypatch):
    rollout, policy = engines(LocalExecutor("cpu"), tmp_path, model, apart=False)
    policy.sync_weights(rollout)

    def dead(*given, **options):
        raise WorkerDied("the worker of slot 0 ended")

    monkeypatch.setattr(rollout, "call", dead)
    monkeypatch.setattr(rollout.executor, "dead", lambda: {0: WorkerDied("the worker of slot 0 ended")})
    with pytest.raises(
        WorkerDied, match=r"slot 0 ended\nIt cannot be started again: slots \[0\] died, and with them .*policy"
    ):
        drawn(rollout)
    Lanes(rollout, SAMPLING, 3)
    with pytest.raises(WorkerDied, match="requests that run ahead of training were in it"):
        drawn(rollout)
    monkeypatch.setattr(rollout.executor, "dead", dict)
    policy.advance()
    with pytest.raises(WorkerDied, match="the trainer has version 1, and requests that were begun with version 0"):
        drawn(rollout)
    rollout.bring_weights = rollout.brought = None
    with pytest.raises(WorkerDied, match=r"slot 0 ended$"):
        drawn(rollout)


@pytest.mark.parametrize("since", ["nothing", "another sync", "a step"])
def test_a_trainer_that_does_not_say_its_version_gives_its_weights_again_if_it_was_not_called_since(
    tmp_path, model, monkeypatch, since
):
    executor = LocalExecutor("cpu")
    rollout, policy = engines(executor, tmp_path, model, apart=False, scorer=Silent)
    other, _ = engines(executor, tmp_path, model, apart=False)
    policy.advance()
    assert "weights_version" not in policy.methods and policy.sync_weights(rollout) == 1
    wanted, call, deaths = drawn(rollout), rollout.call, [WorkerDied("the worker of slot 0 ended")]

    def dying(*given, **options):
        if deaths:
            raise deaths.pop()
        return call(*given, **options)

    monkeypatch.setattr(rollout, "call", dying)
    if since == "another sync":
        assert policy.sync_weights(other) == 2
    if since == "a step":
        policy.advance()
        with pytest.raises(WorkerDied, match=r"weights are gone: policy.* was called since.*a method weights_version"):
            drawn(rollout)
    else:
        assert drawn(rollout) == wanted and rollout.weights_version == rollout.brought == 1
    assert policy.sync_weights(rollout) == (3 if since == "another sync" else 2)


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ray")
@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")
def test_a_killed_actor_comes_back_with_the_current_weights_and_its_requests(tmp_path, model):
    ray = pytest.importorskip("ray")
    from rl_bridge.executors.ray import RayExecutor

    torch.set_num_threads(1)
    wanted, trainer = engines(LocalExecutor("cpu"), tmp_path, model, apart=False)
    executor = RayExecutor(slots=[{"CPU": 1}] * 2, timeout=60, start_timeout=60)
    try:
        executor.call(lambda host: torch.set_num_threads(1), {0: (), 1: ()}, what="threads")
        rollout, policy = engines(executor, tmp_path, model)
        assert (rollout.slots, policy.slots) == ([0], [1])
        for _ in range(2):
            trainer.advance()
            policy.advance()
            trainer.sync_weights(wanted)
            policy.sync_weights(rollout)
        first = drawn(wanted)
        assert drawn(rollout) == first
        (tmp_path / "deaths").write_text("once\nand again")
        assert drawn(rollout) == first, "no request is lost, none is answered twice"
        assert (rollout.revived, rollout.weights_version) == (2, 2)
        assert rollout.run(lambda host: torch.get_num_threads()) == [1]
        # Killed while it has nothing to do, it is there again for the next update.
        ray.kill(executor._actors[0])
        trainer.advance()
        policy.advance()
        trainer.sync_weights(wanted)
        policy.sync_weights(rollout)
        assert drawn(rollout) == drawn(wanted) and rollout.revived == 3
        # The trainer's weights are gone with its worker.
        ray.kill(executor._actors[1])
        with pytest.raises(WorkerDied, match="slot 1"):
            policy.sync_weights(rollout)
        ray.kill(executor._actors[0])
        with pytest.raises(WorkerDied, match=r"slot 0(?s:.*)cannot be started again: slots \[0, 1\] died"):
            drawn(rollout)
    finally:
        executor.stop()
