"""Prefix hashes: equal prefixes agree, block by block, and nothing else does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.prefix import HASH_NBYTES, HeldPrefix, agreed_tokens, hold_prefix

IDS = st.lists(st.integers(0, 3), max_size=40)


@given(IDS, IDS, st.integers(1, 7))
def test_agreement_is_the_common_prefix_in_whole_blocks(
    ours: list[int], theirs: list[int], block: int
) -> None:
    """Agreed tokens are the longest common prefix, counted in decode's whole blocks."""
    common = 0
    while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
        common += 1
    expected = min(common, len(theirs) // block * block) // block * block
    held = hold_prefix(np.array(theirs, np.int64), block, b"salt")
    assert held.tokens == len(theirs) // block * block
    assert agreed_tokens(held, np.array(ours, np.int32), b"salt") == expected


@given(IDS.filter(bool), st.integers(1, 7))
def test_another_salt_shares_nothing(ids: list[int], block: int) -> None:
    """Equal tokens under another model, adapter or image are another prefix."""
    held = hold_prefix(np.array(ids), block, b"one")
    assert agreed_tokens(held, np.array(ids), b"other") == 0


def test_a_block_in_the_middle_changes_all_that_follow() -> None:
    """Hashes are chained: after an unlike block no later one is equal."""
    one = hold_prefix(np.arange(20), 4, b"").hashes
    two = hold_prefix(np.where(np.arange(20) == 5, 99, np.arange(20)), 4, b"").hashes
    same = [one[i : i + HASH_NBYTES] == two[i : i + HASH_NBYTES] for i in range(0, len(one), HASH_NBYTES)]
    assert same == [True, False, False, False, False]


def test_hashes_of_a_peer_that_are_no_hashes_agree_on_nothing() -> None:
    """A claim with half a hash, or random ones, is worth no token."""
    for hashes in (b"", b"short", b"x" * 64):
        assert agreed_tokens(HeldPrefix(4, hashes), np.arange(40), b"") == 0
