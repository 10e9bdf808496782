"""A server with vLLM's paths that draws numbers: FOLDER/offset stands for the weights. Misbehaves as FOLDER/act says.

Its replies have the fields of vLLM 0.32's published types; test_vllm.py asks the real server the same.
"""

import json
import os
import socket
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


def option(name):
    return sys.argv[sys.argv.index(name) + 1]


FOLDER = Path(option("--model")) if __name__ == "__main__" else Path()
ACT = (FOLDER / "act").read_text() if (FOLDER / "act").exists() else ""
STATE = {"offset": 0, "version": "default", "new": 0}
ABORTED, RUNS, WRITES = set(), threading.Event(), threading.Lock()
RUNS.set()
SEATS = threading.Semaphore(int(option("--max-num-seqs")) if __name__ == "__main__" else 1)


def generate(payload):
    with SEATS:
        # Rows that are held keep their seats until there is the file "go".
        while ACT == "hold" and "request_id" in payload and not (FOLDER / "go").exists():
            time.sleep(0.01)
        return drawn(payload)


def drawn(payload):
    name, wanted = "generate-tokens-" + payload.get("request_id", "probe"), payload["sampling_params"]
    if not payload["token_ids"]:
        return 400, {"error": {"message": "List should have at least 1 item"}}
    assert "seed" not in wanted, "vLLM's own seed ends an engine on a CPU where a prompt is read in pieces"
    seed, before = wanted["extra_args"]["rl_fn"][:2]
    tokens, versions, reason = [], [], "length"
    while len(tokens) < wanted["max_tokens"]:
        RUNS.wait()
        if name in ABORTED:
            reason = "abort"
            break
        if ACT == "die" and len(tokens) == 3:
            os._exit(7)
        if ACT == "error":
            return 500, {"error": {"message": "engine is broken"}}
        time.sleep(float((FOLDER / "delay").read_text()))
        # By what it has read, and by the number of the draw.
        read, number = len(payload["token_ids"]) + len(tokens), before + len(tokens)
        tokens.append((seed + read + 2 * number + STATE["offset"]) % 13)
        versions.append(STATE["version"])
        if tokens[-1] in wanted.get("stop_token_ids", ()):
            reason = "stop"
            break
    with WRITES, (FOLDER / "served").open("a") as file:
        file.write(f"{name} {len(tokens)} {reason}\n")
    content = [{"token_id": t, "logprob": -0.5 - t / 100, "rank": 1, "top_logprobs": []} for t in tokens]
    spans = [{"version": v, "start": n, "end": n + 1} for n, v in enumerate(versions)]
    choice = {"index": 0, "finish_reason": reason, "stop_reason": None, "token_ids": tokens, "sampling_mask": None}
    choice |= {"weight_versions": spans, "logprobs": {"content": content}, "routed_experts": None}
    usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    return 200, {"request_id": name, "model": "policy", "usage": usage, "choices": [choice]}


def collective(method, *words):
    """A method of the only worker; each draw of a truncated request was of an even number."""
    if method == "rl_fn_allowed":
        return [[0, 2, 4]] * words[1]
    if method == "rl_fn_adopt":
        STATE["offset"] = int(Path(words[0], "offset").read_text())
        return [1, 2] if ACT == "two adapters" else [1]
    if method == "rl_fn_held":
        folder, adapter = words
        wanted = int(Path(adapter or folder, "offset").read_text())
        return [1, {} if STATE["offset"] == wanted else {"offset": f"{STATE['offset']} and not {wanted}"}, {}]
    size = int(ACT.removeprefix("heads of ")) if ACT.startswith("heads of") else 64
    return {"registered": ACT != "no plugin", "head_size": size, "head_sizes": [32, 64]}


def command(path, payload, query):
    if path == "/pause":
        assert query["mode"] == ["keep"]
        RUNS.clear()
    elif path == "/resume":
        RUNS.set()
    elif path == "/abort_requests":
        ABORTED.update(payload["request_ids"])
    elif path == "/update_weights":
        STATE["new"] = int(Path(payload["update_info"]["folder"], "offset").read_text())
    elif path == "/finish_weight_update":
        STATE.update(offset=STATE["new"], version=payload["weight_version"])
    elif path == "/update_weight_version":
        STATE["version"] = payload["new_version"]
    elif path == "/reset_prefix_cache":
        return {"success": True}
    elif path == "/is_paused":
        return {"is_paused": not RUNS.is_set()}
    elif path == "/weight_info":
        return {"weight_version": STATE["version"]}
    elif path == "/collective_rpc":
        return {"results": [collective(payload["method"], *payload.get("args", ()))]}
    elif path == "/v1/models":
        return {"data": [{"max_model_len": int(option("--max-model-len"))}]}
    elif path == "/server_info":
        return {"vllm_config": {"cache_config": {"block_size": 16, "enable_prefix_caching": True}}}
    return {}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "null"))

    def do_GET(self):
        self.answer(None)

    def answer(self, payload):
        url = urlsplit(self.path)
        if url.path == "/health":
            status, body = (503 if ACT == "sick" else 200), {}
        elif url.path == "/inference/v1/generate":
            status, body = generate(payload)
        else:
            status, body = 200, command(url.path, payload, parse_qs(url.query))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def address_string(self):
        return "unix"

    def log_message(self, format, *words):
        pass


class Listening(socketserver.ThreadingMixIn, socketserver.TCPServer):
    address_family, daemon_threads, request_queue_size = socket.AF_UNIX, True, 128


if __name__ == "__main__":
    print("the fake begins", flush=True)
    if ACT == "exit":
        sys.exit("no such weights")
    STATE["offset"] = int((FOLDER / "offset").read_text())
    if ACT == "hang":
        time.sleep(1000)
    Listening(option("--uds"), Handler).serve_forever(0.01)
