"""Where peers are: a plain list, a DNS name with many addresses, or a file, alone or mixed.

An entry is one of

- ``ADDRESS``: as it stands;
- ``dns:NAME:PORT[?OPTIONS]``: every address that NAME has now (the headless service of a cluster);
- ``@FILE``: the entries of a file, one a line, ``#`` to the end of a line for remarks.

Who runs long asks again every ``LOOK_SECONDS``: files and names are then what they have become.
"""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvferry.errors import DeadlineError, InputError
from kvferry.transport.address import Address, parse_address, parse_host_port

__all__ = ["LOOK_SECONDS", "RESOLVE_SECONDS", "find_peers", "is_watched", "read_entries"]

LOOK_SECONDS = 2.0
RESOLVE_SECONDS = 15.0
MAX_FILE_NBYTES = 1 << 20
MAX_PEERS = 1 << 14
_OPTIONS = ("plain", "streams", "contact")


def is_watched(entries: Iterable[str]) -> bool:
    """Whether what the entries stand for can change: a file or a name is among them."""
    return any(entry.startswith(("@", "dns:")) for entry in entries)


def read_entries(entries: Iterable[str], field: str) -> tuple[str, ...]:
    """The entries, each ``@FILE`` replaced by what is in the file now.

    Raises InputError naming ``field``, the file and its line. A file names no other file.
    """
    found: list[str] = []
    for entry in entries:
        found += _lines(entry[1:], field) if entry.startswith("@") else [entry]
    if len(found) > MAX_PEERS:
        raise InputError(f"{field}: {len(found)} entries, more than {MAX_PEERS}")
    return tuple(found)


def find_peers(
    entries: Iterable[str], field: str, *, scheme: str = "tcp", timeout_seconds: float = RESOLVE_SECONDS
) -> tuple[str, ...]:
    """Addresses of all entries, in their order; those of a name in the order of their numbers.

    ``scheme``: what addresses of a name begin with; plain entries stay as they are.
    Raises InputError naming ``field`` for an entry without sense, a file that cannot be read and a name
    that has no address; DeadlineError where name servers do not answer in time.
    """
    found: list[str] = []
    for entry in read_entries(entries, field):
        if entry.startswith("dns:"):
            found += _addresses(entry, field, scheme, timeout_seconds)
        else:
            found.append(entry)
    return tuple(found)


def _lines(name: str, field: str) -> Iterator[str]:
    if not name:
        raise InputError(f"{field}: '@' is followed by no file; write @FILE")
    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"{field}: {name!r}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_FILE_NBYTES:
        raise InputError(f"{field}: {name}: longer than {MAX_FILE_NBYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{field}: {name}: no UTF-8 at byte {error.start}") from error
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) > 1 or (words and words[0].startswith("@")):
            raise InputError(f"{field}: {name}, line {number}: {' '.join(words)!r} is not one entry")
        yield from words


def _addresses(entry: str, field: str, scheme: str, timeout_seconds: float) -> list[str]:
    try:
        parsed = parse_address(f"dns://{entry.removeprefix('dns:')}", "dns", _OPTIONS)
        host, port = parse_host_port(parsed)
    except InputError as error:
        raise InputError(f"{field}: {entry!r} does not read dns:NAME:PORT") from error
    if port == 0:
        raise InputError(f"{field}: {entry!r} has port 0; a peer has a port of its own")
    shown = []
    for ip in sorted(_resolve(host, field, timeout_seconds), key=_order):
        place = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        shown.append(str(Address(scheme, place, parsed.options)))
    return shown


def _order(ip: str) -> tuple[int, int, str]:
    parsed = ipaddress.ip_address(ip)
    return parsed.version, int(parsed), ip


def _resolve(host: str, field: str, timeout_seconds: float) -> set[str]:
    """Every address of a name. The resolver cannot be told to stop, so its thread is left behind late."""
    answers: queue.SimpleQueue[set[str] | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answers.put({str(address[0]) for *_, address in found})
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, name=f"kvferry-resolve-{host}", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_seconds)
    except queue.Empty:
        raise DeadlineError(
            f"{field}: no name server answered for {host!r} within {timeout_seconds:g} s",
            phase="resolve",
            next_step="see /etc/resolv.conf, or give addresses instead of a name",
        ) from None
    if isinstance(answer, set):
        return answer
    raise InputError(f"{field}: {host!r}: {getattr(answer, 'strerror', None) or answer}") from answer
