"""Point a contract test at your own plugin, with the flag that train.py takes::

    pytest tests/plugin_contracts --dynamic-sampling-filter-path my_filters.py:keep_hard_prompts

Without the flag the test runs on an example. ``--reward-key`` and ``--group-rm`` go with ``--custom-rm-path`` as they
do in train.py; ``--rm-label``, ``--rm-metadata`` (JSON) and ``--rm-response`` (one that deserves a high reward) are
what it is asked about.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout.conftest import (  # noqa: F401
    engine,
    http_engine,
    make_args,
    make_manager,
    model_folder,
    plugin,
    prompt_file,
    tokenizer,
)

Given = Callable[[str], Any]

TRAINING = Path(__file__).parent.parent / "training" / "plugins.py"

EXAMPLES = {
    "--custom-rm-path": plugin("rewards.py:label_in_response"),
    "--custom-generate-function-path": plugin("slime_style.py:generate"),
    "--rollout-function-path": plugin("slime_style.py:wrapped_rollout"),
    "--data-source-path": plugin("sources.py:Hinted"),
    "--dynamic-sampling-filter-path": "slimelite.rollout.filters.check_all",
    "--buffer-filter-path": plugin("sources.py:newest_first"),
    "--rollout-sample-hook-path": plugin("hooks.py:note_rollout"),
    "--rollout-sample-filter-path": plugin("hooks.py:remove_truncated"),
    "--rollout-all-samples-process-path": plugin("hooks.py:count_everything"),
    "--custom-reward-post-process-path": plugin("hooks.py:tenfold"),
    "--custom-rollout-log-function-path": plugin("hooks.py:adds_a_metric"),
    "--custom-eval-rollout-log-function-path": plugin("hooks.py:adds_eval_metric"),
    "--eval-function-path": plugin("hooks.py:fixed_scores"),
    "--custom-loss-function-path": f"{TRAINING}:twice_the_likelihood",
    "--custom-advantage-function-path": f"{TRAINING}:all_ones",
    "--custom-tis-function-path": f"{TRAINING}:tis_as_slime_does",
    "--custom-pg-loss-reducer-function-path": f"{TRAINING}:longest_response_reducer",
}
SETTINGS: dict[str, Any] = {"--reward-key": None, "--rm-label": "42", "--rm-metadata": "{}"}
SETTINGS["--rm-response"] = "I think that the answer is 42."


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("plugin contracts")
    for flag in EXAMPLES:
        group.addoption(flag, metavar="PLUGIN", help="run its contract test on this function")
    for flag in SETTINGS:
        group.addoption(flag, help="what the function of --custom-rm-path is asked about")
    group.addoption("--group-rm", action="store_true", help="--custom-rm-path takes groups")


@pytest.fixture(scope="session")
def given(request: pytest.FixtureRequest) -> Given:
    """What a flag says: a plugin or its example, a setting or its default."""

    def value(flag: str) -> Any:
        # unregistered when this folder was not named on pytest's command line
        return request.config.getoption(flag, default=None) or {**EXAMPLES, **SETTINGS}.get(flag)

    return value
