"""The examples of docs/engines.md run over two ranks; tests/repository runs them in one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S))


def test_the_examples_run_over_two_ranks(tmp_path):
    script = tmp_path / "engines.py"
    script.write_text(f"import rl_bridge\nrl_bridge.init()\n{CODE}\nassert workers == 2\nprint('reached the end')\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("reached the end") == 1, done.stderr[-3000:]


@pytest.mark.parametrize("word", ["colocate_with", "sync_weights", 'cuda("weights")', ".cpu(", 'cuda("kv_cache")'])
def test_the_page_shows(word):
    assert word in PAGE.read_text("utf-8")
