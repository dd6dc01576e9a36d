"""``kvferry certs``: a small authority for one cluster, and a certificate for each endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from kvferry.cli.options import Whole

__all__ = ["certs", "init", "issue"]

certs = App(
    name="certs",
    help="Make the certificates by which a cluster's endpoints know each other (needs kvferry[tls]).",
    help_format="plaintext",
    result_action="return_value",
)

Json = Annotated[bool, Parameter(name="--json", negative="")]
Folder = Annotated[Path, Parameter(name="FOLDER")]


@certs.command
def init(
    folder: Folder, /, *, name: str = "kvferry cluster", days: Whole = 3650, as_json: Json = False
) -> None:
    """Make a new authority: ca.pem, which every endpoint trusts, and ca-key.pem, which signs.

    Parameters
    ----------
    folder
        Where the files go; it is created.
    name
        What certificates call the authority.
    days
        How long it is valid.
    as_json
        Print one JSON object.
    """
    from kvferry.transport.certificates import AUTHORITY_KEY, init_authority

    authority = init_authority(folder, name=name, days=days)
    if as_json:
        print(json.dumps({"authority": str(authority), "authority_key": str(folder / AUTHORITY_KEY)}))
        return
    print(f"{authority}: give it to every endpoint")
    print(f"{folder / AUTHORITY_KEY}: signs certificates; keep it off the workers, who has it can join")


@certs.command
def issue(
    folder: Folder,
    name: Annotated[str, Parameter(name="NAME")],
    /,
    *,
    host: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    days: Whole = 90,
    as_json: Json = False,
) -> None:
    """Make or renew NAME.pem, an endpoint's key and certificate; endpoints that run use it from then on.

    Parameters
    ----------
    folder
        The authority's folder.
    name
        The endpoint's name, by which its peers may know it.
    host
        A host name or IP address at which it listens, for peers that go by the host; repeatable.
    days
        How long it is valid, at most as long as the authority.
    as_json
        Print one JSON object.
    """
    from kvferry.transport.certificates import issue as issue_certificate

    path = issue_certificate(folder, name, hosts=host, days=days)
    if as_json:
        print(json.dumps({"identity": str(path), "name": name, "hosts": list(host)}))
        return
    print(f"{path}: key and certificate of {', '.join((name, *host))}; readable by you only")
