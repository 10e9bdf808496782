"""Where other machines reach this one. Addresses are of IPv4 throughout the executors."""

import contextlib
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def own_addresses(towards: str | None = None) -> list[str]:
    """IPv4 addresses of this machine that another one may reach, the likeliest first. Nothing is sent.

    ``towards``: a machine of the job; the address on the way to it comes first.
    """
    found = []
    for target in (towards, "10.255.255.255"):
        if target is None:
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                found.append(probe.getsockname()[0])
        except OSError:  # no route, or no such name
            continue
    with contextlib.suppress(OSError):  # a name that nobody knows
        found.append(socket.gethostbyname(socket.gethostname()))
    found = [address for address in dict.fromkeys(found) if not address.startswith("127.")]
    return found or ["127.0.0.1"]


def use_gloo_interface(towards: str | None = None) -> None:
    """Let gloo use the interface that other machines reach, unless the user has chosen one.

    Left alone gloo asks for the address of this machine's name, and on Debian that is 127.0.1.1: another machine which
    connects to it finds itself. ``towards``: as for ``own_addresses``.
    """
    interface = interface_of(own_addresses(towards)[0])
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Name of the interface that has this address; None where the system does not say."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
