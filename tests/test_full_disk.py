"""A disk that is full for logs stops no handoff: /dev/full is one."""

from __future__ import annotations

import os

import pytest

from full_disk_worker import FULL, play


@pytest.mark.skipif(not os.path.exists(FULL), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    ("where", "mode", "scheme"), [("process", "pull", "tcp"), ("threads", "push", "shm")]
)
@pytest.mark.slow
def test_a_handoff_goes_on_when_nothing_can_be_logged(where: str, mode: str, scheme: str) -> None:
    """With logs and stderr of all processes at a full disk, bytes arrive and every hold ends."""
    said = play(where, mode, scheme)
    assert said["arrived"] is True
    assert said["held"] == 0
    assert said["path"] == {"tcp": "tcp", "shm": "mapped"}[scheme]
    assert int(str(said["refused_lines"])) > 0, "nothing was logged: the disk was not tried"
