"""Each fault of a weight update on real vLLM and on its double: where it is found, and what the engine has afterwards.

RL_FN_WRITE_TABLE=1 writes the table of docs/rollouts.md; otherwise the table there must be the one measured.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_bridge.executors import LocalExecutor
from rl_bridge.weights import WeightSyncError
from tests.bridge.rollout.vllm.faults import FAULTS, NOT_DELIVERED, TIED, not_delivered
from tests.bridge.rollout.vllm.policies import (
    ENGINES,
    draw,
    ends_of,
    gap,
    make_model,
    open_vllm,
    rollout,
    start_request,
    trainer,
    worker_of,
)

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "rollouts.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
EQUAL = 1e-4
HERE: dict[str, tuple[str, str]] = {}


@pytest.fixture(scope="module", params=ENGINES)
def world(request, tmp_path_factory):
    """A trainer, one with adapters, and an engine that takes weights from both; one for all faults."""
    folder, model = tmp_path_factory.mktemp("model"), make_model(tied=True)
    model.save_pretrained(folder)
    executor = LocalExecutor("cpu")
    engine, worker = rollout(request.param, folder, executor)
    plain, adapted = trainer(model, executor), trainer(model, executor, name="adapted", adapter=True)
    yield {"real": request.param is open_vllm, "engine": engine, "worker": worker, False: plain, True: adapted}
    worker.client.close()


def whole_model(policy):
    """The model that the trainer computes with, adapters and all."""
    return worker_of(policy).model


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_and_recovered_from(world, fault, monkeypatch):
    engine, worker, policy = world["engine"], world["worker"], world[fault.adapter]
    for other in (world[False], world[True]):
        while worker_of(other).steps < worker.updated.version():
            other.advance()
    policy.advance()
    before = policy.sync_weights(engine)
    start_request(worker.client, "running")
    policy.advance()
    replaced = worker.updated.replaced

    raised = ""
    with monkeypatch.context() as patch:
        if fault.here is not None:
            fault.here(worker, patch)
        counted, said = policy.replaced_engines, ""
        try:
            policy.sync_weights(engine, through=fault.through)
            [said] = policy.last_sync.replaced
        except (ValueError, WeightSyncError) as error:
            raised = str(error)
    after, now = engine.weights_version, worker.updated.replaced - replaced
    assert after == before if raised else after == before + 1, "an update has happened and is proved, or it raised"
    assert policy.replaced_engines - counted == (after - before), "the user is told"

    # What was running ends once, drawn by one version of the weights.
    [ended] = ends_of(worker.client)
    [span] = ended.outputs[0].weight_versions
    assert (ended.request_id, len(ended.outputs[0].token_ids), int(span.version)) == ("running", 30, after)
    if after == before + 1:
        assert gap(draw(worker.client), whole_model(policy)) < EQUAL

    # The next update is a right one, and proved.
    policy.advance()
    assert policy.sync_weights(engine) == engine.weights_version == before + 2
    assert gap(draw(worker.client), whole_model(policy)) < EQUAL
    assert worker.updated.replaced == replaced + now
    if world["real"]:
        HERE[fault.name] = found_by(raised or said), left_with(now, after - before)


@pytest.mark.parametrize("world", ENGINES[1:], indirect=True)
def test_an_adapter_that_is_not_delivered_is_found_and_recovered_from(world, tmp_path, monkeypatch):
    world["worker"].client.close()  # a process has room for one
    model, executor = make_model(), LocalExecutor("cpu")
    model.save_pretrained(tmp_path)
    engine, worker = rollout(lambda place: open_vllm(place, adapter_rank=4), tmp_path, executor, adapter_rank=4)
    policy = trainer(model, executor, adapter=True)
    try:
        policy.advance_adapter()
        before = policy.sync_weights(engine)
        start_request(worker.client, "running")
        policy.advance_adapter()
        not_delivered(worker.client, monkeypatch)
        policy.sync_weights(engine)
        [said] = policy.last_sync.replaced
        [ended] = ends_of(worker.client)
        assert [int(span.version) for span in ended.outputs[0].weight_versions] == [before + 1]
        assert engine.weights_version == before + 1 and worker.updated.replaced == 1
        assert gap(draw(worker.client), whole_model(policy)) < EQUAL
        policy.advance_adapter()
        assert policy.sync_weights(engine) == before + 2 and worker.updated.replaced == 1
        assert gap(draw(worker.client), whole_model(policy)) < EQUAL
    finally:
        worker.client.close()
    HERE[NOT_DELIVERED] = found_by(said), left_with(1, 1)


def found_by(message):
    """Which check of an update it was."""
    if "step '" in message:
        return "step “" + message.split("step '")[1].split("'")[0].partition(" (")[0] + "”"
    if "no numbers" in message:
        return "while it arrives"
    assert "nothing was overwritten" in message or "comes twice" in message
    return "before anything is sent"


def left_with(replaced, advanced):
    if not replaced:
        return "goes on with its old weights; the sync raises"
    if advanced:
        return "replaced, with the new weights, proved; the run goes on"
    return "replaced, with the last proved weights; the sync raises"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """What happens with each fault in a process of its own, in which vLLM is as it comes."""
    target = tmp_path_factory.mktemp("bare") / "outcomes.json"
    command = [sys.executable, "-m", "tests.bridge.rollout.vllm.bare", str(target)]
    environment = os.environ | {"VLLM_PLUGINS": ""}
    done = subprocess.run(command, env=environment, cwd=ROOT, timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(target.read_text("utf-8"))


@pytest.mark.vllm
def test_the_table_of_the_documentation_is_what_was_measured(bare):
    assert len(HERE) == len(FAULTS) + 1, "run the whole file, in one process"
    head = ["| fault | bare vLLM 0.32 | here: found | here: the engine |", "|---|---|---|---|"]
    rows = [f"| {TIED} | {bare[TIED]} | — | has the new weights |"]
    rows += [f"| {name} | {bare[name]} | {' | '.join(HERE[name])} |" for name in HERE]
    table = "\n".join([BEGIN, *head, *rows, END])
    page = PAGE.read_text("utf-8")
    start, end = page.index(BEGIN), page.index(END) + len(END)
    if os.environ.get("RL_FN_WRITE_TABLE"):
        PAGE.write_text(page[:start] + table + page[end:], "utf-8")
    assert page[start:end] == table or os.environ.get("RL_FN_WRITE_TABLE")
