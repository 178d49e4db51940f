"""Hospitals that have compared their signing keys, as by telephone."""

from collections.abc import Mapping
from pathlib import Path

from fedsilo.client_app.privacy.signing import KnownKeys, signing_key
from fedsilo.client_app.site.node import OWN
from fedsilo.strategies.wire.signatures import key_code, public_text


def compare_keys(states: Mapping[str, Path]) -> dict[str, str]:
    """Let hospitals make their keys and compare each with each, and return the codes by site.

    Args:
        states: the 'state-dir' of each hospital, by site.
    """
    codes = {}
    for site, state in states.items():
        codes[site] = key_code(public_text(signing_key(state / OWN / site)))
    for site, state in states.items():
        known = KnownKeys(state / OWN / site)
        for other, code in codes.items():
            if other != site and known.read().get(other) is None:
                known.mark(other, code)
    return codes
