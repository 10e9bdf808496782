"""Rewards: functions and their files, names of sources, judges, HTTP servers, environments."""

import json
import os
import shlex
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.bridge.bad_inputs.case import POLICY, Case, Damage, changed
from tests.bridge.bad_inputs.data import text
from tests.bridge.bad_inputs.inputs import REWARD

KIND = "rewards"
MINE = changed(POLICY, "--reward mine.py:score")
HEAD = "def score(completion, row):\n"
NAMED = ("score|reward reward", "asked.jsonl", "row")

# Name, what the function does, what has to be said besides the reward and the row.
BODIES = [
    ("returns nothing", "pass", ("None",)),
    ("returns text", "return 'good'", ("good",)),
    ("returns NaN", "return float('nan')", ("nan",)),
    ("returns infinity", "return float('inf')", ("inf",)),
    ("returns more than float32 holds", "return 1e39", ("1e+39|1e39",)),
    ("returns a list", "return [1.0]", ("list|[1.0]",)),
    ("returns an empty object", "return {}", ()),
    ("returns an object of text", "return {'a': 'good'}", ("good",)),
    ("returns an object with NaN", "return {'a': float('nan')}", ("nan",)),
    ("returns other rewards for each row", "return {str(len(completion)): 1.0}", ()),
    ("returns a tensor", "import torch; return torch.zeros(3)", ("tensor",)),
    ("returns a complex number", "return 1j", ("1j",)),
    ("returns itself", "return score", ("function",)),
    ("raises", "raise KeyError('anser')", ("KeyError", "anser")),
    ("raises for a column that is not there", "return row['anser']", ("KeyError", "anser")),
    ("divides by zero", "return 1 / 0", ("ZeroDivisionError",)),
    ("calls itself for ever", "return score(completion, row)", ("RecursionError",)),
    ("raises what is no Exception", "class Own(BaseException): pass\n    raise Own('x')", ("Own",)),
    ("leaves", "import sys; sys.exit(0)", ("SystemExit|exit",)),
    ("leaves at once", "import os; os._exit(0)", ("_exit",)),
    ("imports what is not there", "import nonsense_package", ("nonsense_package",)),
    ("asks for words", "return float(input())", ("EOFError|input",)),
    ("a generator", "yield 1.0", ("generator",)),
]
LIMITED = [
    ("hangs", "import time; time.sleep(999)", ("2", "seconds|s")),
    ("runs for ever", "while True: pass", ("2", "seconds|s")),
    ("ends by a signal", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ()),
    ("crashes", "import ctypes; ctypes.string_at(0)", ()),
    ("leaves", "import os; os._exit(0)", ()),
    ("raises", "raise KeyError('anser')", ("KeyError", "anser")),
    ("returns NaN", "return float('nan')", ("nan",)),
]
# Name, content of mine.py, what has to be said besides its name.
FILES = [
    ("empty", "", ("score",)),
    ("no such function", "def scores(completion, row): return 1.0\n", ("score",)),
    ("no function", "score = 5\n", ("score",)),
    ("does not parse", "def score(completion, row)\n    return 1\n", ("line 1|SyntaxError",)),
    ("raises when it is loaded", "raise KeyError('at the top')\n" + REWARD, ("KeyError", "at the top")),
    ("imports what is not there", "import nonsense_package\n" + REWARD, ("nonsense_package",)),
    ("leaves when it is loaded", "import sys; sys.exit(0)\n" + REWARD, ("SystemExit|exit",)),
    ("not UTF-8", REWARD.encode() + "A = 'é'\n".encode("latin-1"), ()),
    ("zeros", b"\0" * 99, ()),
    ("one parameter", "def score(completion):\n    return 1.0\n", ("score",)),
    ("a class", "class score:\n    pass\n", ("score",)),
]
# Name, words of --reward and others, what has to be said.
SOURCES = [
    ("absent file", ("--reward gone.py:score",), ("gone.py", "no such file|no such reward")),
    ("a folder", ("--reward tinyq:score",), ("tinyq:score", "FILE.py:function")),
    ("no function's name", ("--reward judged.py",), ("judged.py", "FILE.py:function")),
    ("no file", ("--reward :score",), (":score", "FILE.py:function")),
    ("an empty function's name", ("--reward judged.py:",), ("judged.py:", "FILE.py:function")),
    ("a path with dots", ("--reward judged.score",), ("judged.score", "FILE.py:function")),
    ("misspelt exact", ("--reward exakt",), ("exakt", "FILE.py:function")),
    ("empty", ("--reward ''",), ("reward", "FILE.py:function")),
    ("an unknown kind", ("--reward ftp://host/x",), ("ftp://host/x", "FILE.py:function")),
    ("environment without one", ("--reward environment",), ("environment", "--environment")),
    ("two of one name", ("--reward a=exact a=judged.py:score",), ("two rewards", "a")),
    ("one twice", ("--reward judged.py:score judged.py:score",), ("two rewards", "score")),
    ("fewer weights", ("--reward a=exact b=judged.py:score", "--reward-weights 1"), ("weights", "a", "b")),
    ("more weights", ("--reward-weights 1 2",), ("weights", "2 weights")),
    ("more weights of one number", ("--policy.scalar.weights 1 2",), ("--policy.scalar.weights", "2 numbers")),
    (
        "an ideal point of two",
        ("--policy.scalar.method tchebycheff", "--policy.scalar.ideal 1 1"),
        ("--policy.scalar.ideal", "2 numbers"),
    ),
    (
        "more weights of the objective",
        ("objective:gdpo", "--objective.weights 1 2"),
        ("--objective.weights", "2 numbers"),
    ),
    ("weights of text", ("--reward-weights good",), ("reward-weights", "good")),
    ("weights NaN", ("--reward-weights nan",), ("reward-weights", "nan")),
    ("another protocol", ("--reward-protocol trl2",), ("reward-protocol", "trl2", "trl")),
    ("a protocol without a function", ("--reward exact", "--reward-protocol trl"), ("reward-protocol", "no effect")),
    ("a timeout without a function", ("--reward exact", "--reward-timeout 3"), ("reward-timeout", "no effect")),
    ("a timeout of nothing", ("--reward-timeout 0",), ("reward-timeout|timeout", "0")),
    ("a timeout below nothing", ("--reward-timeout -3",), ("reward-timeout|timeout", "-3.0|-3")),
]
JUDGE = {"url": "http://127.0.0.1:9/v1", "model": "m", "template": "{prompt} {completion}"}
# Name, fields of judge.toml as TOML in place of the right ones (None: absent), what has to be said.
JUDGES = [
    *((f"no {name}", {name: None}, (name,)) for name in JUDGE),
    *((f"{name} a number", {name: "5"}, (name, "text")) for name in JUDGE),
    *((f"{name} NaN", {name: "nan"}, (name,)) for name in ("maximum", "timeout", "wait", "temperature", "missing")),
    *((f"{name} below nothing", {name: "-1"}, (name,)) for name in ("maximum", "timeout", "retries", "wait", "concurrency")),
    *((f"{name} text", {name: '"x"'}, (name,)) for name in ("maximum", "timeout", "retries", "wait", "concurrency", "missing", "temperature", "max_tokens")),
    ("an unknown field", {"modle": '"m"'}, ("modle",)),
    ("a score that is no expression", {"score": '"("'}, ("score",)),
    ("a score without a group", {"score": '"5"'}, ("score", "group")),
    ("a template of another column", {"template": '"{anser}"'}, ("anser",)),
    ("an address that is none", {"url": '"nonsense"'}, ("url", "nonsense")),
    ("an address of files", {"url": '"file:///etc/hosts"'}, ("url", "file:///etc/hosts")),
    ("an empty address", {"url": '""'}, ("url",)),
    ("a list for text", {"model": "[1]"}, ("model", "text")),
]  # fmt: skip
JUDGE_FILES = [("absent", None, ("judge.toml",)), ("empty", "", ("judge.toml", "url")), ("JSON", "{}", ("judge.toml", "TOML")), ("not UTF-8", b"\xff\xfe", ("judge.toml",))]  # fmt: skip
# Name, status, body, what has to be said besides the address. Every server answers all that is asked.
SERVERS = [
    ("404", 404, {}, ("404",)),
    ("401", 401, {"error": "no key"}, ("401",)),
    ("400 with words", 400, {"error": "no such model"}, ("400", "no such model")),
    ("a redirect to a file", 302, {"Location": "file:///etc/hosts"}, ("302",)),
    ("no JSON", 200, b"hello", ("JSON",)),
    ("cut JSON", 200, b'{"rewards": [1.0', ("JSON",)),
    ("an empty body", 200, b"", ("JSON",)),
    ("a list", 200, [1.0], ("rewards",)),
    ("no rewards", 200, {"scores": [1.0]}, ("rewards",)),
    ("too few", 200, {"rewards": []}, ("rewards",)),
    ("too many", 200, {"rewards": [1.0] * 99}, ("99", "rewards")),
    ("text", 200, {"rewards": ["good"] * 4}, ("good",)),
    ("null", 200, {"rewards": [None] * 4}, ("None|null",)),
    ("NaN", 200, b'{"rewards": [NaN, NaN, NaN, NaN]}', ("nan",)),
    ("one number", 200, {"rewards": 1.0}, ("rewards",)),
    ("500", 500, {}, ("500",)),
    ("HTML", 200, b"<html><body>login</body></html>", ("JSON",)),
]
ADDRESSES = [
    ("nobody listens", "http://127.0.0.1:9/score#retries=0", ("127.0.0.1:9",)),
    ("no host", "http://#retries=0", ("host",)),
    ("blanks", "'http://a b/#retries=0'", ("white space",)),
    ("no port", "http://127.0.0.1:port/#retries=0", ("port",)),
    ("an unknown limit", "http://127.0.0.1:9/#retry=0", ("retry", "retries")),
    ("a limit of text", "http://127.0.0.1:9/#timeout=soon", ("timeout", "soon")),
    ("a limit NaN", "http://127.0.0.1:9/#timeout=nan", ("timeout", "nan")),
    ("a limit below nothing", "http://127.0.0.1:9/#retries=-1", ("retries", "-1")),
    ("a name that resolves to nothing", "http://nothing.invalid/#retries=0", ("nothing.invalid",)),
]
GAME = "from rl_bridge.environments import Step\n\n\nclass Game:\n"
RESET = "    def reset(self, row):\n        return [{'role': 'user', 'content': row['prompt']}]\n"
STEP = "    def step(self, messages):\n        return Step(reward=1.0, done=True)\n"
# Name, content of game.py, what has to be said besides its name.
GAMES = [
    ("empty", "", ("Game",)),
    ("does not parse", "class Game\n", ("line 1|SyntaxError",)),
    ("no reset", GAME + STEP, ("Game", "reset")),
    ("no step", GAME + RESET, ("Game", "step")),
    ("a number", "Game = 5\n", ("Game",)),
    ("makes with a parameter", GAME + "    def __init__(self, size): pass\n" + RESET + STEP, ("Game", "size")),
    (
        "reset raises",
        GAME + RESET.replace("return", "raise KeyError('anser')\n        return") + STEP,
        ("KeyError", "anser"),
    ),
    ("reset returns nothing", GAME + "    def reset(self, row): pass\n" + STEP, ("reset",)),
    (
        "step raises",
        GAME + RESET + STEP.replace("return", "raise KeyError('anser')\n        return"),
        ("KeyError", "anser"),
    ),
    ("step returns nothing", GAME + RESET + "    def step(self, messages): pass\n", ("step",)),
    ("a reward of NaN", GAME + RESET + STEP.replace("1.0", "float('nan')"), ("nan",)),
    ("a reward of text", GAME + RESET + STEP.replace("1.0", "'good'"), ("good",)),
]
# Any character ends a turn, for an environment is asked about turns that have ended.
ENDS = shlex.join(c for c in map(chr, range(33, 127)) if c != "-")
PLAYED = changed(POLICY, "--reward -", "--environment game.py:Game", f"--policy.sampling.stop {ENDS}")
PLAY_SOURCES = [
    ("absent file", "gone.py:Game", ("gone.py",)),
    ("no name", "judged.py", ("judged.py", "FILE.py")),
    ("no such name", "judged.py:Gmae", ("judged.py", "Gmae")),
    ("empty", "''", ("environment",)),
]


def judge(**fields: str | None) -> Damage:
    told = {name: json.dumps(value) for name, value in JUDGE.items()} | fields
    return text("judge.toml", "".join(f"{n} = {v}\n" for n, v in told.items() if v is not None))


def serving(status: int, body) -> Damage:
    """A server in the case's own process; its address is written to the environment."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status == 302:
                self.send_header("Location", body["Location"])
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format, *words):
            pass

    def damage(folder: Path) -> None:
        for _ in range(50):
            try:
                server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
                break
            except OSError:  # the one before is not gone yet
                time.sleep(0.1)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    return damage


PORT = 20000 + os.getpid() % 20000


def cases() -> list[Case]:
    found = [
        Case(
            kind=KIND,
            name=f"function: {name}",
            command=MINE,
            says=(*NAMED, *says),
            damage=text("mine.py", HEAD + f"    {body}\n"),
        )
        for name, body, says in BODIES
    ]
    limited = changed(MINE, "--reward-timeout 2")
    found += [
        Case(
            kind=KIND,
            name=f"function with a limit: {name}",
            command=limited,
            says=(*NAMED, *says),
            damage=text("mine.py", HEAD + f"    {body}\n"),
        )
        for name, body, says in LIMITED
    ]
    for limit, command in (("", MINE), (" with a limit", limited)):
        found += [
            Case(
                kind=KIND,
                name=f"file{limit}: {name}",
                command=command,
                says=("mine.py|reward score", *says),
                damage=text("mine.py", content),
            )
            for name, content, says in FILES
        ]
    found.append(
        Case(
            kind=KIND,
            name="file with a limit: hangs when it is loaded",
            command=limited,
            says=("mine.py", "2", "seconds|s"),
            damage=text("mine.py", "import time; time.sleep(999)\n" + REWARD),
        )
    )
    found += [
        Case(kind=KIND, name=f"source: {name}", command=changed(POLICY, *words), says=says)
        for name, words, says in SOURCES
    ]
    judged = changed(POLICY, "--reward judge:judge.toml")
    for name, fields, says in JUDGES:
        fields = {"retries": "0"} | fields
        found.append(
            Case(
                kind=KIND,
                name=f"judge: {name}",
                command=judged,
                says=(*(("judge",) if "column" in name else ("judge.toml",)), *says),
                damage=judge(**fields),
            )
        )
    for name, content, says in JUDGE_FILES:
        damage = None if content is None else text("judge.toml", content)
        found.append(Case(kind=KIND, name=f"judge's file: {name}", command=judged, says=says, damage=damage))
    found.append(
        Case(kind=KIND, name="judge: nobody listens", command=judged, says=("127.0.0.1:9",), damage=judge(retries="0"))
    )
    served = changed(POLICY, f"--reward http://127.0.0.1:{PORT}/score#retries=0")
    for name, status, body, says in SERVERS:
        found.append(
            Case(
                kind=KIND,
                name=f"server: {name}",
                command=served,
                says=(f"127.0.0.1:{PORT}|reward", *says),
                damage=serving(status, body),
            )
        )
    found += [
        Case(kind=KIND, name=f"address: {name}", command=changed(POLICY, f"--reward {url}"), says=says)
        for name, url, says in ADDRESSES
    ]
    found += [
        Case(
            kind=KIND,
            name=f"environment: {name}",
            command=PLAYED,
            says=("game.py|Game", *says),
            damage=text("game.py", content),
        )
        for name, content, says in GAMES
    ]
    return found + [
        Case(
            kind=KIND,
            name=f"environment's source: {name}",
            command=changed(PLAYED, f"--environment {source}"),
            says=says,
        )
        for name, source, says in PLAY_SOURCES
    ]
