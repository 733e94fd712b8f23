"""Commands in processes of their own that are forked from one that has imported everything: a second each, not ten.

`Commands` starts that process, with the variables that libraries read once (HF_ENDPOINT, HF_HOME).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finished:
    """A command that has ended: its exit code, wall time, and what it printed (stdout and stderr)."""

    code: int
    seconds: float
    output: str


class Commands:
    """Runs commands in the directory `place`."""

    def __init__(self, place: Path, environment: Mapping[str, str]) -> None:
        self.place = place
        self._output = place / "output.txt"
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._output)],
            cwd=place,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> Finished:
        """Run `medusa-train`, `configs/tiny_m1.yaml`, for instance; raise AssertionError unless it succeeds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        code, seconds = json.loads(self._process.stdout.readline())
        finished = Finished(code, seconds, self._output.read_text(encoding="utf-8"))
        assert finished.code == 0, f"{' '.join(words)}\n{finished.output}"
        return finished

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _serve(output: str) -> None:
    import medusa_train.cli.entry as entry
    import medusa_train.cli.evaluate
    import medusa_train.cli.export
    import medusa_train.cli.selfdistill
    import medusa_train.cli.train
    import medusa_train.evaluation.run
    import medusa_train.training.run  # noqa: F401

    names = {"medusa-train": "train", "medusa-selfdistill": "selfdistill", "medusa-eval": "evaluate"}
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
            getattr(entry, names.get(words[0], "export"))()
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, time.perf_counter() - started]), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
