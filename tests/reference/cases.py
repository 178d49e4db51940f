"""Every method that has a reference, with settings by which its parts weigh something."""

from tests.reference import averaging, personal
from tests.reference.harness import Case

NORMED = {"network.name": "small_world:build_normed"}
ADAPTIVE = {"fedadam.server-learning-rate": 0.05, "fedadam.tau": 0.1}
FINE = {"fedavg-ft.finetune-rounds": 5, "fedavg-ft.finetune-learning-rate": 0.05}

CASES = (
    Case("fedavg", averaging.fedavg),
    Case("fedavg", averaging.fedavg, NORMED, "fedavg, batch norm"),
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
    Case("moon", averaging.moon, {"moon.contrast-mu": 1.0}),
    Case("distrans", personal.distrans, {"distrans.offset-learning-rate": 0.1}),
    Case("local", personal.local),
    Case("fedper", personal.fedper),
    Case("fedrep", personal.fedrep),
    Case("fedbn", personal.fedbn, NORMED),
    Case("fedavg-ft", personal.fedavg_ft, FINE),
    Case("fedbabu", personal.fedbabu, FINE),
    Case("ditto", personal.ditto, {"ditto.personal-lambda": 0.5}),
    Case("apfl", personal.apfl, {"apfl.mixing-alpha": 0.4}),
    Case("fedproto", personal.fedproto, {"fedproto.class-min-count": 1}),
    Case("feddistill", personal.feddistill, {"feddistill.class-min-count": 1}),
    Case("ring", personal.ring),
    Case("matcha", personal.matcha, {"matcha.budget": 0.5}),
    Case("cdl", personal.cdl),
)
