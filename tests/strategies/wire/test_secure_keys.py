import base64
import contextlib
import os
from itertools import combinations
from typing import Any

import pytest

from fedsilo.core.errors import SiteError
from fedsilo.strategies.wire.secure_keys import (
    Shares,
    cut_secret,
    join_shares,
    mask_check,
    mask_key,
    new_key_pair,
    open_shares,
    public_half,
    read_texts,
    read_tokens,
    read_whole,
    seal_key,
    seal_shares,
)
from tests.support.errors import refuses


def test_two_sites_agree_on_a_key_and_a_third_has_another() -> None:
    a, b, c = (new_key_pair() for _ in range(3))
    key = mask_key(a.private, b.public, b"round")
    assert key == mask_key(b.private, a.public, b"round")
    assert len(key) == 32
    assert key != mask_key(c.private, b.public, b"round")
    assert key != mask_key(a.private, b.public, b"other round")
    assert seal_key(a.private, b.public, b"round") == seal_key(b.private, a.public, b"round")
    assert base64.urlsafe_b64decode(seal_key(a.private, b.public, b"round")) != key
    for private, public in ((a.private, b"no key"), (b"no key", a.public), (a.public, a.public)):
        with pytest.raises(SiteError, match="a received key is not a key"):
            mask_key(private, public, b"")


def test_a_secret_is_known_again_by_its_public_half_or_its_check() -> None:
    pair, other = new_key_pair(), new_key_pair()
    assert public_half(pair.private) == pair.public != public_half(other.private)
    assert mask_check(b"a" * 32) != mask_check(b"b" * 32)
    with pytest.raises(SiteError, match="a received key is not a key"):
        public_half(b"no key")


def test_any_threshold_of_shares_give_the_secret_and_fewer_do_not() -> None:
    for secret in (os.urandom(32), new_key_pair().private):
        shares = cut_secret(secret, 3, 5)
        assert all(join_shares(some) == secret for some in combinations(shares, 3))
        for few in combinations(shares, 2):
            with contextlib.suppress(SiteError):
                assert join_shares(few) != secret


def test_shares_of_other_secrets_are_told() -> None:
    one, other = cut_secret(os.urandom(32), 2, 3), cut_secret(new_key_pair().private, 2, 3)
    with pytest.raises(SiteError, match="not belong to one secret"):
        join_shares([one[0], other[1]])
    with pytest.raises(SiteError, match="not belong to one secret"):
        join_shares([one[0], one[0]])
    with pytest.raises(SiteError, match="not belong to one secret"):
        join_shares([b"short", b"other"])


def test_sealed_shares_open_for_their_receiver_alone() -> None:
    a, b, c = (new_key_pair() for _ in range(3))
    shares = Shares(b"own", b"mask")
    key = seal_key(a.private, b.public, b"1")
    token = seal_shares(shares, key, (0, 1))
    assert b"own" not in token
    assert open_shares(token, seal_key(b.private, a.public, b"1"), (0, 1)) == shares
    with pytest.raises(SiteError, match="sealed with another key: are they from another round"):
        open_shares(token, seal_key(c.private, a.public, b"1"), (0, 1))
    with pytest.raises(SiteError, match="from another site or for another site"):
        open_shares(token, key, (2, 1))
    with pytest.raises(SiteError, match="sealed with another key"):
        open_shares(token[:-3], key, (0, 1))


@pytest.mark.parametrize("value", [None, "a", 3, [b"a"], [3], [""] * 2 + [None]])
def test_records_of_another_form_are_told(value: Any) -> None:
    record = {} if value is None else {"key": value}
    with refuses(SiteError, "key"):
        read_texts(record, "key")
    if value != [b"a"]:
        with refuses(SiteError, "key", "4"):
            read_tokens(record, "key", 4)
    if value != 3:
        with refuses(SiteError, "key"):
            read_whole(record, "key")


def test_a_token_has_bytes_and_not_too_many() -> None:
    assert read_tokens({"key": [b"abcd"]}, "key", 4) == [b"abcd"]
    for wrong in ([b""], [b"abcde"], [b"a", "b"]):
        with refuses(SiteError, "key"):
            read_tokens({"key": wrong}, "key", 4)
