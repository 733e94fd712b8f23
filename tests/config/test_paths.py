"""Names that lead to files, from the working directory or from the project."""

from pathlib import Path

import pytest

from medusa_train.config.paths import PROJECT_ROOT, nearest_path, public_name, resolve_path
from medusa_train.errors import ConfigError


def test_names_are_found_in_the_working_directory_then_below_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_path("configs/tiny_m1.yaml") == PROJECT_ROOT / "configs/tiny_m1.yaml"
    Path("configs").mkdir()
    Path("configs/tiny_m1.yaml").touch()
    assert resolve_path("configs/tiny_m1.yaml") == Path("configs/tiny_m1.yaml")


@pytest.mark.parametrize("name", ["a" * 300, "b/" + "c" * 5000, "a\0b"])
def test_a_name_that_no_file_can_have_does_not_exist(name: str) -> None:
    assert resolve_path(name) is None


def test_the_home_of_an_unknown_user_is_an_error() -> None:
    with pytest.raises(ConfigError, match="~nosuchuser/x: the home of ~nosuchuser is not known"):
        resolve_path("~nosuchuser/x")


def test_a_tilde_within_a_path_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("~x").mkdir()
    assert resolve_path("./~x") == Path("~x")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("data/tinny", "data/tiny"),
        ("models/llama-3", "models/llama-2"),
        ("models/qwen", None),
        ("absent/tiny", None),
        ("tinny", None),
        ("data/a.txt/tiny", None),
    ],
)
def test_a_mistyped_path_is_compared_with_the_names_in_its_directory(
    name: str, nearest: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in ("data/tiny", "data/other", "models/llama-2", "tiny"):
        Path(directory).mkdir(parents=True)
    Path("data/a.txt").touch()
    assert nearest_path(name) == nearest


def test_directories_of_this_machine_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert public_name("owner/name") == "owner/name"
    assert public_name("runs/mine") == "runs/mine"
    assert public_name(str(tmp_path.resolve() / "runs" / "mine")) == "runs/mine"
    assert public_name(str(PROJECT_ROOT / "data" / "tiny")) == "data/tiny"
    assert public_name("/home/me/models/mine") == "mine"
