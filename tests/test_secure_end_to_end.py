"""Secure aggregation from settings to run directory: the sum is right, its parts are nowhere."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, Error, Message
from safetensors.numpy import load_file

import fedsilo.engines.inline_engine
from fedsilo.client_app.masked_part import MaskedPart
from fedsilo.client_app.privacy import secure_aggregation
from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import (
    ARRAYS,
    CONFIG,
    SECURE_AGREE,
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_UNMASK,
    TRAIN,
)
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import InlineGrid, run_inline
from fedsilo.models.privacy.secure_sum import SAMPLES, quantisation
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.loop.ask import Question
from fedsilo.strategies.loop.round import Round
from fedsilo.strategies.wire.records import unpack
from fedsilo.strategies.wire.secure_keys import SECURE
from tests.support.soak import in_soak

InlineRun = Callable[..., RunDirectory]
Tiny = Callable[..., dict[str, Value]]
Change = Callable[[str, str, Message], Message | None]
SILOS = 4
CLIP = 0.5
LEAST = 15  # samples that train at all sites together, at least


@pytest.fixture(scope="module")
def values(tiny: Tiny) -> dict[str, Value]:
    few = {
        "split.silos": SILOS,
        "secure.clip-norm": CLIP,
        "secure.aggregation": "secagg",
        "run.min-sites": 3,
    }
    return tiny("fedavg", rounds=1) | few


@pytest.fixture(scope="module")
def plain(values: dict[str, Value], tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return a run in which nothing fails, for tests that compare theirs with it."""
    named = {"run.name": "plain", "run.out": str(tmp_path_factory.mktemp("plain"))}
    return run_inline(resolve(values | named), SILOS)


class FaultyGrid(InlineGrid):
    """Passes replies through ``change``, which may alter or lose them, and keeps all that came."""

    change: Change = staticmethod(lambda site, phase, reply: reply)
    received: ClassVar[list[tuple[str, str, Message]]] = []

    def answer(self, message: Message) -> Message:
        config = message.content.config_records.get(CONFIG, {})
        phase = str(config.get("phase", message.metadata.message_type))
        site = f"site {list(self.get_node_ids()).index(message.metadata.dst_node_id) + 1}"
        answer = super().answer(message)
        reply = type(self).change(site, phase, answer)
        if reply is None:
            reply = Message(Error(0, "the line is cut"), reply_to=message)
        type(self).received.append((site, phase, reply))
        return reply


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> type[FaultyGrid]:
    monkeypatch.setattr(fedsilo.engines.inline_engine, "InlineGrid", FaultyGrid)
    monkeypatch.setattr(FaultyGrid, "received", [])
    monkeypatch.setattr(FaultyGrid, "change", FaultyGrid.change)
    return FaultyGrid


def model(directory: RunDirectory) -> dict[str, Any]:
    return load_file(directory.path / "model.safetensors")


@dataclass
class Seen:
    """What sites masked: their clipped updates by site, and what those are updates of."""

    updates: dict[str, dict[str, Any]] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    known = Seen()
    masked = secure_aggregation.SecureSite.mask

    def watched(
        self: Any, updates: Mapping[str, Any], received: Mapping[str, Any], *more: Any
    ) -> Any:
        if not updates:  # measured alone
            return masked(self, updates, received, *more)
        known.before = {name: received[f"{ARRAYS}/{name}"].astype(np.float64) for name in updates}
        known.updates[self.site] = {name: update.numpy() for name, update in updates.items()}
        return masked(self, updates, received, *more)

    monkeypatch.setattr(secure_aggregation.SecureSite, "mask", watched)
    return known


def mean_of(parts: Iterable[dict[str, Any]], name: str) -> Any:
    return np.mean([part[name] for part in parts], axis=0)


def test_the_mean_is_that_of_the_clipped_updates_within_the_step(
    values: dict[str, Value], inline_run: InlineRun, seen: Seen
) -> None:
    directory = inline_run(values, SILOS)
    parts = seen.updates.values()
    assert len(parts) == SILOS
    norms = [np.sqrt(sum(np.square(a).sum() for a in part.values())) for part in parts]
    assert max(norms) == pytest.approx(CLIP), "an update is longer than the clip: it was cut"
    way = quantisation(resolve(dict(values)).common, SILOS)
    for name, found in model(directory).items():
        plain = seen.before[name] + mean_of(parts, name)
        coarse = 4 * way.step * SAMPLES / LEAST  # rounding is of parts scaled by samples over B
        assert np.allclose(found, plain, rtol=1e-6, atol=coarse)
    assert directory.read_json("summary.json")["privacy"]["guarantee"].startswith("no diff")
    told = " ".join(directory.read_json("privacy.json")["leaves each site"])
    assert "the server learns only their mean over all sites" in told


@pytest.mark.parametrize("phase", [SECURE_KEYS, SECURE_SHARES, TRAIN, SECURE_AGREE, SECURE_UNMASK])
def test_a_site_that_drops_out_of_a_phase_costs_the_sum_its_part_alone(
    phase: str,
    values: dict[str, Value],
    inline_run: InlineRun,
    faulty: type[FaultyGrid],
    seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drop(site: str, asked: str, reply: Message) -> Message | None:
        return None if site == "site 2" and asked == phase else reply

    monkeypatch.setattr(faulty, "change", staticmethod(drop))
    directory = inline_run(values, SILOS)
    gone = "s2a" if phase in (SECURE_KEYS, SECURE_SHARES, TRAIN) else ""
    parts = [part for site, part in seen.updates.items() if site != gone]
    assert len(parts) == (3 if gone else 4)
    for name, found in model(directory).items():
        assert np.allclose(found, seen.before[name] + mean_of(parts, name), rtol=1e-6, atol=4e-6)
    failures = directory.read_json("summary.json")["failures"]
    assert [(f["site"], f["phase"]) for f in failures] == [("s2a", phase)]


def test_no_single_update_reaches_the_server_or_its_disk(
    values: dict[str, Value],
    inline_run: InlineRun,
    faulty: type[FaultyGrid],
    seen: Seen,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = inline_run(values, SILOS)
    before = seen.before
    longest = max(before, key=lambda name: before[name].size)
    files = [path for path in directory.path.rglob("*") if path.is_file()]
    on_disk = {path: path.read_bytes() for path in files}
    assert any(model(directory)[longest].tobytes()[:64] in data for data in on_disk.values())
    sent = [r for _, p, r in faulty.received if p == TRAIN and r.has_content()]
    assert len(sent) == SILOS
    for site, part in seen.updates.items():
        weights = (before[longest] + part[longest]).astype(np.float32)
        for text in (weights, part[longest].astype(np.float32), part[longest]):
            pieces = [text.tobytes()[start : start + 16] for start in (0, 64, 256)]
            assert not [p for p, data in on_disk.items() for piece in pieces if piece in data], site
        number = f"{weights.ravel()[0]:.6f}"
        assert number not in caplog.text + capsys.readouterr().out
        for reply in sent:
            received = unpack(reply.content.array_records[ARRAYS][longest])
            steps = quantisation(resolve(dict(values)).common, SILOS).quantise(part[longest])
            assert (received == steps).mean() < 0.01


@pytest.mark.parametrize(
    ("changes", "told", "fix"),
    [
        ({"clip-norm": 0.0}, "but is 0: a sum has room", {"clip-norm": 1.0}),
        ({"secure.threshold": 5}, "must be from 3 to 4 for 4 sites", {"secure.threshold": 0}),
        ({"secure.threshold": 2}, "must be from 3 to 4 for 4 sites", {"secure.threshold": 4}),
        ({"aggregation": "median"}, "a sum gives the mean only", {"aggregation": "mean"}),
        ({"run.site-weights": "w.json"}, "weigh themselves by their own", {"run.site-weights": ""}),
        (
            {"server.sites-per-round": 2},
            "needs at least three sites, but there are 2",
            {"silos": 4},
        ),
        ({"max-epsilon": 3.0}, "there is no epsilon without", {"max-epsilon": 0.0}),
        (
            {"method": "fedproto"},
            "method 'fedproto' needs more than the sum of the sites' arrays",
            {"secure-aggregation": "none", "clip-norm": 0.0},
        ),
    ],
    ids=str,
)
def test_what_cannot_be_summed_is_refused_and_the_mend_runs(
    changes: dict[str, Value],
    told: str,
    fix: dict[str, Value],
    values: dict[str, Value],
    tiny: Tiny,
    inline_run: InlineRun,
    tmp_path: Path,
) -> None:
    asked = tiny(str(changes.get("method", "fedavg"))) | values | changes
    with pytest.raises((SettingError, SiteError), match=told) as caught:
        inline_run(asked, SILOS)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    fixed = asked | fix
    if "server.sites-per-round" in changes:
        fixed["server.sites-per-round"] = 0
    inline_run(fixed, SILOS)


def test_trust_sums_tells_means_over_all_sites_and_no_single_answer(
    values: dict[str, Value],
    inline_run: InlineRun,
    faulty: type[FaultyGrid],
    plain: RunDirectory,
) -> None:
    found = inline_run(values | {"trust": "sums"}, SILOS)
    assert all((model(found)[name] == array).all() for name, array in model(plain).items())
    for _, phase, reply in faulty.received:
        metrics = reply.content.metric_records.get("metrics", {})
        assert [key for key in metrics if not key.startswith("unrepeatable.")] in (
            [],
            ["kept-state"],
        ), phase
        if phase == "query.hello":
            assert reply.content[CONFIG]["label-counts"] == "{}"
    rows = found.read_csv("metrics.csv")
    assert {row["site"] for row in rows} == {"all"}
    means = {(r["round"], r["split"], r["metric"]): float(r["value"]) for r in rows}
    silos = plain.read_json("silos.json")
    for (round_, split, metric), mean in means.items():
        weighed = [
            (silos[row["site"]]["sizes"][split], float(row["value"]))
            for row in plain.read_csv("metrics.csv")
            if (row["round"], row["split"], row["metric"]) == (round_, split, metric)
        ]
        total = sum(size for size, _ in weighed)
        assert mean == pytest.approx(sum(n * v for n, v in weighed) / total, abs=2e-4)
    assert {metric for _, _, metric in means} == {
        *("accuracy", "entropy", "loss"),
        "trained-loss",
    }
    summary = found.read_json("summary.json")
    assert summary["sites"] == {}
    assert summary["mean"]["accuracy"] == means["1", "test", "accuracy"]
    silo = found.read_json("silos.json")["s1a"]
    assert silo["sizes"] == silo["label_counts"] == silo["fingerprints"] == {}
    told = " ".join(found.read_json("privacy.json")["leaves each site"])
    assert "Nothing else that it measures leaves" in told


def test_trust_sums_opens_its_last_sum_again_for_the_same_sites_alone(
    values: dict[str, Value], inline_run: InlineRun
) -> None:
    directory = inline_run(values | {"trust": "sums"}, SILOS)
    for site in ("s1a", "s3a"):
        folder = directory.path / "sites" / site
        assert not (folder / "secure-round.json").exists()
        opened = json.loads((folder / "secure-sums.json").read_text())
        assert {number: len(one["sites"]) for number, one in opened.items()} == {"1": 4, "2": 4}


def test_two_sites_are_too_few(values: dict[str, Value], inline_run: InlineRun) -> None:
    with pytest.raises(SettingError, match="needs at least three sites, but there are 2"):
        inline_run(values | {"split.silos": 2, "run.min-sites": 0}, 2)


def _other_round(reply: Message) -> None:
    reply.content[SECURE]["round"] = 7


def _short(reply: Message) -> None:
    record = reply.content.array_records[ARRAYS]
    name = sorted(record)[0]
    record[name] = Array(unpack(record[name]).ravel()[:-1].copy())


def _floats(reply: Message) -> None:
    record = reply.content.array_records[ARRAYS]
    name = sorted(record)[0]
    record[name] = Array(unpack(record[name]).astype(np.float32))


def _no_record(reply: Message) -> None:
    del reply.content[SECURE]


def _forged(reply: Message) -> None:
    reply.content[SECURE]["signature"] = b"x" * 70


def _few_shares(reply: Message) -> None:
    reply.content[SECURE]["shares"] = reply.content[SECURE]["shares"][:-1]


def _long_share(reply: Message) -> None:
    reply.content[SECURE]["shares"] = [b"x" * 5000] * SILOS


def _others(reply: Message) -> None:
    reply.content[SECURE]["to"] = ["s1a", "s2a", "s9z"]


BAD: list[tuple[str, Callable[[Message], None], str]] = [
    (SECURE_KEYS, _no_record, "record 'secure' has no whole number 'round'"),
    (SECURE_KEYS, _other_round, "record 'secure' belongs to round 7, not 1"),
    (SECURE_KEYS, _forged, "its signature does not match its keys"),
    (SECURE_SHARES, _others, "record 'secure' names other sites"),
    (SECURE_SHARES, _other_round, "record 'secure' belongs to round 7, not 1"),
    (TRAIN, _short, r"expected uint32 \("),
    (TRAIN, _floats, "is float32 .* expected uint32"),
    (SECURE_AGREE, _forged, "does not match the list of sites whose weights arrived"),
    (SECURE_UNMASK, _other_round, "record 'secure' belongs to round 7, not 1"),
    (SECURE_UNMASK, _few_shares, "record 'secure' must have 4 entries, but has 3"),
    (SECURE_UNMASK, _long_share, "no list 'shares' of at most 1024 bytes each"),
]


# One of each phase; the others are in `make test-soak`
@pytest.mark.parametrize(("phase", "alter", "told"), in_soak(BAD, but=BAD[::2]))
def test_a_bad_reply_names_site_round_and_reason_and_the_run_goes_on_without(
    phase: str,
    alter: Callable[[Message], None],
    told: str,
    values: dict[str, Value],
    inline_run: InlineRun,
    faulty: type[FaultyGrid],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(site: str, asked: str, reply: Message) -> Message:
        if site == "site 2" and asked == phase and reply.has_content():
            alter(reply)
        return reply

    monkeypatch.setattr(faulty, "change", staticmethod(change))
    with pytest.raises(SiteError, match=rf"site s2a, round 1, phase {phase}: .*{told}"):
        inline_run(values | {"run.min-sites": 4}, SILOS)
    inline_run(values | {"run.min-sites": 3}, SILOS)


def test_a_round_begun_anew_without_a_site_opens_no_second_sum(
    values: dict[str, Value],
    inline_run: InlineRun,
    faulty: type[FaultyGrid],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server holds the shares of the whole sum, and training again would give the same."""
    two = values | {"rounds": 2}

    def lose(site: str, asked: str, reply: Message) -> Message | None:
        second = (
            faulty.received
            and sum(phase == SECURE_UNMASK for _, phase, _ in faulty.received) >= SILOS
        )
        return None if site == "site 2" and asked == SECURE_UNMASK and second else reply

    def gone(site: str, asked: str, reply: Message) -> Message | None:
        return None if site == "site 2" and asked == TRAIN else reply

    monkeypatch.setattr(faulty, "change", staticmethod(lose))
    with pytest.raises(SiteError, match="site s2a, round 2, phase secure-unmask"):
        inline_run(two | {"run.min-sites": SILOS}, SILOS)
    monkeypatch.setattr(faulty, "change", staticmethod(gone))
    with pytest.raises(
        SiteError, match=r"the sum of s1a, s1b, s2a, s3a was already unmasked in this round"
    ):
        inline_run(two | {"run.min-sites": 3, "run.resume": True}, SILOS)
    monkeypatch.setattr(faulty, "change", staticmethod(lambda site, asked, reply: reply))
    resumed = inline_run(two | {"run.min-sites": 3, "run.resume": True}, SILOS)  # the fix
    whole = inline_run(two | {"run.name": "whole"}, SILOS)
    assert all((model(resumed)[name] == array).all() for name, array in model(whole).items())


def test_weights_whose_masks_do_not_fit_are_not_taken_for_a_mean(
    values: dict[str, Value],
    inline_run: InlineRun,
    faulty: type[FaultyGrid],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(site: str, asked: str, reply: Message) -> Message:
        if site == "site 2" and asked == TRAIN:
            record = reply.content.array_records[ARRAYS]
            for name in record:
                record[name] = Array(unpack(record[name]) + np.uint32(2**31))
        return reply

    monkeypatch.setattr(faulty, "change", staticmethod(change))
    with pytest.raises(
        SiteError, match=r"round 1: the masks do not .* of s1a, s1b, s2a, s3a masked other"
    ):
        inline_run(values, SILOS)


def _zeroed(site: str, reply: Message, key: str) -> None:
    if reply.has_content() and key in reply.content[SECURE]:
        values = reply.content[SECURE][key]
        reply.content[SECURE][key] = [value[:4] + bytes(len(value) - 4) for value in values]


def test_one_site_that_gives_wrong_shares_does_no_harm(
    values: dict[str, Value],
    inline_run: InlineRun,
    faulty: type[FaultyGrid],
    plain: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(site: str, asked: str, reply: Message) -> Message:
        if site == "site 1" and asked == SECURE_UNMASK:
            _zeroed(site, reply, "shares")
        return reply

    monkeypatch.setattr(faulty, "change", staticmethod(change))
    found = model(inline_run(values | {"run.name": "wrong"}, SILOS))
    assert all((found[name] == array).all() for name, array in model(plain).items())
    with pytest.raises(SiteError, match=r"if only 4 sites answered, one of s1a, s1b, s2a, s3a"):
        inline_run(values | {"secure.threshold": 4, "run.name": "none-to-spare"}, SILOS)


def test_a_site_whose_shares_nobody_can_open_is_named(
    values: dict[str, Value],
    inline_run: InlineRun,
    faulty: type[FaultyGrid],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(site: str, asked: str, reply: Message) -> Message:
        if site == "site 1" and asked == SECURE_SHARES:
            _zeroed(site, reply, "sealed")
        return reply

    monkeypatch.setattr(faulty, "change", staticmethod(change))
    with pytest.raises(SiteError, match=r"the masks of site s1a: 1 of 4 sites could open its"):
        inline_run(values, SILOS)


def test_sites_that_are_sent_different_models_give_away_no_sum(
    values: dict[str, Value], inline_run: InlineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pasquini et al. 2022: a model that trains nothing at all sites but one leaves that one's."""
    message = Round.message

    def other(self: Round, site: str, question: Question) -> Message:
        if site != "s1a" and question.phase == TRAIN:
            nothing = {name: array * 0 for name, array in question.send[site].items()}
            question = replace(question, send={**question.send, site: nothing})
        return message(self, site, question)

    monkeypatch.setattr(Round, "message", other)
    with pytest.raises(SiteError, match="round 1: the masks do not cancel in the sum"):
        inline_run(values, SILOS)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function by which some sites add 0, as hospitals do that could not answer."""
    honest = MaskedPart._mask

    def fail(*sites: str) -> None:
        def masked(self: MaskedPart, update: Any, metrics: Any) -> Any:
            broken = self.session.silo.name in sites
            return honest(self, None if broken else update, metrics)

        monkeypatch.setattr(MaskedPart, "_mask", masked)

    return fail


def test_sites_that_fail_in_the_sum_are_left_out_of_the_mean_and_counted(
    values: dict[str, Value], inline_run: InlineRun, seen: Seen, failing: Callable[..., None]
) -> None:
    failing("s2a")
    directory = inline_run(values | {"trust": "sums"}, SILOS)
    parts = [part for site, part in seen.updates.items() if site != "s2a"]
    assert len(parts) == SILOS - 1
    for name, found in model(directory).items():
        assert np.allclose(found, seen.before[name] + mean_of(parts, name), rtol=1e-6, atol=4e-6)
    failures = directory.read_json("summary.json")["failures"]
    assert {failure["site"] for failure in failures} == {"unknown"}, "nobody knows which it was"
    assert "1 site of 4 could not answer" in failures[0]["reason"]
    means = {row["metric"]: float(row["value"]) for row in directory.read_csv("metrics.csv")}
    assert 0 < means["accuracy"] <= 1


def test_min_sites_counts_the_sites_that_could_answer(
    values: dict[str, Value], inline_run: InlineRun, failing: Callable[..., None]
) -> None:
    failing("s2a", "s3a")
    with pytest.raises(SiteError, match=r"2 sites of 4 could not answer .* 2 of 4 .* 3 are needed"):
        inline_run(values | {"trust": "sums"}, SILOS)
    inline_run(values | {"privacy.trust": "sums", "run.min-sites": 2}, SILOS)


def test_a_sum_of_failures_alone_is_an_error(
    values: dict[str, Value], inline_run: InlineRun, failing: Callable[..., None]
) -> None:
    failing("s1a", "s1b", "s2a", "s3a")
    with pytest.raises(SiteError, match="none of 4 sites could answer"):
        inline_run(values | {"privacy.trust": "sums", "run.min-sites": 1}, SILOS)


def test_a_metric_that_is_not_finite_is_a_mean_over_the_other_sites(
    values: dict[str, Value], inline_run: InlineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cast of a nan is undefined: the mean that the server showed was silently wrong."""
    honest = MaskedPart._mask
    losses: dict[str, float] = {}
    loss = "trained.train.loss"

    def masked(self: MaskedPart, update: Any, metrics: dict[str, float]) -> Any:
        changed = dict(metrics)
        if loss in metrics:
            losses[self.session.silo.name] = metrics[loss]
            changed[loss] = math.nan if self.session.silo.name == "s2a" else metrics[loss]
        return honest(self, update, changed)

    monkeypatch.setattr(MaskedPart, "_mask", masked)
    directory = inline_run(values | {"trust": "sums"}, SILOS)
    rows = directory.read_csv("metrics.csv")
    (found,) = [float(row["value"]) for row in rows if row["metric"] == "trained-loss"]
    others = [value for site, value in losses.items() if site != "s2a"]
    assert found == pytest.approx(np.mean(others), abs=2e-3)


def test_a_metric_that_no_site_has_is_left_out_with_a_line(
    values: dict[str, Value], inline_run: InlineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = MaskedPart._mask

    def masked(self: MaskedPart, update: Any, metrics: dict[str, float]) -> Any:
        return honest(self, update, dict.fromkeys(metrics, math.nan))

    monkeypatch.setattr(MaskedPart, "_mask", masked)
    directory = inline_run(values | {"trust": "sums"}, SILOS)
    assert not directory.read_csv("metrics.csv")
    reasons = [f["reason"] for f in directory.read_json("summary.json")["failures"]]
    assert "no site has a finite value of 'trained.train.loss': it is left out" in reasons
