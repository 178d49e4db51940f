"""The data protection report's blanks for GDPR Articles 30(1) and 35(7).

The run answers what only the software knows. Everything else is marked for a person. The rows are
not legal advice and do not replace the controller's own record or assessment.

Source: Regulation (EU) 2016/679, https://eur-lex.europa.eu/eli/reg/2016/679/oj.
"""

from fedsilo.core.one_line import join_names
from fedsilo.core.settings.common_settings import NOBODY, SUMS
from fedsilo.reports.reporting_guideline import describe_columns
from fedsilo.runs.finished_run import Shown

TO_WRITE = "to be written by a person"

# Articles of which the run knows nothing: article, content
_BLANK = {
    "30(1)(a)": "name and contact details of the controller, joint controllers and the data "
    "protection officer",
    "30(1)(b)": "purposes of the processing; legal basis (Articles 6 and 9)",
    "30(1)(e)": "transfers to third countries",
    "35(7)(b)": "necessity and proportionality in relation to the purposes",
    "35(7)(c)": "risks to the rights and freedoms of the patients",
}


def processing_rows(run: Shown) -> list[list[str]]:
    """Build the table for the record of processing that GDPR Articles 30(1) and 35(7) ask for.

    Each row is one point of these articles. Its cells are the number of the point, its topic, and
    the run's answer. If the run has no answer, the cell is "to be written by a person". Rows are
    sorted by the number.
    """
    answers = {
        "30(1)(c)": ("categories of data subjects and of personal data", _categories(run)),
        "30(1)(d)": ("recipients", _recipients(run)),
        "30(1)(f)": ("time limits for erasure", _erasure()),
        "30(1)(g)": ("technical and organisational measures", _measures(run)),
        "35(7)(a)": ("systematic description of the processing", _description(run)),
        "35(7)(d)": ("measures that address the risks", _measures(run)),
    }
    rows = []
    for article, content in _BLANK.items():
        rows.append([article, content, TO_WRITE])
    for article, (content, answer) in answers.items():
        rows.append([article, content, answer])
    return sorted(rows)


def _categories(run: Shown) -> str:
    outcome, predictors = describe_columns(run)
    sites = join_names(run.silos)
    return f"{run.noun(2)} of {sites}. Health data (Article 9): {outcome}; inputs: {predictors}"


def _recipients(run: Shown) -> str:
    """Describe who receives the data that a site sends, for the record of processing.

    The text first says that nobody gets records of patients. At trust level ``sums``, it then says
    that the server's operator gets only sums. At other levels, it refers to the page's section
    "What left each site". It ends with a note on the numbers and models that hospitals may get.
    """
    server = "the server's operator gets what is listed under 'What left each site'"
    if run.trust == SUMS:
        server = "the server's operator gets sums over several hospitals only"
    others = (
        "Some methods pass a hospital's numbers on to the others: the same section says so. The "
        "model that results goes to all hospitals, unless the method keeps models at each."
    )
    return f"Records of patients are sent to nobody. {server[0].upper()}{server[1:]}. {others}"


def _erasure() -> str:
    return (
        "fedsilo deletes nothing by itself: the run directory stays at the server, and at each "
        f"hospital the audit log, the ledger and the private state. The limits are {TO_WRITE}"
    )


def _measures(run: Shown) -> str:
    """Describe the technical and organisational measures of a run in one line.

    The line joins these parts by semicolons:

    1. The promise of the trust level.
    2. The transport, the hospital's rules and the audit log. For simulated sites, this part says
       that they had none of these.
    3. Differential privacy, at trust level ``nobody`` only.
    4. A note that a person must write the organisational measures.
    """
    parts = [f"trust level '{run.trust}': {run.summary['privacy']['trust']['promise']}"]
    if run.is_simulated:
        parts.append("the sites were simulated on one machine: no transport, site file or log")
    else:
        parts.append(
            "TLS with registered keys, the hospital's own code and site file, and a chained audit "
            "log (docs/threat-model.md says what each promises)"
        )
    if run.trust == NOBODY:
        parts.append("differential privacy per patient, bounded by the hospital's ledger")
    parts.append(f"organisational measures are {TO_WRITE}")
    return "; ".join(parts)


def _description(run: Shown) -> str:
    summary = run.summary
    return (
        f"{len(run.silos)} hospitals trained a model by {summary['title']} in {summary['rounds']} "
        f"rounds on data set {summary['dataset']}; what was sent is listed above. The purpose is "
        f"{TO_WRITE}"
    )
