"""Each list of settings is a query by role; what it must hold is stated here, key by key."""

import hashlib
import json

import pytest

from fedsilo.client_app import opening
from fedsilo.client_app.site import identity, private_state
from fedsilo.core.settings import common_settings as common_settings
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import defaults, keys_in, keys_with, rules_of
from fedsilo.datasets.partition import cuts
from fedsilo.datasets.shifted.shifted import ShiftedImages
from fedsilo.datasets.silo import row_splits
from fedsilo.datasets.weights import provenance
from fedsilo.engines import planning
from fedsilo.finetuning import finetune_settings as finetune
from fedsilo.finetuning import pretrain
from fedsilo.models.networks import kinds
from fedsilo.server_app.config import settings as config
from fedsilo.server_app.config.settings import resolve

_ROLES = (
    *(
        "own",
        "files",
        "pixels",
        "partition",
        "silo",
        "sampling",
        "rows",
        "folds",
        "validation",
    ),
    *("network", "shape", "step", "structured"),
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
        *("server.sites", "server.sites-per-round", "server.aggregation", "server.max-update-norm"),
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
    ) == opening._CUTS


def test_a_sites_own_word_goes_before_the_runs() -> None:
    own = {"data.dir", "data.cache-dir", "machine.device", "vit.backbone-weights", "plugin"}
    assert set(identity._OWN) == own


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


def test_settings_of_a_vit_are_those_of_its_group() -> None:
    of_vit = {key for key, kind in kinds._APPLIES_TO.items() if kind == "vit"}
    assert of_vit == set(keys_in(CommonSettings, "vit"))


def test_paths_are_made_absolute() -> None:
    assert planning._PATHS == ("data.dir", "data.cache-dir", "run.out")


def test_every_role_is_described_and_has_settings() -> None:
    rules = rules_of(CommonSettings).values()
    assert {role for rule in rules for role in rule.roles} == set(_ROLES)
    words = (common_settings.__doc__ or "").replace("\n", " ")
    for role in _ROLES:
        assert f" {role}: " in words, role


def test_every_setting_but_those_that_name_an_experiment_has_a_group() -> None:
    bare = {key for key in defaults(CommonSettings) if "." not in key}
    assert bare == set(keys_in(CommonSettings, ""))


def test_a_misspelt_role_is_told() -> None:
    with pytest.raises(ValueError, match="no field of CommonSettings has the role 'netwrok'"):
        keys_with(CommonSettings, "netwrok")


@pytest.mark.parametrize(
    ("method", "decisive"),
    [
        ("uefl", "22816c30d3477d556eab9c799c379a1320cd978f1c71b3efd0412d9277d8fe8f"),
        ("fedavg", "d5ad67754b9da23d3823f77bd18a4fc1bfa5fa8fd9585f642db01625293711c2"),
    ],
)
def test_decisive_settings_are_those_of_before(method: str, decisive: str) -> None:
    text = json.dumps(resolve({"method": method}).decisive()).encode()
    assert hashlib.sha256(text).hexdigest() == decisive
