"""What is refused of differential privacy, its ledgers and secure sums, and the fixes."""

from pathlib import Path

import pytest

from fedsilo.client_app.privacy.ledger import LEDGER
from fedsilo.client_app.privacy.unmasked_sums import SUMS
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from tests.support.federation import SITES, Federation
from tests.support.fixes import Case, Values, check, refused, tiny
from tests.support.setting_keys import as_keys

SECURE: Values = {"secure.clip-norm": 1.0, "secure.aggregation": "secagg"}
PRIVATE: Values = {
    "privacy.sample-clip-norm": 1.0,
    "privacy.noise-multiplier": 4.0,
    "data.standardise": "declared",
}
# Parts of the errors that the functions below try
TRIED = (
    "contain non-finite values: nothing left the site; lower",
    "nothing else records what was spent in this run",
    "nothing else records which sums were opened",
)
CASES = [
    Case(
        "the server would see replies of single sites; set it to 'secagg'",
        {**tiny("fedavg"), "trust": "sums", "clip-norm": 2.0},
        {"set it to 'secagg'": {"secure-aggregation": "secagg"}},
    ),
    Case(
        "each site reports its own epsilon; set 'privacy.trust' to 'nobody', or "
        "'privacy.sample-clip-norm' to 0",
        {
            **tiny("fedavg"),
            **SECURE,
            "privacy.trust": "sums",
            "privacy.sample-clip-norm": 1.0,
            "privacy.noise-multiplier": 2.0,
        },
        {
            "set 'privacy.trust' to 'nobody'": {"trust": "nobody"},
            "'privacy.sample-clip-norm' to 0": {
                "privacy.sample-clip-norm": 0.0,
                "privacy.noise-multiplier": 0.0,
            },
        },
    ),
    Case(
        "which has not been tested with noise: set",
        {
            **tiny("fedavg"),
            "privacy.sample-clip-norm": 1.0,
            "privacy.noise-multiplier": 2.0,
            "server.wire-precision": "bf16",
        },
        {
            "set 'server.wire-precision' and 'server.wire-down' to 'fp32'": {
                "server.wire-precision": "fp32"
            }
        },
    ),
    Case(
        "masks cancel only in sums of whole updates; set",
        {**tiny("fedavg"), **SECURE, "secure.clip-norm": 2.0, "server.wire-down": "bf16"},
        {
            "set 'server.wire-precision' and 'server.wire-down' to 'fp32'": {
                "server.wire-down": "fp32"
            }
        },
    ),
    Case(
        "nothing that leaves is differentially private; set 'privacy.sample-clip-norm' and",
        {**tiny("fedavg"), "trust": "nobody"},
        {
            "set 'privacy.sample-clip-norm' and 'privacy.noise-multiplier'": {
                "privacy.sample-clip-norm": 2.0,
                "privacy.noise-multiplier": 2.0,
            }
        },
    ),
    Case(
        "a site would send exact sums of its own rows; set it to 'declared' or 'site'",
        {
            **SECURE,
            "method": "fedavg",
            "dataset": "heart-synthetic",
            "standardise": "pooled",
            "trust": "sums",
        },
        {"'declared'": {"standardise": "declared"}, "'site'": {"standardise": "site"}},
    ),
]
FEW = SITES[2:]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_run_that_breaks_privacy_promise_with_fix_keeps_it(case: Case) -> None:
    check(case, resolve)


def test_private_run_at_lower_rate_does_not_diverge(tmp_path: Path) -> None:
    values = tiny("fedavg", rounds=1, optimiser="sgd", local_steps=2, out=str(tmp_path))

    def attempt(rate: float) -> str:
        named: Values = {"train.learning-rate": rate, "run.name": f"run-{rate}"}
        return refused(lambda: run_inline(resolve(as_keys({**values, **SECURE, **named})), 3))

    said = attempt(1e12)
    assert "non-finite values" in said
    assert "nothing left the site; lower 'train.learning-rate'" in said
    assert not attempt(0.01)


@pytest.mark.parametrize(
    ("way", "sites", "name", "known", "again"),
    [
        (PRIVATE, FEW, LEDGER, "nothing else records what was spent in this run", {"resume": True}),
        (
            SECURE,
            SITES[1:],
            SUMS,
            "nothing else records which sums were opened",
            {"run.out": "anew"},
        ),
    ],
    ids=["ledger", "sums"],
)
def test_lost_ledger_restored_or_in_new_run_is_accepted(
    way: Values, sites: tuple[str, ...], name: str, known: str, again: Values, tmp_path: Path
) -> None:
    federation = Federation(tmp_path)

    def attempt(**more: Value) -> str:
        values = {"run.out": "first", "run.name": "run", **way, **more}
        values["run.out"] = str(tmp_path / str(values["run.out"]))
        return refused(lambda: federation.run(values, sites))

    assert not attempt()
    (tmp_path / "first" / "run" / "summary.json").unlink()  # as if it had died before the end
    path = federation.kept(sites[0], name, "run")
    whole = path.read_text()
    path.write_text("[")
    said = attempt(**again)
    assert f"{name} is damaged" in said
    assert f"bring it back, or choose another 'run.name'; {known}" in said
    assert not attempt(**{"run.name": "another"})
    path.write_text(whole)
    assert not attempt(**again)
