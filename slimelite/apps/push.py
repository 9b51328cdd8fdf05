"""``slimelite push``: upload a model, an adapter or a GGUF file to the Hugging Face hub."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from slimelite.apps.runnable import resolve_model
from slimelite.arguments.training import ADAPTER_CONFIG
from slimelite.models.hub import push, refusal

EXAMPLES = """examples:
  slimelite push runs/a me/my-model              the newest model or adapter that --save-hf of the run wrote
  slimelite push out/model me/my-model --private
  slimelite push model.gguf me/my-model          adds one file to the repository
The token comes from `hf auth login` or HF_TOKEN and needs write permission.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: there is no such model, or it cannot be uploaded.
    """
    parser = argparse.ArgumentParser(
        prog="slimelite push",
        description="Upload a model folder, an adapter, the newest model of a run, or a file to the Hugging Face hub.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="FOLDER|RUN|FILE", help="what to upload")
    parser.add_argument("repo", metavar="ORG/NAME", help="the repository; it is created if it does not exist")
    parser.add_argument("--private", action="store_true", help="if the repository is new, make it private")
    parser.add_argument("--branch", help="the branch; it is created if it does not exist (default: main)")
    parser.add_argument("--message", help="message of the commit (default: Upload NAME with slimelite)")
    args = parser.parse_args(argv)
    if (why := refusal(args.repo)) is not None:
        raise ValueError(why)
    path = Path(args.what)
    if not path.is_file():
        path = _model(args.what)
    message = args.message or f"Upload {path.resolve().name} with slimelite"
    print(push(path, args.repo, private=args.private, branch=args.branch, message=message))
    return 0


def _model(what: str) -> Path:
    """The folder of a model or adapter. For a run, it is the newest model or adapter of the run."""
    if not Path(what).exists():
        raise ValueError(f"{what}: no such folder or file")
    path = Path(resolve_model(what).path)
    if not any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ValueError(
            f"{path} is not a model folder: give a folder that --save-hf wrote; a checkpoint of --save is only for "
            "resuming"
        )
    return path
