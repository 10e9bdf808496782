"""A trainer for the tuner's tests: a run folder, a checkpoint a step, and no imports that take time.

``python toy.py RUN SEED STEPS PAUSE [--resume] [OPTION VALUE …]``. The reward has its optimum at x = 0.3. ``fail`` at a
step: crash, hang (deaf to SIGTERM), stuck (hang, once), wait (for SIGTERM, once), or kill (SIGKILL, once).
"""

import json
import os
import signal
import sys
import time


def read(name):
    with open(name) as file:
        return file.read()


def main(folder, seed, steps, pause, words):
    options = dict(zip(words[::2], words[1::2], strict=True))
    resume = "--resume" in sys.argv
    if not resume:
        os.mkdir(folder)
    state = os.path.join(folder, "state.json")
    done = int(read(state)) if os.path.exists(state) else 0
    stopping = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    with open(os.path.join(folder, "starts"), "a") as starts:
        starts.write(f"{os.getpid()} {done}\n")
    fail, x = options.get("fail", "no").strip(), float(options.get("x", 0.0))
    for step in range(done, steps):
        if stopping:
            sys.exit(128 + stopping[0])
        if fail == "crash" and step == 2:
            raise ValueError(f"x = {x} is too much")
        while fail == "hang" and step == 2:
            time.sleep(1)
        if fail == "stuck" and step == 2 and not resume:
            open(os.path.join(folder, "stuck"), "w").close()
            while True:
                time.sleep(1)
        while fail == "wait" and step == 2 and not resume and not stopping:
            time.sleep(0.01)
        if fail == "kill" and step == 2 and not resume:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)
        reward = (1 - (x - 0.3) ** 2) * (step + 1) / steps + 0.01 * seed
        record = {"stage": "toy", "step": step, "seconds": pause * step, "reward": reward, "kl": x}
        with open(os.path.join(folder, "metrics.jsonl"), "a") as metrics:
            metrics.write(json.dumps(record) + "\n")
        with open(state + ".tmp", "w") as file:
            file.write(str(step + 1))
        os.replace(state + ".tmp", state)
    with open(os.path.join(folder, "summary.tmp"), "w") as file:
        json.dump({"seconds": 1.0, "device": os.environ.get("CUDA_VISIBLE_DEVICES")}, file)
    os.replace(os.path.join(folder, "summary.tmp"), os.path.join(folder, "summary.json"))


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--resume"]
    main(given[0], int(given[1]), int(given[2]), float(given[3]), given[4:])
