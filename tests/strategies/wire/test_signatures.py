import subprocess
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedsilo.core.errors import SiteError
from fedsilo.strategies.wire.signatures import (
    arrays_digest,
    bound_to,
    common_splits,
    context_of,
    fingerprint,
    is_signed,
    key_words,
    public_text,
    sign_text,
    simulated_key,
    words,
)

KEYS = {"a": (b"a mask", b"a seal"), "b": (b"b mask", b"b seal")}


def test_is_signed_by_the_holder_of_the_key_and_of_these_words() -> None:
    north, south = simulated_key(1, "north"), simulated_key(1, "south")
    signature = sign_text(north, b"text")
    assert is_signed(public_text(north), b"text", signature)
    assert not is_signed(public_text(north), b"other text", signature)
    assert not is_signed(public_text(south), b"text", signature)
    assert not is_signed(public_text(north), b"text", signature[:-1] + bytes([signature[-1] ^ 1]))
    assert not is_signed(b"no key", b"text", signature)


def test_simulated_key_is_made_from_seed_and_site() -> None:
    first = public_text(simulated_key(1, "north"))
    assert first == public_text(simulated_key(1, "north"))
    assert first != public_text(simulated_key(2, "north"))
    assert first != public_text(simulated_key(1, "south"))


def test_fingerprint_is_what_ssh_keygen_prints(tmp_path: Path) -> None:
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(tmp_path / "north")]
    subprocess.run(make, check=True)
    show = ["ssh-keygen", "-l", "-f", str(tmp_path / "north.pub")]
    said = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    assert fingerprint((tmp_path / "north.pub").read_bytes()) == said.split()[1]
    private = load_ssh_private_key((tmp_path / "north").read_bytes(), None)
    assert fingerprint(public_text(private)) == said.split()[1]  # type: ignore[arg-type]  # it is EC
    with pytest.raises(SiteError, match="not in OpenSSH's form"):
        fingerprint(b"ssh-dsa AAAA")


def test_words_of_parts_do_not_run_into_each_other() -> None:
    assert words("keys", "ab", "c") != words("keys", "a", "bc")
    assert words("keys", "a") != words("answered", "a")
    assert words("keys", b"\x01\xff") == b'["fedsilo secure sum", "keys", "01ff"]'


@pytest.mark.parametrize("place", range(6))
def test_key_words_hold_all_that_a_site_vouches_for(place: int) -> None:
    first = ["run", 1, "a", (b"m", b"s"), b"terms", "val"]
    other = ["run 2", 2, "b", (b"s", b"m"), b"term", "test"]
    changed = [*first[:place], other[place], *first[place + 1 :]]
    assert key_words(*first) != key_words(*changed)  # type: ignore[arg-type]


def test_context_is_of_run_round_threshold_names_and_keys() -> None:
    others = [
        context_of("run 2", 1, KEYS, 3),
        context_of("run", 2, KEYS, 3),
        context_of("run", 1, KEYS, 2),
        context_of("run", 1, {"a": KEYS["a"], "c": KEYS["b"]}, 3),
        context_of("run", 1, {"a": KEYS["b"], "b": KEYS["a"]}, 3),
    ]
    assert len({context_of("run", 1, KEYS, 3), *others}) == 6
    assert context_of("run", 1, dict(reversed(KEYS.items())), 3) == context_of("run", 1, KEYS, 3)


def test_bound_to_is_of_arrays_and_metrics() -> None:
    arrays = {"w": np.zeros(2, np.float32)}
    same = {"w": np.asfortranarray(np.zeros(2, np.float32))}
    assert arrays_digest(arrays) == arrays_digest(same)
    others = [
        {"v": arrays["w"]},
        {"w": np.ones(2, np.float32)},
        {"w": np.zeros(2, np.float64)},
        {"w": np.zeros((2, 1), np.float32)},
    ]
    assert len({arrays_digest(arrays), *map(arrays_digest, others)}) == 5
    assert bound_to(b"c", arrays, ["x"]) != bound_to(b"c", arrays, ["y"])
    assert bound_to(b"c", arrays, ["x"]) != bound_to(b"d", arrays, ["x"])
    assert bound_to(b"c", arrays, {"x": 1.0, "y": 2.0}) == bound_to(b"c", arrays, ["y", "x"])


def test_common_splits_are_those_that_all_sites_measure() -> None:
    assert common_splits(["train,val,test", "val,test", "test,val"]) == ["test", "val"]
    assert common_splits(["train", "", "train"]) == []
    assert common_splits([]) == []
