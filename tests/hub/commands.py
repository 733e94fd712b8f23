"""Commands in processes of their own that are forked from one that has imported everything: a
second each, not ten.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

_MODULES = {"medusa-train": "train", "medusa-selfdistill": "selfdistill", "medusa-eval": "evaluate"}


class Commands:
    """Runs commands in the directory `place`, with variables that libraries read once (HF_ENDPOINT,
    HF_HOME).
    """

    def __init__(self, place: Path, environment: Mapping[str, str]) -> None:
        self.place = place
        self._environment = {**os.environ, **environment}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            [sys.executable, __file__], cwd=place, env=self._environment, text=True, **pipes
        )

    def run(self, *words: str, code: int = 0) -> tuple[float, str]:
        """Run `medusa-train`, `configs/tiny_m1.yaml`, for instance; return the seconds and what it
        printed.

        Raises:
            AssertionError: the command ended with another exit code than `code`.
        """
        started = time.perf_counter()
        done = self.complete(words, self._environment)
        output = done.stdout + done.stderr
        assert done.returncode == code, f"{' '.join(words)}\n{output}"
        return time.perf_counter() - started, output

    def complete(
        self, words: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with other variables, of which libraries may have read some; return its exit
        code and what it printed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as directory:
            printed = [f"{directory}/stdout", f"{directory}/stderr"]
            self._process.stdin.write(json.dumps([words, dict(environment), printed]) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            texts = [Path(path).read_text(encoding="utf-8") for path in printed]
        return subprocess.CompletedProcess(words, code, *texts)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _serve() -> None:
    for name in (
        "cli.evaluate",
        "cli.export",
        "cli.selfdistill",
        "cli.train",
        "evaluation.run_bench",
        "training.stages",
    ):
        import_module(f"medusa_train.{name}")
    # steps over trees are timed once: which tree is chosen is tested elsewhere
    choosing = import_module("medusa_train.tree_search.choose_tree")
    choosing.THOROUGH = choosing.QUICK = choosing.Effort(rounds=1, steps=2)
    gc.freeze()  # a collection need not look at what is imported
    atexit.register(gc.unfreeze)  # or libraries report objects that are left at the end
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words, environment, printed = json.loads(line)
        child = os.fork()
        if child == 0:
            for handle, path in enumerate(printed, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), handle)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = words
            import_module(f"medusa_train.cli.{_MODULES.get(words[0], 'export')}").app()
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    _serve()
