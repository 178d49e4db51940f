import dataclasses
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict

from fedsilo.client_app import session
from fedsilo.client_app.hello import feature_sums, site_facts
from fedsilo.client_app.methods.fedavg import FedAvgSite
from fedsilo.client_app.methods.uefl import UEFLSite
from fedsilo.client_app.opening import open_site
from fedsilo.client_app.session import SiteSession, session_of
from fedsilo.client_app.site.identity import site_name, site_settings
from fedsilo.client_app.site.node import is_simulated
from fedsilo.client_app.training.standardised import ready_silo
from fedsilo.core.errors import DataError, RefusedError, SettingError, SiteError
from fedsilo.core.messages import STANDARDISED, TRAIN, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo, Split, log_once
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.wire.records import to_record
from tests.support.errors import refuses
from tests.support.lab import lab_of, session_with

Node = Callable[..., Context]


def named(name: str, run_dir: str = "") -> Instruction:
    return Instruction(1, TRAIN, run_name=name, run_dir=run_dir)


@pytest.mark.parametrize(("partition", "name"), [(0, "s1a"), (1, "s2a"), (2, "s3a")])
def test_a_simulated_node_is_the_silo_of_its_partition(
    context: Node, partition: int, name: str
) -> None:
    node = context({"partition-id": partition, "num-partitions": 3})
    assert site_name(node, site_settings(node)) == name
    assert open_site(node).silo.name == name


def test_the_nodes_own_name_wins_over_its_partition(context: Node) -> None:
    node = context({"site": "s3a", "partition-id": 0})
    assert open_site(node).silo.distribution == "D3"


def test_a_node_without_a_name_is_told_how_to_give_one(context: Node) -> None:
    node = context({"state-dir": "/somewhere", "trust": "server"})
    with refuses(SiteError, 'site="s1a"', "s1a", "s2a", "s3a"):
        open_site(node)


def test_a_partition_beyond_the_silos_is_refused(context: Node) -> None:
    with refuses(SiteError, "4", "3", "s1a", "s2a", "s3a"):
        open_site(context({"partition-id": 3}))


def test_a_name_that_is_no_silo_is_refused(context: Node) -> None:
    with pytest.raises(DataError, match=r"no silo '../s1a'"):
        open_site(context({"site": "../s1a"}))


def test_an_unknown_device_of_a_node_is_refused_when_a_method_is_opened(
    context: Node, message: Callable[..., Message]
) -> None:
    with refuses(SettingError, "device", "tpu"):
        lab_of(message(TRAIN), context({"partition-id": 0, "device": "tpu"}))


@pytest.mark.parametrize(
    ("node", "simulated"),
    [
        ({"partition-id": 0, "num-partitions": 3}, True),
        ({"partition-id": 0, "site": "s1a"}, False),
        ({"partition-id": 0, "site-file": "/etc/site.yaml"}, False),
        ({"partition-id": 0, "state-dir": "/private", "trust": "server"}, False),
        ({"site": "s1a", "state-dir": "/private", "trust": "server"}, False),
        ({"site": "s1a"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_site_is_simulated_by_its_own_node_config_and_never_by_a_message(
    context: Node,
    message: Callable[..., Message],
    node: dict[str, Any],
    simulated: bool,
    tmp_path: Path,
) -> None:
    assert is_simulated(context(node)) is simulated
    if not node:
        return  # it has no name either
    assert open_site(context(node)).simulated is simulated
    homed = node if simulated else node | {"state-dir": str(tmp_path), "trust": "server"}
    asked = message(TRAIN, run_dir="/server/run")
    assert lab_of(asked, context(homed)).session.simulated is simulated


def heart_node(node: dict[str, Any], **changes: Any) -> Context:
    """Return the context of a made-up heart hospital: node config, settings."""
    values = {"method": "fedavg", "dataset": "heart-synthetic"}
    settings = resolve(values | {key.replace("_", "-"): v for key, v in changes.items()})
    return Context(1, 1001, node, RecordDict(), settings.as_mapping())


def admitted(context: Context) -> SiteSession:
    """Return the session of a site as a hello opens it, but without its own secret seed."""
    return SiteSession.admit(open_site(context))


def test_a_hospitals_raised_floor_keeps_its_sums_at_home() -> None:
    assert (
        feature_sums(admitted(heart_node({"site": "switzerland", "sums-min-count": 30})))
        is not None
    )
    with refuses(RefusedError, 30, 31):
        feature_sums(admitted(heart_node({"site": "switzerland", "sums-min-count": 31})))


@pytest.mark.parametrize("folds", [{"test_folds": 3}, {"val_folds": 3}])
def test_a_real_site_has_no_folds_unless_it_allows_them_itself(
    message: Callable[..., Message], folds: dict[str, int], tmp_path: Path
) -> None:
    real = {"site": "va", "state-dir": str(tmp_path), "trust": "server"}
    said = r"over different samples reveal single patients: set 'allow-folds=true'"
    for node in (real, real | {"partition-id": 3}, real | {"allow-folds": False}):
        with pytest.raises(SiteError, match=said):
            open_site(heart_node(node, **folds))
        with pytest.raises(SiteError, match=said):
            lab_of(message(TRAIN), heart_node(node, **folds))
    plain = open_site(heart_node(real)).silo.fingerprints
    for node in (real | {"allow-folds": True}, {"partition-id": 3}):
        assert open_site(heart_node(node, **folds)).silo.fingerprints != plain


@pytest.mark.parametrize(
    "share", [{"split.sample-share": 0.01}, {"split.public-share": 0.5}, {"split.fold-seed": 1}]
)
def test_a_real_site_gives_no_share_of_its_images_unless_it_allows_that_itself(
    share: dict[str, float], tmp_path: Path
) -> None:
    values = {"method": "fedavg", "dataset": "dermoscopy-phantom", "data.image-size": 16}
    settings = resolve(values | {"split.sample-share": 0.02} | share).as_mapping()

    def node(**more: str | bool) -> Context:
        config = {"site": "vidir_modern", "state-dir": str(tmp_path), "trust": "server", **more}
        return Context(1, 1001, config, RecordDict(), settings)

    with pytest.raises(SiteError, match="choose which of this site's samples are used"):
        open_site(node())
    assert open_site(node(**{"allow-folds": True})).silo.name == "vidir_modern"


def test_the_run_config_names_the_method_and_its_settings(
    context: Node, message: Callable[..., Message], tmp_path: Path
) -> None:
    fedavg = lab_of(message(TRAIN), context({"partition-id": 0}))
    assert isinstance(fedavg.session.method, FedAvgSite)
    uefl = lab_of(message(TRAIN, round=4), context({"partition-id": 1}, "uefl", codes=6))
    assert isinstance(uefl.session.method, UEFLSite)
    assert uefl.session.method.settings.codes == 6
    assert uefl.instruction.round == 4
    assert uefl.state_files.folder == tmp_path / "sites" / "s2a"


def test_a_real_site_keeps_its_state_in_its_own_folder(context: Node) -> None:
    node = context({"site": "s1a", "state-dir": "/private", "trust": "server", "partition-id": 0})
    assert admitted(node).state_folder(named("run", "/server")) == Path("/private/run/s1a")


def test_a_simulated_site_keeps_its_state_in_the_run_directory(context: Node) -> None:
    folder = admitted(context({"partition-id": 0})).state_folder(named("run", "/server/run"))
    assert folder == Path("/server/run/sites/s1a")


@pytest.mark.parametrize("node", [{"site": "s1a"}, {"partition-id": 0}])
def test_a_site_with_nowhere_to_keep_its_state_is_refused(
    context: Node, node: dict[str, Any]
) -> None:
    run_dir = "" if "partition-id" in node else "/server/run"
    with refuses(SiteError, "s1a", "state-dir"):
        admitted(context(node)).state_folder(named("run", run_dir))


TABLE = CommonSettings(dataset="table", sums_min_count=2)
NAN = float("nan")


def test_noise_of_a_real_site_is_keyed_on_nothing_that_a_server_knows(
    silo: Silo, common: CommonSettings
) -> None:
    opened = session_with(common, silo)
    assert opened.noise("privacy", 1) is None, "the operating system"
    opened = dataclasses.replace(opened, simulated=True)
    first, second = opened.noise("privacy", 1), opened.noise("privacy", 1)
    assert first is not None
    assert second is not None
    assert torch.equal(torch.randn(3, generator=first), torch.randn(3, generator=second))


def table_silo(declared: FeatureStatistics | None = None) -> Silo:
    """Return a hospital of three training rows and a test row; a pulse is missing in each part."""
    return Silo(
        name="north",
        distribution="north",
        shape=NetworkShape((2,), 2),
        train=Split(torch.tensor([[1.0, 60.0], [3.0, NAN], [5.0, 80.0]]), torch.tensor([0, 1, 1])),
        val=Split(torch.empty(0, 2), torch.empty(0, dtype=torch.int64)),
        test=Split(torch.tensor([[7.0, NAN]]), torch.tensor([1])),
        fingerprints={"train": "a", "val": "b", "test": "c"},
        features=("age", "pulse"),
        declared=declared,
    )


def standardisation_message(mean: list[float], std: list[float]) -> RecordDict:
    arrays = {"mean": np.array(mean), "std": np.array(std)}
    return RecordDict({STANDARDISED: to_record(arrays)})


def test_a_site_sends_the_sums_of_its_training_rows_alone() -> None:
    sums = feature_sums(session_with(TABLE, table_silo()))
    assert sums is not None
    assert sums.count.tolist() == [3, 2]
    assert sums.total.tolist() == [9, 140]
    assert sums.squares.tolist() == [35, 10000]


def test_images_have_no_sums(context: Node) -> None:
    assert feature_sums(admitted(context({"partition-id": 0}))) is None


@pytest.mark.parametrize("standardise", ["site", "declared"])
def test_a_site_sends_no_sums_where_statistics_are_not_pooled(standardise: str) -> None:
    few = dataclasses.replace(TABLE, standardise=standardise, sums_min_count=99)
    assert feature_sums(session_with(few, table_silo())) is None


def test_sums_of_too_few_rows_stay_at_the_site_which_names_feature_and_key() -> None:
    with pytest.raises(SiteError) as caught:
        feature_sums(session_with(dataclasses.replace(TABLE, sums_min_count=3), table_silo()))
    told = str(caught.value)
    assert told.startswith("site north sends no sums: 2 training rows have a value of 'pulse'")
    assert "at least 3 are needed ('privacy.sums-min-count')" in told
    with refuses(RefusedError, 3, 4):
        feature_sums(session_with(dataclasses.replace(TABLE, sums_min_count=4), table_silo()))


def test_a_feature_that_nobody_knows_at_a_site_gives_nothing_away() -> None:
    silo = table_silo()
    rows = silo.train.inputs.clone()
    rows[:, 1] = NAN
    unknown = dataclasses.replace(silo, train=Split(rows, silo.train.labels))
    sums = feature_sums(session_with(dataclasses.replace(TABLE, sums_min_count=3), unknown))
    assert sums is not None
    assert sums.count.tolist() == [3, 0]


def test_a_site_of_too_few_rows_sends_no_sums_even_if_it_knows_no_value() -> None:
    silo = table_silo()
    nothing = torch.full_like(silo.train.inputs, NAN)
    unknown = dataclasses.replace(silo, train=Split(nothing, silo.train.labels))
    with pytest.raises(SiteError, match="site north sends no sums"):
        feature_sums(session_with(dataclasses.replace(TABLE, sums_min_count=4), unknown))


def test_pooled_statistics_of_the_message_standardise_every_part_and_fill_the_gaps() -> None:
    ready = ready_silo(table_silo(), TABLE, standardisation_message([3.0, 100.0], [2.0, 40.0]))
    assert ready.train.inputs.tolist() == [[-1.0, -1.0], [0.0, 0.0], [1.0, -0.5]]
    assert ready.test.inputs.tolist() == [[2.0, 0.0]]
    assert ready.val.inputs.shape == (0, 2)
    assert ready.train.labels.tolist() == [0, 1, 1]
    assert ready.fingerprints == table_silo().fingerprints, "they are of the rows as read"


@pytest.mark.parametrize(
    ("standardise", "simulated", "is_said"),
    [
        ("declared", False, True),
        ("declared", True, True),
        ("pooled", False, True),
        ("pooled", True, False),  # the server says it
        ("site", False, False),
    ],
)
def test_a_column_in_another_unit_is_named_in_the_sites_own_log(
    standardise: Any, simulated: bool, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    settings = dataclasses.replace(TABLE, standardise=standardise, sums_min_count=2)
    silo = table_silo(FeatureStatistics(np.array([3.0, 7.0]), np.array([2.0, 1.0])))
    session = dataclasses.replace(session_with(settings, silo), simulated=simulated)
    before = site_facts(session).to_config()
    session.silo_for(standardisation_message([3.0, 7.0], [2.0, 1.0]))
    assert ("column 'pulse': mean 70, 7 " in caplog.text) == is_said
    assert "'age'" not in caplog.text
    assert site_facts(session).to_config() == before, "nothing more leaves"


def test_a_column_with_fewer_values_than_the_floor_is_not_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_once.cache_clear()
    settings = dataclasses.replace(TABLE, standardise="declared", sums_min_count=3)
    silo = table_silo(FeatureStatistics(np.array([3.0, 7.0]), np.array([2.0, 1.0])))
    session_with(settings, silo).silo_for(RecordDict())
    assert "pulse" not in caplog.text


def test_a_sites_own_statistics_are_of_its_training_rows_whatever_the_message_holds() -> None:
    own = dataclasses.replace(TABLE, standardise="site")
    ready = ready_silo(table_silo(), own, standardisation_message([0.0, 0.0], [1.0, 1.0]))
    std = (8 / 3) ** 0.5  # of 1, 3 and 5; the pulse has mean 70 and deviation 10
    expected = torch.tensor([[-2 / std, -1.0], [0.0, 0.0], [2 / std, 1.0]])
    torch.testing.assert_close(ready.train.inputs, expected)
    torch.testing.assert_close(ready.test.inputs, torch.tensor([[4 / std, 0.0]]))
    assert ready.train.inputs.mean(dim=0).abs().max().item() < 1e-7


def test_declared_statistics_are_those_of_the_schema_whatever_the_message_holds() -> None:
    declared = dataclasses.replace(TABLE, standardise="declared")
    silo = table_silo(FeatureStatistics(np.array([5.0, 70.0]), np.array([4.0, 5.0])))
    ready = ready_silo(silo, declared, standardisation_message([0.0, 0.0], [1.0, 1.0]))
    assert ready.train.inputs.tolist() == [[-1.0, -2.0], [-0.5, 0.0], [0.0, 2.0]]
    with refuses(SettingError, "standardise", "declared"):
        ready_silo(table_silo(), declared, RecordDict())


def test_a_message_without_the_pooled_statistics_is_refused() -> None:
    with pytest.raises(SiteError, match=r"lacks the pooled mean and std: .*different versions"):
        ready_silo(table_silo(), TABLE, RecordDict())


def test_images_are_ready_as_they_are(silo: Silo, common: CommonSettings) -> None:
    assert ready_silo(silo, common, RecordDict()) is silo


def test_a_method_gets_its_silo_standardised_by_the_message(
    message: Callable[..., Message],
) -> None:
    node = heart_node({"partition-id": 3, "num-partitions": 4})
    asked = message(TRAIN)
    with pytest.raises(SiteError, match="lacks the pooled mean and std"):
        lab_of(asked, node)
    asked.content[STANDARDISED] = to_record({"mean": np.full(13, 2.0), "std": np.full(13, 4.0)})
    held = lab_of(asked, node).silo
    raw = load_silo("va", CommonSettings(dataset="heart-synthetic"))
    assert held.name == "va"
    for name, split in held.splits().items():
        torch.testing.assert_close(split.inputs, (raw.splits()[name].inputs - 2) / 4)


def test_a_hospital_says_what_it_runs_and_where_and_a_simulated_site_does_not(
    context: Node,
) -> None:
    said = site_facts(
        SiteSession.admit(
            open_site(
                context({"site": "s3a", "state-dir": "/there", "trust": "server", "device": "cpu"})
            )
        )
    ).software
    assert said.keys() == {"fedsilo", "revision", "flower", "torch", "device"}
    assert said["device"] == "cpu"
    assert said["torch"] == version("torch")
    assert site_facts(SiteSession.from_context(context({"partition-id": 0}))).software == {}
    with refuses(SettingError, "device", "tpu"):
        admitted(context({"site": "s3a", "device": "tpu"}))


def test_session_of_a_simulated_site_is_kept_until_the_next_hello(context: Node) -> None:
    node = context({"partition-id": 0})
    first = session_of(node)
    assert session_of(node) is first
    assert session_of(context({"partition-id": 1})) is not first
    again = session_of(node, again=True)
    assert again is not first
    assert session_of(node) is again


def test_session_of_another_run_config_is_another(context: Node) -> None:
    node, other = context({"partition-id": 0}), context({"partition-id": 0})
    first = session_of(node)
    other.run_config = {**node.run_config, "seed": 8}
    assert session_of(other) is not first
    assert session_of(other).settings.seed == 8


def test_session_of_a_real_site_is_opened_for_every_message(context: Node, tmp_path: Path) -> None:
    node = context({"site": "s1a", "state-dir": str(tmp_path), "trust": "server"})
    assert session_of(node) is not session_of(node)


def test_sessions_keep_a_bounded_number_of_other_sites_samples(
    context: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [context({"partition-id": index}) for index in range(3)]
    size = session_of(nodes[0]).held_bytes()
    assert size > 0
    monkeypatch.setattr(session, "_OTHERS", size + size // 2)  # room for one beside the newest
    first, second = session_of(nodes[0]), session_of(nodes[1])
    session_of(nodes[2])
    assert session_of(nodes[1]) is second
    assert session_of(nodes[0]) is not first, "the least recently used goes first"
