"""An embedded engine as a server that speaks SGLang's /generate, such as a teacher for on-policy distillation.

python -m slimelite.engines.serve MODEL --port 30010
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from slimelite.engines.embedded import EmbeddedEngine
from slimelite.model_files import has_weights


def main(argv: list[str] | None = None) -> None:
    """Load the model, print the base URL, serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="Hugging Face folder or hub id")
    parser.add_argument("--host", default="127.0.0.1", help="address of this machine to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args(argv)
    if not has_weights(args.model):
        print(f"warning: {args.model} holds no weights: random ones answer", file=sys.stderr)
    asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> None:
    engine = EmbeddedEngine(args.model, device=args.device, http_host=args.host, http_port=args.port)
    try:
        print(f"{args.model} at {await engine.start_http()}", flush=True)
        await asyncio.Event().wait()
    finally:
        await engine.close()


if __name__ == "__main__":
    main()
