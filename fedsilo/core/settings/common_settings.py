"""The settings that every method shares, in groups; a method's own are a group more.

Each group is a class: its fields are the settings, its ``group`` is the first part of their keys,
and its first sentence is the group's heading. ``CommonSettings`` inherits from all groups, so code
reads ``settings.learning_rate``. A function that needs only one group takes that group's class.

A setting may also have roles. ``keys_with`` lists the settings of one role over all groups:

- own: a site's node config overrides the run's config; never a setting that protects the site;
- files: where the data's files are; pixels: how images are read;
- partition: how images become silos; silo: how many silos, and how large;
- sampling: which samples are used; rows: which of them train, validate and test;
- folds: how rows are shuffled into folds; validation: does not change the choice of test rows;
- network: the parts of a ViT; shape: the sizes of its backbone;
- step: how an optimiser step is computed;
- structured: a text of YAML, which may be a mapping or a list where it is written.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, get_args

from fedsilo.core.settings.data_settings import DataSettings, SplitSettings
from fedsilo.core.settings.training_settings import NetworkSettings, TrainSettings, ViTSettings
from fedsilo.core.settings_schema import keys_in, keys_with, setting
from fedsilo.core.tasks import CLASSIFICATION, TASKS

Aggregation = Literal["auto", "mean", "norm-clip", "median", "trimmed", "multikrum"]
AUTO, AGGREGATIONS = "auto", get_args(Aggregation)[1:]
SERVER, SUMS, NOBODY = "server", "sums", "nobody"  # whom a hospital trusts
GPU_SHARE = "FEDSILO_GPU_SHARE"  # environment variable: share of a GPU that a client may take

_count = partial(setting, ge=0)
_positive = partial(setting, ge=1)


@dataclass(frozen=True)
class ExperimentSettings:
    """Method, data set, plugins, seed and rounds of an experiment; these keys have no group."""

    group: ClassVar[str] = ""

    method: str = setting("uefl", "federated method, or a plugin: module or module:Class")
    dataset: str = setting("digits", "data set of silos, or a plugin: module:object")
    task: str = setting(
        CLASSIFICATION,
        "what is learned, which decides loss, metrics and reports",
        pattern="|".join(TASKS),
        wording=f"one of {', '.join(TASKS)}",
    )
    # Without a group as well: 'method' and 'dataset' may be in these files, which are loaded first
    plugin: str = setting(
        "",
        "files FILE.py or modules with plugins, with commas between; at a hospital only its own",
        roles="own",
    )
    plugin_digests: str = setting(
        "",
        "SHA-256 of each plugin's file or package, or empty for those here",
        is_internal=True,
    )
    plugin_settings: str = setting(
        "", "settings of a plugin's method, as JSON, for 'flwr run'", is_internal=True
    )
    seed: int = _count(42, "seed of every random number")
    rounds: int = _positive(30, "communication rounds")


@dataclass(frozen=True)
class ServerSettings:
    """The server's part of a round: the sites that it asks, the combined replies, the end."""

    group: ClassVar[str] = "server"

    sites: str = setting(
        "", "sites that take part, with commas between, or empty for all that are connected"
    )
    sites_per_round: int = _count(0, "sites sampled for each round (0: all)")
    aggregation: Aggregation = setting(
        "auto",
        "how the sites' weights are combined: auto, norm-clip of real sites where the method "
        "averages and nothing is summed in secret, else mean; mean, weighted by samples; "
        "norm-clip, the same with updates clipped to the median norm; or, with equal weights for "
        "all sites, median, trimmed (mean of each number but the least and the largest) and "
        "multikrum (all but the site farthest from the others)",
    )
    max_update_norm: float = _count(
        100.0,
        "a site's update is refused if its norm is more than this many times the round's median; "
        "needs three sites, does not apply to secagg (0: no limit)",
    )
    wire_precision: Literal["fp32", "bf16"] = setting(
        "fp32", "numbers of a site's update as it travels to the server, for methods that average"
    )
    wire_down: Literal["fp32", "bf16"] = setting(
        "fp32", "numbers of the weights that sites are sent to train"
    )
    evaluate_every: int = _count(
        1, "rounds between evaluations of the global model, or 0 to evaluate at the end only"
    )
    early_stopping_metric: Literal[
        "none",
        "accuracy",
        "balanced-accuracy",
        "auc",
        "average-precision",
        "calibration-error",
        "loss",
        "entropy",
        "dice",
        "iou",
        "surface-distance",
        "hausdorff-95",
        "mae",
        "rmse",
        "r2",
        "c-index",
        "brier",
    ] = setting(
        "none",
        "validation metric, a mean over sites by samples, by which the best round is kept and "
        "training stops",
    )
    patience: int = _positive(10, "early stopping: measured rounds without a better value")


@dataclass(frozen=True)
class PrivacySettings:
    """How much a site may reveal, and differential privacy per patient."""

    group: ClassVar[str] = "privacy"

    trust: Literal["server", "sums", "nobody"] = setting(
        "server",
        "whom sites must trust to take part: the server with single answers, the server with "
        "sums over sites (needs secagg), or nobody (what leaves is private per patient)",
    )
    sums_min_count: int = _positive(
        10,
        "samples that a site's sums, class means and counts per bin need; of fewer it sends none",
    )
    sample_clip_norm: float = _count(
        0.0, "differential privacy per patient: L2 norm of a sample's gradient (DP-SGD) (0: none)"
    )
    noise_multiplier: float = _count(
        0.0,
        "standard deviation of the noise on a step's gradients, in privacy.sample-clip-norms",
        le=1e6,
    )
    statistics_clip_norm: float = setting(
        10.0, "L2 norm of a sample's part in class means and prototypes", gt=0.0
    )
    statistics_noise: float = _count(
        0.0,
        "standard deviation of the noise on statistics (class means, prototypes, measurements), in "
        "a patient's part (0: privacy.noise-multiplier)",
        le=1e6,
    )
    delta: float = setting(1e-5, "delta of (epsilon, delta)", gt=0.0, lt=1.0)
    max_epsilon: float = _count(0.0, "a site spends at most this, then the run ends (0: no limit)")


@dataclass(frozen=True)
class SecureSettings:
    """Secure aggregation, by which the server learns only sums over sites."""

    group: ClassVar[str] = "secure"

    secure_aggregation: Literal["none", "secagg"] = setting(
        "none",
        "secagg: sites mask their weights, and the server learns only the sum; needs "
        "secure.clip-norm and three sites",
    )
    clip_norm: float = _count(0.0, "L2 norm that a site's update is clipped to")
    secure_threshold: int = _count(0, "sites that must stay, more than half (0: over two thirds)")


@dataclass(frozen=True)
class MachineSettings:
    """The device, number format and threads that a site computes with."""

    group: ClassVar[str] = "machine"

    device: str = setting(
        "auto",
        "where a site computes; auto: on a GPU if there is one",
        roles="own",
        pattern=r"auto|cpu|cuda(:[0-9]+)?",
        wording="auto, cpu, cuda or cuda:N",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "auto", "auto: bf16 on a GPU that has it, else fp32; fp16, on a GPU, scales the loss"
    )
    memory_format: Literal["auto", "contiguous", "channels-last"] = setting(
        "auto",
        "of images and convolutions; auto: channels-last on a GPU, and on a CPU for conv and "
        "vgg16-bn; the other format is mostly slower, and rounds differently",
    )
    threads: int = _positive(1, "CPU threads of one client")
    deterministic: Literal["warn", "true", "false"] = setting(
        "warn",
        "GPU operations without a deterministic form: warn names them in summary.json, true "
        "refuses them, false takes the fastest ones",
    )
    fused_optimiser: bool = setting(
        False, "compute an optimiser step in one kernel, which rounds differently"
    )
    vectorised: int = _count(
        1,
        "engine inline: sites that train as one batch, which rounds differently (0: all sites on "
        "a GPU if method and settings allow it, otherwise 1)",
        le=10_000,
    )


@dataclass(frozen=True)
class RunningSettings:
    """A run's folder, its name and its waiting times; none of these changes its result."""

    group: ClassVar[str] = "run"

    out: str = setting("", "folder of run directories, or empty for $FEDSILO_RUNS, ~/.fedsilo/runs")
    run_name: str = setting("", "name of the run directory, or empty for method, data, time")
    resume: bool = setting(False, "continue the run run.name from its newest checkpoint")
    purpose: Literal["train", "survey", "meet"] = setting(
        "train",
        "train; survey the sites' data; or meet: write what sites report of themselves to "
        "<run.out>/<run.name>-meeting.json",
        is_internal=True,  # the commands 'survey' and 'doctor run' set it
    )
    min_sites: int = _count(0, "sites that must answer each round (0: all that joined)")
    reply_timeout: float = setting(3600.0, "seconds to wait for a phase's replies", gt=0.0)
    away_timeout: float = _count(
        300.0, "seconds that a site may be disconnected before it is given up"
    )
    site_weights: str = setting(
        "",
        "file at the server: training samples agreed for each site, the weights in averages, "
        "or empty for those that sites report",
    )
    track: Literal["none", "tensorboard", "mlflow", "wandb"] = setting(
        "none", "where metrics also go after each round (extra 'tracking')"
    )


# Python takes the fields of the last base first, so the bases are in reverse order
@dataclass(frozen=True)
class CommonSettings(
    RunningSettings,
    MachineSettings,
    SecureSettings,
    PrivacySettings,
    ServerSettings,
    TrainSettings,
    ViTSettings,
    NetworkSettings,
    SplitSettings,
    DataSettings,
    ExperimentSettings,
):
    """The settings of all groups; a method's own are in ``models/methods/<method>.py``."""

    def is_private(self) -> bool:
        """Return whether training is differentially private per patient."""
        return self.sample_clip_norm > 0

    def compresses(self) -> bool:
        """Return whether weights travel in fewer bytes than float32, in either direction."""
        return (self.wire_precision, self.wire_down) != ("fp32", "fp32")

    def measures_in(self, round_: int) -> bool:
        """Return whether a round measures the model with which it begins.

        Rounds count from 1. If the setting 'server.evaluate-every' is k, the rounds 1, 1 + k, 1 + 2
        k and so on measure the model. If the setting is 0, no round does.
        """
        # Subtract 1, because rounds count from 1 and the first one is always measured
        return self.evaluate_every > 0 and (round_ - 1) % self.evaluate_every == 0


# The settings that a network is built from
NETWORK_KEYS = keys_in(CommonSettings, "network") + keys_with(CommonSettings, "network")
