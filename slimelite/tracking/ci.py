"""Checks of a run's own metrics that end it with an error: ``--ci-metric-checker-…`` and ``--ci-…-grad-norm``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from slimelite.arguments import DebugArgs
from slimelite.base.files import write_text
from slimelite.base.guard import nearest
from slimelite.models.checkpoints import read_json

# slime's tolerance: runs with another parallel layout must reproduce the recorded gradient norms
GRAD_NORM_TOLERANCE = 0.03


class RunChecks:
    """Collects the values that the checks need during a run.

    A grad-norm file is a JSON object ``{"rollout/step": norm}``; the step counts from 0 within its rollout.
    """

    def __init__(self, args: DebugArgs) -> None:
        self._key, self._threshold = args.ci_metric_checker_key, args.ci_metric_checker_threshold
        self._best: float | None = None
        self._logged: set[str] = set()
        self._save = args.ci_save_grad_norm
        self._norms: dict[str, float] = {}
        self._expected: dict[str, float] | None = None
        if args.ci_load_grad_norm is not None:
            self._expected = read_json(Path(args.ci_load_grad_norm))

    def note(self, metrics: Mapping[str, float]) -> None:
        """Remember the best value of the checked metric, if it is among ``metrics``, and the names of all."""
        self._logged.update(metrics)
        if self._key is not None and self._key in metrics:
            self._best = max(metrics[self._key], -math.inf if self._best is None else self._best)

    def note_grad_norm(self, rollout_id: int, step: int, norm: float) -> None:
        """Record the gradient norm of an optimizer step, and compare it with the one recorded earlier.

        Raises:
            AssertionError: the norm differs by more than 3 %, or the record has no such step.
        """
        name = f"{rollout_id}/{step}"
        if self._save is not None:
            self._norms[name] = norm
            Path(self._save).parent.mkdir(parents=True, exist_ok=True)
            write_text(Path(self._save), json.dumps(self._norms))
        if self._expected is None:
            return
        recorded = self._expected.get(name)
        if recorded is None or not math.isclose(norm, recorded, rel_tol=GRAD_NORM_TOLERANCE):
            raise AssertionError(
                f"--ci-load-grad-norm: step {name} (rollout/step) has the gradient norm {norm:.6g}, and "
                f"{'none' if recorded is None else f'{recorded:.6g}'} was recorded"
            )

    def finish(self) -> None:
        """Check the metric after the last rollout.

        Raises:
            AssertionError: the checked metric was never logged, or never reached its threshold.
        """
        if self._key is None:
            return
        if self._best is None:
            raise AssertionError(
                f"--ci-metric-checker-key {self._key} was never logged{nearest(self._key, self._logged)}"
            )
        if self._best < (self._threshold or 0.0):
            raise AssertionError(
                f"--ci-metric-checker-key {self._key} reached {self._best:g} at most, not {self._threshold}"
            )
