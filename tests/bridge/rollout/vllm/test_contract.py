"""What an update relies on, of the double and of real vLLM alike: without this a test on the double proves nothing."""

import pytest
import torch

from rl_bridge.rollout.vllm.weight_copies import Copies, header_of
from rl_bridge.rollout.vllm.weight_updates import buckets_by_layer
from rl_bridge.weights.manifest import Manifest, TensorSpec
from tests.bridge.rollout.vllm.policies import ENGINES, PROMPT, RUNNING, draw, ends_of, gap, make_model, start_request

NEAR, FAR = 1e-4, 1e-2


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("model"), make_model(tied=True)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(params=ENGINES, scope="module")
def client(start, request):
    made = request.param(start[0])
    yield made
    made.close()


def filled(folder, model):
    """The model's weights as a copy of the checkpoint in a folder."""
    copies = Copies(folder)
    copy = copies.begin(Manifest(copies.expected))
    for name, tensor in model.named_parameters():
        copy.tensors[name].copy_(tensor)
    return copies, copy


@pytest.fixture(scope="module")
def first(start):
    """The weights that the engine started from."""
    copies, copy = filled(*start)
    yield copy
    copies.close()


@pytest.fixture(scope="module")
def changed(start):
    """Other weights: the model, and their copy."""
    model = make_model(tied=True)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(0.03 * noise)
    copies, copy = filled(start[0], model)
    yield model, copy
    copies.close()


@pytest.fixture
def fresh(client, first):
    """The engine with its first weights, whatever the test before did to it."""
    assert not client.step() and not client.has_unfinished_requests()
    if client.version() != "0":
        client.pause()
        client.start()
        load(client, first)
        client.finish("0")
        client.resume()
    assert not client.is_paused()
    client.reset_prefix_cache()
    return client


def load(client, copy, size=40_000):
    """In several buckets."""
    buckets = list(buckets_by_layer(copy.specs, size))
    assert len(buckets) > 1
    for names in buckets:
        client.update(copy.folder, names)


def test_what_is_drawn_says_where_it_comes_from(start, fresh):
    first = draw(fresh)
    assert (len(first.tokens), first.cached, first.version, first.prompt) == (12, 0, "0", PROMPT)
    assert gap(first, start[1]) < NEAR
    again = draw(fresh)
    assert (again.tokens, again.cached) == (first.tokens, 32) and gap(again, start[1]) < NEAR
    assert fresh.limits() == (60, 96, 32)


def test_keys_and_values_outlive_their_weights_until_the_cache_is_reset(fresh, changed):
    model, copy = changed
    draw(fresh)
    fresh._core.pause_scheduler("keep", clear_cache=False)
    fresh.start()
    load(fresh, copy)
    fresh.finish("7")
    stale = draw(fresh)
    assert (stale.cached, stale.version, fresh.version()) == (32, "7", "7") and gap(stale, model) > FAR
    assert fresh.reset_prefix_cache()
    right = draw(fresh)
    assert right.cached == 0 and gap(right, model) < NEAR
    assert fresh.is_paused()
    fresh.resume()
    assert not fresh.is_paused()


def test_a_paused_request_goes_on_with_the_new_weights_and_nothing_of_the_old(start, fresh, changed):
    model, copy = changed
    start_request(fresh, "kept")
    fresh.pause()
    assert fresh.is_paused() and fresh.step() == []
    fresh.start()
    load(fresh, copy)
    fresh.finish("8")
    assert len(draw(fresh).tokens) == 12 and fresh.is_paused() and fresh.step() == []
    fresh.resume()
    [ended] = ends_of(fresh)
    drawn = ended.outputs[0]
    assert [span.version for span in drawn.weight_versions] == ["0", "8"]
    at = drawn.weight_versions[1].start
    logprobs = [row[token].logprob for token, row in zip(drawn.token_ids, drawn.logprobs, strict=True)]
    for own, first, last in ((start[1], 0, at), (model, at, 30)):
        sequence = torch.tensor([[*RUNNING, *drawn.token_ids]])
        scores = torch.log_softmax(own(sequence).logits[0], -1)
        for place in range(first, last):
            expected = scores[len(RUNNING) - 1 + place, drawn.token_ids[place]]
            assert abs(float(expected) - logprobs[place]) < NEAR


def test_calls_out_of_order_raise_and_leave_the_engine_as_it_is(start, fresh, changed):
    _, copy = changed
    with pytest.raises(RuntimeError, match="start"):
        fresh.update(copy.folder, list(copy.specs))
    with pytest.raises(RuntimeError, match="matching start"):
        fresh.finish("9")
    fresh.pause()
    fresh.start()
    with pytest.raises(RuntimeError, match="already active"):
        fresh.start()
    with pytest.raises(ValueError, match="unknown"):
        fresh.update(copy.folder, ["model.layers.9.mlp.down_proj.weight"])
    fresh.resume()
    assert fresh.version() == "0"


def test_a_copy_of_another_model_is_refused_before_a_layer_is_touched(start, fresh, tmp_path):
    specs = header_of(start[0]) | {"model.norm.weight": TensorSpec((63,), torch.float32)}
    copies = Copies(start[0], tmp_path)
    copy = copies.begin(Manifest(specs))
    fresh.pause()
    fresh.start()
    with pytest.raises(ValueError, match=r"nothing was overwritten: weight 'model\.norm\.weight': expected .*63"):
        fresh.update(copy.folder, list(specs))
    fresh.resume()
    assert gap(draw(fresh), start[1]) < NEAR


def test_an_engine_that_sleeps_draws_nothing_and_goes_on_when_it_wakes(start, fresh):
    wanted = drawn_alone(fresh)
    start_request(fresh, "slept")
    fresh.engine.sleep(level=0, mode="keep")
    assert fresh.is_paused() and fresh.step() == []
    fresh.engine.wake_up(["scheduling"])
    assert not fresh.is_paused()
    [ended] = ends_of(fresh)
    assert ended.outputs[0].token_ids == wanted and not fresh.has_unfinished_requests()


def drawn_alone(client):
    start_request(client, "awake")
    [ended] = ends_of(client)
    return ended.outputs[0].token_ids


@pytest.mark.parametrize("why", ["incomplete", "twice"])
def test_an_update_that_breaks_off_leaves_an_engine_to_be_replaced(start, fresh, changed, why):
    model, copy = changed
    start_request(fresh, "again")
    fresh.pause()
    fresh.start()
    first, *_ = buckets_by_layer(copy.specs, 1)
    fresh.update(copy.folder, first)
    if why == "incomplete":
        with pytest.raises(ValueError, match="ended before"):
            fresh.finish("9")
    else:
        with pytest.raises(ValueError, match="came twice"):
            fresh.update(copy.folder, first)
    with pytest.raises(RuntimeError):
        draw(fresh)
    fresh.replace(copy.folder, "9")
    assert fresh.is_paused() and fresh.version() == "9" and fresh.step() == []
    probe = draw(fresh)
    assert (probe.version, probe.cached) == ("9", 0) and gap(probe, model) < NEAR
    fresh.resume()
    [ended] = ends_of(fresh)
    assert [span.version for span in ended.outputs[0].weight_versions] == ["9"]
    assert ended.request_id == "again" and not fresh.has_unfinished_requests()
