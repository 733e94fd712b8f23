"""Upload an export to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import HFValidationError, validate_repo_id

from medusa_train.errors import ConfigError, MedusaError
from medusa_train.hub import hub_is_unreachable
from medusa_train.network import check_network


def push(directory: Path, repo: str, *, private: bool) -> str:
    """Upload `directory` as the model repository `repo`; return its URL."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"push_to_hub: {repo}: {error}") from None
    if hub_is_unreachable():
        raise MedusaError(
            f"the hub can't be reached (or HF_HUB_OFFLINE is set); the export is in {directory}"
        )
    check_network()
    api = HfApi()
    try:
        url = api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        # do not upload evaluations of the export, because they contain paths of this machine
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=str(directory),
            repo_type="model",
            ignore_patterns=["eval/*", "compiled/*"],
        )
    # the client raises many unrelated types: no token, no permission, no network
    except Exception as error:
        raise MedusaError(
            f"upload of {directory} to {repo} failed: {error}\nLog in with `hf auth login` (or set"
            " HF_TOKEN) with a token that has write access; the export is complete"
        ) from error
    return str(url)
