"""The settings that every method shares: what to run, on which silos, with which budget.

Each states its roles once, and ``keys_with`` lists the settings of a role:

- training, where none is named: how the method trains and measures, and what it learns;
- course: how long a run is, how often it measures and whom it asks; step: what an optimiser step
  is; combining: what the server makes of replies, which sites need not know;
- seed: what random numbers start from; machine: what a site computes on;
- privacy: how much a site may tell; floor: of that, what a hospital may raise at any time;
- network: what it is built of; vit: what means nothing without a ViT; shape: a ViT's measures;
- data: which data set; files: where its files lie; pixels: how its images are read;
- partition: how images become silos; silo: how many silos, and how large;
- sampling: which samples are used; split: which of them train, validate and test; folds: how they
  are shuffled into folds; validation: what of the split leaves the choice of test rows alone;
- own: where a site's node config goes before the run's config: never what protects the site;
- circumstance: where a run lies and how it is waited for, which does not change its result.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsilo.models.contract.settings_schema import setting

AGGREGATIONS = ("mean", "norm-clip", "median", "trimmed", "multikrum")
GPU_SHARE = "FEDSILO_GPU_SHARE"  # in the environment: the part of a GPU that a client may take


@dataclass(frozen=True)
class CommonSettings:
    """Run settings common to all methods; a method's own are in ``models/<method>.py``."""

    method: str = setting("uefl", "federated method")
    dataset: str = setting("digits", "data set that the silos are cut from", roles="data")
    seed: int = setting(42, "seed of every random number", roles="seed", minimum=0)
    rounds: int = setting(30, "communication rounds in all", roles="course", minimum=1)
    silos: int = setting(
        9,
        "silos that images are cut into; tables have named sites",
        roles=("partition", "silo"),
        minimum=1,
        maximum=100_000,
    )
    min_sites: int = setting(
        0, "sites that must answer a round; 0: all that joined", roles="circumstance", minimum=0
    )
    sites_per_round: int = setting(
        0, "sites that a round asks, drawn by seed and round; 0: all", roles="course", minimum=0
    )
    aggregation: str = setting(
        "mean",
        "how weights of sites become one: mean by samples; norm-clip, the same of updates cut to "
        "the median norm; median and trimmed of each number, multikrum of the sites nearest to "
        "one another: these three weigh all sites alike",
        roles="combining",
        choices=AGGREGATIONS,
    )
    aggregation_faulty: int = setting(
        1,
        "sites f that may send anything: trimmed drops f at each end and needs 2f + 1 sites, "
        "multikrum leaves f out and needs 2f + 3",
        roles="combining",
        minimum=0,
    )
    max_update_norm: float = setting(
        100.0,
        "norm of a site's update, in medians of the round's, beyond which its reply is refused; "
        "of at least three sites, none with secagg; 0: no limit",
        roles="combining",
        minimum=0.0,
    )

    local_epochs: int = setting(2, "passes over a site's training data per round", minimum=1)
    local_steps: int = setting(
        0, "optimiser steps of every site per round, instead of passes; 0: local-epochs", minimum=0
    )
    epoch_steps: int = setting(
        0,
        "optimiser steps of an epoch that spans rounds, of samples/epoch-steps each; 0: a round "
        "is local-epochs or local-steps",
        minimum=0,
        maximum=100_000,
    )
    pace: int = setting(40, "of those, steps a round: it divides epoch-steps", minimum=1)
    batch_size: int = setting(32, "samples per optimiser step", roles="step", minimum=2)
    micro_batch: int = setting(
        0,
        "samples computed at once, of which a step adds up gradients; 0: all",
        roles="step",
        minimum=0,
    )
    gradient_checkpointing: bool = setting(
        False,
        "resnet22: compute inner values again when going back, to save memory",
        roles="network",
    )
    learning_rate: float = setting(
        1e-3, "step size of the optimiser", roles="step", above=0.0, maximum=1e30
    )
    optimiser: str = setting(
        "adam", "optimiser of local training", roles="step", choices=("adam", "adamw", "sgd")
    )
    optimiser_state: str = setting(
        "round",
        "a site's optimiser begins afresh each round, or goes on over the run; where 'epoch-steps' "
        "is set it goes on",
        choices=("round", "run"),
    )
    rate_decay: str = setting(
        "none",
        "learning rate over the steps of all rounds: none, or divided by the root of their number",
        choices=("none", "inverse-sqrt"),
    )
    weight_decay: float = setting(
        0.0, "L2 penalty of the optimiser, of adamw decoupled decay", roles="step", minimum=0.0
    )

    network: str = setting(
        "auto",
        "auto: conv for images, of cifar10, cifar100 and gtsrb vgg16-bn, logistic for tables",
        roles="network",
        choices=("auto", "conv", "vgg16-bn", "resnet22", "vit", "logistic", "mlp"),
    )
    width: int = setting(
        16,
        "channels of the first stage (128 is UEFL's, 16 resnet22's), twice those of vgg16-bn (128 "
        "is VGG16 as published), or hidden units of mlp",
        roles="network",
        minimum=1,
    )
    leading_norm: bool = setting(
        True,
        "conv: batch norm and ReLU after each stage's first convolution; UEFL's authors have none",
        roles="network",
    )
    dropout: float = setting(
        0.1, "dropout rate of the head", roles="network", minimum=0.0, below=1.0
    )
    classifier: str = setting(
        "seed",
        "resnet22: three layers from the seed, or the published file's own two, which tell "
        "malignant from not (Wu et al.)",
        roles="network",
        choices=("seed", "published"),
    )
    mc_passes: int = setting(
        20, "Monte Carlo dropout passes of a measurement; 0: one pass without dropout", minimum=0
    )

    loss: str = setting(
        "auto",
        "auto: evidential for vit, else cross-entropy",
        choices=("auto", "cross-entropy", "evidential"),
    )
    evidence: str = setting(
        "softplus", "how logits become evidence, if evidential", choices=("softplus", "relu")
    )

    backbone: str = setting(
        "vit_small_patch16_224",
        "timm name of the ViT that vit prompts",
        roles=("network", "vit", "shape"),
        pattern=r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?",
        wording="a name of timm, without a path or an address",
    )
    backbone_weights: str = setting(
        "",
        "its weights: a file (also in data-dir or cache-dir/backbones), timm, or random; of "
        "resnet22 a file, empty: from the seed",
        roles=("vit", "own"),
    )
    backbone_width: int = setting(
        0,
        "embedding channels of the ViT; 0: as named",
        roles=("network", "vit", "shape"),
        minimum=0,
    )
    backbone_depth: int = setting(
        0, "blocks of the ViT; 0: as named", roles=("network", "vit", "shape"), minimum=0
    )
    backbone_heads: int = setting(
        0, "attention heads of the ViT; 0: as named", roles=("network", "vit", "shape"), minimum=0
    )
    backbone_patch: int = setting(
        0, "pixels of a patch's side; 0: as named", roles=("network", "vit", "shape"), minimum=0
    )
    initial_weights: str = setting(
        "",
        "what the exchanged weights start from: a safetensors file as a run writes it ('encoder:' "
        "before it: only its encoder, for other classes), a ViT's or vgg16-bn's weights file, or "
        "a name of timm with 'timm:' before it; empty: the seed",
    )
    train_backbone: bool = setting(
        False, "whether the ViT is trained and exchanged, not frozen", roles="vit"
    )
    prompt_sets: str = setting(
        "b-t",
        "prompts: b in the first layers and t in the rest, one set g, or none",
        roles=("network", "vit"),
        choices=("b-t", "g", "none"),
    )
    prompt_length: int = setting(
        50, "prefix keys and values per layer", roles=("network", "vit"), minimum=1
    )
    basic_layers: int = setting(
        3, "first layers, which take b-prompts", roles=("network", "vit"), minimum=1
    )
    basic_learning_rate: float = setting(
        2.5e-4, "step size of b- and g-prompts", roles=("step", "vit"), above=0.0, maximum=1e30
    )

    image_size: int = setting(
        0,
        "pixels of an image's side; 0: the data set's own",
        roles="pixels",
        minimum=0,
        maximum=4096,
    )
    colour_constancy: bool = setting(
        False, "shades-of-grey colour constancy, power 6", roles="pixels"
    )
    broken_images: str = setting(
        "refuse",
        "images that are missing or cannot be decoded: stop, or go on without them and say so",
        roles="pixels",
        choices=("refuse", "skip"),
    )
    target: str = setting(
        "nevus",
        "what dermoscopic images are classified into: nevus against all others, or diagnoses",
        choices=("nevus", "diagnosis"),
    )
    sample_share: float = setting(
        1.0, "share of each site's samples that is used", roles="sampling", above=0.0, maximum=1.0
    )
    public_share: float = setting(
        0.0,
        "share of each site's lesions for pre-training, which no site holds",
        roles="sampling",
        minimum=0.0,
        below=1.0,
    )

    intensity_profiles: bool = setting(
        True, "whether each site's images get a vendor-like tone curve of its own", roles="pixels"
    )

    pixel_scale: str = setting(
        "standard",
        "standardised pixels, or raw 0..255",
        roles="pixels",
        choices=("standard", "raw"),
    )
    partition: str = setting(
        "own",
        "how samples become silos: as the data set has them; of images by labels that others have "
        "not seen; of each label by a Dirichlet draw; by few labels a silo",
        roles=("partition", "sampling"),
        choices=("own", "unseen", "dirichlet", "labels"),
    )
    unseen: float = setting(
        1.0,
        "partition unseen: share of each silo's labels that no other silo has",
        roles=("partition", "sampling"),
        minimum=0.0,
        maximum=1.0,
    )
    concentration: float = setting(
        0.5,
        "partition dirichlet: alpha of the draw; the smaller, the fewer labels a silo has",
        roles=("partition", "sampling"),
        above=0.0,
    )
    labels_per_silo: int = setting(
        2, "partition labels: how many each silo holds", roles=("partition", "sampling"), minimum=1
    )
    silo_set: str = setting(
        "",
        "silos by name with their links: gaia, or a CSV file of edges; empty: numbered",
        roles="partition",
    )
    silo_train_size: int = setting(
        0, "training images a silo; 0: the data set's own", roles="silo", minimum=0
    )
    silo_test_size: int = setting(
        0, "test images a silo; 0: the data set's own", roles="silo", minimum=0
    )

    standardise: str = setting(
        "pooled",
        "features of a table: pooled figures of all sites, each site's own, or the schema's",
        choices=("pooled", "site", "declared"),
    )
    sums_min_count: int = setting(
        10,
        "samples behind a site's sums, class means and counts per bin; of fewer it sends none",
        roles=("privacy", "floor"),
        minimum=1,
    )
    test_folds: int = setting(
        0,
        "stratified folds of a site's rows, one is test data; 0: the data set's split",
        roles=("split", "folds"),
        minimum=0,
    )
    test_fold: int = setting(0, "which of the test folds, from 0", roles="split", minimum=0)
    val_folds: int = setting(
        0,
        "stratified folds of a site's training rows, one is validation data; 0: none",
        roles=("split", "folds", "validation"),
        minimum=0,
    )
    val_fold: int = setting(
        0, "which of the validation folds, from 0", roles=("split", "validation"), minimum=0
    )
    fold_seed: int = setting(
        0,
        "seed of the shuffling into folds, and of a cut into silos",
        roles=("split", "folds", "seed"),
        minimum=0,
    )
    use_test: bool = setting(
        True,
        "whether test rows are read; false while settings are chosen",
        roles=("split", "validation"),
    )

    clip_norm: float = setting(
        0.0,
        "differential privacy: largest L2 norm of what a site's arrays tell; 0: none",
        roles="privacy",
        minimum=0.0,
    )
    noise_multiplier: float = setting(
        0.0, "standard deviation of the noise on them, in clip-norms", roles="privacy", minimum=0.0
    )
    delta: float = setting(1e-5, "delta of (epsilon, delta)", roles="privacy", above=0.0, below=1.0)
    max_epsilon: float = setting(
        0.0,
        "the run ends before a site would have spent more; 0: no limit",
        roles="privacy",
        minimum=0.0,
    )

    secure_aggregation: str = setting(
        "none",
        "secagg: weights leave masked, and the server learns their sum alone; needs 'clip-norm' "
        "and three sites",
        roles="combining",
        choices=("none", "secagg"),
    )
    secure_threshold: int = setting(
        0,
        "sites that must stay to the end of a round of secagg, more than half; 0: two thirds",
        roles="combining",
        minimum=0,
    )
    secure_bits: int = setting(
        0,
        "bits of a number in secagg; 0: as many as a sum of 32 bits has room for",
        roles="combining",
        minimum=0,
        maximum=30,
    )
    secure_noise: str = setting(
        "own",
        "own: each site adds the whole noise; spread: a part, such that 'secure-threshold' sites "
        "add the whole",
        roles="combining",
        choices=("own", "spread"),
    )

    device: str = setting(
        "auto",
        "where a site computes; auto takes a GPU where there is one",
        roles=("machine", "own"),
        pattern=r"auto|cpu|cuda(:[0-9]+)?",
        wording="auto, cpu, cuda or cuda:N",
    )
    precision: str = setting(
        "auto", "auto: bf16 on a GPU, else fp32", roles="machine", choices=("auto", "fp32", "bf16")
    )
    threads: int = setting(1, "CPU threads of one client", roles="machine", minimum=1)
    deterministic: str = setting(
        "warn",
        "operations of a GPU that have no deterministic form: true refuses them, warn names them "
        "in summary.json, false takes the fastest of all",
        roles="machine",
        choices=("true", "warn", "false"),
    )
    fused_optimiser: bool = setting(
        False, "whether an optimiser's step is one kernel; rounds otherwise", roles="machine"
    )
    evaluate_every: int = setting(
        1,
        "rounds between evaluations of the global model; 0: only at the end",
        roles="course",
        minimum=0,
    )

    data_dir: str = setting(
        "", "folder of the data files; empty: $FEDSILO_DATA", roles=("files", "circumstance", "own")
    )
    cache_dir: str = setting(
        "",
        "folder of decoded data; empty: $FEDSILO_CACHE, ~/.cache/fedsilo",
        roles=("files", "circumstance", "own"),
    )
    out: str = setting(
        "", "folder of run directories; empty: $FEDSILO_RUNS, ~/.fedsilo/runs", roles="circumstance"
    )
    purpose: str = setting(
        "train",
        "what sites are asked for: to train, or once for a survey of their data",
        roles="circumstance",
        choices=("train", "survey"),
    )
    run_name: str = setting(
        "", "name of the run directory; empty: made from method and time", roles="circumstance"
    )
    resume: bool = setting(
        False, "go on from the newest whole checkpoint of run-name", roles="circumstance"
    )
    reply_timeout: float = setting(
        3600.0, "seconds to wait for the replies of a phase", roles="circumstance", above=0.0
    )
    away_timeout: float = setting(
        300.0,
        "seconds that a site may be disconnected before its reply is given up",
        roles="circumstance",
        minimum=0.0,
    )
    join_timeout: float = setting(
        60.0, "seconds to wait for sites to connect", roles="circumstance", minimum=0.0
    )
    site_weights: str = setting(
        "",
        "file at the server of the training samples agreed for each site, which averages weigh "
        "by; empty: what sites say",
        roles="circumstance",
    )
    meeting: str = setting(
        "",
        "file to write what the sites say of themselves to, instead of a run: nothing is trained; "
        "empty: run",
        roles="circumstance",
    )
    track: str = setting(
        "none",
        "where the rows of metrics.csv and traffic.csv also go (extra 'tracking')",
        roles="circumstance",
        choices=("none", "tensorboard", "mlflow"),
    )

    def measures_in(self, round_: int) -> bool:
        """Tell whether ``round_`` measures the model that it begins with."""
        return self.evaluate_every > 0 and (round_ - 1) % self.evaluate_every == 0


@dataclass(frozen=True)
class NoSettings:
    """The settings of a method that has none of its own."""
