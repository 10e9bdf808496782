"""An update while requests run on real vLLM: the probe's prompt is read in pieces beside them, and they go on."""

import pytest
import torch

from rl_bridge.executors import LocalExecutor
from tests.bridge.rollout.vllm.policies import (
    OPTIONS,
    RUNNING,
    draw,
    ends_of,
    gap,
    make_model,
    open_vllm,
    request,
    rollout,
    trainer,
    worker_of,
)

pytestmark = pytest.mark.vllm
COUNT, ROWS = 30, 4
# Fewer tokens a step than the probe's prompt has, and than a running request's, which is read again after the update.
PIECES = ("block_size=32", "max_num_batched_tokens=24")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder, model, executor = tmp_path_factory.mktemp("model"), make_model(), LocalExecutor("cpu")
    model.save_pretrained(folder)
    engine, worker = rollout(lambda place: open_vllm(place, arguments=PIECES), folder, executor)
    yield trainer(model, executor), engine, worker
    worker.client.close()


def start(client):
    """Rows with a few tokens drawn, and one whose prompt is still being read."""
    for row in range(ROWS):
        client.add_request(f"row-{row}", {"prompt_token_ids": list(RUNNING[row:])}, request(client, COUNT, seed=row))
    for _ in range(12):
        assert not client.step()
    client.add_request("late", {"prompt_token_ids": list(RUNNING)}, request(client, COUNT, seed=ROWS))
    assert not client.step()


@torch.no_grad()
def check(client, models):
    """Every row ends once, and each span has the log-probabilities of its version's full forward."""
    ended, versions = ends_of(client), []
    assert sorted(output.request_id for output in ended) == ["late", *(f"row-{row}" for row in range(ROWS))]
    for output in ended:
        [made] = output.outputs
        prompt = output.prompt_token_ids
        spans = [(int(span.version), span.start, span.end) for span in made.weight_versions]
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])] and spans[-1][2] == COUNT
        versions.append([version for version, _, _ in spans])
        for version, first, last in spans:
            scores = models[version](torch.tensor([[*prompt, *made.token_ids]])).logits[0].log_softmax(-1)
            for place in range(first, last):
                token = made.token_ids[place]
                assert abs(float(scores[len(prompt) - 1 + place, token]) - made.logprobs[place][token].logprob) < 1e-4
    return versions


def model_at(policy):
    """The trainer's model as it is now."""
    made = make_model()
    made.load_state_dict(worker_of(policy).model.state_dict())
    return made


def test_running_requests_go_on_across_an_update(world):
    policy, engine, worker = world
    old, before = policy.weights_version(), model_at(policy)
    start(worker.client)
    policy.advance()
    assert policy.sync_weights(engine) == engine.weights_version == old + 1 and worker.updated.replaced == 0
    versions = check(worker.client, {old: before, old + 1: model_at(policy)})
    assert versions == [[old, old + 1]] * (ROWS + 1)
    assert gap(draw(worker.client), worker_of(policy).model) < 1e-4


def test_an_update_waits_for_no_row_where_more_run_than_have_seats(world):
    """Behind nine rows of eight seats a probe would be drawn after the first row's end, at 30 tokens."""
    policy, engine, worker = world
    client, rows = worker.client, OPTIONS["max_num_seqs"] + 1
    for row in range(rows):
        client.add_request(f"row-{row}", {"prompt_token_ids": list(RUNNING)}, request(client, COUNT, seed=row))
    for _ in range(12):
        assert not client.step()
    policy.advance()
    before = tokens_of(client)
    assert policy.sync_weights(engine) == engine.weights_version and worker.updated.replaced == 0
    assert before == {name: tokens_of(client)[name] for name in before} and sum(before.values()) > 0
    assert sorted(output.request_id for output in ends_of(client)) == [f"row-{row}" for row in range(rows)]


def tokens_of(client):
    """Tokens that each request of the scheduler has drawn."""
    return {name: one.num_output_tokens for name, one in client._core.scheduler.requests.items()}


def test_running_requests_begin_again_in_a_replaced_engine(world, monkeypatch):
    policy, engine, worker = world
    policy.advance()
    policy.sync_weights(engine)
    start(worker.client)
    policy.advance()

    def lost(folder, names):
        raise ConnectionError("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(worker.client, "update", lost)
        new = policy.sync_weights(engine)
    assert new == engine.weights_version == policy.weights_version() and worker.updated.replaced == 1
    assert "the connection was lost" in policy.last_sync.replaced[0]
    assert check(worker.client, {new: model_at(policy)}) == [[new]] * (ROWS + 1)


def test_draws_leave_torch_s_own_random_numbers_alone(world):
    """The trainer may draw from them at any moment, in another thread: here, in the middle of the engine's step."""
    *_, worker = world
    client, drawn = worker.client, []
    runner = client.engine.model_executor.driver_worker.model_runner
    torch.manual_seed(3)
    hook = runner.sampler.topk_topp_sampler.register_forward_pre_hook(
        lambda module, args: drawn.append(float(torch.rand(1)))
    )
    try:
        first = draw(client, count=8)
    finally:
        hook.remove()
    assert len(drawn) >= 8 and drawn == torch_sequence(3, len(drawn))
    assert draw(client, count=8).tokens == first.tokens


def torch_sequence(seed, count):
    """What torch's own generator gives one after another."""
    generator = torch.Generator().manual_seed(seed)
    return [float(torch.rand(1, generator=generator)) for _ in range(count)]
