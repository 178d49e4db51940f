"""A mean over some of the sites says over which, and why the others have no value."""

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.server_app.records.partial_means import (
    describe_hidden,
    describe_partial_means,
    find_hidden,
    over_sites,
    sites_without,
)


def test_a_mean_names_the_sites_that_it_leaves_out() -> None:
    lacking = {"auc": ["b"], "f1": ["b"], "kappa": [f"s{place}" for place in range(6)]}
    summaries = [
        {"dataset": "x", "lacking": {}, "site_count": 9},
        {"dataset": "x", "lacking": lacking, "site_count": 9},
        {"dataset": "y", "lacking": {"accuracy": ["c"]}, "site_count": 2},
    ]
    assert describe_partial_means(summaries, ["accuracy", "auc", "f1", "kappa"]) == [
        "'all' of auc, f1 is the mean over 8 of 9 sites, without b",
        "'all' of kappa is the mean over 3 of 9 sites",
        "'all' of accuracy is the mean over 1 of 2 sites, without c",
    ]
    assert describe_partial_means(summaries[:1], ["accuracy", "auc"]) == []
    assert over_sites(summaries[:2], "accuracy") == "over sites"


def test_a_site_without_a_value_is_left_out_of_that_metric_only() -> None:
    metrics = {"a": {"auc": 0.5, "loss": 1.0}, "b": {"loss": 2.0}, "all": {"auc": 0.5}}
    assert sites_without(metrics, ["a", "b"]) == {"auc": ["b"]}


def test_hidden_metrics_are_named_with_their_sites_and_the_floor() -> None:
    row = {"accuracy": 0.5, "auc": 0.7, "loss": 1.0}
    shown = {"a": row, "b": {"accuracy": 0.5, "loss": 1.0}, "c": {"loss": 1.0}}
    hidden = find_hidden({"a": row, "b": row, "c": row}, shown, ["auc", "accuracy"])
    assert hidden == {"auc": ["b", "c"], "accuracy": ["c"]}
    first, second = describe_hidden(hidden, CommonSettings(sums_min_count=7))
    assert first.startswith("n/a at b, c: auc (on fewer than 7 samples")
    assert second.startswith("n/a at c: accuracy (")
