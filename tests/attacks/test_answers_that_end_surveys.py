"""One hospital's answer to a survey ends neither the survey nor its page, whatever it says."""

import json
import os
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedsilo.core.messages import SURVEYED
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.survey import Survey
from fedsilo.reports.survey.document import SurveyDocument
from fedsilo.reports.survey.survey_page import survey_page
from fedsilo.server_app.run.survey import survey_document
from fedsilo.strategies.meeting.survey import Surveyed, read_survey
from tests.fuzz.mutations import TEXTS

TRIALS = int(os.environ.get("FUZZ_TRIALS", "4"))  # more by `make fuzz`
PRINTABLE = [text for text in TEXTS if text.isprintable() and len(text) <= 200]
NAMES = st.sampled_from([*PRINTABLE, "age", "$x$", "a_b", "_", "{}", "|", "no value"])
COUNTS = st.none() | st.sampled_from([0, 1, 12, 10**9])
NUMBERS = st.sampled_from([-1e300, -1.0, 0.0, 1e-300, 0.5, 70.0, 1e300])


def about(site: str, features: list[dict[str, Any]], classes: list[str]) -> dict[str, Any]:
    return {
        "version": 1,
        "site": site,
        "simulated": True,
        "dataset": "table",
        "on": "2026-01-01",
        "changed": False,
        "floor": 10,
        "classes": classes,
        "features": features,
        "file_features": [],
    }


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an answer that has the right form; its texts and numbers are anything within that."""
    features: list[dict[str, Any]] = []
    for name in draw(st.lists(NAMES, max_size=3, unique=True)):
        feature: dict[str, Any] = {"name": name, "lacking": draw(st.booleans())}
        if draw(st.booleans()):
            feature["edges"] = sorted(draw(st.sets(NUMBERS, max_size=4)))
        else:
            feature["levels"] = draw(st.lists(NAMES, max_size=4))
        features.append(feature)
    classes = draw(st.lists(NAMES, min_size=2, max_size=4))
    histograms, means, percentiles = {}, {}, {}
    for feature in features:
        known = len(feature.get("levels", [])) or len(feature.get("edges", [])) + 1
        has_cells = feature.get("levels") or feature.get("edges")
        cells = known + feature["lacking"] if has_cells else 0
        histograms[feature["name"]] = draw(st.lists(COUNTS, min_size=cells, max_size=cells))
        means[feature["name"]] = {"mean": draw(NUMBERS), "sd": abs(draw(NUMBERS))}
        percentiles[feature["name"]] = [draw(NUMBERS), draw(NUMBERS)]
    labels = draw(st.lists(COUNTS, min_size=len(classes), max_size=len(classes)))
    return {
        "about": about("liar", features, classes),
        "samples": {"train": draw(COUNTS)},
        "labels": {"train": labels},
        "left-out": {"count": draw(COUNTS), "missing": {draw(NAMES): draw(COUNTS)}},
        "histograms": {"train": histograms},
        "means": {"train": means},
        "percentiles": {"train": percentiles},
    }


def received(parts: dict[str, Any]) -> Survey:
    config = {key: json.dumps(part) for key, part in parts.items()}
    return read_survey(RecordDict({SURVEYED: ConfigRecord(config)}), "table")


HONEST = {
    "about": about("north", [{"name": "age", "edges": [30.0, 70.0]}], ["well", "ill"]),
    "samples": {"train": 120},
    "labels": {"train": [80, 40]},
    "histograms": {"train": {"age": [20, 70, 30]}},
}


@settings(
    max_examples=TRIALS,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a page takes a second: no shrinking
    suppress_health_check=[HealthCheck.too_slow],
)
@given(answers())
def test_whatever_one_answer_says_the_page_is_made(parts: dict[str, Any]) -> None:
    found = {"liar": received(parts), "north": received(HONEST)}
    common = CommonSettings(dataset="table", run_name="asked")
    written = json.dumps(survey_document(Surveyed(found, ("west: no answer",)), common))
    page = survey_page(SurveyDocument.model_validate_json(written))
    assert "north" in page
    assert "<script>alert" not in page
