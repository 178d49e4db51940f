"""One hospital's names, texts and facts end nobody else's work: not at the end, nor in a report.

A run of four hospitals of tables is taken once, as it was answered; each trial runs the server
again over these answers, of which one hospital's are changed. Whatever it says, the run ends with
its model, its summary and its privacy record, every picture is drawn, and every reader reads it.
"""

import contextlib
import io
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from flwr.app import Error, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fedsilo.comparison.results import experiment_results
from fedsilo.core.errors import ERROR_CODES, EpsilonSpentError
from fedsilo.core.messages import CONFIG, EVALUATE, METRICS
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import flower_identity
from fedsilo.inference.export.card import card_text
from fedsilo.pictures.learning_curves import draw_pictures
from fedsilo.pictures.picture_files import write_picture
from fedsilo.reports.report import READERS, report
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.runner import run
from tests.fuzz.mutations import hostile_text
from tests.fuzz.replies import Key, ReplayGrid, _Answers, _taken
from tests.fuzz.reply_mutations import copied, near_name

LIAR = 1001
TRIALS = int(os.environ.get("FUZZ_TRIALS", "1"))  # more by `make fuzz`
SITES = 3
TABLE: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "method": "fedavg",
    "data.standardise": "declared",
    "rounds": 2,
    "train.local-steps": 2,
    "train.batch-size": 16,
    "network.dropout": 0.0,
    "train.mc-passes": 0,
    "machine.device": "cpu",
}
# One name outside of the grammar, of which test_metric_names.py tries more, and those within it
NAMES = (
    "incoming.test.reliability.x",
    "incoming.test.reliability.0.mean",
    "incoming.val.confidence.0.count",
    "incoming.test.class.7.right",
    "incoming.test.routing.nowhere.mean",
    "incoming.test.accuracy-from-nowhere",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> _Answers:
    return _taken(tmp_path_factory.mktemp("honest"), TABLE)


Changes = Mapping[Key, RecordDict | Error]


@pytest.fixture(scope="module")
def honest(answers: _Answers, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return ended(answers, {}, tmp_path_factory.mktemp("again"))


def of_liar(answers: _Answers, kind: str, round_: int) -> Key:
    """Return which message of the liar that is."""
    found = [k for k in answers.by_key if (k[0], k[1], k[2]) == (LIAR, kind, round_)]
    return found[0]


def last(answers: _Answers) -> Key:
    """Return the liar's last message: the final evaluation."""
    return max(k for k in answers.by_key if k[0] == LIAR and k[1] == EVALUATE)


def ended(answers: _Answers, changes: Changes, out: Path, **more: Value) -> RunDirectory:
    """Run the server over the answers, some of them changed; the run must end well."""
    answered = _Answers(answers.values | more, answers.by_key)
    with flower_identity(), contextlib.redirect_stdout(io.StringIO()) as shown:
        grid = ReplayGrid({**answers.by_key, **changes})
        directory = run(grid, answered.settings(out, min_sites=2))
    assert directory.has_ended()
    assert "cannot be written" not in shown.getvalue()
    return directory


def read_everywhere(directory: RunDirectory) -> None:
    """Draw every picture and have every reader read the run.

    Pictures for the screen only: those for paper are the same figures with the same texts.
    """
    with pytest.MonkeyPatch.context() as patch:
        curves = "fedsilo.pictures.learning_curves"
        patch.setattr(f"{curves}.write_for_screen_and_paper", _write_for_screen)
        draw_pictures(directory, pytest.fail)
    for reader in READERS:
        assert "</html>" in report([directory.path], reader)
    assert card_text(FinishedRun.open(directory.path), None)
    summary = directory.read_json("summary.json")
    metrics = ["accuracy", "auc", "loss"]
    results = experiment_results("one", {7: summary}, metrics)
    assert not results.duplicated(["group", "metric", "seed"]).any()


def _write_for_screen(path: Path, figure: Figure) -> list[Path]:
    write_picture(path, figure)
    return [path]


def refused(directory: RunDirectory) -> list[str]:
    """Return why the liar's replies were refused; each line names it."""
    failures = directory.read_json("summary.json")["failures"]
    sites = {failure["site"] for failure in failures}
    assert len(sites) <= 1, "nobody else is blamed"
    return [failure["reason"] for failure in failures]


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_of_another_name_is_refused_with_the_site_and_the_run_ends(
    name: str, answers: _Answers, honest: RunDirectory, tmp_path: Path
) -> None:
    key = last(answers)
    content = copied(answers.by_key[key])
    content.metric_records[METRICS][name] = 0.0
    directory = ended(answers, {key: content}, tmp_path)
    (reason,) = refused(directory)
    assert "metric" in reason
    summary, before = (one.read_json("summary.json") for one in (directory, honest))
    assert len(summary["sites"]) == SITES - 1
    for site, row in summary["sites"].items():
        assert row == before["sites"][site]
    if name == NAMES[0]:
        read_everywhere(directory)  # of a run without the liar's last reply, whatever its name


def test_too_many_names_are_refused_before_a_checkpoint_holds_them(
    answers: _Answers, tmp_path: Path
) -> None:
    key = of_liar(answers, "train", 1)
    content = copied(answers.by_key[key])
    for number in range(20_000):
        content.metric_records[METRICS][f"incoming.test.m{number}"] = 0.5
    directory = ended(answers, {key: content}, tmp_path)
    (reason,) = refused(directory)
    assert "the limits are 500" in reason


@settings(
    max_examples=TRIALS,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a run takes seconds: no shrinking
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_whatever_one_reply_names_the_run_ends_and_is_read(
    answers: _Answers, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32), label="seed"))
    changes: dict[Key, RecordDict | Error] = {}
    for key in rng.sample(sorted(k for k in answers.by_key if k[0] == LIAR and k[2]), 2):
        content = copied(answers.by_key[key])
        for _ in range(rng.choice([1, 1, 3])):
            value = rng.choice([0.0, 0.5, 1.0, 3.0, 1e9])
            content.metric_records[METRICS][near_name(rng)] = value
        changes[key] = content
    directory = ended(answers, changes, tmp_path_factory.mktemp("trial"))
    refused(directory)
    read_everywhere(directory)


# Two texts to a run, because reading a run everywhere takes a second
@pytest.mark.parametrize(
    ("reason", "other"),
    [("x" * 9000, "\x1b[2J[bold red]"), ("a\u2028b" * 99, "$\\frac{")],
)
def test_the_text_of_an_error_ends_no_run_and_no_reader(
    reason: str, other: str, answers: _Answers, tmp_path: Path
) -> None:
    code = ERROR_CODES[EpsilonSpentError.code]
    changes = {last(answers): Error(code, reason), of_liar(answers, "train", 2): Error(2, other)}
    directory = ended(answers, changes, tmp_path)
    assert len(refused(directory)) == 2
    read_everywhere(directory)


# Several facts of one hello, because reading a run everywhere takes a second
FACTS: dict[str, dict[str, object]] = {
    "empty": {
        "distribution": "",
        "class-names": json.dumps(["", " "]),
        "software": json.dumps({"|": "`[x](y)", "": ""}),
    },
    "blank": {
        "distribution": " " * 200,
        "class-names": json.dumps(["a", "a"]),
        "dropped": 10**9,
    },
    "markup": {
        "distribution": "<b>[red]x[/red]|`*_#",
        "class-names": json.dumps(["</table>", "{{x}}{% y %}"]),
        "software": json.dumps({"device": "=1+1"}),
    },
}


def told_at_hello(answers: _Answers, facts: Mapping[str, object], out: Path) -> RunDirectory:
    """Run with a hello of the liar's that has these facts."""
    (key,) = (k for k in answers.by_key if k[0] == LIAR and k[1].startswith("query"))
    content = copied(answers.by_key[key])
    for name, value in facts.items():
        content.config_records[CONFIG][name] = value  # type: ignore[assignment]
    return ended(answers, {key: content}, out)


@pytest.mark.parametrize("facts", FACTS)
def test_no_fact_of_a_hello_ends_a_run_or_a_reader(
    facts: str, answers: _Answers, tmp_path: Path
) -> None:
    directory = told_at_hello(answers, FACTS[facts], tmp_path)
    assert refused(directory) == [], "the readers meet it"
    read_everywhere(directory)


def test_a_distribution_of_a_reserved_name_is_refused_and_the_run_ends(
    answers: _Answers, tmp_path: Path
) -> None:
    failures = told_at_hello(answers, {"distribution": "all"}, tmp_path).read_json("summary.json")
    (failure,) = failures["failures"]
    assert "'distribution' is 'all'" in failure["reason"]


@settings(
    max_examples=TRIALS,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a run takes seconds: no shrinking
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.integers(0, 2**32))
def test_whatever_a_hello_says_the_run_ends_and_is_read(
    answers: _Answers, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng = random.Random(seed)
    (key,) = (k for k in answers.by_key if k[0] == LIAR and k[1].startswith("query"))
    content = copied(answers.by_key[key])
    record = content.config_records[CONFIG]
    for name in rng.sample(sorted(record), 2):
        text = hostile_text(rng)
        if isinstance(record[name], str) and str(record[name])[:1] in ("{", "["):
            record[name] = _with_text(rng, str(record[name]), text)
        elif isinstance(record[name], str):
            record[name] = text.encode(errors="replace").decode()
    directory = ended(answers, {key: content}, tmp_path_factory.mktemp("trial"))
    read_everywhere(directory)


def _with_text(rng: random.Random, written: str, text: str) -> str:
    """Return JSON with one of its texts replaced."""
    content = json.loads(written)
    if isinstance(content, list) and content:
        content[rng.randrange(len(content))] = text
    elif isinstance(content, dict) and content:
        old = rng.choice(sorted(content))
        content[rng.choice([old, text])] = content.pop(old)
    return json.dumps(content)


def test_a_refused_reply_is_refused_again_when_the_run_is_resumed(
    answers: _Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it was one grammar, the run failed at its end, and at each resume."""
    key = last(answers)
    content = copied(answers.by_key[key])
    content.metric_records[METRICS]["incoming.test.certainty.0.count"] = 1.0

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedsilo.server_app.run.runner.write_end", die)
        with pytest.raises(KeyboardInterrupt):
            ended(answers, {key: content}, tmp_path)
    directory = ended(answers, {key: content}, tmp_path, resume=True)
    assert len(refused(directory)) == 1
