"""A deployment's plan: its commands, its file, and what is refused before anything starts."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedsilo.cli.main import main
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import SettingError
from fedsilo.core.processes import app_folder, end_trees, free_ports, process_of, runs
from fedsilo.deployment import commands
from fedsilo.deployment import flower_commands as flower
from fedsilo.deployment.commands import (
    down,
    logs,
    prepare,
    requested_node_config,
    up,
)
from fedsilo.deployment.deployed_run import resume_command
from fedsilo.deployment.deployment import (
    SERVER,
    Deployment,
    DeploymentError,
    is_deployment,
    locked,
    plan,
    read_deployment,
)
from fedsilo.deployment.member_status import MemberStatus, status
from fedsilo.deployment.options import DeploymentOptions
from fedsilo.server_app.config.operator_files import REGISTRY, read_registry
from tests.support.errors import refuses


@pytest.fixture
def planned(tmp_path: Path) -> Deployment:
    return plan(tmp_path, ["west", "north"], [8000, 9092, 9101, 9102], {"device": "cpu", "n": 3})


def _options(command: list[str]) -> dict[str, str]:
    return {name: value for name, value in itertools.pairwise(command) if "--" in name}


def test_each_site_has_its_own_name_state_key_and_port(planned: Deployment) -> None:
    assert planned.sites == ["north", "west"]
    north, west = (_options(planned.supernode_command(site)) for site in planned.sites)
    home = planned.folder / "sites" / "north"
    assert north["--node-config"] == (f'site="north" state-dir="{home / "state"}" device="cpu" n=3')
    assert north["--superlink"] == west["--superlink"] == "127.0.0.1:9092"
    for option in ("--port", "--auth-supernode-private-key", "--node-config"):
        assert north[option] != west[option]
    homes = {planned.environment(member)["FLWR_HOME"] for member in planned.members}
    assert len(homes) == 3


def test_the_server_has_tls_keys_and_a_database(planned: Deployment) -> None:
    command = planned.superlink_command()
    options = _options(command)
    assert "--enable-supernode-auth" in command
    assert "--insecure" not in command
    assert options["--fleet-api-address"] == "127.0.0.1:9092"
    assert options["--host"] == "127.0.0.1", "who may start runs is who is on this machine"
    assert options["--database"].startswith(str(planned.folder))
    assert {"--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"} <= options.keys()


def test_members_do_not_inherit_what_this_shell_says_to_flower(
    planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", "/elsewhere")
    monkeypatch.setenv("FEDSILO_RUNS", "/elsewhere")
    for member in planned.members:
        assert "/elsewhere" not in planned.environment(member).values()
    assert planned.environment(SERVER)["FEDSILO_RUNS"] == str(planned.runs)


def test_members_reach_each_other_without_the_proxy_of_this_shell(
    planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    for member in planned.members:
        environment = planned.environment(member)
        assert environment["no_proxy"] == "127.0.0.1,localhost,example.org"
        assert environment["NO_PROXY"] == environment["no_proxy"]
        assert environment["https_proxy"] == "http://proxy.example.org:3128"


def test_the_commands_that_start_nothing_do_not_import_pytorch() -> None:
    code = (
        "import sys, fedsilo.deployment.commands, fedsilo.deployment.joining\n"
        "import fedsilo.deployment.backup.backup\n"
        "print([name for name in ('torch', 'flwr', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_it_is_read_as_it_was_written(planned: Deployment) -> None:
    planned.write()
    started = planned.with_started("west", os.getpid()).with_node("west", "17")
    assert read_deployment(planned.folder) == started
    assert started.running() == ["west"]
    content = json.loads((planned.folder / "deployment.json").read_text())
    content["started"]["west"]["at"] -= 60  # the id was another process's a minute ago
    (planned.folder / "deployment.json").write_text(json.dumps(content))
    assert read_deployment(planned.folder).running() == []


def test_the_registry_binds_each_name_to_its_key_and_the_server_reads_it(
    planned: Deployment,
) -> None:
    for folder in (planned.secrets, planned.home(SERVER)):
        folder.mkdir(parents=True)
    for site in planned.sites:
        key = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"{site}"]
        subprocess.run(key, cwd=planned.secrets, check=True)
    planned.write()
    registered = planned.with_node("west", "17").with_node("north", "5")
    registered.write_registry()
    assert planned.environment(SERVER)[REGISTRY] == str(planned.registry)
    assert REGISTRY not in planned.environment("north")
    assert read_registry(planned.registry).nodes == {"north": 5, "west": 17}
    said = ["ssh-keygen", "-l", "-f", str(planned.secrets / "west.pub")]
    done = subprocess.run(said, capture_output=True, text=True, check=True)
    assert json.loads(planned.registry.read_text())["west"]["key"] == done.stdout.split()[1]
    (planned.secrets / "west.pub").write_text("no key")
    with pytest.raises(DeploymentError, match=r"west\.pub"):
        registered.write_registry()


@pytest.mark.parametrize(
    ("sites", "told"),
    [
        (["a", "b", "a"], "site 'a' is named twice"),
        ([], "needs at least one site, but none is named"),
    ],
)
def test_two_hospitals_of_one_name_are_refused(sites: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=told):
        plan(tmp_path, sites, list(range(2 + len(sites))), {})


@pytest.mark.parametrize("content", ["", "{}", '{"ports": 1, "node_config": {}, "started": 3}'])
def test_a_damaged_file_is_told(content: str, tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="there is no deployment"):
        read_deployment(tmp_path)
    (tmp_path / "deployment.json").write_text(content)
    with pytest.raises(DeploymentError, match="is damaged"):
        read_deployment(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["up", "picsr-heart", "--sites", "3"], "has no effect with data set 'heart'"),
        (["up", "--site", "a", "--site", "a"], "site 'a' is named twice"),
        (["up", "--site", "a", "--site", "http"], "'http' cannot be a site's name"),
        (["up", "--site", "../elsewhere"], "'../elsewhere' cannot be a site's name"),
        (["up", "--node-config", "site=x"], "node config 'site' differs between sites"),
        (["up", "--node-config", "allow-folds"], "write key=value"),
        (["status"], "there is no deployment"),
        (["down"], "there is no deployment"),
        (["run", "uefl-digits"], "there is no deployment"),
    ],
)
def test_bad_input_starts_nothing_and_leaves_nothing(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "there"
    assert main(["deploy", *arguments, "--deployment", str(folder)]) == 1
    assert told in capsys.readouterr().err
    assert not (folder / "deployment.json").exists()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--sites", "3"], "--sites is 3, but the deployment in"),
        (["--site", "east"], "--site is east, but the deployment in"),
        (["--device", "cuda"], "--node-config device is cuda, but the deployment in"),
        (["--node-config", 'site-file="/x.yaml"'], "--node-config site-file is /x.yaml, but"),
    ],
)
def test_what_a_deployment_was_not_made_with_is_refused(
    asked: list[str], told: str, planned: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write()
    assert main(["deploy", "up", *asked, "--deployment", str(planned.folder)]) == 1
    assert told in " ".join(capsys.readouterr().err.split())
    assert read_deployment(planned.folder) == planned


def test_a_folder_in_the_checkout_would_go_to_every_site(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = app_folder() / "elsewhere"
    assert main(["deploy", "up", "--site", "a", "--deployment", str(folder)]) == 1
    assert "is in fedsilo's checkout" in " ".join(capsys.readouterr().err.split())
    assert not folder.exists()


def test_a_run_directory_that_exists_starts_nothing(
    planned: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write()
    (planned.runs / "again").mkdir(parents=True)
    told = ("--name", "again", "--deployment", str(planned.folder))
    assert main(["deploy", "run", "local-digits", *told]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "exists: choose another 'run.name'" in said


@pytest.mark.parametrize("dataset", ["table", "images"])
def test_a_run_of_hospitals_own_files_needs_none_at_the_server(
    planned: Deployment,
    dataset: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    planned.write()
    own = ("--set", f"dataset={dataset}", "--deployment", str(planned.folder))
    assert main(["deploy", "run", "fedavg", *own]) == 1
    assert "server, north, west" in " ".join(capsys.readouterr().err.split()), "they are down"


def test_the_command_that_resumes_a_run_has_the_options_it_was_started_with() -> None:
    changes = ("split.silos=6", "run.resume=true", "resume=true")
    sources = RunSources(file=Path("mine.yaml"), config=Path("more.toml"), changes=changes)
    assert resume_command("uefl-digits", Path("here"), sources, 3, "x") == (
        "fedsilo deploy run uefl-digits --deployment here --file mine.yaml --config more.toml "
        "--seed 3 --set split.silos=6 --name x --set run.resume=true"
    )


def test_a_key_that_others_may_read_starts_nothing(
    planned: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write()
    planned.secrets.mkdir()
    (planned.secrets / "north.key").write_text("key")
    (planned.secrets / "north.key").chmod(0o640)
    assert main(["deploy", "up", "--deployment", str(planned.folder)]) == 1
    assert (
        "north.key has mode 640, so other users may read it: chmod 600" in capsys.readouterr().err
    )
    assert read_deployment(planned.folder).started == {}


def test_logs_of_an_unknown_member_name_the_known(
    planned: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write()
    assert main(["deploy", "logs", "nort", "--deployment", str(planned.folder)]) == 1
    assert "did you mean 'north'" in capsys.readouterr().err
    assert main(["deploy", "logs", "north", "--deployment", str(planned.folder)]) == 1
    assert "because it has not run yet" in capsys.readouterr().err
    planned.with_node("far", "5")
    assert main(["deploy", "logs", "far", "--deployment", str(planned.folder)]) == 1
    assert "far runs on another machine: read its log" in capsys.readouterr().err
    assert main(["deploy", "logs", "--lines", "0", "--deployment", str(planned.folder)]) == 1
    assert "--lines must be at least 1, but is 0" in capsys.readouterr().err


def test_a_call_that_fails_as_the_certificate_has_ended_says_so(
    planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(deployment: Deployment) -> bool:
        raise DeploymentError("the server's certificate is not valid: certificate has expired")

    failed = subprocess.CompletedProcess([], 1, "", "Connection to the SuperLink is unavailable.")
    monkeypatch.setattr(flower.subprocess, "run", lambda *words, **options: failed)
    monkeypatch.setattr(flower, "is_healthy", ended)
    with pytest.raises(DeploymentError, match="certificate has expired"):
        flower.flwr(planned, "supernode", "list")


def test_what_runs_comes_back_as_data_and_nothing_is_printed(
    planned: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write()
    log = planned.log("north")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("one\ntwo\nthree\n")
    assert status(planned.folder) == [
        MemberStatus(SERVER, None, "", planned.log(SERVER)),
        *(MemberStatus(site, None, "offline", planned.log(site)) for site in planned.sites),
    ]
    assert logs(planned.folder, "north", 2) == "two\nthree"
    assert down(planned.folder) == (planned, [])
    assert capsys.readouterr().out == ""


def test_a_request_tells_every_site_of_its_device_and_its_data(tmp_path: Path) -> None:
    options: DeploymentOptions = {
        "device": "cuda",
        "data_dir": tmp_path / "up" / "..",
        "node_config": ("allow-folds=true",),
    }
    assert requested_node_config(options) == {
        "device": "cuda",
        "data-dir": str(tmp_path.resolve()),
        "allow-folds": True,
    }
    assert requested_node_config({}) == {}


@pytest.mark.parametrize("is_new", [True, False])
def test_a_second_command_that_changes_a_deployment_is_refused_in_one_line(
    is_new: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "server"
    if not is_new:
        prepare(plan(folder, [], [8000, 9092], {}, "fl.example.org:9092"))
    commands = [["deploy", "up", "--host", "fl.example.org"]]
    if not is_new:
        commands += [["deploy", name, "north"] for name in ("add", "renew", "revoke")]
    with locked(folder):
        for words in commands:
            assert main([*words, "--deployment", str(folder)]) == 1
            error = capsys.readouterr().err
            assert f"another 'fedsilo deploy' is changing {folder}: wait until it ends" in error
            assert error.count("\n") == 1
    assert is_deployment(folder) is not is_new


def test_the_lock_of_a_deployment_ends_with_the_command_though_its_processes_live(
    tmp_path: Path,
) -> None:
    with locked(tmp_path):
        site = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with locked(tmp_path):
        assert site.poll() is None
    site.communicate(b"\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sites", "2", "--site", "north"], "--sites has no effect with --site"),
        (["--sites", "0"], "--sites must be at least 1"),
        (["--sites", "2", "--host", "a b"], "--host must be a name or an address"),
        (["unknown-experiment"], "unknown experiment 'unknown-experiment'"),
    ],
)
def test_options_that_no_deployment_can_have_leave_no_folder(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "server"
    assert main(["deploy", "up", *words, "--deployment", str(folder)]) == 1
    assert said in capsys.readouterr().err
    assert not folder.exists()


def test_a_whole_tree_of_processes_is_ended() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    root = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE)
    process = psutil.Process(root.pid)
    limit = time.monotonic() + 30
    while not process.children() and time.monotonic() < limit:
        time.sleep(0.05)
    tree = [process, *process.children(recursive=True)]
    started = process.create_time()
    assert process_of(root.pid, started) == process
    end_trees([process])
    assert len(tree) == 2
    assert not any(runs(one) for one in tree)
    assert process_of(root.pid, started) is None
    root.wait()


def test_ports_are_free_and_differ() -> None:
    assert len(set(free_ports(5))) == 5


def test_up_does_not_ignore_an_experiment_of_other_silos(
    planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(planned)
    monkeypatch.setattr(commands, "refuse_other_flower", lambda: None)
    monkeypatch.setattr(commands, "_start_missing", lambda deployment, say: deployment)
    with refuses(SettingError, "fedavg-digits", "s1a", "north, west", "--deployment"):
        up(planned.folder, "fedavg-digits", DeploymentOptions(), print)
    assert up(planned.folder, None, DeploymentOptions(), print).sites == ["north", "west"]
    monkeypatch.setattr(commands, "_silos", lambda *_: ["west", "north"])
    assert up(planned.folder, "own", DeploymentOptions(), print).sites == ["north", "west"]
