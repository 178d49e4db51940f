"""Which replies to the phases of secure aggregation are of the right form, and by whom signed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import SECURE_AGREE, SECURE_KEYS, SECURE_SHARES
from fedsilo.strategies.wire.reply import Reply
from fedsilo.strategies.wire.secure_keys import (
    LONGEST_KEY,
    LONGEST_SEALED,
    LONGEST_SHARE,
    SECURE,
    refuse_no_key,
    texts,
    token,
    tokens,
    whole,
)
from fedsilo.strategies.wire.signatures import is_signed, key_words, words

if TYPE_CHECKING:
    from fedsilo.strategies.loop.secure_round import SecureSum


def secure_fault(sum_: SecureSum, phase: str, reply: Reply) -> str | None:
    """Say why what was received for secure aggregation cannot be used, if it cannot."""
    record = reply.secure
    try:
        if whole(record, "round") != sum_.round:
            return f"record '{SECURE}' is of round {record['round']!r}, not {sum_.round}"
        if phase == SECURE_KEYS:
            _check_keys(sum_, reply)
        elif phase == SECURE_SHARES:
            _check_names(texts(record, "to"), set(sum_.keys) - {reply.site})
            _check_number(tokens(record, "sealed", LONGEST_SEALED), len(sum_.keys) - 1)
            token(record, "check", LONGEST_KEY)
        elif phase == SECURE_AGREE:
            _check_signature(sum_, reply)
        else:
            of = texts(record, "of")
            _check_names(of, set(sum_.sealed) & {*of, reply.site})
            _check_number(tokens(record, "shares", LONGEST_SHARE), len(of))
    except SiteError as error:
        return str(error)
    return None


def _check_keys(sum_: SecureSum, reply: Reply) -> None:
    record = reply.secure
    parts = ("mask-key", "seal-key", "public", "terms", "signature")
    mask, seal, public, terms, signature = (token(record, part, LONGEST_KEY) for part in parts)
    refuse_no_key(mask)
    refuse_no_key(seal)
    (splits,) = texts({"splits": [record.get("splits")]}, "splits")
    said = key_words(sum_.common.run_name, sum_.round, reply.site, (mask, seal), terms, splits)
    if not is_signed(public, said, signature):
        raise SiteError("its signature does not fit its keys: is it of another run or round?")


def _check_signature(sum_: SecureSum, reply: Reply) -> None:
    said = words("answered", sum_.context.hex(), list(sum_.replies))
    public, _ = sum_.signers[reply.site]
    if not is_signed(public, said, token(reply.secure, "signature", LONGEST_KEY)):
        raise SiteError("its signature does not fit the list of sites whose weights came")


def _check_names(names: Sequence[str], wanted: set[str]) -> None:
    if set(names) != wanted or len(names) != len(wanted):
        raise SiteError(f"record '{SECURE}' is of other sites than those that take part")


def _check_number(listed: Sequence[bytes], wanted: int) -> None:
    if len(listed) != wanted:
        raise SiteError(f"record '{SECURE}' has {len(listed)} entries, not {wanted}")
