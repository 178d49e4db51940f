"""A column of a table as its schema declares it: kind, levels, statistics, range and words."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from fedsilo.core.files.declarations import FileModel, Text, fault, number
from fedsilo.core.files.text_files import Marks, same_text
from fedsilo.datasets.silo.measures import ColumnWords

_MOST_EDGES = 64


def _in_one_form(levels: list[str]) -> list[str]:
    return list(map(same_text, levels))


def _keys_in_one_form(names: dict[str, str]) -> dict[str, str]:
    return {same_text(level): name for level, name in names.items()}


def _are_rising(numbers: list[float], most: int) -> bool:
    """Tell whether there are at most ``most`` numbers, each above the one before it."""
    return len(numbers) <= most and numbers == sorted(set(numbers))


class Column(FileModel):
    """A column of a table.

    Attributes:
        name: its name.
        kind: 'numeric', 'categorical' or 'ignored'.
        levels: the possible values of a categorical column.
        mean, std: statistics to standardise a numeric column with; both or neither.
        edges: bin edges of its histogram in a survey; without them they follow from mean and std.
        range: lowest and highest possible value of a numeric column, in its ``unit``. ``fedsilo
            predict`` refuses other values; ``TableSchema.out_of_range`` decides about training
            rows.
        unmeasured: values of a numeric column that mean "not measured"; they are imputed, whatever
            the schema's policy.
        indicator: whether to add a feature ``column=unmeasured``: 1 if the value is imputed, else
            0.
        title: a name for people.
        unit: the unit of the numbers.
        level_names: level -> a name for people.
    """

    model_config = ConfigDict(title="a column")

    name: Text
    kind: Literal["numeric", "categorical", "ignored"] = "numeric"
    levels: Annotated[list[Text], AfterValidator(_in_one_form)] = Field(default_factory=list)
    mean: Annotated[float, number(-1e300, 1e300)] | None = None
    std: Annotated[float, number(1e-12, 1e300)] | None = None
    edges: list[Annotated[float, number(-1e300, 1e300)]] = Field(default_factory=list)
    range: list[Annotated[float, number(-1e300, 1e300)]] = Field(default_factory=list)
    unmeasured: Annotated[list[Text], AfterValidator(_in_one_form)] = Field(default_factory=list)
    indicator: bool = False
    title: Text = ""
    unit: Text = ""
    level_names: Annotated[dict[Text, Text], AfterValidator(_keys_in_one_form)] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _consistent(self) -> Column:
        sentence = self._find_fault()
        if sentence:
            raise fault(f"column '{self.name}' {sentence}")
        return self

    def _find_fault(self) -> str:
        """Describe how the column's keys contradict each other and how to correct them.

        Only the first contradiction is described. Without one, the result is ''. The rules are, in
        this order:

        - A categorical column has 'levels', all different. No other column has them.
        - The name of a used column has no '='.
        - A categorical column has at least two levels.
        - 'mean' and 'std' are both given or both missing.
        - Only a numeric column has 'edges', which are at most 64 ascending numbers.
        - Only a numeric column has a 'range', which is two ascending numbers.
        - Only a numeric column has 'unmeasured', 'indicator' or 'unit'.
        - 'level-names' names only declared levels.
        """
        is_numeric = self.kind == "numeric"
        different = len(set(self.levels))
        if (self.kind == "categorical") != bool(self.levels) or different < len(self.levels):
            return (
                f"is {self.kind} with {len(self.levels)} levels, of which {different} differ: a "
                "categorical column, and no other, lists its levels, each once"
            )
        if "=" in self.name and self.kind != "ignored":
            return "has '=' in its name, as levels do: rename it"
        if different == 1:
            return "has only one level: declare it as 'ignored'"
        if (self.mean is None) != (self.std is None):
            return "declares one of 'mean' and 'std': give both or none"
        if self.edges and not (is_numeric and _are_rising(self.edges, _MOST_EDGES)):
            return (
                f"has 'edges', but they must be up to {_MOST_EDGES} rising numbers of a numeric "
                "column: correct them"
            )
        is_pair = len(self.range) == 2 and _are_rising(self.range, 2)
        if self.range and not (is_numeric and is_pair):
            return (
                "has a 'range', but it must be the lowest and the highest possible value of a "
                "numeric column: correct it"
            )
        if not is_numeric and (self.unmeasured or self.indicator):
            return (
                f"is {self.kind}, but has 'unmeasured' or 'indicator', which only numeric columns "
                "have: list its mark of a missing value under the schema's 'missing'"
            )
        if self.unit and not is_numeric:
            return f"is {self.kind}, but has a 'unit', which only numeric columns have: remove it"
        if not set(self.level_names) <= set(self.levels):
            return "has 'level-names', but not all of them name one of its 'levels': correct them"
        return ""

    def unmeasured_marks(self) -> Marks:
        """Return the values that mean "not measured"; numbers match by value, as '0.0' and '0'."""
        return Marks(self.unmeasured)

    def words(self) -> ColumnWords:
        """Return the column's title and level names as they are shown to people.

        Brackets after the title contain the column's name, if it differs from the title, and the
        unit: 'Age (age, years)'. The title of a column without one is its name. A level reads 'name
        (level)'. A level without a name is not in the result.
        """
        title = self.title or self.name
        within = []
        if title != self.name:
            within.append(self.name)
        if self.unit:
            within.append(self.unit)
        if within:
            title = f"{title} ({', '.join(within)})"
        levels = {}
        for level, name in self.level_names.items():
            levels[level] = f"{name} ({level})"
        return ColumnWords(title, levels)

    def range_text(self) -> str:
        """Return the range with its unit, such as '50 to 1500 mg/dl', or '' without a range."""
        if not self.range:
            return ""
        low, high = self.range
        return f"{low:g} to {high:g} {self.unit}".rstrip()

    def survey_edges(self) -> tuple[float, ...]:
        """Return the bin edges of a column's histogram in a survey, a report on the sites' data.

        The result is the declared edges. Without them, it is seven ascending edges: the mean, and
        the mean plus and minus 1, 2 and 3 standard deviations. Without a declared mean and
        deviation, as in a categorical column, it is ().
        """
        if self.edges or self.mean is None or self.std is None:
            return tuple(self.edges)
        # Three standard deviations below the mean, up to three above
        return tuple(self.mean + step * self.std for step in range(-3, 4))
