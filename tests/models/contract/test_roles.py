"""Each list of settings is a query by role; what it must hold is stated here, key by key."""

import hashlib
import json

import pytest

from fedsilo.client_app import session
from fedsilo.client_app.site import identity, private_state
from fedsilo.datasets.partition import cuts
from fedsilo.datasets.shifted.shifted import ShiftedImages
from fedsilo.datasets.silo import row_splits
from fedsilo.datasets.weights import provenance
from fedsilo.models.contract import settings as common_settings
from fedsilo.models.contract.removed import with_former_keys
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import (
    defaults,
    groups_of,
    keys_in,
    keys_with,
    rules_of,
)
from fedsilo.models.networks import kinds
from fedsilo.server_app.config import settings as config
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.run import planning
from fedsilo.server_app.studies.finetune import pretrain
from fedsilo.server_app.studies.finetune import settings as finetune

_GROUPS = (
    "data",
    "split",
    "network",
    "vit",
    "train",
    "server",
    "privacy",
    "secure",
    "machine",
    "run",
)


def test_a_resumed_run_may_differ_in_the_circumstances_only() -> None:
    assert {
        *("data.dir", "data.cache-dir", "run.out", "run.name", "run.resume"),
        *(
            "run.min-sites",
            "run.reply-timeout",
            "run.away-timeout",
            "run.site-weights",
            "run.track",
        ),
        *("run.purpose", "plugin", "plugin-settings"),
    } == config.CIRCUMSTANCES


def test_a_sites_state_opens_whatever_its_machine_and_patience() -> None:
    assert {
        *(
            "data.dir",
            "data.cache-dir",
            "run.out",
            "run.name",
            "run.resume",
            "vit.backbone-weights",
        ),
        *("run.min-sites", "privacy.sums-min-count", "run.reply-timeout", "run.away-timeout"),
        *(
            "rounds",
            "machine.device",
            "machine.precision",
            "machine.threads",
            "server.evaluate-every",
            "run.site-weights",
        ),
        *("server.early-stopping-metric", "server.patience"),
        *(
            "machine.deterministic",
            "machine.fused-optimiser",
            "machine.vectorised",
            "machine.memory-format",
        ),
        *("run.track", "run.purpose"),
        *("server.wire-precision", "server.wire-down"),
        *("plugin", "plugin-settings"),
        *("server.sites-per-round", "server.aggregation", "server.max-update-norm"),
        *("secure.aggregation", "secure.threshold", "secure.clip-norm"),
    } == private_state._FREE


def test_the_same_images_are_tested_whatever_they_look_like() -> None:
    assert {
        *("data.dir", "data.cache-dir", "split.val-folds", "split.val-fold", "split.use-test"),
        *(
            "data.image-size",
            "data.colour-constancy",
            "data.pixel-scale",
            "data.intensity-profiles",
            "data.broken-images",
        ),
    } == provenance._SAME_TEST
    assert {
        *(
            "split.silos",
            "split.partition",
            "split.unseen",
            "split.silo-set",
            "split.concentration",
            "split.labels-per-silo",
        ),
    } == provenance.PARTITION


def test_fine_tuning_takes_settings_of_network_data_and_training() -> None:
    assert {
        *(
            "network.name",
            "network.width",
            "network.leading-norm",
            "network.dropout",
            "network.gradient-checkpointing",
        ),
        "network.classifier",
        *(
            "vit.backbone",
            "vit.backbone-width",
            "vit.backbone-depth",
            "vit.backbone-heads",
            "vit.backbone-patch",
        ),
        *("vit.prompt-sets", "vit.prompt-length", "vit.basic-layers"),
    } == finetune._OF_NETWORK
    assert {
        *(
            "split.silos",
            "split.partition",
            "split.unseen",
            "split.silo-set",
            "split.concentration",
            "split.labels-per-silo",
        ),
        *("dataset", "data.dir", "data.cache-dir"),
    } == finetune._OF_DATA
    assert {
        *(
            "train.batch-size",
            "train.micro-batch",
            "train.learning-rate",
            "train.optimiser",
            "train.weight-decay",
            "train.optimiser-arguments",
        ),
        *("vit.basic-learning-rate", "machine.device", "machine.precision", "machine.threads"),
        *("machine.deterministic", "machine.fused-optimiser"),
    } == finetune._OF_TRAINING
    assert finetune._FILES == ("data.dir", "data.cache-dir")


def test_a_refusal_names_what_chooses_among_samples_in_its_order() -> None:
    assert (
        *(
            "split.test-folds",
            "split.val-folds",
            "split.fold-seed",
            "split.sample-share",
            "split.public-share",
        ),
        *("split.partition", "split.unseen", "split.concentration", "split.labels-per-silo"),
    ) == session._CUTS


def test_a_sites_own_word_goes_before_the_runs() -> None:
    own = {"data.dir", "data.cache-dir", "machine.device", "vit.backbone-weights", "plugin"}
    assert set(keys_with(CommonSettings, "own")) == own
    names = {"data-dir", "cache-dir", "device", "backbone-weights", "plugin"}
    assert identity.NODE_FIELDS.keys() == names  # a node config has no groups


def test_the_split_is_in_the_order_that_a_tables_cache_folder_is_named_by() -> None:
    assert (
        *(
            "split.test-folds",
            "split.test-fold",
            "split.val-folds",
            "split.val-fold",
            "split.fold-seed",
            "split.use-test",
        ),
    ) == row_splits.SPLIT_KEYS


def test_silos_of_a_pool_are_cut_by_number_and_size() -> None:
    assert {"split.silos", "split.silo-train-size", "split.silo-test-size"} == cuts.cut_keys(
        "labels"
    ) - {"split.fold-seed"}
    assert ShiftedImages.settings == cuts.cut_keys("unseen") | {"data.pixel-scale"}


def test_pretrained_weights_tell_the_shape_of_their_vit_in_order() -> None:
    assert (
        *(
            "vit.backbone",
            "vit.backbone-width",
            "vit.backbone-depth",
            "vit.backbone-heads",
            "vit.backbone-patch",
        ),
    ) == pretrain._SHAPE


def test_only_a_vit_reads_the_settings_of_its_group() -> None:
    vit = {key for key, kind in kinds._APPLIES_TO.items() if kind == "vit"}
    assert vit == {key for key in defaults(CommonSettings) if key.startswith("vit.")}


def test_paths_are_made_absolute() -> None:
    assert planning._PATHS == ("data.dir", "data.cache-dir", "run.out")


def test_every_setting_but_the_bare_ones_has_a_group() -> None:
    bare = {key for key in defaults(CommonSettings) if "." not in key}
    assert bare == {
        *("method", "dataset", "plugin", "plugin-digests", "plugin-settings", "seed", "rounds")
    }
    assert tuple(groups_of(CommonSettings)) == ("", *_GROUPS)
    assert set(keys_in(CommonSettings, "", *_GROUPS)) == set(defaults(CommonSettings))


def test_the_docstring_says_each_role() -> None:
    words = (common_settings.__doc__ or "").replace("\n", " ")
    roles = {role for rule in rules_of(CommonSettings).values() for role in rule.roles}
    assert roles
    assert all(f" {role}: " in words for role in roles)


def test_a_group_that_does_not_exist_is_told() -> None:
    with pytest.raises(ValueError, match="CommonSettings has no group 'netwrok'"):
        keys_in(CommonSettings, "netwrok")


def test_a_misspelt_role_is_told() -> None:
    with pytest.raises(ValueError, match="no field of CommonSettings has the role 'netwrok'"):
        keys_with(CommonSettings, "netwrok")


@pytest.mark.parametrize(
    ("method", "decisive"),
    [
        ("uefl", "6001378e340c707a03b60726722176d9fb96b6155d8701fea90f0467bbcab22b"),
        ("fedavg", "beb8017f6596825d52c327fbe4a5fcc5d24cb839f9c99e922fb23b232fa342f9"),
    ],
)
def test_decisive_settings_are_those_of_before(method: str, decisive: str) -> None:
    """By the names of 0.1, in no order: groups changed the names and the order only."""
    former = with_former_keys(resolve({"method": method}).decisive())
    text = json.dumps(former, sort_keys=True).encode()
    assert hashlib.sha256(text).hexdigest() == decisive
