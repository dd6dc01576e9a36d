"""Link files as JSON: read with the line and the key of whatever is wrong, written one sample a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import msgspec

from kvferry.errors import InputError, LocalError, did_you_mean
from kvferry.link.locate import Place, place_at, place_of
from kvferry.link.presets import PRESETS, preset_links
from kvferry.link.profile import FORMAT, VERSION, LinkFile

__all__ = ["MAX_LINKS_NBYTES", "decode_links", "encode_links", "load_links"]

MAX_LINKS_NBYTES = 256 << 20
"""All pairs of 8 nodes with 1,000 samples each take 6 MB; of 256 nodes without samples, 140 MB."""

_WIDTH = 160
"""The longest sample fits: one sample is one line."""


class _Envelope(msgspec.Struct):
    """What says whether a file is ours, before its schema is applied."""

    format: str
    version: int


_decoder = msgspec.json.Decoder(LinkFile)
_envelope = msgspec.json.Decoder(_Envelope)
_PATH = re.compile(r"(.*?)(?: - at `(.*)`)?", re.DOTALL)
_NAMED = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_NO_NUMBER = re.compile(rb"-?(?:nan|infinity|inf)\b", re.IGNORECASE)
_BYTE = re.compile(r"JSON is malformed: (.*) \(byte ([0-9]+)\)")


def load_links(path_or_preset: str | Path) -> LinkFile:
    """The links in a file, or a preset by its name (unmeasured, between any two nodes).

    Raises InputError, one line with file, line and key, for a file that is not there, is larger than
    :data:`MAX_LINKS_NBYTES`, is no JSON, has an unknown or missing key, or a value out of its bounds.
    """
    name = str(path_or_preset)
    if name in PRESETS:
        return preset_links(name)
    path = Path(name)
    try:
        with path.open("rb") as file:
            # Asked first so that a huge file costs nothing; read bounded because a size can lie.
            nbytes = path.stat().st_size
            data = file.read(MAX_LINKS_NBYTES + 1) if nbytes <= MAX_LINKS_NBYTES else b""
    except FileNotFoundError:
        known = f"known: {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}"
        raise InputError(f"link: {name}: no such file, and no preset; {known}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"link: {name}: {getattr(error, 'strerror', None) or error}") from error
    if max(nbytes, len(data)) > MAX_LINKS_NBYTES:
        raise InputError(f"link: {name}: more than {MAX_LINKS_NBYTES} bytes; that is no link file")
    return decode_links(data, name)


def decode_links(data: bytes, name: str = "links") -> LinkFile:
    """The same from bytes; ``name`` is what messages call them."""
    if not data.strip():
        raise InputError(f"link: {name}: empty")
    try:
        envelope = _envelope.decode(data)
        if envelope.format != FORMAT:
            _refuse(name, place_of(data, "$.format"), f"{envelope.format!r} is not {FORMAT!r}")
        if envelope.version != VERSION:
            _refuse(
                name,
                place_of(data, "$.version"),
                f"version {envelope.version}; this kvferry reads version {VERSION}",
            )
        return _decoder.decode(data)
    except msgspec.ValidationError as error:
        _refuse_value(name, data, error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse_text(name, data, error)


def _refuse_value(name: str, data: bytes, error: msgspec.ValidationError) -> NoReturn:
    match = _PATH.fullmatch(str(error))
    assert match is not None
    message, path = match[1], match[2] or "$"
    named = _NAMED.fullmatch(message)
    if named is None:
        _refuse(name, place_of(data, path), message.replace("`", ""), error)
    place = place_of(data, f"{path}.{named[2]}")
    what = "unknown key" if named[1] == "contains unknown" else "missing key"
    _refuse(name, place, what, error)


def _refuse_text(name: str, data: bytes, error: Exception) -> NoReturn:
    match = _BYTE.fullmatch(str(error))
    if match is None:
        _refuse(name, place_at(data, len(data)), f"not JSON: {error}", error)
    offset = int(match[2])
    place = place_at(data, offset)
    # Of -Infinity the parser names the second byte, of nan the second or third.
    words = _NO_NUMBER.finditer(data, max(offset - 4, 0), offset + 16)
    word = next((word for word in words if word.start() <= offset < word.end()), None)
    reason = f"{word[0].decode()} is no number" if word else f"not JSON: {match[1]}"
    _refuse(name, place, reason, error)


def _refuse(name: str, place: Place, reason: str, cause: Exception | None = None) -> NoReturn:
    key = f" {place.key}:" if place.key else ""
    # Keys and values may hold anything; the message stays one line.
    raise InputError(" ".join(f"link: {name}, line {place.line}:{key} {reason}".split())) from cause


def encode_links(links: LinkFile) -> bytes:
    """The file as JSON that a person can read and ``diff``: short objects on one line each.

    Raises LocalError when a record breaks its own schema (a NaN, a negative time), so that no file
    is written that could not be read.
    """
    data = f"{_pretty(msgspec.to_builtins(links), '')}\n".encode()
    try:
        again = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise LocalError(f"the links do not fit their own schema: {error}") from error
    if again != links:
        raise LocalError("the links do not fit their own schema: a number is not finite")
    return data


def _pretty(value: object, indent: str) -> str:
    # With indent=0 msgspec writes one line, a space after each comma and colon.
    line = msgspec.json.format(msgspec.json.encode(value), indent=0).decode()
    if len(indent) + len(line) <= _WIDTH or not isinstance(value, dict | list | tuple):
        return line
    inner = indent + "  "
    if not isinstance(value, dict):
        return "[\n" + ",\n".join(inner + _pretty(item, inner) for item in value) + f"\n{indent}]"
    parts = [f'{inner}"{key}": {_pretty(item, inner)}' for key, item in value.items()]
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
