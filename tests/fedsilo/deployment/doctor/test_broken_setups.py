"""Set-ups that are broken by script: doctor names each in one line, with the fix that works."""

import dataclasses
import json
import shutil
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedsilo.deployment.certificates import sign_server
from fedsilo.deployment.doctor.findings import Finding, Status, exit_code, format_finding
from tests.fedsilo.deployment.doctor.conftest import (
    Hospital,
    Server,
    certificate,
    write_images,
    write_table,
)
from tests.support.setting_keys import as_keys

LONG_AGO, LATELY = datetime(2020, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC)
YEAR = timedelta(days=366)
Break = Callable[[Any, pytest.FixtureRequest], None]


@dataclasses.dataclass(frozen=True)
class Broken:
    """A set-up that is broken.

    Attributes:
        break_: breaks one thing of a set-up.
        check: which is to tell of it.
        said: what it says of it.
        fix: what it tells to do.
        fixed: does that, where it is cheap; None: it is not.
    """

    break_: Break
    check: str
    said: str
    fix: str
    fixed: Break | None = None


def _copy(source: str, target: str) -> Break:
    def copy(one: Any, _: object) -> None:
        shutil.copy(one.secrets / source, one.secrets / target)

    return copy


def _unlink(name: str) -> Break:
    return lambda one, _: (one.folder / name).unlink()


def _mode(name: str, mode: int) -> Break:
    return lambda one, _: (one.secrets / name).chmod(mode)


def _options(**changes: Any) -> Break:
    return lambda one, _: one.options.update(changes)


def _node(**changes: Any) -> Break:
    return lambda one, _: one.node.update({k.replace("_", "-"): v for k, v in changes.items()})


def _run(**changes: Any) -> Break:
    return lambda one, _: one.run.update(as_keys(changes))


def _allow(**changes: Any) -> Break:
    return lambda one, _: one.allow(**changes)


def _write(name: str, text: str) -> Break:
    return lambda one, _: (one.folder / name).write_text(text)  # type: ignore[return-value]


def _without(key: str) -> Break:
    return lambda one, _: one.node.pop(key)


def _both(*breaks: Break) -> Break:
    def do(one: Any, request: pytest.FixtureRequest) -> None:
        for each in breaks:
            each(one, request)

    return do


def _of_others(name: str) -> Break:
    def take(one: Any, request: pytest.FixtureRequest) -> None:
        shutil.copy(request.getfixturevalue("other_secrets") / name, one.secrets / name)

    return take


def _ended(name: str, begin: datetime = LONG_AGO, end: datetime = LATELY) -> Break:
    def sign(one: Any, _: object) -> None:
        key = one.secrets / f"{Path(name).stem}.key"
        certificate(one.secrets, key, one.secrets / name, begin, end)

    return sign


def _listening(option: str, form: str) -> Break:
    """Let somebody else listen where the set-up is to."""

    def listen(one: Any, request: pytest.FixtureRequest) -> None:
        taken = socket.create_server(("127.0.0.1", 0))
        request.addfinalizer(taken.close)
        port = taken.getsockname()[1]
        one.options[option] = form.format(port) if form else port

    return listen


def _free(what: str, **values: Any) -> Break:
    """Let the machine say that it has little of something."""

    def patch(one: Any, request: pytest.FixtureRequest) -> None:
        monkeypatch = request.getfixturevalue("monkeypatch")
        module, name = (shutil, "disk_usage") if what == "disk" else (psutil, "virtual_memory")
        real = getattr(module, name)
        shown = real(*(["/"] if what == "disk" else []))._replace(**values)
        monkeypatch.setattr(module, name, lambda *_: shown)

    return patch


def _other_flower(one: Hospital, request: pytest.FixtureRequest) -> None:
    metadata = one.folder / "elsewhere" / "flwr-1.20.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: flwr\nVersion: 1.20.0\n")
    request.getfixturevalue("monkeypatch").syspath_prepend(str(metadata.parents[1]))


def _silent(one: Hospital, _: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        one.options["superlink"] = f"127.0.0.1:{closed.getsockname()[1]}"


def _plain(one: Hospital, request: pytest.FixtureRequest) -> None:
    one.options["superlink"] = f"127.0.0.1:{request.getfixturevalue('plain_port')}"


def _other_host(one: Hospital, _: object) -> None:
    one.options["superlink"] = one.options["superlink"].replace("127.0.0.1", "127.0.0.2")


def _clock(apart: timedelta) -> Break:
    return lambda one, _: one.options.update(now=lambda: datetime.now(UTC) + apart)


def _no_data(one: Hospital, _: object) -> None:
    shutil.rmtree(one.data)
    one.data.mkdir()


def _images(one: Hospital, _: object) -> None:
    write_images(one.data)
    assert one.run is not None
    one.run = {
        "method": "fedavg",
        "dataset": "images",
        "machine.device": "cpu",
        "train.mc-passes": 0,
    }


SITES = {
    "authority missing": Broken(
        _unlink("secrets/ca.crt"), "authority", "ca.crt is missing", "copy the file there"
    ),
    "authority ended": Broken(
        _ended("ca.crt"), "authority", "ended on 2021-01-01", "deploy renew server"
    ),
    "authority garbled": Broken(
        _write("secrets/ca.crt", "-----BEGIN CERTIFICATE-----\nxx\n"),
        *("authority", "cannot be read", "make a new one"),
    ),
    "another authority": Broken(
        _of_others("ca.crt"), "server", "cannot be trusted", "ask the server's operator"
    ),
    "another host": Broken(
        _other_host, "server", "IP address mismatch", "send nothing, and ask the server's operator"
    ),
    "server silent": Broken(
        _silent, "server", "does not answer", "ask the operator whether it runs"
    ),
    "no TLS": Broken(_plain, "server", "does not speak TLS", "the port of its Fleet API"),
    "no port": Broken(
        _options(superlink="fl.example.org"), "server", "address is 'fl.example.org'", "host:port"
    ),
    "clock a year behind": Broken(_clock(-YEAR), "authority", "begins on", "machine's clock"),
    "clock a year ahead": Broken(
        *(_clock(YEAR), "clock", "from the server's time", "set this machine's clock"),
        _clock(timedelta()),
    ),
    "clock ten minutes ahead": Broken(
        _clock(timedelta(minutes=10)), "clock", "more than 5 minutes", "by NTP"
    ),
    "key missing": Broken(_unlink("secrets/north.key"), "key", "is missing", "copy the file"),
    "key world-readable": Broken(
        *(
            _mode("north.key", 0o644),
            "key",
            "has mode 644, so other users may read it",
            "chmod 600",
        ),
        _mode("north.key", 0o600),
    ),
    "key of another kind": Broken(
        _copy("server.key", "north.key"),
        "key",
        "does not contain 'BEGIN OPENSSH",
        "mount the right file",
    ),
    "signing key of no kind": Broken(
        _write("state/.own/north/signing.key", "no key"),
        *("signing", "signing.key cannot be used", "bring it back"),
    ),
    "a list of keys of no kind": Broken(
        _write("state/.own/north/known-keys.json", "[1]"),
        *("signing", "known-keys.json is damaged", "bring it back"),
    ),
    "a key that is another one now": Broken(
        _write(
            "state/.own/north/known-keys.json",
            json.dumps({"south": {"compared": "a", "day": "2026-01-02", "received": "b"}}),
        ),
        *("signing", "south signs with key b, but a was compared", "by telephone"),
    ),
    "port taken": Broken(_listening("port", ""), "port", "is taken by process", "another port"),
    "no disk": Broken(_free("disk", free=10**8), "disk", "has 0.10 GB free", "free some space"),
    "no file can be written": Broken(
        _node(state_dir="/proc/fedsilo"), "disk", "/proc", "another disk"
    ),
    "no memory": Broken(
        _free("memory", available=10**8), "memory", "0.1 GB of memory are free", "raise the"
    ),
    "no memory for a message": Broken(
        *(_node(max_memory=100), "memory", "allows a message 0.1 GB", "in the site file"),
        _node(max_memory=0),
    ),
    "data folder empty": Broken(_no_data, "data folder", "is empty", "copy the data there"),
    "data folder missing": Broken(
        _node(data_dir="/nowhere"), "data folder", "is missing", "copy the data there"
    ),
    "wrong column": Broken(
        *(lambda one, _: write_table(one.data, "age,cholesterol,diagnosis"), "data", "chol", ""),
        lambda one, _: write_table(one.data),
    ),
    "broken image": Broken(
        _images, "data", "line 7", "data.broken-images", _run(broken_images="skip")
    ),
    "site file misspelt": Broken(
        *(_allow(metods=["*"]), "site file", "metods", "did you mean 'methods'"),
        lambda one, _: one.rules.pop("metods") and one.allow(),
    ),
    "site file missing": Broken(_unlink("site.yaml"), "site file", "is missing", "copy it there"),
    "site file of another site": Broken(
        _allow(site="south"), "site file", "'site' is 'south'", "this is site 'north'"
    ),
    "audit log nowhere": Broken(
        _allow(audit_log="/nowhere/audit.jsonl"), "site file", "folder /nowhere is missing", "make"
    ),
    "method not allowed": Broken(
        *(_allow(methods=["local"]), "requests", "does not allow method 'fedavg'", "'methods'"),
        _allow(methods=["local", "fedavg"]),
    ),
    "arrays not allowed": Broken(
        *(_allow(records=["config/*", "metrics/*"]), "requests", "arrays/", "('records')"),
        _allow(records=["config/*", "metrics/*", "arrays/*"]),
    ),
    "too many rounds": Broken(
        _allow(max_rounds=1), "requests", "at most 1 round", "'max-rounds'", _run(rounds=1)
    ),
    "too few samples": Broken(
        *(_allow(minimum_train_samples=1000), "requests", "fewer than 1000", "minimum-train"),
        _allow(minimum_train_samples=10),
    ),
    "sums of too few": Broken(
        *(_allow(sums_min_count=100), "requests", "sends no sums", "'declared'"),
        _run(standardise="site"),  # the schema declares no mean of the age
    ),
    "batches too small": Broken(
        _run(batch_size=4), "requests", "'train.batch-size' is 4", "raise it", _run(batch_size=8)
    ),
    "consent lacking": Broken(
        _run(fold_seed=3), "data", "fold-seed choose which", "allow-folds", _node(allow_folds=True)
    ),
    "cap without clipping": Broken(
        _node(max_epsilon=5.0), "data", "cap on epsilon", "set 'privacy.sample-clip-norm'"
    ),
    "node config misspelt": Broken(
        *(_node(state_dri="x"), "node config", "state-dri", "did you mean 'state-dir'"),
        _without("state-dri"),
    ),
    "no state folder": Broken(
        _without("state-dir"), "node config", "no 'state-dir'", "--node-config"
    ),
    "no name": Broken(_without("site"), "node config", "names no 'site'", "--node-config"),
    "a name that cannot be": Broken(
        _node(site="a/b"), "node config", "cannot be a site's name", "choose another 'site'"
    ),
    "device that is none": Broken(_node(device="gpu"), "node config", "'gpu'", "cuda:N"),
    "other Flower": Broken(
        _other_flower, "software", "flwr 1.20.0", "pip install 'flwr[simulation]>=1.39,<1.40'"
    ),
    "key not registered": Broken(
        _options(node=8), "admission", "no registration of this key", "newest kit"
    ),
}
SERVERS = {
    "certificate ended": Broken(
        *(_ended("server.crt"), "certificate", "ended on 2021-01-01", "deploy renew server"),
        lambda one, _: sign_server(one.secrets, ["localhost"]),
    ),
    "certificate ends soon": Broken(
        _ended("server.crt", LATELY, datetime.now(UTC) + timedelta(days=3)),
        *("certificate", "in 2 days", "deploy renew server"),
    ),
    "certificate of another authority": Broken(
        _of_others("server.crt"), "certificate", "was not signed by", "use the pair"
    ),
    "key of another": Broken(
        _of_others("server.key"), "key", "is not the key", "mount a key with its"
    ),
    "key world-readable": Broken(
        *(_mode("server.key", 0o604), "key", "mode 604", "chmod 600"),
        _mode("server.key", 0o600),
    ),
    "fleet port taken": Broken(
        _listening("fleet", "127.0.0.1:{}"), "fleet port", "is taken by process", "another port"
    ),
    "control port open": Broken(
        *(_options(control="0.0.0.0:8000"), "control port", "where anyone could start", "--host"),
    ),
    "database that is none": Broken(
        _write("superlink.db", "hello, I am a text"), "database", "not an SQLite", "another file"
    ),
    "database nowhere": Broken(
        _options(database=Path("/nowhere/superlink.db")), "database", "is missing", "make the"
    ),
    "disk slow": Broken(
        lambda one, request: request.getfixturevalue("monkeypatch").setattr(
            "fedsilo.deployment.doctor.server.commit_seconds", lambda _: [0.1, 0.4, 0.9]
        ),
        *("database", "takes 400 ms", "on a local disk"),
    ),
    "no disk": Broken(_free("disk", free=10**9), "disk", "1.00 GB free", "free some space"),
    "hospital not in the registry": Broken(
        _options(hospitals=(("east", None),)),
        "registry",
        "east has no line in the registry",
        "deploy renew east",
    ),
    "another key registered": Broken(
        _copy("south.pub", "north.pub"), "registry", "the key of north", "deploy renew north"
    ),
    "registry damaged": Broken(
        _write("registry.json", '{"north": 3}'),
        "registry",
        "'north' must be a mapping",
        "the keys node-id, key",
    ),
}


def _refused(found: list[Finding], broken: Broken) -> None:
    """Assert that one line tells of it, with the fix, and that nothing says it has passed."""
    (told,) = (finding for finding in found if finding.check == broken.check)
    assert told.status is Status.FAILED, told
    (line,) = format_finding(told)
    assert "\n" not in line
    assert broken.said in line
    assert broken.fix in line.replace(told.said, "") or broken.fix in told.said
    assert exit_code(found) == 1


def _passes(found: list[Finding], check: str) -> None:
    (told,) = (finding for finding in found if finding.check == check)
    assert told.status is Status.PASSED, told


def test_thirty_set_ups_are_broken() -> None:
    assert len(SITES) + len(SERVERS) >= 30


@pytest.mark.parametrize("name", SITES)
def test_a_broken_site_is_named_in_one_line_with_its_fix(
    name: str, hospital: Hospital, request: pytest.FixtureRequest
) -> None:
    broken = SITES[name]
    broken.break_(hospital, request)
    _refused(hospital.found(), broken)
    if broken.fixed:
        broken.fixed(hospital, request)
        _passes(hospital.found(), broken.check)


@pytest.mark.parametrize("name", SERVERS)
def test_a_broken_server_is_named_in_one_line_with_its_fix(
    name: str, server: Server, request: pytest.FixtureRequest
) -> None:
    broken = SERVERS[name]
    broken.break_(server, request)
    _refused(server.found(), broken)
    if broken.fixed:
        broken.fixed(server, request)
        _passes(server.found(), broken.check)


def test_a_site_that_is_set_up_well_passes_all_but_its_gpu(hospital: Hospital) -> None:
    found = hospital.found()
    assert [f.check for f in found if f.status is not Status.PASSED] == ["gpu"], found
    assert exit_code(found) == 0


def test_a_column_unlike_the_schemas_mean_is_named_to_the_site(hospital: Hospital) -> None:
    def lines() -> str:
        (data,) = [found for found in hospital.found() if found.check == "data"]
        assert data.status is Status.PASSED, data
        return "\n".join(data.details)

    schema = Path(str(hospital.node["data-dir"])) / "schema.yaml"
    text = schema.read_text().replace("{name: age}", "{name: age, mean: 55.0, std: 15.0}")
    schema.write_text(text)
    assert "mean" not in lines()
    schema.write_text(text.replace("mean: 240.0, std: 50.0", "mean: 6.2, std: 1.3"))
    assert "column 'chol'" not in lines(), "a title comes from the schema"
    assert "chol: mean 2" in lines()
    assert "mmol/l" in lines()


def test_a_server_that_is_set_up_well_passes_all_that_can_be_known(server: Server) -> None:
    found = server.found()
    skipped = [f.check for f in found if f.status is not Status.PASSED]
    assert skipped == ["answer", "nodes"], found
    assert exit_code(found) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(hospital: Hospital) -> None:
    hospital.node["device"] = "cuda"
    hospital.run = None
    (told,) = (finding for finding in hospital.found() if finding.check == "gpu")
    assert told.status is Status.FAILED
    assert "use the cpu" in told.fix


def test_nothing_is_left_at_the_site_but_its_decoded_data(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_CACHE")
    before = sorted(path.name for path in hospital.folder.iterdir())
    hospital.found()
    assert sorted(path.name for path in hospital.folder.iterdir()) == before
    own = hospital.folder / "state" / ".own"
    assert [path.name for path in own.parent.iterdir()] == [".own"]
    assert sorted(path.name for path in own.iterdir()) == ["cache", "north"]
    kept = sorted(path.name for path in (own / "north").iterdir() if path.suffix != ".lock")
    assert kept == ["known-keys.json", "signing.key"], "no run book, no seed, no audit log"
