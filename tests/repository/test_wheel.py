"""The wheel: four packages with py.typed, a report's page, loops to copy; a consumer's type checker reads the types."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SOURCES = {"rl_fn": "rl_fn", "rl_kernels": "kernels/rl_kernels", "rl_bridge": "bridge/rl_bridge"}
SOURCES |= {"rl_train": "bridge/rl_train", "rl_tools": "bridge/rl_tools"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel's contents in a folder."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_the_packages_and_nothing_else(unpacked):
    there = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    wanted = {
        f"{package}/{path.relative_to(ROOT / source).as_posix()}"
        for package, source in SOURCES.items()
        for path in (ROOT / source).rglob("*")
        if path.suffix in (".py", ".html", ".css", ".js") or path.name == "py.typed"
    }
    wanted |= {f"rl_tools/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert {f"{package}/py.typed" for package in SOURCES} | {"rl_tools/report/page/page.html"} <= wanted
    assert {path for path in there if ".dist-info/" not in path} == wanted


def named_together(source):
    """The strings of each tuple, list, set and keys of a dict."""
    for node in ast.walk(ast.parse(source)):
        parts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", None)
        if parts is not None:
            yield {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def test_a_list_from_rl_bridge_to_rl_tools_has_what_is_between_them():
    """Else a package is somebody else's there: its files would be a user's reader, its faults a stranger's."""
    bridge = {package for package, source in SOURCES.items() if source.startswith("bridge/")}
    files = [file for folder in (*SOURCES.values(), "tests", ".ci") for file in (ROOT / folder).rglob("*.py")]
    lists = [
        (file.relative_to(ROOT).as_posix(), {name.removeprefix("bridge/") for name in names} & bridge)
        for file in files
        for names in named_together(file.read_text("utf-8"))
    ]
    ends = bridge - {"rl_train"}
    from_end_to_end = [(file, names) for file, names in lists if ends <= names]
    assert len(from_end_to_end) >= 5
    assert [(file, bridge - names) for file, names in from_end_to_end if names != bridge] == []


def test_each_part_has_its_extra(unpacked):
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert {"bridge", "kernels", "flax", "docs", "dev"} <= set(re.findall(r"^Provides-Extra: (\w+)$", text, flags=re.M))
    always = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", text, flags=re.M)
    assert set(always) == {"jax", "jaxtyping", "chex", "numpy"}


def test_a_consumer_sees_the_types(unpacked, tmp_path):
    (tmp_path / "user.py").write_text(
        "import rl_fn\nreveal_type(rl_fn.whiten)\nreveal_type(rl_fn.recipes.grpo())\nrl_fn.ppo_clip(clip_hihg=0.2)\n",
        encoding="utf-8",
    )
    config = {"include": ["user.py"], "extraPaths": [str(unpacked)], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    messages = [(d["severity"], d["message"]) for d in json.loads(result.stdout)["generalDiagnostics"]]
    types = [text for severity, text in messages if severity == "information"]
    assert len(types) == 2 and "Unknown" not in " ".join(types)
    assert "Array" in types[0] and '"Objective"' in types[1]
    assert any(severity == "error" and "clip_hihg" in text for severity, text in messages)
