"""Stands in for `vllm serve`: `python fake_vllm.py -m vllm... serve MODEL --port P ...`, behaviour
by FAKE_VLLM.

The file `FAKE_VLLM` names holds one word per start: ok, refuse (the heads), slow (never ready), or
die (killed while it is measured, for want of memory). Starts after the last word are ok. Command
lines are appended to the same file's `.log`, and process ids to its `.pids`. With `VLLM_API_KEY` it
answers only requests with that key, else only those without any.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fake_server import FakeServer, Reply, error
from tests.server_bench.servers import BenchServer

REFUSAL = """(APIServer pid=6) WARNING 11-22 14:00:00 [utils.py:1] Errors like `OSError: Too many open files` follow.
(EngineCore pid=7) ERROR 11-22 14:00:00 [core.py:1] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-22 14:00:00 [core.py:1] ValueError: Following weights were not initialized: {'token_map'}
RuntimeError: Engine core initialization failed. See root cause above.
"""


def main() -> None:
    arguments = sys.argv[1:]
    script = Path(os.environ["FAKE_VLLM"])
    words = script.read_text().split()
    with script.with_suffix(".log").open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    child = subprocess.Popen(["sleep", "300"])  # as vLLM's engine, a process of its own
    with script.with_suffix(".pids").open("a") as pids:
        pids.write(f"{os.getpid()} {child.pid}\n")
    started = len(script.with_suffix(".pids").read_text().splitlines())
    behaviour = words[started - 1] if started <= len(words) else "ok"
    if behaviour == "refuse":
        print(REFUSAL + 30 * "nanobind: leaked 1 instances!\n - leaked instance 0x7f10c0a0\n")
        sys.exit(1)
    if behaviour == "slow":
        time.sleep(300)
    heads = "--speculative-config" in arguments
    fake = FakeServer(int(arguments[arguments.index("--port") + 1]))
    server = BenchServer(fake, heads=heads, seconds=0.001 if heads else 0.004, words=4)
    server.models[0]["id"] = "served"
    if behaviour == "die":

        def die(number: int, body: dict[str, Any]) -> Reply:
            if number >= 6:
                print("torch.OutOfMemoryError: out of memory", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return None

        server.script = die
    else:
        key = os.environ.get("VLLM_API_KEY")
        expected = f"Bearer {key}" if key else None

        def locked(number: int, body: dict[str, Any]) -> Reply:
            if fake.authorization[number] != expected:
                return error(401, "Unauthorized")
            return None

        server.script = locked
    fake.serve_forever()


if __name__ == "__main__":
    main()
