"""Secrets are planted wherever a run could take one along; no byte of any store has one."""

import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from rl_bridge.run.provenance import git_state, read_provenance
from rl_tools.export.export import ExportOptions, export
from rl_tools.report.page import write_report
from tests.bridge.tools.export.ledgers import Trainer, kept_bytes
from tests.bridge.tools.export.stores import TRACKERS
from tests.support.counting_run import go

PLANTED = {
    "name": "planted-by-name-1f2e3d",
    "nested": "planted-in-a-list-4c5b6a",
    "shape": "hf_plantedshapeABCDEFGHIJKLMNOP",
    "url": "planted-in-address-778899",
    "query": "planted-in-query-aabbcc",
    "environment": "planted-in-environment-ddeeff",
    "word": "planted-after-option-001122",
    "equals": "planted-in-option-334455",
    "remote": "planted-in-remote-667788",
    "metric": "planted-in-metric-99aabb",
    "header": "plantedInHeader0123456789",
}


@dataclass(frozen=True)
class Hub:
    token: str = PLANTED["name"]
    names: tuple[str, ...] = ("plain", f"--api-key={PLANTED['nested']}")
    address: str = f"https://me:{PLANTED['url']}@example.org/x?token={PLANTED['query']}&y=1"


@dataclass(frozen=True)
class Options:
    rate: float = 0.5
    judge: str = f"Authorization: Bearer {PLANTED['header']}"
    note: str = f"uses {PLANTED['shape']} and {PLANTED['environment']}"
    hub: Hub = field(default_factory=Hub)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A run in a repository whose remote has credentials, with secrets in its environment and command line."""
    for words in (
        ["init", "--quiet"],
        ["remote", "add", "origin", f"https://me:{PLANTED['remote']}@example.org/r.git"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVICE_PASSWORD", PLANTED["environment"])
    monkeypatch.setenv("HF_TOKEN", PLANTED["environment"])
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"/logs/{PLANTED['environment']}")
    command = ["rl-fn", "--hub.token", PLANTED["word"], f"--judge-api-key={PLANTED['equals']}", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", command)
    with Trainer(tmp_path / f"run {PLANTED['environment']}", Options()) as trainer:
        # A metric's name is a user's text too.
        trainer.step(3, **{f"reward {PLANTED['environment']} token={PLANTED['metric']}": 1.0})
        yield trainer.end()


@pytest.mark.parametrize("name", TRACKERS)
def test_no_store_has_a_planted_secret(planted, name, output):
    kept = output / "planted" if name != "trackio" else output
    assert export(planted, ExportOptions(to=name, output=kept, project="planted", artifacts="files"))[0] == 3
    content = kept_bytes(kept)
    assert b"example.org" in content and b"plain" in content and b"0123456789abcdef" in content
    assert [place for place, secret in PLANTED.items() if secret.encode() in content] == []


def test_the_record_of_where_a_run_comes_from_has_none(planted):
    content = (planted / "provenance.jsonl").read_text()
    assert [place for place, secret in PLANTED.items() if secret in content] == []
    [attempt] = read_provenance(planted)
    assert attempt["command"] == ["rl-fn", "--hub.token", "***", "--judge-api-key=***", "--steps", "3"]
    assert attempt["git"]["remote"] == "https://***@example.org/r.git"
    assert not {"HF_TOKEN", "NCCL_DEBUG_FILE", "SERVICE_PASSWORD"} & set(attempt["environment"])


def test_no_file_of_a_run_has_one_and_no_variable_is_kept_for_its_first_letters_usr_11(tmp_path, monkeypatch, capsys):
    variables = ("VLLM_ADMIN_KEY", "TORCH_MIRROR_KEY", "HF_PAT", "NCCL_HOME_TOKEN", "CUDA_SECRETS", "JAX_PASSWORD")
    for name in variables:
        monkeypatch.setenv(name, PLANTED["environment"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    folder = tmp_path / "run"
    go(folder, Options(), until=4)
    go(folder, Options(), resume=True)  # compared with what the checkpoint says of them
    with pytest.raises(ValueError, match=r"--rate was 0\.5 and is 0\.25"):
        go(folder, Options(rate=0.25), resume=True)
    assert write_report([folder], folder / "report.html", title=None, reload_seconds=None) > 0
    content = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {"config.json", "provenance.jsonl", "manifest.json", "report.html"} <= {path.name for path in content}
    printed = capsys.readouterr()
    content[folder / "printed"] = (printed.out + printed.err).encode()
    found = [(path.name, place) for path in content for place in PLANTED if PLANTED[place].encode() in content[path]]
    assert found == []
    assert b"example.org" in content[folder / "config.json"]
    kept = [attempt["environment"] for attempt in read_provenance(folder)]
    assert all(not set(variables) & set(names) and names["OMP_NUM_THREADS"] == "3" for names in kept)


def test_git_state_tells_changes_apart(tmp_path):
    def git(*words):
        about = {
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@b",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@b",
        }
        done = subprocess.run(
            ["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True, env={**os.environ, **about}
        )
        return done.stdout.strip()

    assert git_state(str(tmp_path)) is None
    git("init", "--quiet")
    (tmp_path / "a.py").write_text("x = 1\n")
    git("add", "a.py")
    git("commit", "--quiet", "-m", "first")
    clean = git_state(str(tmp_path))
    assert clean["commit"] == git("rev-parse", "HEAD") and not clean["dirty"] and clean["diff_sha256"] is None
    hashes = set()
    for content in ("x = 2\n", "x = 3\n", "x = 2\n"):
        (tmp_path / "a.py").write_text(content)
        state = git_state(str(tmp_path))
        assert state["dirty"] and state["commit"] == clean["commit"]
        hashes.add(state["diff_sha256"])
    assert len(hashes) == 2 and None not in hashes
    (tmp_path / "new.py").write_text("")
    assert git_state(str(tmp_path))["untracked"] == 1
