"""The grammar of metric names: what honest sites send is in it, and one reading undoes writing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.metric_names import (
    BIN_FAMILIES,
    BINS,
    BinCounts,
    Metric,
    is_metric_key,
    read_bins,
    read_measurement,
    read_metric,
)
from fedsilo.models.methods.cross import metric_from

SITES = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")


@pytest.mark.parametrize(
    ("key", "metric"),
    [
        ("incoming.test.accuracy", Metric("accuracy")),
        ("trained.train.loss", Metric("loss")),
        ("incoming.test.own-labels-accuracy", Metric("own-labels-accuracy")),
        ("incoming.val.auc-from-st.gallen", Metric("auc", site="st.gallen")),
        ("incoming.test.routing.st.gallen.q05", Metric("routing", "st.gallen", "q05", "st.gallen")),
        ("incoming.test.class.12.auc", Metric("class", "12", "auc")),
        ("incoming.test.reliability.9.mean", Metric("reliability", "9", "mean")),
    ],
)
def test_a_measurement_is_taken_apart(key: str, metric: Metric) -> None:
    read = read_measurement(key)
    assert read is not None
    assert read.metric == metric
    assert is_metric_key(key)
    assert f"{read.model}.{read.split}.{read.name}" == key


@pytest.mark.parametrize("key", ["seconds", "num-examples", "unrepeatable.aten.cumsum_cuda"])
def test_a_number_about_the_reply_is_no_measurement(key: str) -> None:
    assert is_metric_key(key)
    assert read_measurement(key) is None


@pytest.mark.parametrize(
    "key",
    [
        "incoming.test.reliability.x",
        "incoming.test.reliability.",
        "incoming.test.reliability.0.count.count",
        "incoming.test.reliability.10.count",
        "incoming.test.reliability.00.count",
        "incoming.test.certainty.0",
        "incoming.test.certainty",
        "incoming.test.class.0.count",
        "incoming.test.class.-1.right",
        "incoming.test.class.٣.right",  # a digit for int(), but in no array of classes
        "incoming.test.routing..mean",
        "incoming.test.routing.va.q50.mean2",
        "incoming.test.accuracy-from-",
        "incoming.test.-from-va",
        "incoming.test.trained-accuracy",  # metrics.csv calls the other model's so
        "incoming.update.norm",  # metrics.csv has the server's own numbers there
        "incoming.all.accuracy",
        "incoming.test.confidence.x.count",
        "incoming.test.class.x.right",
        "incoming.test.class.0.auc.auc",
        "trained.update.cosine",
        "incoming.test..accuracy",
        "outgoing.test.accuracy",
        "incoming.test.",
        "incoming.test",
        "incoming.",
        "num.examples",
        "unrepeatable.",
        "unrepeatable.a b",
        "seconds\n",
    ],
)
def test_no_other_key_is_taken(key: str) -> None:
    assert not is_metric_key(key)


@given(st.from_regex(r"\A[a-z][a-z-]{0,20}\Z"), SITES)
def test_the_site_of_a_crossed_metric_is_read_back(word: str, site: str) -> None:
    read = read_metric(metric_from(word, site))
    if "-from-" in f"{word}-from" or word.startswith("trained-"):
        return  # no metric of ours is called so
    assert read == Metric(word, site=site)


@given(SITES)
def test_the_expert_of_a_routing_metric_is_read_back(site: str) -> None:
    assert read_metric(f"routing.{site}.mean") == Metric("routing", site, "mean", site)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_but_fails_nowhere(text: str) -> None:
    is_metric_key(text)
    is_metric_key(f"incoming.test.{text}")
    read_metric(text)


def test_a_bin_without_all_its_parts_is_none() -> None:
    values = {"certainty.0.count": 2.0, "certainty.0.right": 1.0, "certainty.0.mean": 0.5}
    values |= {"certainty.3.count": 4.0, "confidence.0.count": 1.0}
    assert read_bins(values, "certainty") == {0: BinCounts(2.0, 1.0, 0.5)}


def test_every_bin_of_every_family_has_its_names() -> None:
    for family in BIN_FAMILIES:
        for number in range(BINS):
            read = read_metric(f"{family}.{number}.right")
            assert read == Metric(family, str(number), "right")
