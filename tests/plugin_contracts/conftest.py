"""Point a contract test at your own plugin, with the flag that train.py takes::

    pytest tests/plugin_contracts --dynamic-sampling-filter-path my_filters.py:keep_hard_prompts

Without the flag the test runs on an example.
"""

from __future__ import annotations

from collections.abc import Callable

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

Given = Callable[[str], str]

EXAMPLES = {
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
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("plugin contracts")
    for flag in EXAMPLES:
        group.addoption(flag, metavar="PLUGIN", help="run its contract test on this function")


@pytest.fixture
def given(request: pytest.FixtureRequest) -> Given:
    """The plugin that a flag names, or its example."""

    def path(flag: str) -> str:
        # unregistered when this folder was not named on pytest's command line
        return request.config.getoption(flag, default=None) or EXAMPLES[flag]

    return path
