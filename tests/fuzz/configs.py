"""Kinds of settings: TOML files, ``--set``, simulation.yaml, run configs, site and operator files.

Settings are refused in one line or are settings: of known keys, values of their types and ranges,
finite. The kind ``settings`` also runs what is allowed, over tiny data for a round.
"""

import io
import math
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

import tomli_w
import yaml

from fedsilo.api.experiment_list import list_experiments
from fedsilo.client_app.site.policy import parse_site_file
from fedsilo.comparison.tune import Tuning
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import FedsiloError
from fedsilo.core.methods import METHODS, known_defaults, server_class, settings_class, site_class
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, defaults, rule_of
from fedsilo.engines.experiments import find_experiment, read_experiments, read_section
from fedsilo.engines.inline_engine import run_inline
from fedsilo.engines.planning import plan_run
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.server_app.config.operator_files import read_registry, read_weights, registered_keys
from fedsilo.server_app.config.settings import RunSettings, group_settings, resolve
from tests.fuzz.driver import Kind, Trial
from tests.fuzz.mutations import (
    NUMBERS,
    hostile_text,
    hostile_value,
    mutate_text,
    mutate_tree,
)
from tests.fuzz.oracle import line_faults, run_directory_faults
from tests.fuzz.replies import listening
from tests.support.tiny import TINY, TINY_METHOD

_ROOT = Path(__file__).resolve().parents[2]
_SIMULATION = _ROOT / "simulation.yaml"
_SITE = (_ROOT / "docs" / "examples" / "site.yaml").read_text()
_REGISTRY = """\
north: {node-id: "123", key: "SHA256:aaaa"}
south: {node-id: 456, key: "SHA256:bbbb"}
"""
_WEIGHTS = "north: 200\nsouth: 300\n"
# Larger ones are honest work for hours, and no fault
_COPIES = 20  # of a network: two sites' own and visiting ones, gradients, moments, replies
_WORK = 64
_LEAVE = frozenset(
    {"run.out", "run.name", "run.resume", "run.purpose", "data.dir", "data.cache-dir"}
)
_LEAVE |= {
    "run.reply-timeout",
    "run.away-timeout",
    "rounds",
    "run.track",
    "machine.device",
    "split.silos",
}


def kinds() -> list[Kind]:
    """Return the kinds."""
    return [
        Kind("config-toml", _toml, 30),
        Kind("config-set", _changes, 30),
        Kind("config-simulation", _simulation, 15),
        Kind("config-run", lambda folder: _run_config, 30),
        Kind("config-site-file", lambda folder: _site_file, 30),
        Kind("config-operator", lambda folder: _operator, 30),
        Kind("settings", _runs, 5),
    ]


def _checked(one: Trial, settings: RunSettings) -> None:
    """Note what is wrong with settings that were taken."""
    for key, value in settings.as_mapping().items():
        if isinstance(value, float) and not math.isfinite(value):
            one.faults.append(f"setting {key} is {value}")
        if isinstance(value, str):
            one.faults += [f"setting {key}: {fault}" for fault in line_faults(value)]


def _told(one: Trial, run: Callable[[], None]) -> None:
    """Run; an error is to be one line."""
    try:
        with listening(one):
            run()
    except FedsiloError as error:
        one.faults += line_faults(str(error))
        raise


def _plan(one: Trial, experiment: str, sources: RunSources) -> None:
    settings, _ = plan_run(experiment, sources)
    _checked(one, settings)


def _toml(folder: Path) -> Callable[[Trial], None]:
    texts = []
    for method in METHODS:
        own = defaults(CommonSettings) | defaults(settings_class(method)) | {"method": method}
        texts.append(tomli_w.dumps(group_settings(own)))

    def trial(one: Trial) -> None:
        path = one.folder / "run.toml"
        text = mutate_text(one.rng, one.rng.choice(texts), one.done)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        sources = RunSources(file=_SIMULATION, config=path, out=one.folder / "runs")
        _told(one, lambda: _plan(one, "fedavg-digits", sources))

    return trial


def _changes(folder: Path) -> Callable[[Trial], None]:
    names, keys = sorted(read_experiments(_SIMULATION)), sorted(known_defaults())

    def trial(one: Trial) -> None:
        changes = []
        for _ in range(one.rng.choice([1, 1, 2, 3])):
            key = one.rng.choice(keys) if one.rng.random() < 0.85 else hostile_text(one.rng)
            value = one.rng.choice([hostile_text, hostile_value, _number])(one.rng)
            changes.append(one.rng.choice([f"{key}={value}"] * 8 + [key, f"{key}=[{value}]"]))
        one.done += [change[:80] for change in changes]
        sources = RunSources(file=_SIMULATION, changes=tuple(changes), out=one.folder / "runs")
        _told(one, lambda: _plan(one, one.rng.choice(names), sources))

    return trial


def _number(rng: Random) -> Any:
    return rng.choice([*NUMBERS, "1e400", "0x10", "1_000", '"1"', "2024-01-01", "true", "'x"])


def _simulation(folder: Path) -> Callable[[Trial], None]:
    text = _SIMULATION.read_text()
    tree = yaml.safe_load(text)
    names = sorted(tree["experiments"])

    def trial(one: Trial) -> None:
        path = one.folder / "simulation.yaml"
        if one.rng.random() < 0.5:
            few = one.rng.sample(names, 3)
            own = {name: dict(tree["experiments"][name]) for name in few}
            mutated = mutate_tree(one.rng, {"experiments": own, "tuning": {"trials": 2}}, one.done)
            changed = _dumped(mutated)
        else:
            changed = mutate_text(one.rng, text, one.done)
        path.write_bytes(changed.encode("utf-8", "surrogatepass"))

        def run() -> None:
            read_section(path, "tuning", Tuning)
            list(list_experiments(path))
            for name in list(read_experiments(path))[:3]:
                find_experiment(path, name)
                _plan(one, name, RunSources(file=path, out=one.folder / "runs"))

        _told(one, run)

    return trial


def _dumped(tree: Any) -> str:
    try:
        return yaml.safe_dump(tree)
    except (yaml.YAMLError, RecursionError, ValueError):
        return "[" * 3000


def _run_config(one: Trial) -> None:
    """Take a run config as Flower hands it on: any text or number by any key."""
    method = one.rng.choice(sorted(METHODS))
    values: dict[str, Value] = {"method": method}
    keys = sorted(known_defaults())
    for _ in range(one.rng.choice([1, 2, 3])):
        key = one.rng.choice(keys) if one.rng.random() < 0.9 else hostile_text(one.rng)
        values[key] = one.rng.choice([*NUMBERS, True, hostile_text(one.rng)])
    one.done.append(str(values)[:200])
    _told(one, lambda: _checked(one, resolve(values)))


def _site_file(one: Trial) -> None:
    if one.rng.random() < 0.5:
        text = _dumped(mutate_tree(one.rng, yaml.safe_load(_SITE), one.done))
    else:
        text = mutate_text(one.rng, _SITE, one.done)
    _told(one, lambda: _bounded(one, parse_site_file(text)))


def _bounded(one: Trial, limits: Any) -> None:
    for key, value in limits.given.items():
        if isinstance(value, float) and not math.isfinite(value):
            one.faults.append(f"limit {key} is {value}")


def _operator(one: Trial) -> None:
    text = one.rng.choice([_REGISTRY, _WEIGHTS])
    path = one.folder / "operator.yaml"
    changed = (
        _dumped(mutate_tree(one.rng, yaml.safe_load(text), one.done))
        if one.rng.random() < 0.5
        else mutate_text(one.rng, text, one.done)
    )
    path.write_bytes(changed.encode("utf-8", "surrogatepass"))

    def run() -> None:
        if text is _REGISTRY:
            read_registry(path)
            registered_keys(path)
        else:
            read_weights(path)

    _told(one, run)


def _runs(folder: Path) -> Callable[[Trial], None]:
    """Import what runs import, which takes seconds, and return what runs a trial."""
    for method in METHODS:
        server_class(method)
        site_class(method)
    settings = resolve(TINY | {"method": "fedavg", "run.out": str(folder), "run.name": "first"})
    with redirect_stdout(io.StringIO()):
        run_inline(settings, 3)
    return _settings


def _settings(one: Trial) -> None:
    """Run settings that are allowed, one to three of them at an end of their range."""
    method = one.rng.choice(sorted(METHODS))
    values: dict[str, Value] = TINY | {"method": method} | TINY_METHOD.get(method, {})
    values |= {"split.silos": 2, "rounds": 1, "split.silo-train-size": 20}
    if one.rng.random() < 0.4 and method not in ("fedevprompt", "cdl", "uefl"):
        few = {key: value for key, value in values.items() if not key.startswith("silo")}
        few.pop("network.width", None)
        values = few | {
            "dataset": "heart-synthetic",
            "network.name": "logistic",
            "train.mc-passes": 0,
        }
    own, common = settings_class(method), CommonSettings
    keys = sorted(({*defaults(own), *defaults(common)}) - _LEAVE - {"method", "dataset"})
    for key in one.rng.sample(keys, one.rng.choice([1, 2, 3])):
        values[key] = _at_an_end(one.rng, own if key in defaults(own) else common, key)
        one.done.append(f"{key} = {values[key]!r}")
    one.done.append(method)

    def run() -> None:
        settings = resolve(values | {"run.out": str(one.folder / "runs"), "run.name": "run"})
        _checked(one, settings)
        one.megabytes = _COPIES * _network_megabytes(settings.common)
        nodes = 2 if "split.silos" in values else 4
        directory = run_inline(settings, nodes)
        one.faults += run_directory_faults(directory.path)

    _told(one, run)


def _network_megabytes(common: CommonSettings) -> float:
    """Return what the network of the digits takes that settings ask for."""
    if common.network not in ("auto", "conv") or common.dataset != "digits":
        return 0.0
    network = build_classifier(common, NetworkShape((1, 8, 8), 10))
    return sum(parameter.numel() for parameter in network.parameters()) * 4e-6


def _at_an_end(rng: Random, cls: type, key: str) -> Value:
    rule, usual = rule_of(cls, key), defaults(cls)[key]
    if isinstance(usual, bool):
        return not usual
    if isinstance(usual, str):
        return rng.choice([*rule.choices, usual])
    low = rule.minimum if math.isfinite(rule.minimum) else -1e6
    high = rule.maximum if math.isfinite(rule.maximum) else 1e6
    ends = [low, high, low + 1, 35, 2, usual]
    if isinstance(usual, int):
        return min(int(rng.choice(ends)), _WORK)
    return float(rng.choice([*ends, 1e-300, 1e6, 0.5]))
