"""NIXL and Mooncake between two hosts: who may, and what of it is on the wire.

The libraries cannot encrypt. So with certificates kvferry's own connection is sealed, by which each side
learns how to reach the other's memory, and payload leaves the host only where both sides allow it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.transport import transport_for
from off_host_kit import Wire, handoff, identified_hosts, identity
from off_host_worker import REQUEST
from probe_kit import Namespaces

WILDCARD = {"nixl": "", "mooncake": "?wildcard=yes"}


PROBLEMS = {scheme: transport_for(f"{scheme}://").unavailable() for scheme in WILDCARD}
pytestmark = pytest.mark.skipif(all(PROBLEMS.values()), reason="; ".join(map(str, PROBLEMS.values())))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with identified_hosts() as made:
        yield made


@pytest.fixture(params=list(WILDCARD))
def scheme(request: pytest.FixtureRequest) -> str:
    problem = PROBLEMS[request.param]
    if problem is not None:
        pytest.skip(problem)
    return str(request.param)


def address(hosts: Namespaces, scheme: str) -> dict[str, object]:
    return {"address": f"{scheme}://{hosts.hosts[0]}:0{WILDCARD[scheme]}"}


def test_without_certificates_nothing_is_listened_at(hosts: Namespaces, scheme: str) -> None:
    """Off loopback, as for tcp: also where ``plain`` is allowed anywhere."""
    given, _ = handoff(hosts, address(hosts, scheme) | {"plain": "anywhere"}, {})
    assert given.get("kind") == "input", given
    assert "kvferry certs" in str(given["error"])


@pytest.mark.parametrize(("gives", "takes"), [("loopback", "anywhere"), ("anywhere", "loopback")])
def test_payload_leaves_the_host_only_where_both_sides_allow_it(
    hosts: Namespaces, scheme: str, gives: str, takes: str
) -> None:
    """Certificates alone do not do: whichever side has not said so ends it, both say why, and nothing is on
    the wire."""
    wire = Wire(hosts)
    given, taken = handoff(
        hosts,
        address(hosts, scheme) | {"identity": identity(0), "plain": gives},
        {"identity": identity(1), "plain": takes},
    )
    total, found = wire.stop()
    assert "path" not in taken, taken
    for who_says in ([str(taken["error"])], given["log"]):
        assert any(f"{scheme} moves payload in plain" in line for line in who_says), (given, taken)  # type: ignore[attr-defined]
    assert total > 0
    assert found == 0


@pytest.mark.parametrize(("tokens", "is_seen"), [(8, False), (1000, True)], ids=["small", "large"])
def test_where_both_allow_it_the_metadata_is_sealed_and_large_payload_is_not(
    hosts: Namespaces, scheme: str, tokens: int, is_seen: bool
) -> None:
    """What is said on kvferry's connection is not to be read on the wire, a small copy neither; what the
    library moves is."""
    both = {"plain": "anywhere", "tokens": tokens}
    name, payload = Wire(hosts, REQUEST.encode()), Wire(hosts)
    given, taken = handoff(
        hosts,
        address(hosts, scheme) | both | {"identity": identity(0)},
        both | {"identity": identity(1)},
    )
    assert taken.get("path") == f"{scheme}-tcp", (given, taken)
    assert taken["arrived"] is True
    assert name.stop()[1] == 0
    assert (payload.stop()[1] > 0) is is_seen, "the wire was not read, or the library encrypts"


def test_a_peer_of_another_authority_gets_no_metadata(hosts: Namespaces, scheme: str) -> None:
    """The certificate must be of the host that decode connects to, also where payload may be plain."""
    both = {"plain": "anywhere"}
    given, taken = handoff(
        hosts,
        address(hosts, scheme) | both | {"identity": identity(1)},
        both | {"identity": identity(1)},
    )
    assert taken.get("kind") == "peer", (given, taken)
    assert "IP address mismatch" in str(taken["error"])
