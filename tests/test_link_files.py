"""Link files come back as they were written, and a bad one is refused by file, line and key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import InputError, LocalError, NoPlanError
from kvferry.link import (
    MAX_LINKS_NBYTES,
    PRESETS,
    Knee,
    LinkFile,
    LinkFit,
    Mode,
    Node,
    Registration,
    Sample,
    Span,
    Spread,
    decode_links,
    encode_links,
    load_links,
    preset_links,
)
from kvferry.link.locate import place_of
from kvferry.link.profile import ConditionFit, LinkProfile
from kvferry.protocol.ticket import Mode as ProtocolMode
from link_kit import MARCH, MAY, line, links, profile, sweep


def rich_file() -> LinkFile:
    """A file that uses every key of the schema."""

    def cost(nbytes: int, descriptors: int) -> float:
        return 5e-5 + 1e-6 * descriptors + nbytes / (6e9 if nbytes < 2**22 else 2e9)

    sizes = [2**power for power in range(16, 29)]
    samples = [
        *sweep(cost, noise=0.02, repeats=3, sizes=sizes),
        *sweep(noise=0.02, repeats=3, tls=True, mode=Mode.PUSH, incast=4, under_load=True),
        *sweep(repeats=1, is_cold=True),
    ]
    full = profile(
        samples,
        path="tcp: 2 streams",
        via="stunnel",
        link_class="same rack",
        line_rate=12.5e9,
        registration=Registration(nbytes=2**30, seconds=0.078),
        first_contact_seconds=0.026,
        note="measured at night",
        date=MAY,
    )
    first = full.fits[0]
    fit = msgspec.structs.replace(first.fit, descriptors_overlap=True)
    older = msgspec.structs.replace(first, date=MARCH, fit=fit)
    nodes = (
        Node(
            name="a",
            address="tcp://10.0.0.1:7400",
            host="h1",
            software={"kvferry": "0.1.0"},
            facts={"mtu": "9000"},
        ),
        Node(name="b"),
    )
    pair = msgspec.structs.replace(full, fits=(older, *full.fits[1:]))
    return LinkFile(nodes=nodes, pairs=(pair,))


RICH = rich_file()


def leaves(value: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    """Every scalar of a JSON value with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def steps(path: str) -> list[str | int]:
    return [int(index) if index else key for key, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path)]


def put(value: Any, path: str, new: Any) -> Any:
    """A deep copy with one value replaced (or added)."""
    again = json.loads(json.dumps(value))
    *outer, last = steps(path)
    inner = again
    for step in outer:
        inner = inner[step]
    inner[last] = new
    return again


def refusal(data: bytes) -> str:
    with pytest.raises(InputError) as error:
        decode_links(data, "f.json")
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_file_comes_back_as_it_was() -> None:
    """Every key of the schema survives, byte for byte on the second writing."""
    data = encode_links(RICH)
    again = decode_links(data)
    assert again == RICH
    assert encode_links(again) == data
    keys = set(re.findall(rb'"(\w+)":', data))
    for record in (LinkFile, LinkProfile, ConditionFit, LinkFit, Node, Registration):
        for field in msgspec.structs.fields(record):
            assert field.encode_name.encode() in keys, f"the file of this test lacks {field.encode_name}"


def test_a_file_is_readable() -> None:
    """One sample a line, and no line longer than a screen is wide."""
    text = encode_links(RICH).decode()
    assert max(map(len, text.splitlines())) <= 175
    assert sum('"seconds": ' in row and '"descriptors": ' in row for row in text.splitlines()) == len(
        RICH.pairs[0].samples
    )


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20), st.floats(1e6, 1e12)),
        max_size=4,
    ),
    st.text(max_size=50),
)
def test_any_names_survive(pairs: list[tuple[str, str, float]], note: str) -> None:
    """Names and notes of any characters come back as they were."""
    file = links(
        *(
            profile(sweep(line(1e-5, 1e-6, rate)), a, b, keep=False, note=note, transport=f"t{i}")
            for i, (a, b, rate) in enumerate(pairs)
        )
    )
    assert decode_links(encode_links(file)) == file


def test_every_number_is_bounded() -> None:
    """Each number of the file, made negative, huge or a text, is refused with its own line and key."""
    good = json.loads(encode_links(RICH))
    numbers = {}
    for path, value in leaves(good):
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers.setdefault(re.sub(r"\[\d+\]", "[]", path), path)
    assert len(numbers) > 30
    for path in numbers.values():
        for bad in (-1, 1e300, "fast"):
            text = json.dumps(put(good, path, bad), indent=1)
            row = next(
                i
                for i, row in enumerate(text.splitlines(), 1)
                if re.search(rf'": {re.escape(json.dumps(bad))},?$', row)
            )
            said = refusal(text.encode())
            assert said.startswith(f"link: f.json, line {row}: {path[2:]}"), said


def test_every_object_is_closed() -> None:
    """A key that no schema knows is refused by name, in every object of the file."""
    good = json.loads(encode_links(RICH))
    objects = {re.sub(r"\.\w+$", "", path) for path, _ in leaves(good)} - {
        "$.nodes[0].software",
        "$.nodes[0].facts",
    }
    seen = {re.sub(r"\[\d+\]", "[]", path): path for path in sorted(objects)}
    assert len(seen) >= 8
    for path in seen.values():
        said = refusal(json.dumps(put(good, f"{path}.surprise", 1)).encode())
        assert said.endswith(f"{path}.surprise: unknown key".replace("$.", "", 1)), said


def test_a_key_of_several_lines_is_refused_in_one() -> None:
    """Whatever a key holds, the message is one line."""
    good = json.loads(encode_links(RICH))
    good["pairs"][0]["two\nlines"] = 1
    assert "two lines: unknown key" in refusal(json.dumps(good).encode())


def test_every_needed_key_is_named_when_it_is_missing() -> None:
    """Without a key that has no default, the message says which, and the line of the object around it."""
    text = encode_links(RICH).decode()
    for key in (
        "format",
        "version",
        "pairs",
        "from",
        "to",
        "transport",
        "measured",
        "fits",
        "mode",
        "a_seconds",
    ):
        cut, count = re.subn(rf'"{key}": ', f'"{key}_": ', text, count=1)
        assert count == 1
        said = refusal(cut.encode())
        assert re.search(rf"\b{key}: missing key$|\b{key}_: unknown key$", said), said


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "nan"])
def test_no_number_is_not_a_number(word: str) -> None:
    """NaN and infinities are refused with line and key, though some JSON writers print them."""
    text = re.sub(r'"o_seconds": [^,]+', f'"o_seconds": {word}', encode_links(RICH).decode(), count=1)
    row = next(i for i, row in enumerate(text.splitlines(), 1) if word in row)
    assert f"line {row}: pairs[0].fits[0].fit.o_seconds: {word} is no number" in refusal(text.encode())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"version": 1', '"version": 2', "line 3: version: version 2; this kvferry reads version 1"),
        ("kvferry-links", "other", "line 2: format: 'other' is not 'kvferry-links'"),
        ("2026-05-01T00:00:00Z", "2026-05-01", "pairs[0].date: Invalid RFC3339"),
        ("2026-05-01T00:00:00Z", "2026-05-01T00:00:00", "pairs[0].date: Expected datetime with"),
        ("2026-05-01T00:00:00Z", "2026-02-01T00:00:00Z", "pairs[0]: date: a fit is newer than its profile"),
        ('"mode": "pull"', '"mode": "drag"', "pairs[0].fits[0].mode: Invalid enum value 'drag'"),
        ('"low": 65536', '"low": 999999999', "low 999999999 is above high 268435456"),
        ('{"mtu": "9000"}', '{"mtu": 9000}', "nodes[0].facts: Expected str, got int"),
        (
            f'"samples": {RICH.pairs[0].fits[0].fit.samples}',
            '"samples": 0',
            "samples: a fit has none, and measured is true",
        ),
    ],
)
def test_a_value_that_means_nothing_is_refused(old: str, new: str, said: str) -> None:
    """Versions, dates, modes and spans that make no sense are refused in words."""
    text = encode_links(RICH).decode()
    assert old in text
    assert said in refusal(text.replace(old, new, 1).encode())


def test_the_same_conditions_twice_are_refused() -> None:
    """Two fits under the same conditions would leave the choice to chance."""
    good = json.loads(encode_links(RICH))
    good["pairs"][0]["fits"][1] = good["pairs"][0]["fits"][0]
    assert "the same conditions come twice" in refusal(json.dumps(good).encode())


@pytest.mark.parametrize(
    "data", [b"", b"  \n", b"{", b"[1]", b"5", b"null", b"{}", b"[" * 100_000, b"\x00", b"\xff{}"]
)
def test_bytes_that_are_no_link_file_are_refused(data: bytes) -> None:
    """Empty, cut, deep or foreign bytes: one line, never another error."""
    assert refusal(data).startswith("link: f.json")


@settings(max_examples=200)
@given(st.data())
def test_damaged_files_raise_nothing_else(data: st.DataObject) -> None:
    """Whatever bytes change, the file is read or refused in one line."""
    good = bytearray(encode_links(links(profile(keep=False))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    said = ""
    try:
        decode_links(bytes(good), "f.json")
    except InputError as error:
        said = str(error)
    assert "\n" not in said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z_]{1,4}", fullmatch=True), inner, min_size=1, max_size=3)
    ),
    max_leaves=10,
)


@given(JSON.filter(lambda value: isinstance(value, list | dict)), st.data(), st.sampled_from([None, 0, 2]))
def test_places_are_the_lines_that_a_reader_counts(
    value: Any, data: st.DataObject, indent: int | None
) -> None:
    """The line of any value in any JSON text is that where a mark put in its place stands."""
    paths = [path for path, _ in leaves(value)]
    path = data.draw(st.sampled_from(paths))
    text = json.dumps(put(value, path, "@MARK@"), indent=indent)
    assert text.count("@MARK@") == 1
    place = place_of(text.encode(), path)
    assert place.line == text[: text.index("@MARK@")].count("\n") + 1
    assert place.key == path[1:].removeprefix(".")


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path) -> None:
    """Ten gigabytes in one line are not read, let alone parsed."""
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(10 * 10**9)
    with pytest.raises(InputError, match=rf"huge.json: more than {MAX_LINKS_NBYTES} bytes"):
        load_links(path)


def test_a_file_that_hides_its_size_is_read_no_further() -> None:
    """A device that never ends is refused after the bound, though it says it holds nothing."""
    with pytest.raises(InputError, match="more than"):
        load_links("/dev/zero")


def test_a_name_that_is_nothing_lists_the_presets(tmp_path: Path) -> None:
    """Neither a file nor a preset: the message lists the presets; a folder is said to be one."""
    with pytest.raises(InputError, match=r"isdn: no such file, and no preset; known: nvlink3,.*eth100"):
        load_links("isdn")
    with pytest.raises(InputError, match="Is a directory"):
        load_links(tmp_path)
    with pytest.raises(InputError, match="null"):
        load_links("a\0b")


def test_a_file_is_loaded_by_path(tmp_path: Path) -> None:
    """What was written is what is loaded, from a Path or its text."""
    path = tmp_path / "links.json"
    path.write_bytes(encode_links(RICH))
    assert load_links(path) == load_links(str(path)) == RICH


@pytest.mark.parametrize(
    "change", [{"o_seconds": math.nan}, {"o_seconds": -1.0}, {"worst_error": math.inf}, {"samples": 1.5}]
)
def test_no_file_is_written_that_could_not_be_read(change: dict[str, Any]) -> None:
    """A record made wrong by code is refused when it is written, not when it is needed."""
    pair = RICH.pairs[0]
    fit = msgspec.structs.replace(pair.fits[0].fit, **change)
    bad = msgspec.structs.replace(pair, fits=(msgspec.structs.replace(pair.fits[0], fit=fit),))
    with pytest.raises(LocalError, match="do not fit their own schema"):
        encode_links(links(bad))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_files_of_one_unmeasured_pair(name: str) -> None:
    """A preset loads like a file, is marked, holds for any two nodes, and predicts nothing."""
    file = load_links(name)
    assert file == preset_links(name) == decode_links(encode_links(file))
    pair = file.select("x", "y")
    assert (pair.measured, pair.label, pair.date) == (False, "unmeasured", None)
    assert file.between("x", "y") == (pair,)
    fit = pair.fit(Mode.PUSH, tls=True)
    assert fit.at_least(10**9, 1) == pytest.approx(1e9 / PRESETS[name].bytes_per_second)
    with pytest.raises(NoPlanError, match="nothing was measured"):
        fit.predict(10**9, 1)


@pytest.mark.parametrize("name", PRESETS)
def test_published_figures_are_below_their_brochure(name: str) -> None:
    """What others measured has a source, and no figure is above the link's own rate."""
    for figure in PRESETS[name].published:
        assert figure.source
        assert figure.what
        assert 0 < figure.bytes_per_second <= PRESETS[name].bytes_per_second


def test_pairs_are_selected_by_what_is_given() -> None:
    """One candidate is taken; none or several are refused with the candidates."""
    file = links(profile(), profile(from_node="b", to_node="a"), profile(transport="shm"))
    assert file.select("b").to_node == "a"
    assert file.select("a", "b", "shm").transport == "shm"
    assert [pair.transport for pair in file.between("a", "b")] == ["tcp", "shm"]
    with pytest.raises(InputError, match=r"2 pairs fit.*a -> b over tcp; a -> b over shm"):
        file.select("a", "b")
    with pytest.raises(InputError, match=r"0 pairs fit.*b -> a over tcp"):
        file.select("c")


def test_conditions_that_were_not_measured_are_named() -> None:
    """A fit is never taken for another condition than its own."""
    pair = profile([*sweep(), *sweep(mode=Mode.PUSH, tls=True)])
    assert pair.fit("pull").samples == len(sweep())
    assert pair.fit(Mode.PUSH, tls=True).samples == len(sweep())
    with pytest.raises(NoPlanError, match=r"not measured under pull, TLS; measured: pull; push, TLS"):
        pair.fit(Mode.PULL, tls=True)
    with pytest.raises(NoPlanError, match="pull, incast of 4"):
        pair.fit(incast=4)


def test_modes_are_those_of_the_protocol() -> None:
    """Links and tickets say push and pull with the same words."""
    assert list(map(str, Mode)) == list(map(str, ProtocolMode))


def test_the_documented_file_is_one_and_every_key_is_documented() -> None:
    """The example of docs/links.md loads, and its table names every key and every preset."""
    page = (Path(__file__).parent.parent / "docs" / "links.md").read_text("utf-8")
    example = page.partition("```json\n")[2].partition("```")[0]
    assert decode_links(example.encode()).select().fit(Mode.PULL).predict(2**20, 16) > 0
    keys = {
        field.encode_name
        for record in (
            LinkFile,
            Node,
            LinkProfile,
            ConditionFit,
            LinkFit,
            Knee,
            Spread,
            Span,
            Sample,
            Registration,
        )
        for field in msgspec.structs.fields(record)
    }
    assert not sorted(key for key in keys if f"`{key}`" not in page)
    assert not sorted(name for name in PRESETS if name not in page)
