"""Whether a process is still there."""

import time


def gone(pid, seconds=10.0):
    """Wait for its end; a process that nobody has waited for yet has ended too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):  # the second one if it ends between opening and reading
            return True
        time.sleep(0.02)
    return False
