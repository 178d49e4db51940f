"""A survey's request at a site: whether it is answered, and which parts of the answer may leave.

The first answer is stored for good, and every later survey gets it again. The difference of two
answers would reveal more than each: with slightly moved bins, or data with one patient more, it is
that patient. So a data set's first answer stays until the hospital itself removes it,
``<state-dir>/.own/<site>/survey.json``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from flwr.app import ConfigRecord, Context, RecordDict

from fedsilo.client_app.opening import OpenedSite, open_site
from fedsilo.client_app.site.identity import node_cap, own_name, site_settings
from fedsilo.client_app.site.node import is_simulated, own_folder
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.client_app.site.policy import SiteFile, refuse_few
from fedsilo.client_app.site.secret_seed import secret_seed
from fedsilo.client_app.summary.counts import AnswerBuilder, fingerprint
from fedsilo.core.errors import DataError, RefusedError
from fedsilo.core.messages import SURVEYED
from fedsilo.core.settings.common_settings import SERVER, CommonSettings
from fedsilo.core.settings.removed import with_current_keys
from fedsilo.core.settings_schema import Value, keys_in
from fedsilo.core.survey import ABOUT, Survey
from fedsilo.datasets.registry import data_set

# These decide which samples there are and what is counted
_DECISIVE = ("dataset", *keys_in(CommonSettings, "split"))
_FILE = "survey.json"


@dataclass(frozen=True)
class Kept:
    """A stored first answer."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    parts: Mapping[str, str]  # the parts of the answer, as sent or ready to be sent
    settings: Mapping[str, Value]  # the run's settings that decided what was counted, by key
    fingerprint: Mapping[str, str]  # the fingerprint of the data


def answer_survey(context: Context, rules: SiteFile | None) -> RecordDict:
    """Return the parts of the site's answer that may leave.

    Args:
        context: the node and the survey's settings.
        rules: the hospital's site file as read for this message; None without one.

    Raises:
        FedsiloError: the site does not answer surveys, or its data are unusable.
    """
    if is_simulated(context):
        return _record(_made(context, 0).parts)
    _refuse_where_noise_is_demanded(context)
    folder = own_folder(context, own_name(context))
    if folder is None:
        raise RefusedError(
            "the node config names no 'state-dir', where the first answer to a survey is kept: "
            "start the SuperNode with one"
        )
    allowed = _allowed_parts(rules)
    dataset = site_settings(context).dataset
    kept, new = _first_answer(folder, dataset, lambda: _made(context, secret_seed(folder)))
    parts = kept.parts
    if not new:
        parts = _again(context, kept)
    return _record({name: text for name, text in parts.items() if name in allowed})


def _refuse_where_noise_is_demanded(context: Context) -> None:
    trust = str(context.node_config.get("trust", ""))
    if trust != SERVER:
        raise RefusedError(
            f"the site file says 'trust: {trust}', but a survey's counts are this site's own, "
            "without noise: leave the site out"
        )
    if node_cap(context).max_epsilon:
        raise RefusedError(
            "the site has a cap on epsilon, but a survey's counts have no noise: leave the site "
            "out, or have the hospital answer without a cap"
        )


def _allowed_parts(rules: SiteFile | None) -> set[str]:
    """Return the parts that the hospital's site file names.

    A pattern for everything is not enough, because such files may be older than surveys.
    """
    if rules is None:
        raise RefusedError(
            "the hospital has no site file, but a survey needs one whose 'records' list what may "
            f"leave: '{SURVEYED}/*', or part by part"
        )
    parts = [name.replace("_", "-") for name in Survey.model_fields]
    allowed = rules.survey_parts(parts)
    if ABOUT not in allowed:
        raise RefusedError(
            f"the site file's 'records' do not list '{SURVEYED}/{ABOUT}', but no survey leaves "
            f"without it: '{SURVEYED}/*' is everything of a survey"
        )
    return allowed


def _made(context: Context, secret: int) -> Kept:
    """Build an answer now; broken images are left out and counted."""
    site, run = _open_site(context)
    answer = AnswerBuilder(site, secret).answer()
    return Kept(answer.to_config(), run, dict(fingerprint(site.silo)))


def _first_answer(folder: Path, dataset: str, make: Callable[[], Kept]) -> tuple[Kept, bool]:
    """Return a data set's first answer, and whether it was made just now.

    ``folder`` is the folder that the hospital keeps over all runs.
    """
    file: OwnFile[dict[str, Kept]] = OwnFile(
        folder / _FILE,
        dict[str, Kept],
        f"the hospital's own {_FILE}",
        "bring it back; if it is removed the next survey gets a new answer",
        "no survey leaves that is not kept; make room or repair the disk",
    )
    with file.lock():
        known = file.read({})
        if dataset in known:
            return known[dataset], False
        made = make()
        file.write({**known, dataset: made})
        return made, True


def _again(context: Context, kept: Kept) -> dict[str, str]:
    """Return a stored answer; its part ``about`` tells whether the data have changed."""
    # The settings of the first answer, because other settings would count other samples
    before = with_current_keys(kept.settings, quietly=True)
    now = _open_site(replace(context, run_config={**context.run_config, **before}))[0].silo
    about = json.loads(kept.parts[ABOUT])
    about["changed"] = dict(fingerprint(now)) != dict(kept.fingerprint)
    return {**kept.parts, ABOUT: json.dumps(about)}


def _open_site(context: Context) -> tuple[OpenedSite, dict[str, Value]]:
    """Open the site; return it with the run's settings that decided its silo."""
    run = dict(context.run_config)
    try:
        site = open_site(context)
    except DataError:
        read = data_set(site_settings(context).dataset).settings
        if "data.broken-images" not in read or run.get("data.broken-images") == "skip":
            raise
        run["data.broken-images"] = "skip"
        site = open_site(replace(context, run_config=run))
    refuse_few(site.silo.name, site.silo.label_counts()["train"], context.node_config)
    decisive = {*_DECISIVE, *data_set(site.settings.dataset).settings}
    return site, {key: value for key, value in run.items() if key in decisive}


def _record(parts: Mapping[str, str]) -> RecordDict:
    return RecordDict({SURVEYED: ConfigRecord(dict(parts))})
