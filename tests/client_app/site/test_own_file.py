from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedsilo.client_app.site.own_file import secret_seed
from fedsilo.core.errors import CheckpointError
from tests.support.errors import refuses


def test_the_seed_is_drawn_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    first = secret_seed(tmp_path / "own")
    assert secret_seed(tmp_path / "own") == first
    assert (tmp_path / "own" / "seed").stat().st_mode & 0o777 == 0o600
    assert secret_seed(tmp_path / "other") != first
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == [".seed.lock", "seed"]


def test_messages_side_by_side_get_one_seed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(secret_seed, [tmp_path] * 16))) == 1


@pytest.mark.parametrize("text", ["", "x", "-3", "1.5", "true", "\x00"])
def test_a_damaged_seed_is_named_and_its_mend_works(tmp_path: Path, text: str) -> None:
    (tmp_path / "seed").write_text(text)
    with refuses(CheckpointError, "seed"):
        secret_seed(tmp_path)
    (tmp_path / "seed").unlink()
    assert secret_seed(tmp_path) >= 0
