"""Where peers are: lists, names with many addresses, files; and what becomes of them when they change."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import run
from kvferry.errors import DeadlineError, InputError, KVFerryError
from kvferry.probe import Agent, AgentSite
from kvferry.transport.certificates import init_authority, issue
from kvferry.transport.peers import find_peers, is_watched, read_entries
from kvferry.transport.security import Identity
from probe_kit import agents

REAL = socket.getaddrinfo


def names(monkeypatch: pytest.MonkeyPatch, **known: list[str]) -> None:
    """A resolver that knows these names, and nothing else without dots."""

    def resolve(host: Any, port: Any, *args: Any, **fields: Any) -> Any:
        if host in known:
            return [answer for ip in known[host] for answer in REAL(ip, port, *args, **fields)]
        return REAL(host, port, *args, **fields)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_a_name_is_every_address_of_it_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv4 before IPv6, by number; options go with each; whoever asks says what addresses begin with."""
    names(monkeypatch, fleet=["10.0.0.10", "fd00::2", "10.0.0.9", "10.0.0.10"])
    found = find_peers(["a:1", "dns:fleet:7400?plain=yes", "tcp://b:2"], "peers")
    assert found == (
        "a:1",
        "tcp://10.0.0.9:7400?plain=yes",
        "tcp://10.0.0.10:7400?plain=yes",
        "tcp://[fd00::2]:7400?plain=yes",
        "tcp://b:2",
    )
    assert find_peers(["dns:fleet:80"], "decode", scheme="http")[0] == "http://10.0.0.9:80"
    assert is_watched(["a:1", "dns:fleet:7400"])
    assert is_watched(["@file"])
    assert not is_watched(["a:1", "tcp://b:2"])


def test_a_file_holds_entries_and_remarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, fleet=["10.0.0.9"])
    file = tmp_path / "peers"
    file.write_text("# rack 1\na:1\n\n  b:2  # the slow one\r\ndns:fleet:3\n")
    assert read_entries(["x:1", f"@{file}"], "peers") == ("x:1", "a:1", "b:2", "dns:fleet:3")
    assert find_peers([f"@{file}"], "peers") == ("a:1", "b:2", "tcp://10.0.0.9:3")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a:1 b:2\n", "line 1: 'a:1 b:2' is not one entry"),
        (b"a:1\n@other\n", "line 2: '@other' is not one entry"),
        (b"a:1\n\xff\n", "no UTF-8 at byte 4"),
        (b"#" * ((1 << 20) + 1), "longer than 1048576 bytes"),
        (b"a:1\n" * 20000, "20000 entries, more than 16384"),
        (b"dns:fleet\n", "'dns:fleet' does not read dns:NAME:PORT"),
        (b"dns:fleet:0\n", "'dns:fleet:0' has port 0"),
        (b"dns:fleet:1?color=red\n", "does not read dns:NAME:PORT"),
        (b"dns:no-such-name.invalid:1\n", "'no-such-name.invalid': "),
        (b"dns:" + b"x" * 70 + b".y:1\n", "xxx"),
    ],
)
def test_what_is_no_list_is_one_line_and_exit_2(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name of the option, the file and the line, from every verb that takes a list."""
    file = tmp_path / "peers"
    file.write_bytes(content)
    decode = ["--decode", "http://h:1", "--listen", "127.0.0.1:0"]
    for argv in (["probe", f"@{file}"], ["doctor", f"@{file}"], ["proxy", "--prefill", f"@{file}", *decode]):
        assert run(argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        if argv[0] != "proxy" or "a:1" not in content.decode(errors="replace"):
            assert said in err


@pytest.mark.parametrize("name", ["nowhere", "", "."])
def test_a_file_that_is_not_there(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", f"@{tmp_path / name}" if name else "@"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_list_without_a_pair_says_how_many_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "peers"
    file.write_text("# nobody yet\n")
    assert run(["probe", f"@{file}"]) == 2
    assert "peers: 0 found" in capsys.readouterr().err
    assert run(["doctor", f"@{file}"]) == 2
    assert "peers: the list is empty" in capsys.readouterr().err


def test_a_name_server_that_is_silent_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver cannot be stopped; nobody waits for it longer than was said."""
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_fields: over.wait(60) and [])
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="no name server answered for 'fleet'"):
        find_peers(["dns:fleet:1"], "peers", timeout_seconds=0.05)
    assert time.monotonic() - started < 30
    over.set()


@pytest.mark.slow
def test_a_probe_and_the_doctor_find_agents_by_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real agents at two addresses of one name: measured, examined, and a third is told."""
    with agents(["--listen", "127.0.0.1:0", "--name", "one"]) as first:
        port = first[0].address.rpartition(":")[2]
        with agents(["--listen", f"127.0.0.2:{port}", "--name", "two"]):
            names(monkeypatch, fleet=["127.0.0.2", "127.0.0.1"])
            assert run(["probe", f"dns:fleet:{port}", "--bytes", "64KiB", "--repeat", "1", "--json"]) == 0
            rows = json.loads(capsys.readouterr().out)["pairs"]
            assert {(row["from"], row["to"]) for row in rows} == {("one", "two"), ("two", "one")}
            names(monkeypatch, fleet=["127.0.0.1", "127.0.0.2", "127.0.0.3"])
            assert run(["doctor", f"dns:fleet:{port}", "--json"]) == 1
            told = json.loads(capsys.readouterr().out)
            assert [peer["name"] for peer in told["peers"]] == ["one", "two"]
            assert list(told["unreachable"]) == [f"tcp://127.0.0.3:{port}"]


def test_names_in_a_file_count_from_the_next_connection_on(tmp_path: Path) -> None:
    """An agent's list of whom it takes: names come and go without a restart; an empty list takes nobody."""
    init_authority(tmp_path)
    one, me = (issue(tmp_path, name, hosts=("127.0.0.1",)) for name in ("one", "me"))
    wanted = tmp_path / "names"
    wanted.write_text("other\n")

    async def reach(address: str) -> str:
        try:
            site = await AgentSite.connect(address, tls=Identity.load(me))
        except KVFerryError as error:
            return str(error)
        await site.close()
        return "taken"

    async def go() -> None:
        identity = Identity.load(one, peers=(f"@{wanted}",))
        async with await Agent.listen("tcp://127.0.0.1:0?plain=no", name="one", tls=identity) as agent:
            assert "this side takes other" in await reach(agent.address)
            wanted.write_text("other\nm*\n")
            assert await reach(agent.address) == "taken"
            wanted.write_text("# nobody\n")
            assert "this side takes nobody" in await reach(agent.address)
            wanted.unlink()
            assert await reach(agent.address) != "taken"

    asyncio.run(go())
    with pytest.raises(InputError, match=r"peers: .*names"):
        Identity.load(one, peers=(f"@{wanted}",))
