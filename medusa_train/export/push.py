"""An exported directory onto the Hugging Face hub. Knows nothing of what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.checkpoint.serialize import read_json
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.hub import hub_is_out_of_reach


def push(directory: Path, repo: str, *, private: bool, api: Any = None) -> str:
    """Upload `directory` as the model repository `repo`; returns its address.

    Args:
        private: how a repository is made that is not there yet.
        api: `huggingface_hub.HfApi`, or what stands for it.

    Raises:
        ConfigError: `repo` is no name of the hub. MedusaError: the hub can't be reached, or refuses.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"push_to_hub: {repo}: {error}") from None
    if api is None:
        if hub_is_out_of_reach():
            raise MedusaError(f"the hub can't be reached (or HF_HUB_OFFLINE is set); the export is in {directory}")
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        made = api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        # evaluations of the export itself, which lie in it, are full of this machine's paths
        api.upload_folder(
            repo_id=made.repo_id, folder_path=str(directory), repo_type="model", ignore_patterns=["eval/*"]
        )
    except Exception as error:  # the client raises a dozen unrelated kinds: no token, no right, no network
        raise MedusaError(
            f"the hub did not take {directory} as {repo}: {error}\n"
            "Log in with `hf auth login` (or set HF_TOKEN) with a token that may write; the export itself is whole"
        ) from error
    return str(made)


def named_by_path(directory: Path) -> str | None:
    """The path of this machine by which config.json there names the backbone, of no use elsewhere; None: no path.

    Raises:
        CheckpointError: config.json is no JSON.
    """
    config = directory / "config.json"
    base = read_json(config).get("base_model_name_or_path") if config.is_file() else None
    return base if isinstance(base, str) and Path(base).is_absolute() else None
