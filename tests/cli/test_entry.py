import subprocess
import sys

import pytest

from tests.test_wheel import PYPROJECT

SCRIPTS = PYPROJECT["project"]["scripts"]


@pytest.mark.parametrize("command", SCRIPTS)
def test_ctrl_c_during_the_imports_exits_130_with_one_line(command, tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")  # as Ctrl-C does within an import
    module, _, function = SCRIPTS[command].partition(":")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {module} import {function}; {function}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
