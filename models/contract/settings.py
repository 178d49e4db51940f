"""The settings that every method shares: what to run, on which silos, with which budget.

Each states its roles once, and ``keys_with`` lists the settings of a role:

- training, where none is named: how the method trains and measures, and what it learns;
- wire: in how many bytes updates travel;
- course: how long a run is, how often it measures and whom it asks; step: what an optimiser step
  is; structured: a text of YAML, which may be a mapping or a list where it is written;
- combining: what the server makes of replies, which sites need not know;
- seed: what random numbers start from; machine: what a site computes on;
- privacy: how much a site may tell; floor: of that, what a hospital may raise at any time;
- network: what it is built of; vit: what has no effect without a ViT; shape: a ViT's measures;
- data: which data set; files: where its files are; pixels: how its images are read;
- partition: how images become silos; silo: how many silos, and how large;
- sampling: which samples are used; split: which of them train, validate and test; folds: how they
  are shuffled into folds; validation: what of the split leaves the choice of test rows alone;
- own: where a site's node config goes before the run's config: never what protects the site;
- circumstance: where a run is written and how it is waited for, which does not change its result.
"""

from dataclasses import dataclass
from functools import partial

from fedsilo.models.contract.plugs import plugs
from fedsilo.models.contract.settings_schema import choice, rule_of, setting
from fedsilo.models.contract.training_settings import TrainingSettings

AUTO, AGGREGATIONS = "auto", rule_of(TrainingSettings, "aggregation").choices[1:]
SERVER, SUMS, NOBODY = "server", "sums", "nobody"  # whom a hospital trusts
GPU_SHARE = "FEDSILO_GPU_SHARE"  # environment variable: share of a GPU that a client may take

_count = partial(setting, minimum=0)
_positive = partial(setting, minimum=1)
_share = partial(setting, above=0.0, maximum=1.0)
_private = partial(_count, roles="privacy")
_summing = partial(_count, roles="combining")
_circumstance = partial(setting, roles="circumstance")
_NETWORK = ("network", "vit")
_SHAPE = (*_NETWORK, "shape")
_FOLDS = ("split", "folds", "validation")
_CUT = ("partition", "sampling")
_FOLDERS = ("files", "circumstance", "own")


@dataclass(frozen=True)
class CommonSettings(TrainingSettings):
    """Run settings common to all methods; a method's own are in ``models/methods/<method>.py``."""

    backbone: str = setting(
        "vit_small_patch16_224",
        "vit: timm's name of the transformer",
        roles=_SHAPE,
        pattern=r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?",
        wording="a name of timm, without a path or an address",
    )
    backbone_weights: str = setting(
        "",
        "vit: a file (also by its name in data-dir or cache-dir/backbones), timm, or random; "
        "resnet22: a file, or empty for the seed",
        roles=("vit", "own"),
    )
    backbone_width: int = _count(0, "vit: embedding channels (0: the backbone's)", roles=_SHAPE)
    backbone_depth: int = _count(0, "vit: blocks (0: the backbone's)", roles=_SHAPE)
    backbone_heads: int = _count(0, "vit: attention heads (0: the backbone's)", roles=_SHAPE)
    backbone_patch: int = _count(0, "vit: pixels of a patch (0: the backbone's)", roles=_SHAPE)
    initial_weights: str = setting(
        "",
        "initial exchanged weights: a safetensors file of a run ('encoder:' before it: its encoder "
        "alone, for other classes), a file of a ViT's or vgg16-bn's weights, or 'timm:' and a name",
    )
    train_backbone: bool = setting(False, "vit: train and exchange the backbone too", roles="vit")
    prompt_sets: str = choice(
        *("b-t", "g", "none"),
        help="vit: b-prompts in the first layers and t-prompts in the others, one set g, or none",
        roles=_NETWORK,
    )
    prompt_length: int = _positive(50, "vit: prefix keys and values per layer", roles=_NETWORK)
    basic_layers: int = _positive(3, "vit: first layers, which take b-prompts", roles=_NETWORK)
    basic_learning_rate: float = setting(
        2.5e-4, "vit: step size of b- and g-prompts", roles=("step", "vit"), above=0.0, maximum=1e30
    )
    image_size: int = _count(
        0, "side of an image in pixels (0: the data set's own)", roles="pixels", maximum=4096
    )
    colour_constancy: bool = setting(False, "shades-of-grey colour constancy", roles="pixels")
    broken_images: str = choice(
        "refuse", "skip", help="missing or damaged images: stop, or report them", roles="pixels"
    )
    target: str = choice(
        "nevus", "diagnosis", help="classes of dermoscopic images: nevus or not, or diagnoses"
    )
    sample_share: float = _share(1.0, "share of each site's samples that is used", roles="sampling")
    public_share: float = _count(
        0.0,
        "share of each site's lesions set apart for pre-training, not used by any site",
        roles="sampling",
        below=1.0,
    )
    intensity_profiles: bool = setting(
        True, "give each site's images a tone curve of their own, as of a vendor", roles="pixels"
    )
    pixel_scale: str = choice(
        "standard", "raw", help="standardised pixels, or raw ones from 0 to 255", roles="pixels"
    )
    partition: str = choice(
        *("own", "unseen", "dirichlet", "labels"),
        help="how samples are divided into silos: as the data set has them; by labels that other "
        "silos lack (images); each label by a Dirichlet distribution; by few labels per silo",
        roles=_CUT,
        **plugs("partition"),
    )
    unseen: float = _count(
        1.0, "partition unseen: share of a silo's labels that no other has", roles=_CUT, maximum=1.0
    )
    concentration: float = setting(
        0.5, "partition dirichlet: alpha; smaller: fewer labels per silo", roles=_CUT, above=0.0
    )
    labels_per_silo: int = _positive(2, "partition labels: labels of each silo", roles=_CUT)
    silo_set: str = setting(
        "", "silos by name with their links: gaia, or a CSV file of edges", roles="partition"
    )
    silo_train_size: int = _count(0, "training images per silo (0: the set's own)", roles="silo")
    silo_test_size: int = _count(0, "test images per silo (0: the set's own)", roles="silo")
    standardise: str = choice(
        *("pooled", "site", "declared"),
        help="a table's features by the mean and deviation of all sites, each site, or the schema",
    )
    sums_min_count: int = _positive(
        10,
        "samples that a site's sums, class means and counts per bin need; of fewer it sends none",
        roles=("privacy", "floor"),
    )
    test_folds: int = _count(
        0, "folds of a site's rows, one of them test data (0: no folds)", roles=("split", "folds")
    )
    test_fold: int = _count(0, "number of the test fold, from 0", roles="split")
    val_folds: int = _count(
        0, "folds of the training rows, one of them validation data (0: none)", roles=_FOLDS
    )
    val_fold: int = _count(
        0, "number of the validation fold, from 0", roles=("split", "validation")
    )
    fold_seed: int = _count(
        0, "seed of the division into folds and silos", roles=("split", "folds", "seed")
    )
    use_test: bool = setting(
        True, "read test rows; false while choosing settings", roles=("split", "validation")
    )
    trust: str = choice(
        *(SERVER, SUMS, NOBODY),
        help="whom sites must trust to take part: the server with single answers, the server with "
        "sums over sites (needs secagg), or nobody (what leaves is private per patient)",
        roles="privacy",
    )
    sample_clip_norm: float = _private(
        0.0,
        "differential privacy per patient: L2 norm of a sample's gradient (DP-SGD) (0: none)",
    )
    noise_multiplier: float = _private(
        0.0,
        "standard deviation of the noise on a step's gradients, in sample-clip-norms",
        maximum=1e6,
    )
    statistics_clip_norm: float = setting(
        10.0, "L2 norm of a sample's part in class means and prototypes", roles="privacy", above=0.0
    )
    statistics_noise: float = _private(
        0.0,
        "standard deviation of the noise on statistics (class means, prototypes, measurements), in "
        "a patient's part (0: noise-multiplier)",
        maximum=1e6,
    )
    delta: float = setting(1e-5, "delta of (epsilon, delta)", roles="privacy", above=0.0, below=1.0)
    max_epsilon: float = _private(
        0.0, "a site spends at most this, then the run ends (0: no limit)"
    )
    secure_aggregation: str = choice(
        *("none", "secagg"),
        help="secagg: sites mask their weights, and the server learns only the sum; needs "
        "clip-norm and three sites",
        roles="combining",
    )
    clip_norm: float = _summing(0.0, "secagg: L2 norm that a site's update is clipped to")
    secure_threshold: int = _summing(
        0, "secagg: sites that must stay, more than half (0: over two thirds)"
    )
    device: str = setting(
        "auto",
        "where a site computes; auto: on a GPU if there is one",
        roles=("machine", "own"),
        pattern=r"auto|cpu|cuda(:[0-9]+)?",
        wording="auto, cpu, cuda or cuda:N",
    )
    precision: str = choice(
        *("auto", "fp32", "bf16", "fp16"),
        help="auto: bf16 on a GPU that has it, else fp32; fp16, on a GPU, scales the loss",
        roles="machine",
    )
    memory_format: str = choice(
        *("auto", "contiguous", "channels-last"),
        help="of images and convolutions; auto: channels-last on a GPU, and on a CPU for conv and "
        "vgg16-bn; the other format is mostly slower, and rounds differently",
        roles="machine",
    )
    threads: int = _positive(1, "CPU threads of one client", roles="machine")
    deterministic: str = choice(
        *("warn", "true", "false"),
        help="GPU operations without a deterministic form: warn names them in summary.json, true "
        "refuses them, false takes the fastest ones",
        roles="machine",
    )
    fused_optimiser: bool = setting(
        False, "compute an optimiser step in one kernel, which rounds differently", roles="machine"
    )
    vectorised: int = setting(
        1,
        "engine inline: sites whose small networks are trained as one, which rounds differently",
        roles="machine",
        minimum=1,
        maximum=10_000,
    )
    wire_precision: str = choice(
        *("fp32", "bf16"),
        help="numbers of a site's update as it travels to the server, for methods that average",
        roles="wire",
    )
    wire_down: str = choice(
        "fp32", "bf16", help="numbers of the weights that sites are sent to train", roles="wire"
    )
    evaluate_every: int = _count(
        1,
        "rounds between evaluations of the global model, or 0 to evaluate at the end only",
        roles="course",
    )
    early_stopping_metric: str = choice(
        *("none", "accuracy", "balanced-accuracy", "auc", "average-precision"),
        *("calibration-error", "loss", "entropy"),
        help="validation metric, a mean over sites by samples, by which the best round is kept and "
        "training stops",
        roles="course",
    )
    patience: int = _positive(
        10, "early stopping: measured rounds without a better value", roles="course"
    )
    data_dir: str = setting(
        "", "folder of the data files, or empty for $FEDSILO_DATA", roles=_FOLDERS
    )
    cache_dir: str = setting(
        "", "folder of decoded data, or empty for $FEDSILO_CACHE, ~/.cache/fedsilo", roles=_FOLDERS
    )
    out: str = _circumstance(
        "", "folder of run directories, or empty for $FEDSILO_RUNS, ~/.fedsilo/runs"
    )
    purpose: str = choice(
        *("train", "survey", "meet"),
        help="train; survey the sites' data; or meet: write what sites report of themselves to "
        "<out>/<run-name>-meeting.json",
        roles="circumstance",
    )
    run_name: str = _circumstance("", "name of the run directory, or empty for method, data, time")
    resume: bool = _circumstance(False, "continue the run run-name from its newest checkpoint")
    reply_timeout: float = _circumstance(3600.0, "seconds to wait for a phase's replies", above=0.0)
    away_timeout: float = _count(
        300.0, "seconds that a site may be disconnected before it is given up", roles="circumstance"
    )
    site_weights: str = _circumstance(
        "",
        "file at the server: training samples agreed for each site, the weights in averages, "
        "or empty for those that sites report",
    )
    track: str = choice(
        *("none", "tensorboard", "mlflow", "wandb"),
        help="where metrics also go after each round (extra 'tracking')",
        roles="circumstance",
    )

    def is_private(self) -> bool:
        """Tell whether training is differentially private per patient."""
        return self.sample_clip_norm > 0

    def compresses(self) -> bool:
        """Tell whether weights travel in fewer bytes than float32, in either direction."""
        return (self.wire_precision, self.wire_down) != ("fp32", "fp32")

    def measures_in(self, round_: int) -> bool:
        """Tell whether ``round_``, from 1, measures the model that the round begins with."""
        # Rounds count from 1, and the first one is always measured: hence the - 1
        return self.evaluate_every > 0 and (round_ - 1) % self.evaluate_every == 0
