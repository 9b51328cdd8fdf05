"""Uploads models to the Hugging Face hub with huggingface_hub. If an upload is impossible, this module reports the
reason before other work starts.

huggingface_hub reads the environment variables ``HF_ENDPOINT`` and ``HF_TOKEN``. Only the functions that use
huggingface_hub import it.
"""

from __future__ import annotations

from pathlib import Path

from slimelite.models.checkpoints import HUB_ID

# files that are not uploaded: incomplete files, slimelite's notes on a merged model, hidden files
IGNORED = ["*.partial", "merged_from.json", ".*"]


def refusal(repo: str) -> str | None:
    """The reason why uploads to ``repo`` are impossible; None if no problem was found. This check does not use the
    network."""
    from huggingface_hub import constants, get_token

    if not HUB_ID.fullmatch(repo):
        return f"{repo!r} is not a repository name of the hub: write ORG/NAME or USER/NAME"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so nothing is uploaded: unset it, or upload later with slimelite push"
    if get_token() is None:
        return "there is no token for the hub: log in with `hf auth login`, or set HF_TOKEN"
    return None


def make_room(repo: str, *, private: bool, create: bool = True) -> None:
    """Create the repository of a model, unless it exists. If ``create`` is False, only ask the hub to which account the
    token belongs.

    Raises:
        ValueError: see `refusal`; also if the hub does not answer, or if the token has no permission to write to the
            repository.
    """
    from huggingface_hub import HfApi

    if (why := refusal(repo)) is not None:
        raise ValueError(why)
    try:
        if create:
            HfApi().create_repo(repo, private=private, exist_ok=True)
        else:
            HfApi().whoami()
    except Exception as error:  # the client, requests and sockets raise errors of different types
        raise ValueError(_reason(repo, error)) from error


def push(path: Path, repo: str, *, private: bool = False, branch: str | None = None, message: str) -> str:
    """Upload a folder or a file as one commit. Returns the address of the repository.

    Raises:
        ValueError: see `make_room`; also if the upload fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not path.exists():
        raise ValueError(f"{path} does not exist: name a folder or a file to upload")
    make_room(repo, private=private)
    disable_progress_bars()
    api = HfApi()
    try:
        if branch is not None:
            api.create_branch(repo, branch=branch, exist_ok=True)
        if path.is_dir():
            api.upload_folder(
                repo_id=repo, folder_path=path, revision=branch, commit_message=message, ignore_patterns=IGNORED
            )
        else:
            api.upload_file(
                repo_id=repo, path_or_fileobj=path, path_in_repo=path.name, revision=branch, commit_message=message
            )
    except Exception as error:
        raise ValueError(_reason(repo, error)) from error
    return f"{api.endpoint}/{repo}"


def _reason(repo: str, error: Exception) -> str:
    """One line about an error of huggingface_hub: the server's message, or why the server was not reached."""
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", None)
    reply = " ".join(str(getattr(error, "server_message", None) or error).split())[:200]
    if status == 401:
        return (
            f"the hub at {constants.ENDPOINT} does not accept the token: log in again with `hf auth login`, or set "
            "another HF_TOKEN"
        )
    if status == 403:
        return (
            f"the token has no permission to write to {repo} ({reply}): use a token with write permission, or "
            "another name"
        )
    if status is not None:
        return f"the hub at {constants.ENDPOINT} answered {status} for {repo}: {reply}"
    return f"the hub at {constants.ENDPOINT} cannot be reached ({type(error).__name__}: {reply})"
