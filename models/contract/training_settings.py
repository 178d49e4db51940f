"""The settings of training and its end, of the wire, and of whom a round waits for.

They are declared apart, as all of them would be a file too long to read. Mappings and lists are
texts of YAML, as Flower's run config knows neither; files may have them as they are.
"""

from functools import partial

from fedsilo.models.contract.settings_schema import choice, setting

_structured = partial(setting, "")

LEARNING_RATE = setting(1e-3, "step size of the optimiser", roles="step", above=0.0, maximum=1e30)
OPTIMISER = setting(
    "adam",
    "optimiser of local training, any of torch.optim by name",
    roles="step",
    pattern=r"[A-Za-z]\w*",
    wording="the name of an optimiser of torch.optim, such as adam, adamw, sgd or rmsprop",
)
OPTIMISER_ARGUMENTS = _structured(
    help="its further arguments: a mapping, such as {momentum: 0.9}", roles=("step", "structured")
)
OPTIMISER_STATE = choice(
    "round", "run", help="how long a site keeps its optimiser's state; with epoch-steps: run"
)
SCHEDULE = choice(
    *("constant", "cosine", "step", "one-cycle"),
    help="learning rate over the steps of all rounds, by torch's scheduler of that name",
)
SCHEDULE_ARGUMENTS = _structured(
    help="its arguments: a mapping; step: {step_size: 10, gamma: 0.1}, step_size in rounds",
    roles=("training", "structured"),
)
WARM_UP = setting(
    0.0, "rounds in which the learning rate rises linearly; below 1: share of all", minimum=0.0
)
RATE_DECAY = choice(
    "none", "inverse-sqrt", help="learning rate: constant, or divided by the root of all steps"
)
WEIGHT_DECAY = setting(
    0.0, "L2 penalty; with adamw, decoupled weight decay", roles="step", minimum=0
)
LOSS = choice(
    "auto", "cross-entropy", "evidential", help="auto: evidential for vit, else cross-entropy"
)
CLASS_WEIGHTS = setting(
    "none",
    "weights of the classes in the cross-entropy: none, balanced (by the site's own training "
    "samples), or a number each, such as 0.2,0.8",
    roles=("training", "structured"),
)
AUGMENTATION = _structured(
    help="transforms of torchvision v2 for training images: a list, such as "
    "[{RandomHorizontalFlip: {p: 0.5}}]",
    roles=("training", "structured"),
)
PRECISION = choice(
    *("auto", "fp32", "bf16", "fp16"),
    help="auto: bf16 on a GPU that has it, else fp32; fp16, on a GPU, scales the loss",
    roles="machine",
)
DETERMINISTIC = choice(
    *("warn", "true", "false"),
    help="GPU operations without a deterministic form: warn names them in summary.json, true "
    "refuses them, false takes the fastest ones",
    roles="machine",
)
VECTORISED = setting(
    1,
    "engine inline: sites whose small networks are trained as one, which rounds differently",
    roles="machine",
    minimum=1,
    maximum=10_000,
)
MEMORY_FORMAT = choice(
    *("auto", "contiguous", "channels-last"),
    help="of images and convolutions; auto: channels-last on a GPU, and on a CPU for conv and "
    "vgg16-bn; the other format is mostly slower, and rounds differently",
    roles="machine",
)
EARLY_STOPPING_METRIC = choice(
    *("none", "accuracy", "balanced-accuracy", "auc", "average-precision"),
    *("calibration-error", "loss", "entropy"),
    help="validation metric, a mean over sites by samples, by which the best round is kept and "
    "training stops",
    roles="course",
)
PATIENCE = setting(
    10, "early stopping: measured rounds without a better value", roles="course", minimum=1
)
MINIMUM_DELTA = setting(
    0.0, "early stopping: by how much a value must be better", roles="course", minimum=0.0
)
ROUND_QUORUM = setting(
    1.0,
    "share of the sites that end a round by answering; the others answer late (1: all)",
    roles="combining",
    above=0.0,
    maximum=1.0,
)
LATE_REPLIES = choice(
    *("drop", "discounted"),
    help="with round-quorum: what becomes of a reply that comes s rounds late: nothing, or its "
    "update counts (1+s)^-0.5 times",
    roles="combining",
)
SPEEDS = _structured(
    help="simulation: each site's optimiser steps a second on a virtual clock: lognormal:SIGMA, a "
    "mapping or list, or a YAML or JSON file of one (empty: 1 each)",
    roles=("combining", "structured"),
)
AGGREGATION_FAULTY = setting(
    1,
    "sites f that may be faulty: trimmed drops f at each end and needs 2f + 1 sites, multikrum "
    "leaves out f and needs 2f + 3; of 0 both would be the mean",
    roles="combining",
    minimum=1,
)
WIRE_PRECISION = choice(
    *("fp32", "bf16", "int8"),
    help="numbers of a site's update as it travels to the server, for methods that average: bf16, "
    "or int8 with a scale per array and rounding by chance",
    roles="wire",
)
WIRE_TOP_K = setting(
    1.0, "share of each array's update that travels, the largest", roles="wire", above=0, maximum=1
)
WIRE_FEEDBACK = setting(
    True, "add what an update left out, by the two above, to the site's next one", roles="wire"
)
WIRE_DOWN = choice(
    "fp32", "bf16", help="numbers of the weights that sites are sent to train", roles="wire"
)
