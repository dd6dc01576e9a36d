"""Schemes and addresses: what is known, and one clear line for what is not."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kvferry.errors import InputError, LocalError
from kvferry.transport import registry
from kvferry.transport.address import Address, parse_address, parse_host_port
from kvferry.transport.inproc import InprocTransport
from kvferry.transport.shm import ShmTransport
from kvferry.transport.tcp import TcpTransport


@pytest.mark.parametrize(
    ("text", "cls"),
    [("inproc://x", InprocTransport), ("shm", ShmTransport), ("tcp://127.0.0.1:1?plain=no", TcpTransport)],
)
def test_a_scheme_leads_to_its_class(text: str, cls: type) -> None:
    """Full addresses and bare schemes alike; the class says the same scheme."""
    assert registry.transport_for(text) is cls
    assert cls.scheme in registry.known_schemes()


@pytest.mark.parametrize(("text", "near"), [("tpc://h:1", "tcp"), ("smh", "shm"), ("inprog://x", "inproc")])
def test_an_unknown_scheme_names_the_known_and_the_nearest(text: str, near: str) -> None:
    """A typing error is answered with what was probably meant."""
    with pytest.raises(InputError) as caught:
        registry.transport_for(text)
    assert f"did you mean {near}?" in caught.value.message
    assert f"known are {', '.join(registry.known_schemes())}" in caught.value.message


def test_a_scheme_far_from_all_names_only_the_known() -> None:
    """No guess where nothing is near."""
    with pytest.raises(InputError) as caught:
        registry.transport_for("carrier-pigeon://roof")
    assert "did you mean" not in caught.value.message


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, registry.GROUP)


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ([entry("x", "a:B"), entry("x", "c:D")], "several packages"),
        ([entry("x", "no_such_module_anywhere:T")], "cannot be loaded"),
        ([entry("x", "kvferry.transport.tcp:NoSuchClass")], "cannot be loaded"),
        ([entry("x", "kvferry.transport.base:Memory")], "is no kvferry Transport"),
    ],
    ids=["twice", "no module", "no class", "no transport"],
)
def test_a_broken_declaration_is_a_local_error(
    monkeypatch: pytest.MonkeyPatch, entries: list[EntryPoint], word: str
) -> None:
    """Another package's entry point that does not work is named with what to do."""
    monkeypatch.setattr(registry, "entry_points", lambda **_group: entries)
    with pytest.raises(LocalError, match=word) as caught:
        registry.transport_for("x://")
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1", 0),
        ("tcp://node-7.example:65535", "node-7.example", 65535),
        ("tcp://[::1]:7400", "::1", 7400),
        ("tcp://[fe80::1%eth0]:7400", "fe80::1%eth0", 7400),
    ],
)
def test_hosts_and_ports_are_read(text: str, host: str, port: int) -> None:
    """Names, IPv4 and IPv6; the text comes back as it was."""
    address = parse_address(text, "tcp", ())
    assert parse_host_port(address) == (host, port)
    assert str(address) == text


def test_options_are_read_and_kept() -> None:
    """Given options are there, others are not, and the text comes back with them."""
    address = parse_address("tcp://127.0.0.1:1?plain=yes&streams=3", "tcp", ("plain", "streams"))
    assert address == Address("tcp", "127.0.0.1:1", {"plain": "yes", "streams": "3"})
    assert (address.streams, address.choice("plain", "yes", "no"), address.choice("path", "x")) == (
        3,
        "yes",
        None,
    )
    assert parse_address(str(address), "tcp", ("plain", "streams")) == address


@pytest.mark.parametrize("streams", ["0", "9", "-1", "x", "", "1.5", "٣"])
def test_the_number_of_streams_is_bounded(streams: str) -> None:
    """1 to 8, in ASCII digits."""
    with pytest.raises(InputError, match="streams"):
        parse_address(f"tcp://127.0.0.1:1?streams={streams}", "tcp", ("streams",))
