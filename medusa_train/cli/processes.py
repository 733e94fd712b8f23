"""`medusa-train` in several processes: who starts them, who speaks, how all end together. Knows no keys, no torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from medusa_train.cli.common import print_error, split_arguments
from medusa_train.cli.launch import launch
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.training.inputs import check_inputs
from medusa_train.training.ranks import Place
from medusa_train.training.run_dir import check_output_dir


def start_all(
    arguments: Sequence[str], flags: Mapping[str, object], num_gpus: int | None, hostfile: Path | None
) -> int:
    """Start the command in several processes, once its configuration is known to be good; return the exit code."""
    path, overrides = split_arguments(arguments)
    cfg = load_config(TrainConfig, path, overrides, flags=flags)
    check_output_dir(cfg)
    check_inputs(cfg)
    again = [f"{name}={json.dumps(value)}" for name, value in flags.items() if value is not None]
    return launch([*arguments, *again], num_gpus, hostfile)


def follow(place: Place, arguments: Sequence[str], flags: Mapping[str, object]) -> int:
    """Be any process but the first: silent, unless it fails where the others did not."""
    path, overrides = split_arguments(arguments)
    try:
        cfg = load_config(TrainConfig, path, overrides, flags=flags)
    except ConfigError as error:
        if place.local_rank == 0:  # another machine, which may hold another file
            raise
        return error.exit_code
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    nowhere = Console(quiet=True)
    return train_with_others(place, cfg, nowhere, nowhere)


def train_with_others(place: Place, cfg: TrainConfig, console: Console, results: Console) -> int:
    """Meet the other processes and train with them; return the exit code.

    One process's failure ends all: it says what was wrong; the others end because they can't go on without it.
    """
    from medusa_train.training.distributed import PeerError, join, lost_peer

    try:
        world = join(place)
        from medusa_train.training.run import train

        code = train(cfg, console, results, world)
        world.leave()
        if code:
            _end_now(code)
        return code
    except PeerError as error:
        return error.exit_code
    except MedusaError as error:
        if place.rank == 0:
            raise
        print_error(f"process {place.rank} of {place.size}: {error}")
        return error.exit_code
    except Exception as error:
        if not lost_peer(error):
            raise
        if place.rank == 0:
            print_error("another process has ended, and training can't go on without it")
        return 1


def _end_now(code: int) -> NoReturn:
    """End a stopped process, which has saved and said all, with the others and not some time after them.

    The launcher kills who is still cleaning up when the first one has gone, and takes that for a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
