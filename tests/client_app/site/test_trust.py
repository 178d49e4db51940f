"""Whom a hospital trusts: without a line it takes no part, and less than its line is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.client_app.site.trust import MEANINGS, refuse_distrusted
from fedsilo.core.errors import RefusedError
from fedsilo.core.messages import HELLO, METRICS, TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from tests.support.errors import refuses
from tests.support.hospital import Hospital
from tests.support.setting_keys import as_keys

Make = Callable[..., Hospital]
SECAGG = {"trust": "sums", "secure_aggregation": "secagg", "clip_norm": 1.0}
PRIVATE = {
    "trust": "nobody",
    "sample_clip_norm": 1.0,
    "noise_multiplier": 2.0,
    "standardise": "declared",
}
CAP = {"max-epsilon": 8.0, "delta": 1e-4}


@pytest.fixture
def hospital(tmp_path: Path) -> Make:
    def make(node: dict[str, Any] | None = None, **run: Any) -> Hospital:
        named = as_keys(run)
        return Hospital(tmp_path / "own", named, node=node or {})

    return make


def test_a_site_that_names_nobody_takes_no_part_and_says_the_three_choices(hospital: Make) -> None:
    site = hospital(node={"trust": ""})
    assert site.send(HELLO) is None
    assert site.send(TRAIN, {}) is None
    for refusal in site.refusals:
        assert "the site file does not say whom the site trusts" in refusal
        assert all(f"'trust: {level}'" in refusal for level in MEANINGS)


@pytest.mark.parametrize(
    ("level", "run", "answered"),
    [
        ("server", {}, True),
        ("server", SECAGG, True),
        ("server", PRIVATE, True),
        ("sums", {}, False),
        ("sums", SECAGG, True),
        ("sums", PRIVATE, False),
        ("sums", {**PRIVATE, "secure_aggregation": "secagg"}, False),
        ("nobody", {}, False),
        ("nobody", SECAGG, False),
        ("nobody", PRIVATE, True),
    ],
)
def test_a_run_is_answered_if_it_promises_what_the_hospital_asks_for(
    level: str, run: dict[str, Any], answered: bool
) -> None:
    settings = CommonSettings(**run)
    if answered:
        refuse_distrusted({"trust": level, **CAP}, settings)
        return
    with refuses(RefusedError, f"trust: {level}", "privacy.trust", level):
        refuse_distrusted({"trust": level, **CAP}, settings)


def test_nobody_needs_a_cap_of_the_hospitals_own() -> None:
    with pytest.raises(RefusedError, match="'max-epsilon'"):
        refuse_distrusted({"trust": "nobody"}, CommonSettings(**PRIVATE))


def test_an_unknown_level_is_refused_at_the_hello(hospital: Make) -> None:
    site = hospital(node={"trust": "some"})
    assert site.send(HELLO) is None
    assert "'trust: nobody'" in site.refusals[0]


def test_what_the_answer_took_is_told_to_a_trusted_server_alone(hospital: Make) -> None:
    weights: dict[str, Any] = {"head.1.weight": [[0.0] * 13] * 2, "head.1.bias": [0.0, 0.0]}
    told = {}
    for level, run in (("server", {}), ("nobody", PRIVATE)):
        site = hospital(node={"trust": level, **(CAP if run else {})}, **run)
        reply = site.send(TRAIN, weights)
        assert reply is not None, site.refusals
        told[level] = set(reply[METRICS])
    assert {"seconds", "peak-memory-bytes"} <= told["server"]
    assert not {"seconds", "peak-memory-bytes"} & told["nobody"]
