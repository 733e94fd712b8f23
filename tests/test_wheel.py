"""What a wheel holds and asks for; building, installing and using one takes minutes and is marked
slow.
"""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from medusa_train.config.paths import PROJECT_ROOT

PYPROJECT = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DATA = re.compile(r"^[^#\n]*\bpath: (data/[^\s#,}]+)", re.M)
COMPLETE = [
    path for name in ("tiny", "smollm2") for path in PROJECT_ROOT.glob(f"configs/{name}_*.yaml")
]
NEEDED = [
    "configs/schema.json",
    "data/bench/smollm2/question.jsonl",
    "data/bench/tiny/question.jsonl",
    "data/bench/tools/question.jsonl",
    "data/seeds/tiny.jsonl",
    "data/tiny/chat_template.jinja",
    "data/tiny/config.json",
    "data/tiny/model.safetensors",
    "data/tiny/tokenizer.json",
    "data/tiny/tokenizer_config.json",
    *(f"configs/{path.name}" for path in COMPLETE),
    *{data for path in COMPLETE for data in DATA.findall(path.read_text(encoding="utf-8"))},
]


def test_what_the_demo_needs_is_package_data() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["medusa_train.shipped"]
    held = {
        str(path.relative_to(PROJECT_ROOT))
        for pattern in patterns
        for path in PROJECT_ROOT.glob(pattern)
    }
    assert set(NEEDED) <= held
    assert not [name for name in held if name.endswith(".py")]
    assert [pattern for pattern in patterns if not any(PROJECT_ROOT.glob(pattern))] == []


def test_templates_next_to_modules_are_package_data() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["package-data"]
    package = PROJECT_ROOT / "medusa_train"
    for path in (*package.rglob("*.jinja"), *package.rglob("*.html"), *package.rglob("*.css")):
        name = ".".join(path.parent.relative_to(PROJECT_ROOT).parts)
        assert path.name in listed.get(name, []), path


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_a_mac_is_not_asked_for_what_it_cannot_have(system: str) -> None:
    wanted = {
        requirement.name
        for text in PYPROJECT["project"]["dependencies"]
        if (requirement := Requirement(text)).marker is None
        or requirement.marker.evaluate({"platform_system": system})
    }
    assert ({"deepspeed", "bitsandbytes"} <= wanted) == (system == "Linux")
    assert {"torch", "transformers", "peft"} <= wanted


@pytest.mark.slow
def test_a_wheel_runs_the_demo_s_commands_from_any_directory(tmp_path: Path) -> None:
    """Built, installed without its dependencies into an empty environment that borrows them, and
    used elsewhere.
    """
    if not (Path(sys.prefix) / "pyvenv.cfg").is_file():
        pytest.skip("needs a virtual environment to borrow the dependencies of")
    wheel = build_wheel(tmp_path)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"medusa_train/shipped/{name}" for name in NEEDED} <= names
    assert not [name for name in names if not name.startswith(("medusa_train/", "medusa_train-"))]
    python = borrowed_environment(tmp_path / "venv")
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(*words: str) -> str:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONSAFEPATH": "1",
        }
        done = subprocess.run(
            [str(python.parent / words[0]), *words[1:]],
            cwd=elsewhere, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    where = run("python", "-c", "import medusa_train.config.paths as p; print(p.PROJECT_ROOT)")
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    train = ["max_steps=2", "calibration_tokens=64", "output_dir=runs/demo", "export=vllm"]
    run("medusa-train", "configs/tiny_m1.yaml", *train)
    assert (elsewhere / "runs" / "demo" / "export" / "vllm" / "model.safetensors").is_file()
    run(
        "medusa-eval",
        "--bench",
        "tiny",
        "--model",
        "runs/demo",
        "limit=1",
        "max_new_tokens=8",
        "exactness=false",
    )
    assert (elsewhere / "runs" / "demo" / "eval" / "tiny" / "report.json").is_file()


def build_wheel(where: Path) -> Path:
    """Build sdist and, from it, the wheel, with the setuptools that is installed."""
    code = (
        "import os, sys, tarfile, setuptools.build_meta as backend\n"
        "target = sys.argv[1]\n"
        "name = backend.build_sdist(target)\n"
        "tarfile.open(os.path.join(target, name)).extractall(os.path.join(target, 'source'))\n"
        "os.chdir(os.path.join(target, 'source', name.removesuffix('.tar.gz')))\n"
        "backend.build_wheel(target)\n"
    )
    copy = where / "project"
    files = subprocess.run(
        ["git", "ls-files"], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in files.splitlines():
        if (PROJECT_ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((PROJECT_ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-c", code, str(where)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=True,
    )
    (wheel,) = where.glob("*.whl")
    return wheel


def borrowed_environment(where: Path) -> Path:
    """An empty environment that finds this one's libraries, but not the project, which is installed
    here by a path.
    """
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", str(where)], check=True)
    python = where / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    # a plain path entry: .pth files in there, such as the project's own, are not read
    (Path(own) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_pins_can_be_installed_on_every_supported_python() -> None:
    pins = (PROJECT_ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for pin in (
        Requirement(line)
        for line in pins
        if "==" in line and ";" not in line and not line.startswith("#")
    ):
        with suppress(PackageNotFoundError):
            needs = metadata(pin.name)["Requires-Python"] or ""
            assert all(SpecifierSet(needs).contains(version) for version in ("3.10.0", "3.13.0")), (
                pin
            )
