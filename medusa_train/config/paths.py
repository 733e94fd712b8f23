"""Where names in a configuration lead to on disk. Knows no configuration class."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
#: The directory that holds `configs/` and `data/`: the parent of the package, or in a wheel `shipped/` inside it.
PROJECT_ROOT = next(
    (root for root in (_PACKAGE.parent, _PACKAGE / "shipped") if (root / "configs" / "tiny_m1.yaml").is_file()),
    _PACKAGE.parent,
)


def looks_like_path(name: str) -> bool:
    """Whether a name is none that the hub could know, `NAME` or `OWNER/NAME`: then it is a path, perhaps mistyped."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or len(Path(name).parts) > 2


def resolve_path(name: str | Path) -> Path | None:
    """Find the file or directory `name`: as given (from the working directory), else below the project root.

    So `configs/tiny_m1.yaml` and `data/tiny` work from every directory. None where neither exists; a model
    name of the hub is such a case.
    """
    given = Path(name).expanduser()
    candidates = [given] if given.is_absolute() else [given, PROJECT_ROOT / given]
    return next((path for path in candidates if path.exists()), None)
