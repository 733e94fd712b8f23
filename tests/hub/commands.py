"""Commands in processes of their own that are forked from one that has imported everything: a
second each, not ten.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

_MODULES = {"medusa-train": "train", "medusa-selfdistill": "selfdistill", "medusa-eval": "evaluate"}


class Commands:
    """Runs commands in the directory `place`, with variables that libraries read once (HF_ENDPOINT,
    HF_HOME).
    """

    def __init__(self, place: Path, environment: Mapping[str, str]) -> None:
        self.place = place
        self._output = place / "output.txt"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, __file__, str(self._output)]
        self._process = subprocess.Popen(
            command, cwd=place, env=os.environ | environment, text=True, **pipes
        )

    def run(self, *words: str, code: int = 0) -> tuple[float, str]:
        """Run `medusa-train`, `configs/tiny_m1.yaml`, for instance; return the seconds and what it
        printed.

        Raises:
            AssertionError: the command ended with another exit code than `code`.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        ended, seconds = json.loads(self._process.stdout.readline())
        output = self._output.read_text(encoding="utf-8")
        assert ended == code, f"{' '.join(words)}\n{output}"
        return seconds, output

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _serve(output: str) -> None:
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
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        words = json.loads(line)
        started = time.perf_counter()
        child = os.fork()
        if child == 0:
            with open(output, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.argv = words
            import_module(f"medusa_train.cli.{_MODULES.get(words[0], 'export')}").app()
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, time.perf_counter() - started]), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
