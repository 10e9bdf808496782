"""Two hosts on one machine: network namespaces with a cable between them, names and /etc/hosts of their own."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from experiments.benchmarks.jobs import MARK, ROOT

_CLONE_NEWNET = 0x40000000


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def available() -> bool:
    """Whether this process may make namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        return False
    name = f"rl-try-{uuid.uuid4().hex[:6]}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (subprocess.SubprocessError, OSError):
        return False
    return True


class Loopback:
    """Where no namespaces can be made: two nodes of a job that share this host's network."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.addresses = ["127.0.0.1", "127.0.0.1"]

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was made."""

    def on(self, host: int, *command: str) -> list[str]:
        """The command itself."""
        return [*command]


class TwoHosts:
    """Hosts 0 and 1, at ``addresses``."""

    port = 29500

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:6]
        self.names = [f"rl-{mark}-{i}" for i in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self._cables = [f"rl{mark}{i}" for i in range(2)]

    def __enter__(self) -> "TwoHosts":
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove)
            for name in self.names:
                _ip("netns", "add", name)
            # The cable's ends get their addresses once they are in their hosts.
            _ip("link", "add", self._cables[0], "type", "veth", "peer", "name", self._cables[1])
            for name, cable, address in zip(self.names, self._cables, self.addresses, strict=True):
                _ip("link", "set", cable, "netns", name)
                _ip("-n", name, "link", "set", cable, "name", "eth0")
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
                # What Debian writes: the host's own name leads to the loopback.
                etc = Path("/etc/netns") / name
                etc.mkdir(parents=True)
                others = "\n".join(f"{there} host-{there}" for there in self.addresses)
                (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}\n")
                (etc / "resolv.conf").write_text("")  # nobody to ask
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _remove(self) -> None:
        for name, cable in zip(self.names, self._cables, strict=True):
            for words in (("link", "del", cable), ("netns", "del", name)):
                subprocess.run(["ip", *words], capture_output=True, timeout=30, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def on(self, host: int, *command: str) -> list[str]:
        """The command that runs ``command`` on a host."""
        name = self.names[host]
        named = f'hostname {name} && exec "$0" "$@"'
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, *command]

    @contextlib.contextmanager
    def within(self, host: int) -> Iterator[None]:
        """Sockets that this thread makes meanwhile are of the host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{self.names[host]}") as there:
            if libc.setns(there.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                libc.setns(here.fileno(), _CLONE_NEWNET)

    def cut(self) -> None:
        """Pull the cable out at host 1: neither side is told."""
        _ip("-n", self.names[1], "link", "set", "eth0", "down")


def start(
    hosts: TwoHosts | Loopback, folders: list[Path], *command: str, mark: str, torchrun: bool
) -> list[subprocess.Popen]:
    """A job of two hosts with a rank each, in a working folder each; with torchrun's processes, or as they would do."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    address, port = hosts.addresses[0], str(hosts.port)
    common = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, MARK: mark}
    jobs = []
    for host, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        launcher, environment = (), common
        if torchrun:
            rendezvous = ("--nnodes=2", f"--node_rank={host}", f"--master_addr={address}", f"--master_port={port}")
            launcher = ("-m", "torch.distributed.run", *rendezvous, "--nproc_per_node=1", "--no-python", sys.executable)
        else:
            environment = common | {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        jobs.append(
            subprocess.Popen(
                hosts.on(host, sys.executable, *launcher, *command),
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return jobs
