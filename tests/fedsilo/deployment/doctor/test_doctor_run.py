"""``doctor run``: the sites are met, nothing is trained, no directory is made."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli.main import main
from fedsilo.client_app.app import app
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import SiteError
from fedsilo.core.methods import METHODS
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import Deployment, plan
from fedsilo.deployment.doctor import run_checks as run
from fedsilo.deployment.doctor.findings import Finding, examine
from fedsilo.engines.inline_engine import (
    InlineGrid,
    flower_identity,
    inline_grid,
    partition_configs,
)
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.run.meeting import (
    Meeting,
    meet,
    meeting_file,
    read_meeting,
    write_meeting,
)
from tests.support.setting_keys import as_keys
from tests.support.tiny import TINY, TINY_METHOD


def _run(*words: str, **changes: Value) -> int:
    values = TINY | as_keys(changes)
    sets = [f"--set={key}={json.dumps(value)}" for key, value in values.items()]
    try:
        return main(["doctor", "run", "fedavg-digits", *sets, *words])
    except SystemExit as end:
        return int(str(end.code))


def _document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_prints_roster_splits_and_what_leaves_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run() == 0
    said = capsys.readouterr().out
    assert "s1a: D1: 36 train, 4 val, 10 test; labels: train [" in said
    assert "3 of 3 sites can take part; 3 are needed" in said
    assert "leaves each site: all weights" in said
    assert said.endswith("7 passed, 0 failed, 1 skipped\n")
    assert list(tmp_path.iterdir()) == []


def test_who_cannot_take_part_fails_and_the_others_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsilo.client_app import session
    from fedsilo.core.errors import RefusedError

    def refuse_few_samples(site: str, counts: Any, node_config: Any) -> None:
        if site == "s2a":
            raise RefusedError("site s2a has not agreed")

    monkeypatch.setattr(session, "refuse_few_samples", refuse_few_samples)
    assert _run("--json") == 1
    found = _document(capsys)["findings"]
    failed = {f["check"]: f for f in found if f["status"] == "FAILED"}
    assert "s2a has not agreed" in failed["sites"]["said"]
    assert "doctor site" in failed["sites"]["fix"]
    assert failed["enough"]["said"].startswith(
        "2 of 3 sites can take part, but 'run.min-sites' needs 3"
    )
    assert [f["about"] for f in found if f["check"] == "sites" and f["status"] == "PASSED"] == [
        "s1a",
        "s3a",
    ]
    assert _run("--json", min_sites=2) == 1, "a site that refuses is no run as it was meant"
    assert "enough" not in {f["check"] for f in _document(capsys)["findings"] if f["fix"]}


def test_sites_that_cannot_be_met_are_asked_once_and_fail_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def silent(grid: InlineGrid, settings: Any) -> Meeting:
        asked.append(len(list(grid.get_node_ids())))
        raise SiteError("0 SuperNodes are connected after 60 s")

    monkeypatch.setattr(run, "meet_simulated", silent)
    assert _run("--json") == 1
    found = {finding["check"]: finding for finding in _document(capsys)["findings"]}
    assert asked == [3]
    assert found["sites"]["said"] == "0 SuperNodes are connected after 60 s"
    for check in ("enough", "method"):
        assert (found[check]["status"], found[check]["said"]) == (
            *("SKIPPED", "the sites could not be asked"),
        )


def test_json_has_the_same_and_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--json") == 0
    found = _document(capsys)
    assert found.keys() == {"target", "fedsilo", "exit-code", "count", "findings"}
    assert found["count"] == {"PASSED": 7, "FAILED": 0, "SKIPPED": 1}
    keys = {"check", "status", "said", "fix", "about", "details"}
    assert all(finding.keys() == keys for finding in found["findings"])


def test_a_network_that_cannot_be_built_is_no_passed_method(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run("--json", initial_weights="/nowhere/model.safetensors") == 1
    (method,) = (f for f in _document(capsys)["findings"] if f["check"] == "method")
    assert method["status"] == "FAILED"
    assert "/nowhere/model.safetensors" in method["said"]


def test_a_plan_that_cannot_start_fails_with_every_problem(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run("--json", purpose="meet", initial_weights="/nowhere/model.safetensors") == 1
    failed = [f for f in _document(capsys)["findings"] if f["check"] == "plan"]
    assert [f["status"] for f in failed] == ["FAILED", "FAILED"]
    assert "'run.purpose'" in failed[0]["said"]
    assert "/nowhere/model.safetensors" in failed[1]["said"]


def test_too_few_sites_for_the_aggregation_fail_as_at_the_start_of_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run("--json", "--supernodes", "2", aggregation="trimmed") == 1
    (method,) = (f for f in _document(capsys)["findings"] if f["check"] == "method")
    assert method["status"] == "FAILED"
    assert "needs at least 3 sites, but there are 2" in method["said"]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_says_what_leaves_before_it_runs(method: str) -> None:
    values = TINY | {"method": method} | TINY_METHOD.get(method, {})
    settings = resolve(values)
    with inline_grid(settings, 3) as grid:
        meeting = meet(grid, settings)
    assert (meeting.fault, meeting.refused, len(meeting.sites)) == ("", (), 3)
    assert meeting.leaves or method == "local"


def test_a_meeting_is_read_as_it_was_written(tmp_path: Path) -> None:
    meeting = Meeting(2, 2, {"a": {"sizes": {"train": 3}}}, ("b: no",), (), ("weights",), "", "")
    (tmp_path / "m.json").write_text(json.dumps(asdict(meeting)))
    assert read_meeting(tmp_path / "m.json") == meeting


def test_a_run_whose_purpose_is_to_meet_writes_what_the_sites_report(tmp_path: Path) -> None:
    values = TINY | {
        "method": "fedavg",
        "run.purpose": "meet",
        "run.out": str(tmp_path),
        "run.name": "m",
    }
    settings = resolve(values)
    with flower_identity():
        write_meeting(InlineGrid(app, settings.as_mapping(), partition_configs(3)), settings)
    assert [path.name for path in tmp_path.iterdir()] == ["m-meeting.json"]
    assert len(read_meeting(meeting_file(settings.common)).sites) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "uefl-digit"], "unknown experiment 'uefl-digit'"),
        (["run", "uefl-digits", "--deployment", "nowhere"], "there is no deployment in "),
        (["site", "--deployment", "nowhere"], "there is no deployment in "),
        (["server", "--deployment", "nowhere"], "there is no deployment in "),
        (["site", "uefl-digit"], "unknown experiment 'uefl-digit'"),
        (["site", "--set", "rounds=3"], "have no effect without an experiment"),
        (["site", "--plugin", "own.py"], "have no effect without an experiment"),
        (["site", "--file", "own.yaml"], "have no effect without an experiment"),
        (["site", "--site", "north"], "--site needs --deployment"),
        (["site", "--node-config", "site='a"], "--node-config cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedsilo: error")
    assert told in error
    assert error.count("\n") == 1


BY_HAND = ("superlink", "root-certificates", "auth-supernode-private-key", "host", "port")
SERVER_BY_HAND = ("ssl-ca-certfile", "ssl-certfile", "ssl-keyfile", "database", "fleet-api-address")


@pytest.mark.parametrize(
    ("command", "source", "option"),
    [
        *(("site", "deployment", option) for option in (*BY_HAND, "kit", "node-config")),
        *(("site", "kit", option) for option in (*BY_HAND, "site")),
        *(("server", "deployment", option) for option in (*SERVER_BY_HAND, "hospital", "host")),
        ("server", "deployment", "port"),
        ("run uefl-digits", "deployment", "supernodes"),
    ],
)
def test_an_option_without_effect_is_refused_with_both_names(
    command: str, source: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The folder does not exist, so nothing was read before the refusal
    assert main(["doctor", *command.split(), f"--{source}", "nowhere", f"--{option}", "5"]) == 1
    error = capsys.readouterr().err
    assert f"--{option} has no effect with --{source}:" in error
    assert error.count("\n") == 1


def test_a_site_without_anything_fails_and_says_what_to_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "site"])
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert "the node config names no 'site' -- --node-config 'site=\"NAME\"'" in said
    assert "SKIPPED data folder" in said


@pytest.mark.parametrize(
    ("sites", "status"), [("", "FAILED"), ("s1a", "PASSED"), ("s1a,s2a", "FAILED")]
)
def test_only_the_sites_that_the_run_names_must_be_online(
    sites: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = plan(tmp_path, ["s1a", "s2a"], [8000, 9092, 9101, 9102], {})
    monkeypatch.setattr(Deployment, "process", lambda self, member: member != "s2a")
    monkeypatch.setattr(run, "list_online_sites", lambda _: ["s1a"])
    sources = RunSources(changes=(f"server.sites={sites}",))
    setup = run.RunSetup("fedavg-digits", sources, deployment=deployment)
    checks = [check for check in run.CHECKS if check.name == "members"]
    (finding,) = examine(checks, setup)
    assert finding.status == status


# --- Checks by answers that are made by hand ---


def _check(name: str, setup: run.RunSetup) -> list[Finding]:
    return list(examine([replace(one, needs=()) for one in run.CHECKS if one.name == name], setup))


@pytest.fixture
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run.RunSetup:
    """Return the setup of a deployment with a hospital elsewhere, all of whose members run."""
    monkeypatch.setattr(Deployment, "process", lambda self, member: True)
    deployment = plan(tmp_path, ["s1a", "s2a"], [8000, 9092, 9101, 9102], {})
    (tmp_path / "deployment.json").touch()
    sources = RunSources(changes=("split.silos=3",))
    return run.RunSetup("fedavg", sources, deployment=deployment.with_node("far", "9"))


def test_a_hospital_elsewhere_that_is_away_is_a_detail(
    deployed: run.RunSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "list_online_sites", lambda _: ["s1a", "s2a"])
    (found,) = _check("members", deployed)
    assert (found.status, found.details) == ("PASSED", ("not online: far",))
    assert "2 sites" in found.said
    monkeypatch.setattr(run, "list_online_sites", lambda _: ["s1a", "s2a", "far"])
    assert _check("members", deployed)[0].details == ()
    monkeypatch.setattr(Deployment, "process", lambda self, member: member != "server")
    (down,) = _check("members", deployed)
    assert (down.status, down.fix.startswith("fedsilo deploy up")) == ("FAILED", True)
    assert _check("sites", deployed)[0].status == "SKIPPED"


FACTS: dict[str, Any] = {
    "sizes": {"train": 30},
    "distribution": "D1",
    "dropped": 2,
    "label_counts": {"train": [10, 20]},
    "software": {"fedsilo": "0123456789abcdef"},
}


@pytest.mark.parametrize(
    ("meeting", "statuses"),
    [
        (Meeting(2, 2, {"a": FACTS, "b": FACTS}), ["PASSED"] * 2),
        (Meeting(2, 2, {"a": FACTS}, ("b: no",)), ["FAILED", "PASSED"]),
        (Meeting(2, 2, {}, ("a: no", "b: no")), ["FAILED", "SKIPPED"]),
        (Meeting(2, 2, {"a": FACTS, "b": FACTS}, fault="other columns"), ["PASSED", "FAILED"]),
        (Meeting(2, 2, {"a": FACTS, "b": FACTS}, noise="of counts"), ["PASSED"] * 2),
    ],
)
def test_a_deployment_is_met_once_and_its_answers_are_judged(
    meeting: Meeting,
    statuses: list[str],
    deployed: run.RunSetup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def meet(*given: object) -> Meeting:
        asked.append(given)
        return meeting

    monkeypatch.setattr(run, "meet", meet)
    assert _check("plan", deployed)[0].status == "SKIPPED", "the hospitals have the files"
    assert _check("enough", deployed)[0].status == "SKIPPED", "nobody was asked"
    sites = _check("sites", deployed)
    assert [one.status for one in sites] == ["PASSED"] * len(meeting.sites) + ["FAILED"] * len(
        meeting.refused
    )
    enough, method = _check("enough", deployed)[0], _check("method", deployed)[0]
    assert [enough.status, method.status] == statuses
    assert len(asked) == 1
    if meeting.sites:
        assert sites[0].said == (
            "D1: 30 train, 2 left out; labels: train [10, 20], fedsilo 0123456789ab"
        )
    if len(meeting.sites) == 1:
        assert "'run.min-sites' to 1" in enough.fix
    if meeting.noise:
        assert method.details == ("noise that is not differential privacy: of counts",)


def test_a_site_may_say_nothing_of_its_samples_and_the_plan_names_its_seed(
    deployed: run.RunSetup,
) -> None:
    said = run._describe_site("D1", {**FACTS, "sizes": {}, "dropped": 0, "software": None})
    assert said == "does not say how many samples it has; labels: train [10, 20]"
    private = ("privacy.sample-clip-norm=1.0", "privacy.noise-multiplier=2.0", "split.silos=3")
    seeded = replace(deployed, sources=RunSources(changes=private), seed=5)
    assert seeded.plan[0].common.seed == 5
    assert "clipped to 1, noise 2" in _check("settings", seeded)[0].said
