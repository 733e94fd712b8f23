"""Upload an exported directory to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.checkpoint.serialize import read_json
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.hub import hub_is_unreachable


def push(directory: Path, repo: str, *, private: bool, api: Any = None) -> str:
    """Upload `directory` as the model repository `repo`; returns its URL.

    Args:
        directory: an exported directory.
        repo: repository name, OWNER/NAME.
        private: visibility of the repository if it has to be created.
        api: `huggingface_hub.HfApi` or a test double.

    Raises:
        ConfigError: `repo` is not a valid repository name.
        MedusaError: the hub cannot be reached or refuses the upload.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"push_to_hub: {repo}: {error}") from None
    if api is None:
        if hub_is_unreachable():
            raise MedusaError(f"the hub can't be reached (or HF_HUB_OFFLINE is set); the export is in {directory}")
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        url = api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        # evaluations of the export itself lie in it, with paths of this machine
        api.upload_folder(
            repo_id=url.repo_id, folder_path=str(directory), repo_type="model", ignore_patterns=["eval/*"]
        )
    except Exception as error:  # the client raises a dozen unrelated types: no token, no permission, no network
        raise MedusaError(
            f"upload of {directory} to {repo} failed: {error}\n"
            "Log in with `hf auth login` (or set HF_TOKEN) with a token that has write access; the export is complete"
        ) from error
    return str(url)


def local_base_model(directory: Path) -> str | None:
    """Return the local path that config.json names as backbone, which is invalid elsewhere; None if it is no path.

    Raises:
        CheckpointError: config.json is not valid JSON.
    """
    config = directory / "config.json"
    base = read_json(config).get("base_model_name_or_path") if config.is_file() else None
    return base if isinstance(base, str) and Path(base).is_absolute() else None
