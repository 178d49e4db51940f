"""The data-protection page: sentences that one can read, and a picture of what flows where."""

import re
from html import unescape
from pathlib import Path

import pytest

from fedsilo.core.settings.common_settings import NOBODY, SERVER, SUMS
from fedsilo.core.tasks import CLASSIFICATION, tasks_except
from fedsilo.models.tasks.task import task_named
from fedsilo.reports.flows import picture, sentences, shortened
from fedsilo.reports.report import report
from fedsilo.server_app.records.summary import leaves_by_trust

MOST = 25


def _sentences(html: str) -> list[str]:
    """Return the sentences of a page's paragraphs, items and captions."""
    found = re.findall(
        r"<(?:p|li|figcaption)(?:\s[^>]*)?>(.*?)</(?:p|li|figcaption)>", html, re.DOTALL
    )
    texts = [unescape(re.sub(r"<[^>]+>", "", one)) for one in found]
    return [s for text in texts for s in re.split(r"(?<=[.?!])\s+", text) if s]


def test_sentence_counter_finds_a_long_sentence() -> None:
    words = " ".join(["word"] * 26)
    assert max(len(s.split()) for s in _sentences(f"<p>{words}. Short.</p>")) == 26


@pytest.mark.parametrize("name", ["fedavg", "picsr", "ensemble", "table"])
def test_data_protection_page_has_short_sentences(name: str, finished: Path) -> None:
    html = report([finished / name], "dpo")
    assert [s for s in _sentences(html) if len(s.split()) > MOST] == []


def test_private_data_protection_page_has_short_sentences_and_its_epsilon(private: Path) -> None:
    html = report([private], "dpo")
    assert [s for s in _sentences(html) if len(s.split()) > MOST] == []
    assert "epsilon per patient is at most" in html
    assert "protects nobody" in html


@pytest.mark.parametrize("level", [SERVER, SUMS, NOBODY])
def test_flow_of_each_level_says_what_leaves(level: str) -> None:
    said = [s for part in sentences(level, []).values() for s in part]
    assert all(len(s.split()) <= MOST for s in said)
    drawn = picture(level, 4, "5" if level == NOBODY else "")
    assert "4 hospitals" in drawn.svg
    assert ("masked" in drawn.svg) == (level == SUMS)
    assert ("noise" in drawn.svg) == (level == NOBODY)
    assert ("AUC" in " ".join(sentences(level, [])["With each reply"])) == (level == SERVER)


@pytest.mark.parametrize("task", tasks_except(CLASSIFICATION))
@pytest.mark.parametrize("level", [SERVER, SUMS, NOBODY])
def test_flow_of_another_task_names_no_metric_of_classes(level: str, task: str) -> None:
    leaves = leaves_by_trust(level, task_named(task))
    found = sentences(level, leaves, task)
    said = [one for part in found.values() for one in part]
    assert all(len(one.split()) <= MOST for one in said)
    assert not [one for one in said if re.search("accuracy|certainty|entropy|{", one)]
    assert found["What this method sends"] == []


def test_shortened_cuts_at_the_stop_nearest_the_middle() -> None:
    text = f"{' '.join(['one'] * 20)}, {' '.join(['two'] * 10)}; end"
    cut = list(shortened(text))
    assert [len(s.split()) for s in cut] == [20, 10, 1]
    assert cut[2] == "End."


def test_shortened_cuts_nothing_in_brackets() -> None:
    short = "once: the mean of its samples (no noise; of ten or more), which goes to all sites; end"
    assert list(shortened(short)) == [
        "Once: the mean of its samples (no noise; of ten or more), which goes to all sites.",
        "End.",
    ]
    long = (
        f"{' '.join(['one'] * 9)}, {' '.join(['two'] * 8)} (three, four), {' '.join(['five'] * 9)}"
    )
    assert [one.count("(") - one.count(")") for one in shortened(long)] == [0, 0]


def test_sentence_that_every_method_has_is_not_listed_as_the_methods_own() -> None:
    leaves = ["with each reply: accuracy, loss and entropy of another wording", "its own codebooks"]
    assert sentences(NOBODY, leaves)["What this method sends"] == ["Its own codebooks."]
