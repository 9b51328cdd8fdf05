"""What the plugins of training raise is one error, which names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import one_rank, random_table, save_tiny_model, tiny_args

from slimelite.base.guard import PluginError

PLUGIN = """
import sys

def fail(*args, **named):
    return {}["loss"]

def leave(*args, **named):
    sys.exit(0)

def leave_later(*args):
    return leave
"""


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--custom-loss-function-path", {"loss_type": "custom_loss"}),
        ("--custom-advantage-function-path", {}),
        ("--custom-tis-function-path", {"correction": "custom"}),
        ("--custom-pg-loss-reducer-function-path", {}),
    ],
)
def test_the_error_names_the_plugin(tmp_path: Path, flag: str, given: dict[str, Any]) -> None:
    model, file = save_tiny_model(tmp_path / "model"), tmp_path / "plugin.py"
    file.write_text(PLUGIN)
    wrong = {"fail": r"raised KeyError: 'loss'", "leave": r"called sys\.exit\(0\)"}
    if "reducer" in flag:
        wrong["leave_later"] = wrong["leave"]
    for function, what in wrong.items():
        args = tiny_args(model, **given, **{flag[2:].replace("-", "_"): f"{file}:{function}"})
        message = rf"^{flag} {file}:{function} {what} \({file}, line"
        with one_rank(args) as trainer, pytest.raises(PluginError, match=message):
            trainer.train(0, random_table())
