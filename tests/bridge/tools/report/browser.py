"""Headless Chromium over its own protocol on a pair of pipes: no driver, no port, no network."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE = 60.0


class Page:
    """One page. ``errors`` are what its scripts threw or complained of, ``requests`` the addresses it asked for."""

    def __init__(self, process, commands, answers):
        self.process, self._commands, self._answers = process, commands, answers
        self._buffer, self._number, self._session = b"", 0, None
        self.errors, self.requests, self._events = [], [], []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        number = self._number
        return self._until(method, lambda found: found.get("id") == number)["result"]

    def open(self, file, width, height=900, theme="light", mobile=False):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": theme}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.send("Page.navigate", url=f"file://{file}")
        if not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._until("loading", lambda found: found.get("method") == "Page.loadEventFired")
        # Two frames: observers have run, and what they asked for is drawn.
        self.run(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"
        )

    def run(self, script):
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def key(self, name):
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def point(self, selector, share=0.5):
        """Move the pointer over an element, ``share`` of its width from the left."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.left, b.top, b.width, b.height]; })()"
        )
        left, top, width, height = box
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * share, y=top + height / 2)

    def _until(self, what, wanted):
        ends = time.monotonic() + DEADLINE
        while True:
            while b"\0" in self._buffer:
                text, self._buffer = self._buffer.split(b"\0", 1)
                found = json.loads(text)
                assert "error" not in found, (what, found)
                self._note(found)
                if wanted(found):
                    return found
            left = ends - time.monotonic()
            ready = left > 0 and select.select([self._answers], [], [], left)[0]
            assert ready, f"Chromium did not answer {what} within {DEADLINE:g} s"
            part = os.read(self._answers, 2**20)
            assert part, f"Chromium ended while it was asked for {what}"
            self._buffer += part

    def _note(self, found):
        method, about = found.get("method"), found.get("params", {})
        self._events.append(found)
        if method == "Runtime.exceptionThrown":
            self.errors.append(about["exceptionDetails"])
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])


@contextmanager
def browser(folder):
    """A page of a Chromium whose profile lies in ``folder``; it has ended afterwards."""
    assert CHROMIUM is not None, "there is no chromium on PATH: apt-get install chromium"
    own = [*os.pipe(), *os.pipe()]
    # Away from 3 and 4, which are to be theirs in Chromium.
    read, commands, answers, write = (fcntl.fcntl(descriptor, fcntl.F_DUPFD, 50) for descriptor in own)
    for descriptor in own:
        os.close(descriptor)
    # Chromium reads commands at descriptor 3 and answers at 4.
    options = "--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe --hide-scrollbars"
    # A shell moves the descriptors: Python would have to do so between fork and exec.
    shell = f'exec "$0" "$@" 3<&{read} 4>&{write} {read}<&- {write}>&-'
    process = subprocess.Popen(
        ["bash", "-c", shell, CHROMIUM, *options.split(), f"--user-data-dir={folder}/profile"],
        pass_fds=(read, write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(write)
    try:
        page = Page(process, commands, answers)
        yield page
        page._session = None
        page.send("Browser.close")
        process.wait(20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(20)
        os.close(commands)
        os.close(answers)
