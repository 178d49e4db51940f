"""Two studies side by side on one SuperLink: other hospitals, another trust, nothing is shared."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedsilo.cli.main import main
from fedsilo.client_app.site.node import OWN
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import FILE, Deployment, read_deployment
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.deployed import kill, run_options

SITES = 4
SITE_FILE = """
methods: ["*"]
datasets: ["*"]
records: ["config/*", "metrics/*", "arrays/*"]
"""
_LIMIT = 240.0  # seconds
PRIVATE: dict[str, Value] = {
    "privacy.trust": "nobody",
    "privacy.sample-clip-norm": 1.0,
    "privacy.noise-multiplier": 2.0,
}


def _trust_nobody(folder: Path, sites: Sequence[str]) -> None:
    """Start the nodes of these sites again, with another level of trust than the others'."""
    deployment = read_deployment(folder)
    for site in sites:
        kill(deployment, site)
    plan = json.loads((folder / FILE).read_text())
    for site in sites:
        plan["node_config"][site] |= {"trust": "nobody", "max-epsilon": 1000.0}
    (folder / FILE).write_text(json.dumps(plan))
    assert main(["deploy", "up", "--deployment", str(folder)]) == 0


def _check_own_files(deployment: Deployment, site: str, run: str) -> None:
    """Check that a hospital's run book, by which quotas count, and audit log have one run only."""
    own = Path(str(deployment.node_config[site]["state-dir"])) / OWN / site
    book: dict[str, Any] = json.loads((own / "runs.json").read_text())
    assert book.keys() == {"", run}  # the empty name counts hellos by day
    assert book[""]["messages"] == 1, "another study asked it too"
    lines = [json.loads(line) for line in (own / "audit.jsonl").open()]
    assert {line["run"] for line in lines} == {run}
    assert lines[0]["kind"] == "query.hello"


def test_two_studies_with_other_hospitals_and_another_trust_are_kept_apart(
    folder: Path,
    begin: Callable[..., subprocess.Popen[str]],
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    tmp_path: Path,
) -> None:
    deployment = read_deployment(folder)
    hearts, scans = deployment.sites[:2], deployment.sites[2:]
    _trust_nobody(folder, scans)
    values = {
        "hearts": tiny("fedavg", silos=SITES, rounds=8) | {"server.sites": ",".join(hearts)},
        "scans": tiny("fedavg", silos=SITES, rounds=2)
        | PRIVATE
        | {"server.sites": ",".join(scans)},
    }
    runs = {name: RunDirectory(deployment.runs / name) for name in values}
    first = begin(values["hearts"], "hearts")
    limit = time.monotonic() + _LIMIT
    while not (runs["hearts"].path / "config.toml").is_file() and first.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.1)
    # While one trains, a run of its name is refused, and the other study begins
    assert main([*run_options(folder, values["scans"], "hearts")]) == 1
    second = begin(values["scans"], "scans")
    for process in (first, second):
        printed, _ = process.communicate(timeout=_LIMIT)
        assert process.returncode == 0, printed

    for name, sites in (("hearts", hearts), ("scans", scans)):
        assert sorted(runs[name].read_json("silos.json")) == sites
        for site in sites:
            _check_own_files(deployment, site, name)
        assert runs[name].read_json("summary.json")["rounds"] == values[name]["rounds"]
    assert (runs["scans"].path / "privacy.json").is_file()
    # A study is what it would be alone
    simulated = inline_run(values["hearts"], SITES)
    for file in ("metrics.csv", "model.safetensors"):
        assert (runs["hearts"].path / file).read_bytes() == (simulated.path / file).read_bytes()

    # A run of the hospitals that trust the server only may not ask the others
    options = run_options(folder, tiny("fedavg", silos=SITES, rounds=1), "everybody")
    assert main(options) == 1
    # One backup has both
    secret = tmp_path / "secret"
    secret.write_text("correct horse battery")
    secret.chmod(0o600)
    words = ["deploy", "backup", str(tmp_path / "backup"), "--deployment", str(folder)]
    assert main([*words, "--passphrase-file", str(secret)]) == 0
    words = ["deploy", "restore", str(tmp_path / "backup"), "--deployment", str(tmp_path / "new")]
    assert main([*words, "--passphrase-file", str(secret)]) == 0
    restored = read_deployment(tmp_path / "new")
    for name, run in runs.items():
        model = restored.runs / name / "model.safetensors"
        assert model.read_bytes() == (run.path / "model.safetensors").read_bytes()
