#!/usr/bin/env bash
# Run tests with the newest transformers and peft that pyproject.toml allows. Other packages are those of .venv.
#   bash scripts/test_newest.sh                      the tests marked newest; scripts/test.sh ends with it
#   bash scripts/test_newest.sh all                  all that need only .venv, without those of SGLang, which pins
#                                                    its own transformers, and those marked pinned
#   TORCH=2.14.1 bash scripts/test_newest.sh all     with another torch too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PINNED=$(realpath "${VENV:-.venv}")
NEWEST=${NEWEST:-$PINNED-newest}
[[ -x "$NEWEST/bin/python" ]] || "$PINNED/bin/python" -m venv "$NEWEST"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# .venv's packages come last on the path, so that only newer ones are installed
echo "import site; site.addsitedir('$(site "$PINNED")')" >"$(site "$NEWEST")/zz_pinned.pth"

transformers=$(sed -n 's/^ *"\(transformers[^"]*\)",$/\1/p' pyproject.toml)
torch=${TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}
"$NEWEST/bin/python" -m pip --disable-pip-version-check --quiet install --no-warn-conflicts --upgrade \
    "$transformers" peft ${TORCH:+"torch==$torch"}
# the commands of what was not installed anew, with this python
grep -lI '^#!.*/python' "$PINNED"/bin/* | while read -r command; do
    copy="$NEWEST/bin/${command##*/}"
    [[ "$copy" -nt "$command" ]] || { sed "1s|.*|#!$NEWEST/bin/python|" "$command" >"$copy" && chmod +x "$copy"; }
done
# programs that are not written in Python, such as ruff, are those of .venv
export PATH="$NEWEST/bin:$PINNED/bin:$PATH" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python - "$torch" <<'EOF'
import sys
import huggingface_hub, peft, tokenizers, torch, transformers

for package in (torch, transformers, peft, tokenizers, huggingface_hub):
    print(f"{package.__name__} {package.__version__} of {package.__path__[0]}")
if torch.__version__.split("+")[0] != sys.argv[1]:
    sys.exit(f"torch {sys.argv[1]} is not what is imported")
if not transformers.__file__.startswith(sys.prefix):
    print("The newest transformers is the pinned one: these tests say nothing new.")
EOF
elsewhere="not sglang and not vllm and not browser and not bwrap and not podman and not docker and not hub and not slow"
marked=(-m "newest and $elsewhere")
if [[ "${1:-}" == all ]]; then
    marked=(-m "not pinned and $elsewhere")
    shift
elif [[ $# -eq 0 ]]; then
    mapfile -t files < <(grep -rlF --include='*.py' pytest.mark.newest tests) # no others are imported, in each process
    set -- "${files[@]}"
fi
exec python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "${marked[@]}" "$@"
