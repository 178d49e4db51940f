"""Arguments of commands and of the Python API, checked before any work."""

from pathlib import Path

import pytest

from fedsilo.core.arguments import path_of, refuse_target, several, texts_of
from fedsilo.core.errors import SettingError

CIRCULAR: list[object] = []
CIRCULAR.append(CIRCULAR)


def test_a_target_is_free_and_its_folder_is_made(tmp_path: Path) -> None:
    refuse_target(tmp_path / "new" / "file.pt2", "another --out")
    assert (tmp_path / "new").is_dir()
    with pytest.raises(SettingError, match="already exists: remove it, or give another --out"):
        refuse_target(tmp_path / "new", "another --out")


def test_a_target_below_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SettingError, match=r"cannot be written .*: give another --out"):
        refuse_target(tmp_path / "file" / "below" / "page.html", "another --out")


def test_arguments_become_lists_texts_and_paths() -> None:
    assert several(None) == []
    assert several("run") == ["run"]
    assert several(("a", "b")) == ["a", "b"]
    assert texts_of({"rounds": 2, "network.name": "mlp"}) == ("rounds=2", 'network.name="mlp"')
    assert path_of(None) is None
    wrong: object = 3
    with pytest.raises(SettingError):
        path_of(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (5, "5"),
        (["rounds=2", 5], "5"),
        (Path("settings.toml"), "settings.toml"),
        ({"rounds": 2, "network.name": object()}, "'network.name'"),
        ({"split.silos": {1, 2}}, "'split.silos'"),
        ({"track.tags": CIRCULAR}, "'track.tags'"),
    ],
)
def test_settings_that_are_no_text_and_no_json_are_refused_in_one_line(
    settings: object, named: str
) -> None:
    with pytest.raises(SettingError, match=r"give settings as \{'rounds': 5\}") as refused:
        texts_of(settings)  # type: ignore[arg-type]
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
