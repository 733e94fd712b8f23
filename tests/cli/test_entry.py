import os
import subprocess
import sys

import pytest

from tests.test_wheel import PYPROJECT

SCRIPTS = PYPROJECT["project"]["scripts"]
STARTS = {
    name: ["-c", "from {} import {} as f; f()".format(*entry.split(":"))]
    for name, entry in SCRIPTS.items()
}
MODULES = {
    module: ["-m", f"medusa_train.cli.{module}"]
    for module in ("train", "selfdistill", "evaluate", "export")
}


@pytest.mark.parametrize("start", [*STARTS.values(), *MODULES.values()], ids=[*STARTS, *MODULES])
def test_ctrl_c_during_the_imports_exits_130_with_one_line(start, tmp_path):
    # as Ctrl-C does within an import
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, *start], capture_output=True, text=True, check=False, env=environ
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
