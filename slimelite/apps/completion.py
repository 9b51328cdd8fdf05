"""``slimelite completion``: completes commands and flags of ``slimelite`` and ``train.py`` in bash and zsh.

    eval "$(slimelite completion)"          in ~/.bashrc or ~/.zshrc

The shell reads the flags from ``--help`` at the first Tab, so they fit the installed version.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

SCRIPT = r"""
if [[ -n "${ZSH_VERSION:-}" ]]; then autoload -U +X compinit bashcompinit && compinit -u && bashcompinit; fi
_slimelite_flags() { # NAME COMMAND...: the flags in COMMAND's help output; a shell variable with NAME caches them
    local kept="_slimelite_flags_of_$1"; shift
    eval "_slimelite_have=\${$kept:-}"
    if [[ -z "$_slimelite_have" ]]; then
        _slimelite_have="$("$@" 2>/dev/null | grep -oE -- '--[a-z0-9-]+' | sort -u | tr '\n' ' ')"
        eval "$kept=\$_slimelite_have"
    fi
}
_slimelite_train() { # completes `python train.py` and `./train.py`; it runs no other file
    local word="${COMP_WORDS[COMP_CWORD]}" script="" each
    [[ "$word" == -* ]] || return
    for each in "${COMP_WORDS[@]}"; do [[ "$each" == */train.py || "$each" == train.py ]] && script="$each"; done
    [[ -n "$script" ]] && grep -qx "from slimelite.arguments import parse_args" "$script" 2>/dev/null || return
    _slimelite_flags train "PYTHON" -m slimelite.apps.command train --help-all
    COMPREPLY=($(compgen -W "$_slimelite_have" -- "$word"))
}
_slimelite() {
    local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" help=--help
    if [[ "$COMP_CWORD" == 1 ]]; then COMPREPLY=($(compgen -W "COMMANDS" -- "$word")); return; fi
    [[ "$word" == -* && " COMMANDS " == *" $command "* ]] || return
    [[ "$command" == train ]] && help=--help-all
    _slimelite_flags "${command//-/_}" "PYTHON" -m slimelite.apps.command "$command" "$help"
    COMPREPLY=($(compgen -W "$_slimelite_have" -- "$word"))
}
complete -o default -F _slimelite slimelite
complete -o default -F _slimelite_train python python3 train.py ./train.py
"""


def main(argv: Sequence[str]) -> int:
    """Print the script; returns 0."""
    from slimelite.apps.command import COMMANDS

    parser = argparse.ArgumentParser(
        prog="slimelite completion", description='Print completion for bash and zsh: eval "$(slimelite completion)"'
    )
    parser.parse_args(argv)
    print(SCRIPT.strip().replace("COMMANDS", " ".join(COMMANDS)).replace("PYTHON", sys.executable))
    return 0
