# The bash that runs one of slime's scripts reads this. If slime's models/ is missing, `source .../models/qwen3-4B.sh`
# then finds our models/.
source() {
    local file=$1 from to
    shift
    while IFS='=' read -r from to; do
        [[ -n "$from" && "$file" == "$from"/* ]] && file=$to${file#"$from"}
    done <<<"${SLIME_MAP:-}"
    if [[ ! -f "$file" && "$file" == */models/* && -f "$SLIME_ROOT/models/${file##*/}" ]]; then
        echo "run_slime_script: source $file is models/${file##*/} of $SLIME_ROOT" >&2
        file=$SLIME_ROOT/models/${file##*/}
    fi
    builtin source "$file" "$@"
}
