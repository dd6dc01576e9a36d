"""``kvferry certs``: an authority, identities that endpoints accept, renewal, and bad input."""

from __future__ import annotations

import datetime as dt
import json
import stat
from pathlib import Path

import pytest
from cryptography import x509

from kvferry.cli import run
from kvferry.errors import InputError, LocalError
from kvferry.transport import certificates
from kvferry.transport.security import Identity, names_match


def certificate(path: Path) -> x509.Certificate:
    pem = path.read_bytes()
    return x509.load_pem_x509_certificate(pem[pem.index(b"-----BEGIN CERTIFICATE") :])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_authority_and_an_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands make what ``Identity.load`` takes; keys are their owner's alone."""
    folder = tmp_path / "certs"
    assert run(["certs", "init", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["authority"] == str(folder / "ca.pem")
    hosts = ["--host", "10.0.0.1", "--host", "node1", "--host", "2001:db8::1"]
    assert run(["certs", "issue", str(folder), "prefill-0", *hosts, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["name"] == "prefill-0"
    identity = Identity.load(said["identity"])
    assert identity.authority == str(folder / "ca.pem")
    made = certificate(Path(said["identity"]))
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["prefill-0", "node1"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "2001:db8::1"]
    made.verify_directly_issued_by(certificate(folder / "ca.pem"))
    assert [mode(folder / name) for name in ("ca-key.pem", "prefill-0.pem", "ca.pem")] == [
        0o600,
        0o600,
        0o644,
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["ca-key.pem", "ca.pem", "prefill-0.pem"]


def test_a_certificate_never_outlives_its_authority(tmp_path: Path) -> None:
    """A longer one would fail on the day that nobody thinks of."""
    certificates.init_authority(tmp_path, days=10)
    made = certificate(certificates.issue(tmp_path, "a", days=365))
    assert made.not_valid_after_utc == certificate(tmp_path / "ca.pem").not_valid_after_utc
    short = certificate(certificates.issue(tmp_path, "a", days=1))
    assert short.not_valid_after_utc - dt.datetime.now(dt.UTC) < dt.timedelta(days=1, minutes=1)


def test_a_renewal_is_a_new_key_in_the_same_file(tmp_path: Path) -> None:
    """Issuing again replaces the file; a second authority in the same folder is refused."""
    certificates.init_authority(tmp_path)
    first = certificate(certificates.issue(tmp_path, "a")).public_key()
    assert certificate(certificates.issue(tmp_path, "a")).public_key() != first
    with pytest.raises(InputError, match="there already"):
        certificates.init_authority(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["issue", "FOLDER", "../evil"], "name"),
        (["issue", "FOLDER", "ca"], "name"),
        (["issue", "FOLDER", "ca-key"], "name"),
        (["issue", "FOLDER", ""], "name"),
        (["issue", "FOLDER", "a", "--host", "not a host"], "host"),
        (["issue", "FOLDER", "a", "--host", "ümlaut"], "host"),
        (["issue", "FOLDER", "a", "--days", "0"], "days"),
        (["issue", "FOLDER", "a", "--days", "99999999"], "days"),
        (["issue", "EMPTY", "a"], "kvferry certs init"),
        (["issue", "BROKEN", "a"], "no authority that can be read"),
        (["issue", "MIXED", "a"], "is not the key of"),
        (["init", "FOLDER"], "there already"),
        (["init", "EMPTY", "--name", "x" * 65], "name"),
        (["init", "EMPTY", "--days", "-1"], "days"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    """Exit status 2, one line that names it, and no file is left or changed."""
    for name in ("FOLDER", "MIXED"):
        certificates.init_authority(tmp_path / name)
    (tmp_path / "MIXED" / "ca-key.pem").write_bytes((tmp_path / "FOLDER" / "ca-key.pem").read_bytes())
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "EMPTY").mkdir()
    for file in ("ca.pem", "ca-key.pem"):
        (tmp_path / "BROKEN" / file).write_text("x")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    places = ["FOLDER", "EMPTY", "BROKEN", "MIXED"]
    given = [str(tmp_path / argument) if argument in places else argument for argument in arguments]
    assert run(["certs", *given]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert word in said.err
    assert said.err.count("\n") == 1
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that cannot be written is an error; the identity in use stays whole."""
    certificates.init_authority(tmp_path)
    path = certificates.issue(tmp_path, "a")
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(certificates.os, "fsync", full)
    with pytest.raises(LocalError, match="No space left"):
        certificates.issue(tmp_path, "a")
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pem", "ca-key.pem", "ca.pem"]


def test_names_are_patterns_and_case_does_not_count() -> None:
    """``*`` stands for any letters; a name that only begins alike does not match."""
    assert names_match(("prefill-3",), ("decode-*", "PREFILL-*"))
    assert not names_match(("prefill-3.evil",), ("prefill-?",))
    assert not names_match((), ("*",))
    assert not names_match(("evil-prefill-3",), ("prefill-*",))
