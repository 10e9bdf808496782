"""Where other machines reach this one."""

import os
import socket

import pytest

from rl_bridge.executors import host
from rl_bridge.executors.host import interface_of, own_addresses, use_gloo_interface


def test_addresses_of_this_machine_can_be_bound():
    for address in own_addresses() + own_addresses("127.0.0.1"):
        with socket.create_server((address, 0)):
            pass
    assert own_addresses("no such machine.invalid")


def test_the_interface_of_an_address_has_it():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # of nobody: reserved for documents
    for address in own_addresses():
        assert interface_of(address) in {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize(("chosen", "expected"), [(None, "lo"), ("eth7", "eth7")])
def test_gloo_gets_the_interface_unless_the_user_has_chosen(monkeypatch, chosen, expected):
    monkeypatch.setattr(host, "own_addresses", lambda towards: ["127.0.0.1"])
    monkeypatch.setattr(os, "environ", {} if chosen is None else {"GLOO_SOCKET_IFNAME": chosen})
    use_gloo_interface("10.0.0.9")
    assert os.environ["GLOO_SOCKET_IFNAME"] == expected
