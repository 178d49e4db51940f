"""The research report's table of TRIPOD+AI: what the run answers, and what a person must write.

Source: Collins et al., "TRIPOD+AI statement: updated guidance for reporting clinical prediction
models that use regression or machine learning methods", BMJ 2024;385:e078378. The items are named
in our own words; its checklist has the exact ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedsilo.core.errors import FedsiloError
from fedsilo.core.files.locations import find_places
from fedsilo.core.one_line import join_names
from fedsilo.core.settings.common_settings import NOBODY, SERVER
from fedsilo.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, SEGMENTATION, SURVIVAL
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.tables.table_data_set import TableDataSet
from fedsilo.models.tasks.task import task_class, task_named
from fedsilo.reports.run_facts import result
from fedsilo.runs.finished_run import Shown

BY_A_PERSON = "a person must write this"
# Task -> the form of an answer, and which threshold turns it into a decision
_ANSWERS = {
    CLASSIFICATION: "a probability of each class; the class of the largest is predicted, without "
    "another threshold",
    REGRESSION: "a number in the unit of the outcome, without a threshold",
    MULTI_LABEL: "a probability of each finding, which counts as present from 0.5",
    SEGMENTATION: "the most probable class of each pixel, without another threshold",
    SURVIVAL: "the logarithm of a hazard, of which only differences between patients have a "
    "meaning; no threshold",
}
# Task -> the groups whose sizes may be unequal, and of which the run has counts
_GROUPS = {
    CLASSIFICATION: "counts by class and site",
    REGRESSION: "none: the outcome is a number",
    MULTI_LABEL: "counts of the test samples with each finding, by site",
    SEGMENTATION: "counts by site of the images in whose mask each class is the largest",
    SURVIVAL: "counts of censored patients and of events, by site",
}


@dataclass(frozen=True)
class Item:
    """An item of the guideline.

    Attributes:
        number: the item's number in the checklist, such as "8a".
        topic: what must be reported, in a few words.
        answer: what the run says about it; empty if only a person can answer.
        place: where the facts are: a section of the page, or a file of the run.
        missing: what a person must add; empty if the run's answer is complete.
    """

    number: str
    topic: str
    answer: str = ""
    place: str = ""
    missing: str = BY_A_PERSON


def guideline_items(run: Shown) -> list[Item]:
    """Return the items of TRIPOD+AI in order, with what the run answers."""
    return [*_opening(), *_methods(run), *_results(run), *_discussion()]


def guideline_rows(run: Shown) -> list[list[str]]:
    """Build the rows of the table of TRIPOD+AI, the guideline for reporting prediction models.

    Each item of the guideline has a row. Its cells are the item's number, the topic, the run's
    answer, and the work that a person must still do ("nothing" if the answer is complete). A place
    in brackets says where the run or its pages show the answer. Without an answer, the cell is "-".
    """
    rows = []
    for item in guideline_items(run):
        answer = item.answer
        if item.place:
            answer = f"{answer} ({item.place})"
        rows.append([item.number, item.topic, answer or "-", item.missing or "nothing"])
    return rows


def _opening() -> list[Item]:
    return [
        Item("1", "title: kind of study, target population, outcome"),
        Item("2", "abstract, by the checklist for abstracts"),
        Item("3a-c", "background: medical context, existing models, known inequalities"),
        Item("4", "objectives: development, evaluation or both"),
    ]


def _methods(run: Shown) -> list[Item]:
    return [*_data(run), *_variables(run), *_analysis(run), *_outputs(run)]


def _data(run: Shown) -> list[Item]:
    """Build items 5 to 7 of TRIPOD+AI: where the data come from, and how they were prepared.

    A person must write the items on dates, on eligible participants and on treatments.
    """
    return [
        Item(
            "5a, 6a",
            "sources of the data; number and location of centres",
            f"data set {run.summary['dataset']}; {len(run.silos)} sites: {join_names(run.silos)}",
            "Sites",
            "kind of data (registry, trial, routine care), countries, level of care",
        ),
        Item("5b, 6b", "dates of the data; eligibility of participants"),
        Item("6c", "treatments received, and how they were handled"),
        Item(
            "7",
            "preparation of the data, also across groups of patients",
            f"inputs standardised: {run.settings.common.standardise}; {_without_value(run)}",
            "config.toml",
            "quality checks before the data came to fedsilo",
        ),
    ]


def _variables(run: Shown) -> list[Item]:
    """Build items 8 to 11 of TRIPOD+AI: outcome, predictors, sample size and missing data.

    A person must write the items on the people who assessed outcome and predictors.
    """
    outcome, predictors = describe_columns(run)
    return [
        Item("8a", "outcome: definition, horizon", outcome, "", "how and when it was assessed"),
        Item("8b-c", "outcome: assessors, and what they knew"),
        Item("9a, 9b", "predictors: choice and definition", predictors, "", "why, how measured"),
        Item("9c", "predictors: assessors, and what they knew"),
        Item("10", "sample size", _sizes(run), "Sites", "how it was arrived at"),
        Item(
            "11",
            "missing data",
            _without_value(run),
            "fedsilo survey",
            "reasons for missing values",
        ),
    ]


def _analysis(run: Shown) -> list[Item]:
    """Build items 12 and 13 of TRIPOD+AI: model, performance measures, and class imbalance."""
    summary = run.summary
    return [
        Item(
            "12a-c",
            "how the data were used; kind of model, its building and tuning",
            f"{summary['title']}, network {run.settings.common.network}, {summary['rounds']} "
            "rounds; every setting and its origin",
            "Settings, config.toml",
            "why this method; trials of 'fedsilo tune', if any",
        ),
        Item(
            "12d",
            "differences between centres",
            "results by site",
            "Final metrics",
            "how heterogeneity was judged",
        ),
        Item(
            "12e",
            "measures of performance",
            _measures(run),
            "fedsilo report --for clinic",
            "which measure decides, and why",
        ),
        Item("12f", "updating of the model", "none: the model is that of the last round", "", ""),
        Item(
            "12g",
            "how predictions are computed for evaluation",
            "by each site on its own samples, by this version's code",
            "model.safetensors, fedsilo predict",
            "",
        ),
        _imbalance(run),
    ]


def _outputs(run: Shown) -> list[Item]:
    """Build items 14 to 19 of TRIPOD+AI.

    Items 14 to 16 are on fairness, the model's output, and the data for its evaluation. The other
    items are on ethical approval, the openness of the study, and patients' involvement.
    """
    revision = run.config.environment.get("fedsilo-revision", "unknown")
    return [
        _fairness(run),
        Item(
            "15",
            "output of the model and thresholds",
            _ANSWERS[run.task],
            "fedsilo predict",
            _threshold(run),
        ),
        Item(
            "16",
            "differences between training and evaluation data",
            f"the test samples are of the same sites, split {_split_text(run)}",
            "Sites",
            "evaluation at hospitals that did not train",
        ),
        Item("17", "approval by an ethics committee, consent"),
        Item("18a-d", "funding, conflicts of interest, protocol, registration"),
        Item("18e", "availability of the data", *_availability(run)),
        Item("18f", "availability of the code", f"fedsilo, revision {revision}", "config.toml", ""),
        Item("19", "involvement of patients and the public"),
    ]


def _fairness(run: Shown) -> Item:
    """Build the item on fairness of TRIPOD+AI, a guideline for reporting prediction models.

    The item, number 14, asks for the metrics by groups of patients. For classification, it names
    the report that gives these metrics, and a person adds which groups matter. For any other task,
    no report gives them, so the item has no answer and says that a person must add them.
    """
    if run.task != CLASSIFICATION:
        return Item("14", "fairness", missing="metrics by groups of patients, and why these groups")
    return Item(
        "14",
        "fairness",
        "by groups of patients with --by COLUMN",
        "fedsilo report --for clinic --by",
        "which groups matter, and why",
    )


def _threshold(run: Shown) -> str:
    """Say what a person must add about thresholds."""
    if run.task == CLASSIFICATION:
        return "the threshold for a clinical decision (--decisions helps)"
    return "the threshold for a clinical decision, if there is one"


def _without_value(run: Shown) -> str:
    """Describe what is done with missing values. For a table, its schema decides."""
    if isinstance(data_set(str(run.summary["dataset"])), TableDataSet):
        return "rows without a value are dropped, or cells imputed, as the schema says"
    return "images have no missing cells"


def _results(run: Shown) -> list[Item]:
    dropped = ""
    if run.trust == SERVER:
        dropped = ", and how many were left out"
    return [
        Item(
            "20a",
            "flow of participants",
            f"samples by site and split{dropped}",
            "Sites",
            "flow before the data came to fedsilo, follow-up",
        ),
        Item(
            "20b",
            "characteristics of participants",
            "distributions of the columns by site",
            "fedsilo survey",
            "demographics that are not among the columns",
        ),
        Item(
            "20c",
            "comparison of evaluation and development data",
            "means that differ clearly between sites are listed",
            "Sites",
            "",
        ),
        Item("21", "participants and events in each analysis", _sizes(run), "Sites", ""),
        Item(
            "22",
            "the full model, and how to use it",
            "weights and a model card",
            "model.safetensors, fedsilo card, fedsilo export",
            "",
        ),
        Item("23a", "performance with intervals", result(run), "Final metrics", ""),
        Item("23b", "heterogeneity of performance", "results by site", "Final metrics", ""),
        Item("24", "results of updating", "not applicable: nothing was updated", "", ""),
    ]


def _discussion() -> list[Item]:
    return [
        Item("25", "interpretation, in the light of earlier studies"),
        Item(
            "26",
            "limitations",
            "the main limit of the result is in the first section",
            "In short",
            "limits of the data and of the design",
        ),
        Item("27a-c", "use in care: poor inputs, skills of users, next steps"),
    ]


def describe_columns(run: Shown) -> tuple[str, str]:
    """Describe a run's outcome and its predictors in two texts.

    The first text says what the model predicts, such as the names of the classes. For a table, it
    begins with the names of the label's columns. The second text is "images" or, for a table, the
    titles of all columns that are not ignored. If the table's schema is not on this machine, the
    first text has no column names, and the second says that the schema is missing.
    """
    outcome = task_named(run.task).describe(run.class_names())
    if run.task == CLASSIFICATION:
        outcome = f"classes: {join_names(run.class_names()) or 'classes without names'}"
    data = data_set(str(run.summary["dataset"]))
    if not isinstance(data, TableDataSet):
        return outcome, "images"
    common = run.settings.common
    try:
        schema = data.schema(find_places(common.data_dir, common.cache_dir))
    except FedsiloError:
        # The page may be written on another machine than the hospitals' data
        return outcome, "the columns of the hospitals' schema, which is not here"
    titles = []
    for column in schema.columns:
        if column.kind != "ignored":
            titles.append(column.words().title)
    columns = join_names(schema.label.columns())
    return f"column {columns}: {outcome}", join_names(titles)


def _sizes(run: Shown) -> str:
    """Describe the sample size: the total numbers of training samples and of test samples.

    If any site's number is hidden or was not reported, the text gives no number and says so.
    """
    parts = []
    for split, name in (("train", "training"), ("test", "test")):
        sizes: Sequence[int | None] = [known["sizes"].get(split) for known in run.silos.values()]
        if None in sizes:
            return "the sizes of some sites are hidden or were not reported"
        total = sum(size or 0 for size in sizes)
        parts.append(f"{total:,} {name} {run.noun(total)}")
    return ", ".join(parts)


def _measures(run: Shown) -> str:
    """Name the measures of performance of the run's task."""
    if run.task == CLASSIFICATION:
        return "accuracy, balanced accuracy, AUC, calibration error with 95 % intervals"
    return task_class(run.task).measured_words


def _imbalance(run: Shown) -> Item:
    """Build item 13 of TRIPOD+AI, on class imbalance.

    The first of these rules that applies decides the item:

    1. For regression, the item says that the outcome is a number and has no classes.
    2. For any other task except classification, the item has no answer unless the trust level is
       ``server``, because no counts leave the sites.
    3. In all other cases, the answer says where the sizes of the classes are shown. At trust level
       ``nobody``, it adds that they have noise. A person must add how the imbalance was handled.
    """
    answer, place, missing = _GROUPS[run.task], "Sites", "what was done about it"
    if run.task == REGRESSION:
        return Item("13", "class imbalance", answer, "", "")
    if run.task == MULTI_LABEL:
        place = "fedsilo report --for clinic"
    if run.task != CLASSIFICATION and run.trust != SERVER:
        return Item("13", "class imbalance")  # no count has left
    if run.trust == NOBODY:
        answer += ", with the hospitals' noise"
    return Item("13", "class imbalance", answer, place, missing)


def _split_text(run: Shown) -> str:
    common = run.settings.common
    if common.test_folds:
        return f"by folds: number {common.test_fold} of {common.test_folds}"
    return "as the data set or its schema says"


def _availability(run: Shown) -> tuple[str, str, str]:
    """Describe the availability of the data for TRIPOD+AI.

    Returns:
        Three texts: the answer, the place where a reader finds more, and the work for a person.
        Public data are answered with their licence. Made-up data are answered as made up. Any other
        data stay at the hospitals, and only then a person must add something.
    """
    data = data_set(str(run.summary["dataset"]))
    if data.licence:
        return f"public: {data.licence.licence}", "fedsilo datasets", ""
    if data.origin == "made-up":
        return "made up by fedsilo from the seed", "", ""
    return "they stay at the hospitals", "", "who may ask for them, and how"
