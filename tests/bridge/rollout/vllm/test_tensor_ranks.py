"""An engine of vLLM cut over two processes: it draws, takes updates and dies as one of one process does (ROLL-14)."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_bridge.common.root_cause import root_cause
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine
from rl_bridge.executors.session import LocalExecutor
from rl_bridge.models.model_source import StateSource
from rl_bridge.rollout.inprocess import InProcessRollout
from rl_bridge.rollout.served.process import ServerDied, ServerProcess
from rl_bridge.rollout.served.served_rollout import ServedRollout
from rl_bridge.rollout.served.vllm_server import ServedOptions
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from rl_bridge.rollout.vllm.ranks import binding, numa_nodes
from tests.bridge.rollout.vllm.policies import trainer, worker_of

PROMPTS = ["1+1=", "7", "12+34=", "98-76+54="]
OPTIONS = VLLMOptions(max_model_len=96, max_num_seqs=16, kv_cache_gib=0.02, arguments=("block_size=32",))
SAMPLING = SamplingParams(max_new_tokens=12, n=2, seed=4)
TRUNCATED = replace(SAMPLING, temperature=0.8, top_k=12, top_p=0.9)
STOPPED = replace(TRUNCATED, stop=("1", "="))


def alive(pid):
    try:
        # A zombie is gone, and only not yet waited for.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def shared_by(pids):
    """The files in /dev/shm that these processes have in their memory, and whether each still has its name."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    names = {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return {Path(name.removesuffix(" (deleted)")): not name.endswith(" (deleted)") for name in names}


def assert_without_names(shared, size=2):
    """Of vLLM's sums: what has no name ends with its processes, however they end.

    vLLM's build for CPUs without AVX-512 has no such files: ranks add up by gloo.
    """
    import vllm._custom_ops  # noqa: F401  # loads the operations

    sums = [named for file, named in shared.items() if "cpushm" in file.name]
    assert len(sums) == (size if hasattr(torch.ops._C, "init_shm_manager") else 0) and not any(sums), shared


def ranks_of(worker):
    return [one.proc.pid for one in worker._client.engine.model_executor.workers]


def served_ranks(worker):
    """Processes of a server's ranks, in their order."""
    group, found = os.getpgid(worker.engine.server.process.pid), {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, FileNotFoundError):
            title = (folder / "cmdline").read_text()
            if os.getpgid(int(folder.name)) == group and "Worker_TP" in title:
                found[title] = int(folder.name)
    return [found[title] for title in sorted(found)]


def build(model, tokenizer, executor, *, size=2, options=OPTIONS, **served):
    """The engine of the facade; its worker is in this process."""
    from rl_bridge.rollout.vllm.vllm_rollout import VLLMRollout

    factory = partial(ServedRollout, served=ServedOptions(**served)) if served else VLLMRollout
    factory = partial(factory, StateSource(model), tokenizer, options)
    return InferenceEngine(factory, executor=executor, name="rollout").build(tensor_parallel_size=size)


@pytest.fixture(scope="module")
def engine(model, tokenizer):
    """Of two ranks, in this process."""
    engine = build(model, tokenizer, LocalExecutor("cpu"))
    worker = worker_of(engine)
    ranks = ranks_of(worker)
    assert len(ranks) == 2 and all(map(alive, ranks))
    yield engine
    ranks = {*ranks, *ranks_of(worker)}
    shared = shared_by(ranks_of(worker))
    worker.close()
    assert not any(map(alive, ranks)), "no rank outlives the engine's end"
    assert not any(file.exists() for file in shared)


@pytest.fixture(scope="module")
def one(engine, model, tokenizer):
    """Of one rank, beside the other; both have what one trainer sent last."""
    one = build(model, tokenizer, engine.executor, size=1)
    yield one
    worker_of(one).close()


def assert_equal(engine, one, sampling):
    found, wanted = engine.generate(PROMPTS, sampling), one.generate(PROMPTS, sampling)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.request_id, ours.tokens, ours.weights_versions) == (
            theirs.request_id,
            theirs.tokens,
            theirs.weights_versions,
        )
        np.testing.assert_allclose(ours.sampled_logprobs, theirs.sampled_logprobs, atol=5e-5)
        assert (ours.allowed_tokens is None) == (theirs.allowed_tokens is None) == (sampling is SAMPLING)
        if ours.allowed_tokens is not None:
            assert [set(ids) for ids in ours.allowed_tokens] == [set(ids) for ids in theirs.allowed_tokens]
    return found


@pytest.mark.vllm
@pytest.mark.timeout(550)
class TestTwoRanks:
    """One engine for all, in this order; each may be run alone."""

    @pytest.mark.parametrize("sampling", [SAMPLING, TRUNCATED, STOPPED], ids=["whole", "truncated", "ended by a text"])
    def test_draw_what_one_draws_from_the_same_sets(self, engine, one, sampling):
        """A row that a text ends is taken out of the engine: its sets were left in the ranks."""
        found = assert_equal(engine, one, sampling)
        assert (sampling is STOPPED) == any(t.stop_reason in STOPPED.stop for t in found)

    def test_rows_that_are_withdrawn_have_their_sets(self, engine):
        worker = worker_of(engine)
        decoder = worker.decoder(TRUNCATED)
        for row in range(3):
            decoder.add(row, [5, 6], seed=row, limit=40)
        for _ in range(4):
            decoder.step()
        for drawn in decoder.withdraw():
            assert len(drawn.tokens) == len(drawn.allowed) == len(drawn.logprobs) > 1 and drawn.reason == "abort"
            assert all(token in ids for token, ids in zip(drawn.tokens, drawn.allowed, strict=True))

    def test_what_they_add_up_in_ends_with_them(self, engine):
        assert_without_names(shared_by(ranks_of(worker_of(engine))))

    @pytest.mark.parametrize("adapter", [False, True], ids=["whole", "merged"])
    def test_every_rank_takes_an_update(self, engine, one, model, adapter):
        policy = trainer(model, engine.executor, adapter=adapter)
        before = engine.generate(PROMPTS, SAMPLING)
        first = engine.weights_version
        for _ in range(2 + first):
            policy.advance_adapter(0.3) if adapter else policy.advance()
        for rollout in (engine, one):
            policy.sync_weights(rollout)
            assert worker_of(rollout).updated.replaced == 0
            assert rollout.weights_version == 2 + first
        assert [t.tokens for t in assert_equal(engine, one, SAMPLING)] != [t.tokens for t in before]

    def test_a_killed_rank_is_named_and_the_engine_replaced(self, engine, caplog):
        wanted = engine.generate(PROMPTS, TRUNCATED)
        worker = worker_of(engine)
        step, steps = worker._client.engine.step, iter(range(4))
        killed = ranks_of(worker)[1]

        def dies_in_the_middle():
            if next(steps, None) is None and alive(killed):
                os.kill(killed, signal.SIGKILL)
            return step()

        worker._client.engine.step = dies_in_the_middle
        replaced = worker.updated.replaced
        assert [t.tokens for t in engine.generate(PROMPTS, TRUNCATED)] == [t.tokens for t in wanted]
        assert f"rank 1 of 2 of the engine (process {killed}) ended by SIGKILL; the engine is replaced" in caplog.text
        assert worker.updated.replaced == replaced + 1
        assert killed not in ranks_of(worker) and all(map(alive, ranks_of(worker)))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(550)
@pytest.mark.parametrize("kind", ["adapter", "int8"])
def test_ranks_take_adapters_and_codes(model, tokenizer, kind):
    changed = {"adapter": {"adapter_rank": 8}, "int8": {"precision": "int8", "proof_tolerance": 2.0}}
    options = replace(OPTIONS, **changed[kind])
    engine = build(model, tokenizer, LocalExecutor("cpu"), options=options)
    try:
        policy = trainer(model, engine.executor, adapter=kind == "adapter")
        for _ in range(2):
            policy.advance_adapter(0.3) if kind == "adapter" else policy.advance()
            policy.sync_weights(engine)
        assert (worker_of(engine).updated.replaced, engine.weights_version) == (0, 2)
        found = engine.generate(PROMPTS, TRUNCATED)
    finally:
        worker_of(engine).close()
    one = build(model, tokenizer, engine.executor, options=options, size=1)
    try:
        policy.sync_weights(one)
        wanted = one.generate(PROMPTS, TRUNCATED)
    finally:
        worker_of(one).close()
    first = [(ours.tokens[0], theirs.tokens[0]) for ours, theirs in zip(found, wanted, strict=True)]
    same = sum(ours == theirs for ours, theirs in first)
    assert same == len(first) if kind == "adapter" else same >= len(first) - 2, "codes round sums apart"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(550)
def test_a_server_of_two_ranks_and_its_next_when_one_is_killed(model, tokenizer, tmp_path, caplog):
    """Also where vLLM alone refuses for want of NUMA nodes."""
    log = tmp_path / "log"
    engine = build(model, tokenizer, LocalExecutor("cpu"), log=str(log), start_seconds=300)
    worker = worker_of(engine)
    try:
        policy = trainer(model, engine.executor)
        for version in (1, 2):
            policy.advance()
            assert policy.sync_weights(engine) == engine.weights_version == version
        assert worker.updated.replaced == 0
        found = engine.generate(PROMPTS, TRUNCATED)
        one = build(model, tokenizer, engine.executor, size=1)
        try:
            policy.sync_weights(one)
            wanted = one.generate(PROMPTS, TRUNCATED)
        finally:
            worker_of(one).close()
        assert [t.tokens for t in found] == [t.tokens for t in wanted]
        first, ranks = worker.engine.server.process, served_ranks(worker)
        assert_without_names(shared_by(ranks))
        call = worker.engine.server.draw

        def dies_in_the_middle(ask):
            if alive(ranks[1]):
                os.kill(ranks[1], signal.SIGKILL)
            return call(ask)

        worker.engine.server.draw = dies_in_the_middle
        again = engine.generate(PROMPTS, TRUNCATED)
        assert [t.tokens for t in again] == [t.tokens for t in found], "no request was lost, none changed"
        assert "Worker proc VllmWorker-1 died unexpectedly (exit code: " in caplog.text
        assert (worker.engine.restarts, engine.weights_version) == (1, 2)
        assert first.dead.is_set() and not any(map(alive, ranks))
    finally:
        worker.close()
    assert worker.engine.server.process.dead.is_set()


KILLED = """
import sys, time
from pathlib import Path
from tests.bridge.rollout.vllm.policies import open_vllm

if __name__ == "__main__":
    client = open_vllm(Path(sys.argv[1]), tensor_parallel_size=2)
    print(*(worker.proc.pid for worker in client.engine.model_executor.workers), flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(550)
def test_no_rank_outlives_a_killed_process(folder, tmp_path):
    script = tmp_path / "holds.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
    driver = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        ranks = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(ranks) == 2 and all(map(alive, ranks))
        shared = shared_by(ranks)
        assert_without_names(shared)
    finally:
        driver.kill()
        driver.communicate()
    deadline = time.monotonic() + 60
    while (any(map(alive, ranks)) or any(file.exists() for file in shared)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, ranks)) and not [file for file in shared if file.exists()]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(550)
def test_a_rank_that_does_not_start_says_why(folder, tmp_path):
    from tests.bridge.rollout.vllm.policies import open_vllm

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = broken / "model.safetensors"
    with weights.open("rb+") as file:
        file.truncate(weights.stat().st_size - 1000)
    with pytest.raises(RuntimeError, match=r"a rank of the engine did not start: .*SafetensorError: "):
        open_vllm(broken, tensor_parallel_size=2)
    assert not multiprocessing.active_children()


def test_a_worker_without_such_an_engine_is_refused(model, tokenizer):
    engine = InferenceEngine(partial(InProcessRollout, StateSource(model), tokenizer), executor=LocalExecutor("cpu"))
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2\) made a InProcessRollout of 1: VLLMRollout and"):
        engine.build(tensor_parallel_size=2)
    engine.build()


def test_two_different_numbers_of_ranks_are_refused():
    with pytest.raises(ValueError, match="say one number"):
        VLLMOptions(tensor_parallel_size=4).of_build(2)
    with pytest.raises(ValueError, match="tensor_parallel_size must be positive, got 0"):
        VLLMOptions(tensor_parallel_size=0)
    with pytest.raises(ValueError, match=r"quantises by itself .* is of one process, got tensor_parallel_size=2"):
        VLLMOptions(rank_precisions=("int8",)).of_build(2)


def test_threads_are_unbound_where_nodes_are_fewer_than_ranks(tmp_path, monkeypatch):
    """ROLL-14: "Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers"."""
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = tmp_path / "status"
    status.write_text("Name:\tx\nMems_allowed_list:\t0-1,4\n")
    assert numa_nodes(status) == 3 and numa_nodes(tmp_path / "none") == 1
    assert binding(1) == {}
    assert binding(numa_nodes()) == {} or numa_nodes() == 1
    assert binding(numa_nodes() + 1)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    assert binding(numa_nodes() + 1) == {}


def test_the_first_error_of_a_log_is_the_cause(tmp_path):
    """ROLL-14: 20 lines of the API process, and not the cause."""
    log = """INFO 11-23 [x.py:1] RuntimeError is only mentioned
(EngineCore pid=7) ERROR 11-23 22:00:00 [core.py:99] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-23 22:00:00 [core.py:99]     raise ValueError("x")
(EngineCore pid=7) ERROR 11-23 22:00:00 [core.py:99] AssertionError: Not enough allowed NUMA nodes
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert root_cause(log) == "AssertionError: Not enough allowed NUMA nodes"
    script = f"print({log!r}); print('and more\\n' * 40); raise SystemExit(1)"
    server = ServerProcess([sys.executable, "-c", script], tmp_path / "log")
    with pytest.raises(
        ServerDied, match=r"the first error in its log: AssertionError: Not enough allowed NUMA nodes; "
    ):
        server.wait_until(lambda: False, 60)
    for code in ("-9", "None"):  # vLLM may see the end before its status is there
        died = f"Worker proc W-1 died unexpectedly (exit code: {code})"
        log = f"(EngineCore pid=7) ERROR 11-23 [x.py:9] {died}, more\nRuntimeError: cancelled"
        assert root_cause(log) == died
