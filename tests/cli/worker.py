"""A stand-in for `medusa_train.cli.train` in the processes that a launcher starts.

It notes its arguments and the signals that it gets in the directory NOTES, and ends as ENDING_RANK
says: by an exit code, or by a signal to itself. PARENT_GETS are signals that rank 0 sends to the
launcher.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from medusa_train.cli.worker import stop_with_launcher


def main() -> None:
    notes = Path(os.environ["NOTES"])
    rank = os.environ["RANK"]

    def save(number: int, frame: FrameType | None) -> None:
        time.sleep(0.5)
        (notes / f"saved-{rank}").write_text(signal.Signals(number).name)
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, save)
    stop_with_launcher()
    (notes / f"words-{rank}").write_text(json.dumps(sys.argv[1:]))
    while len(list(notes.glob("words-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    ending = os.environ.get(f"ENDING_{rank}", "")
    if ending.isdecimal():
        sys.exit(int(ending))
    if ending:
        os.kill(os.getpid(), signal.Signals[ending])
    if rank == "0":
        for name in os.environ.get("PARENT_GETS", "").split():
            os.kill(os.getppid(), signal.Signals[name])
            time.sleep(0.1)
    time.sleep(60)


if __name__ == "__main__":
    main()
