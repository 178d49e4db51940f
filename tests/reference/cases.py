"""Every method that has a reference, with settings by which its parts weigh something."""

from tests.reference import averaging, papers, personal, prompts, recent
from tests.reference.harness import Case

NORMED = {"network.name": "small_world:build_normed"}
ADAPTIVE = {"fedadam.server-learning-rate": 0.05, "fedadam.tau": 0.1}
FINE = {"fedavg-ft.finetune-rounds": 5, "fedavg-ft.finetune-learning-rate": 0.05}
UEFL = {
    "uefl.codes": 5,
    "uefl.iteration-rounds": 6,
    "uefl.extension-rounds": 7,
    "uefl.gamma": 0.0,
    "uefl.centroid-min-count": 1,
    "uefl.stop-when-certain": False,
    "train.mc-passes": 1,
}
PICSR = {
    "picsr.expert-rounds": 8,
    "picsr.prototype-min-count": 1,
    "picsr.router-learning-rate": 0.3,
}
# A round is half an epoch
ALIGNED = {
    "train.epoch-steps": 4,
    "train.pace": 2,
    "train.local-epochs": 2,
    "train.batch-size": 32,
    "train.optimiser": "adam",
    "train.learning-rate": 0.01,
    "fedaligncl.shared-embeddings": 12,
    "fedaligncl.alignment-weight": 0.5,
    "fedaligncl.warmup-epochs": 1,
    "fedaligncl.noise-variance": 0.0,
}
PROTO = {"fedproto.class-min-count": 1, "fedproto.prototype-weight": 1.0}
DISTILL = {"feddistill.class-min-count": 1, "feddistill.logit-weight": 1.0}
PAC = {"fedpac.class-min-count": 1, "fedpac.alignment-weight": 1.0}
EFM = {"fedefm.emd-grid": 0, "fedefm.distillation-beta": 0.4, "train.learning-rate": 0.05}
# A tiny ViT of two layers: b-prompts in the first, t-prompts in the second
PROMPTED = {
    "network.name": "vit",
    "vit.backbone-weights": "random",
    "vit.backbone-width": 16,
    "vit.backbone-depth": 2,
    "vit.backbone-heads": 2,
    "vit.backbone-patch": 1,
    "vit.prompt-length": 3,
    "vit.basic-layers": 1,
    "vit.basic-learning-rate": 0.05,
    "network.dropout": 0.0,
    "fedevprompt.distillation-weight": 10000.0,
    "fedevprompt.buffer-maps": 2,
}

CASES = (
    Case("fedavg", averaging.fedavg),
    Case("fedprox", averaging.fedprox, {"fedprox.proximal-mu": 0.5}),
    Case("fedavgm", averaging.fedavgm, {"fedavgm.momentum": 0.5} | NORMED),
    Case("fedadam", averaging.fedadam, ADAPTIVE),
    Case("fedyogi", averaging.fedyogi, ADAPTIVE),
    Case("fedadagrad", averaging.fedadagrad, ADAPTIVE),
    Case("scaffold", averaging.scaffold, {"scaffold.server-learning-rate": 0.8}),
    Case("fednova", averaging.fednova),
    Case("feddyn", averaging.feddyn, {"feddyn.regularisation-alpha": 0.5}),
    Case("fedswa", averaging.fedswa),
    Case("star", averaging.star),
    Case("cyclic", averaging.cyclic),
    Case("mix", averaging.mix),
    Case("moon", averaging.moon, {"moon.contrast-mu": 1.0}),
    Case("distrans", personal.distrans, {"distrans.offset-learning-rate": 0.1}),
    Case("fedcross", recent.fedcross, {"fedcross.cross-alpha": 0.8}),
    Case("fedpac", recent.fedpac, PAC),
    Case("feddbe", recent.feddbe, {"feddbe.mean-weight": 2.0, "feddbe.mean-momentum": 0.6}),
    Case("local", personal.local),
    Case("ensemble", personal.local),
    Case("cross", personal.local),
    Case("fedper", personal.fedper),
    Case("fedrep", personal.fedrep),
    Case("fedbn", personal.fedbn, NORMED),
    Case("fedavg-ft", personal.fedavg_ft, FINE),
    Case("fedbabu", personal.fedbabu, FINE),
    Case("ditto", personal.ditto, {"ditto.personal-lambda": 0.5}),
    Case("apfl", personal.apfl, {"apfl.mixing-alpha": 0.4}),
    Case("fedproto", personal.fedproto, PROTO),
    Case("feddistill", personal.feddistill, DISTILL),
    Case("ring", personal.ring),
    Case("matcha", personal.matcha, {"matcha.budget": 0.5}),
    Case("cdl", personal.cdl, {"cdl.divergence-beta": 0.4}),
    Case("uefl", papers.uefl, UEFL),
    Case("picsr", papers.picsr, PICSR),
    Case("fedefm", papers.fedefm, EFM),
    Case("fedaligncl", papers.fedaligncl, ALIGNED),
    Case("fedevprompt", prompts.fedevprompt, PROMPTED),
)
