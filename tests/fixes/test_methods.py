"""What methods, topologies and the round's own checks refuse, and the fixes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message

from fedsilo.client_app.app import app
from fedsilo.core.messages import CONFIG, HELLO
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import InlineGrid, run_inline
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.failures import read_failures
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.methods.fedavg import FedAvg
from tests.support.federation import SITES, Federation
from tests.support.fixes import GONE, HEART, Case, Values, changed, check, refused, tiny
from tests.support.setting_keys import as_keys
from tests.support.tiny import HALF_EPOCHS, TINY_METHOD

# Parts of the errors that the functions below try
TRIED = (
    "does not take 'train.initial-weights': leave it empty",
    "choose another 'site' in its node config",
    "repair the site and resume or start again",
    "withholds its measurements on validation samples",
)
PLANNED = [
    Case(
        "asks all sites in each round: set 'server.sites-per-round'",
        tiny("local", sites_per_round=2),
        {"set 'server.sites-per-round' to 0": {"server.sites-per-round": 0}},
    ),
    Case(
        "an epoch that spans rounds, 'train.epoch-steps', asks all sites in each: set",
        {**tiny("fedavg", sites_per_round=2), **HALF_EPOCHS},
        {"set 'server.sites-per-round' to 0": {"server.sites-per-round": 0}},
    ),
    Case(
        "does not take 'server.aggregation' 'trimmed': choose one of",
        tiny("uefl", aggregation="trimmed"),
        {way: {"aggregation": way} for way in ("mean", "norm-clip", "median")},
    ),
    Case(
        "does not average updates of what sites were sent: leave",
        tiny("local", wire_precision="bf16"),
        {
            "leave 'server.wire-precision' and 'server.wire-down' at 'fp32'": {
                "server.wire-precision": "fp32",
            }
        },
    ),
    Case(
        "does not take network 'vit': choose another",
        tiny("distrans", network="vit"),
        {"choose another": {"network": "conv"}},
    ),
    Case(
        "but there are 3: choose 'median'",
        tiny("fedavg", aggregation="multikrum"),
        {"choose 'median'": {"aggregation": "median"}},
    ),
    Case(
        "is evidential; leave it at",
        tiny("fedevprompt", loss="cross-entropy"),
        {"leave it at 'auto'": {"loss": "auto"}},
    ),
    Case(
        "which averages nothing: leave it",
        {**tiny("fedevprompt", aggregation="median"), "fedevprompt.shared-prompts": "none"},
        {"leave it at 'mean'": {"aggregation": "mean"}},
    ),
    Case(
        " trains the head first, then the rest: set it",
        tiny("fedrep", local_steps=1),
        {
            "set it to 2 or more": {"train.local-steps": 2},
            "or choose 'fedper'": {"method": "fedper"},
        },
    ),
    Case(
        "): lower it, or raise 'rounds'",
        tiny("fedswa", rounds=1),
        {"lower it": {"fedswa.averaged-rounds": 1}, "or raise 'rounds'": {"rounds": 2}},
    ),
]
ONE_ROUND: Values = {**HEART, "rounds": 1, "width": 4}
RUN = [
    Case(
        "trains all but the last layer, and this network has no other",
        {**ONE_ROUND, **TINY_METHOD["fedbabu"], "method": "fedbabu", "rounds": 2},
        {"choose another 'network.name'": {"network": "mlp"}},
    ),
    Case(
        " arrays of this network: choose another",
        {**ONE_ROUND, "method": "fedper"},
        {
            "choose another 'network.name'": {"network": "mlp"},
            "or method": {"method": "fedavg"},
        },
    ),
    Case(
        " needs one for the head and one for the rest",
        {
            **ONE_ROUND,
            "method": "fedrep",
            "network.name": "mlp",
            "train.local-epochs": 1,
            "train.batch-size": 256,
        },
        {
            "raise 'train.local-epochs'": {"train.local-epochs": 2},
            "or 'train.local-steps'": {"train.local-steps": 2},
        },
    ),
    Case(
        "connects at least 2 silos, but this run has",
        tiny("fedefm", silos=1, rounds=1),
        {"add silos": {"silos": 2}, "or choose method 'local'": {"method": "local"}},
    ),
    Case(
        "the solver ended with",
        {**tiny("fedefm", silos=2, rounds=1), "fedefm.topology": "matcha", "matcha.budget": 1e-300},
        {
            "choose another 'matcha.budget'": {"matcha.budget": 0.5},
            "or topology": {"fedefm.topology": "ring", "matcha.budget": GONE},
        },
    ),
]
CASES = [*PLANNED, *RUN]


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_settings_that_method_refuses_with_fix_pass(case: Case) -> None:
    check(case, resolve)


@pytest.mark.parametrize("case", RUN, ids=str)
def test_refused_topology_with_fix_is_built(case: Case, tmp_path: Path) -> None:
    names = iter(range(10))

    def attempt(values: Values) -> None:
        named: Values = {"run.out": str(tmp_path), "run.name": f"run{next(names)}"}
        run_inline(resolve(changed(values, named)), int(values.get("split.silos", 4)))

    check(case, attempt)


def test_plugin_method_without_initial_weights_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every method of ours takes them."""
    none = dataclasses.replace(FedAvg.capabilities, initial_weights=False)
    monkeypatch.setattr(FedAvg, "capabilities", none)
    values = tiny("fedavg", initial_weights="model.safetensors")
    said = refused(lambda: resolve(values))
    assert "does not take 'train.initial-weights': leave it empty" in said
    assert not refused(lambda: resolve(as_keys({**values, "train.initial-weights": ""})))


@pytest.mark.parametrize("fix", ["resume", "start again", "set 'run.min-sites' to fewer"])
def test_run_with_failed_site_repaired_or_left_out_continues(
    fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, cut = InlineGrid.answer, True

    def answered(grid: InlineGrid, message: Message) -> Message:
        second = message.content.config_records[CONFIG].get("round") == 2
        if cut and second and message.metadata.dst_node_id == 1003:
            return Message(Error(0, "the line is cut"), reply_to=message)
        return answer(grid, message)

    monkeypatch.setattr(InlineGrid, "answer", answered)
    values = {**tiny("fedavg"), "out": str(tmp_path)}

    def attempt(**more: Value) -> str:
        named = {"run.name": "run", **more}
        return refused(lambda: run_inline(resolve(as_keys({**values, **named})), 3))

    said = attempt()
    assert "site s3a, round 2, phase train: the line is cut -- 2 of 3 sites answered" in said
    assert "('run.min-sites'): repair the site and resume or start again, or" in said
    assert fix in said
    found = read_failures(RunDirectory(tmp_path / "run"))
    assert [list(entry.values()) for entry in found] == [
        [2, "train", "s3a", "site", "the line is cut"]
    ]
    if fix.startswith("set"):
        assert not attempt(**{"run.min-sites": 2, "run.resume": True})
        # The second process fails in the same round and again in the next ones; nothing is twice
        failures = RunDirectory(tmp_path / "run").read_json("summary.json")["failures"]
        rounds = [(failure["round"], failure["phase"]) for failure in failures]
        assert rounds[0] == (2, "train")
        assert len(rounds) == len(set(rounds))
        return
    cut = False  # the site is fixed
    assert not attempt(**({"resume": True} if fix == "resume" else {"run.name": "again"}))
    if fix == "resume":
        # The failure that ended the first process is in the results of the second
        (failure,) = RunDirectory(tmp_path / "run").read_json("summary.json")["failures"]
        assert (failure["site"], failure["reason"]) == ("s3a", "the line is cut")


def test_foreign_node_with_plain_name_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own opens no silo of such a name, and what is said of it at home is the doctor's."""

    def other(message: Message, context: Context) -> Message:
        named = str(context.node_config["site"])
        context.node_config["site"] = named if named in SITES else "cleveland"
        reply = app(message, context)
        context.node_config["site"] = named
        if message.metadata.message_type == HELLO:
            reply.content.config_records[CONFIG]["site"] = named
        return reply

    monkeypatch.setattr("tests.support.federation.app", other)
    federation = Federation(tmp_path)
    said = refused(lambda: federation.run({}, ("our/clinic", "va")))
    assert "'our/clinic' cannot be a site's name" in said
    assert "choose another 'site' in its node config" in said
    assert not refused(lambda: federation.run({}, ("our-clinic", "va")))


def test_uefl_with_withheld_entropy_leaves_site_out_or_skips_check(
    tmp_path: Path,
) -> None:
    folds: dict[str, Any] = {"allow-folds": True}
    nodes = {"cleveland": {**folds, "minimum-measured": 1000}, "hungary": folds}
    federation = Federation(tmp_path, nodes)
    values: Values = {
        **TINY_METHOD["uefl"],
        "method": "uefl",
        "network.name": "mlp",
        "train.mc-passes": 2,
        "rounds": 2,
        "split.val-folds": 4,
    }
    said = refused(lambda: federation.run(values, SITES[:2]))
    assert "site cleveland withholds its measurements on validation samples" in said
    assert "leave the site out, or set 'uefl.max-iterations' to 1 (DisFL)" in said
    assert not refused(lambda: federation.run(values, SITES[1:2]))
    single: Values = {**values, "uefl.max-iterations": 1}
    assert not refused(lambda: federation.run(single, SITES[:2]))
