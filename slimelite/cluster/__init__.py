"""Starts a run's workers in this process or in Ray actors. Returns one handle for all workers."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from slimelite.arguments import Args
from slimelite.base import trace
from slimelite.base.heap import loading
from slimelite.cluster.cluster import Cluster
from slimelite.cluster.remote import ClusterError, Progress, with_memory

__all__ = ["Cluster", "ClusterError", "launch"]


@contextmanager
def launch(args: Args, progress: Progress = lambda _done, _total, _note: None) -> Iterator[Cluster]:
    """Start the workers for ``args`` and yield the cluster. When the block ends, all workers are stopped.

    During the start, ``progress`` is called with three values: the number of workers that are ready, the number of all
    workers, and a text such as "waiting for Ray".

    Raises:
        ClusterError: the machines have too few devices for the job.
        ValueError: a worker cannot be created with its arguments.
    """
    if args.model_config is not None:
        from slimelite.data.tokenizer import write_new_model

        # if the architecture flags define a new model, the workers load this folder, which has no weights
        folder = Path(args.run_dir).absolute() / "new_model"
        write_new_model(folder, args.model_config, str(args.tokenizer))
        args = replace(args, hf_checkpoint=str(folder))
    if args.trace:
        trace.begin(Path(args.run_dir).absolute() / trace.FILE, driver=True)
    try:
        with ExitStack() as stack:
            with loading():
                if args.job.local:
                    from slimelite.cluster.workers import local_workers as workers
                elif args.launcher == "torchrun":
                    from slimelite.cluster.torchrun import torchrun_workers as workers
                else:
                    if "RAY_ADDRESS" not in os.environ:
                        _close_ray_to_others()
                    from slimelite.cluster.ray_cluster import ray_workers as workers
                cluster = stack.enter_context(Cluster(args, *stack.enter_context(workers(args, progress))))
                cluster.complete_args()
            yield cluster
    except (RuntimeError, MemoryError, OSError) as error:
        raise with_memory(error, args)  # noqa: B904 - the raised error is the same error, or has it as its cause
    finally:
        trace.finish()


def _close_ray_to_others() -> None:
    """Set up the Ray that this process starts. This Ray listens only on this machine, and requires a secret token.

    Ray reads these variables when it is imported. The name of the first variable mentions Windows and macOS. On these
    systems, Ray's nodes have only the address 127.0.0.1 by default. Ray's processes get the token from their
    environment variables, which other users cannot read. Without a token, Ray would write a token to ~/.ray/auth_token,
    and other users may be able to read this file.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if "ray" in sys.modules:
        os.environ.pop("RAY_AUTH_MODE", None)  # `ray.init` sets it again when it turns tokens on
    else:
        os.environ["RAY_AUTH_MODE"] = "token"
