"""Each list of settings is a query by role; what it must hold is stated here, key by key."""

import hashlib
import json

import pytest

from fedsilo.client_app import opening
from fedsilo.client_app.site import identity, private_state
from fedsilo.core.settings import common_settings as common_settings
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import defaults, keys_with
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
        "training",
        "course",
        "step",
        "structured",
        "seed",
        "privacy",
        "wire",
        "floor",
        "network",
        "vit",
        "shape",
        "data",
    ),
    *("files", "pixels", "sampling", "partition", "silo", "split", "folds", "validation"),
    *("machine", "own", "circumstance", "combining"),
)


def test_a_resumed_run_may_differ_in_the_circumstances_only() -> None:
    assert {
        *("data-dir", "cache-dir", "run.out", "run.name", "run.resume"),
        *(
            "run.min-sites",
            "run.reply-timeout",
            "run.away-timeout",
            "run.site-weights",
            "run.track",
        ),
        *("purpose", "plugin", "plugin-settings"),
    } == config._CIRCUMSTANCES


def test_a_sites_state_opens_whatever_its_machine_and_patience() -> None:
    assert {
        *("data-dir", "cache-dir", "run.out", "run.name", "run.resume", "backbone-weights"),
        *("run.min-sites", "sums-min-count", "run.reply-timeout", "run.away-timeout"),
        *(
            "rounds",
            "device",
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
        *("track", "purpose"),
        *("server.wire-precision", "server.wire-down"),
        *("plugin", "plugin-settings"),
        *("server.sites-per-round", "server.aggregation", "server.max-update-norm"),
        *("secure-aggregation", "secure.threshold", "clip-norm"),
    } == private_state._FREE


def test_the_same_images_are_tested_whatever_they_look_like() -> None:
    assert {
        *("data-dir", "cache-dir", "split.val-folds", "split.val-fold", "split.use-test"),
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
        "classifier",
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
        *("dataset", "data-dir", "cache-dir"),
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
        *("vit.basic-learning-rate", "device", "machine.precision", "machine.threads"),
        *("machine.deterministic", "machine.fused-optimiser"),
    } == finetune._OF_TRAINING
    assert finetune._FILES == ("data-dir", "cache-dir")


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
    own = {"data-dir", "cache-dir", "device", "backbone-weights", "plugin"}
    assert set(identity._NODE_KEYS) == own
    assert keys_with(CommonSettings, "floor") == ("sums-min-count",)


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


def test_settings_of_a_vit_are_those_that_are_named_so() -> None:
    prefixes = ("backbone", "vit.train-backbone", "prompt-", "basic-")
    named = {key for key in defaults(CommonSettings) if key.startswith(prefixes)}
    assert named == {key for key, kind in kinds._APPLIES_TO.items() if kind == "vit"}


def test_paths_are_made_absolute() -> None:
    assert planning._PATHS == ("data-dir", "cache-dir", "out")


def test_every_setting_has_roles_and_the_docstring_says_each() -> None:
    assert set(keys_with(CommonSettings, *_ROLES)) == set(defaults(CommonSettings))
    words = (common_settings.__doc__ or "").replace("\n", " ")
    assert all(f" {role}: " in words or f" {role}, " in words for role in _ROLES)
    for key in defaults(CommonSettings):  # none has a role that is not listed above
        assert any(key in keys_with(CommonSettings, role) for role in _ROLES)


def test_a_misspelt_role_is_told() -> None:
    with pytest.raises(ValueError, match="no field of CommonSettings has the role 'netwrok'"):
        keys_with(CommonSettings, "netwrok")


@pytest.mark.parametrize(
    ("method", "decisive"),
    [
        ("uefl", "66745abfd7186bd872e386896fb09d373bc996ff183d18de40ea0e07ba6b5d1c"),
        ("fedavg", "3b2678cbac82d16ed2b0a978abe68e35578dc8f97e891f2464f309c9708ea6dc"),
    ],
)
def test_decisive_settings_are_those_of_before(method: str, decisive: str) -> None:
    text = json.dumps(resolve({"method": method}).decisive()).encode()
    assert hashlib.sha256(text).hexdigest() == decisive
