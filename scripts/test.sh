#!/bin/sh
# The whole suite. With arguments, one pytest that gets them. Without: what needs the processor runs in two halves beside each
# other, then the cases and short chaos runs alone, which watch the clock. The output of the first half is shown when the
# second has ended.
set -u

cd "$(dirname "$0")/.."
suite() {
    .venv/bin/python -m pytest -m "not slow" "$@"
}

if [ "$#" -gt 0 ]; then
    suite tests "$@"
    exit
fi

log=$(mktemp)
first=
stop() {
    [ -z "$first" ] || kill "$first" 2>/dev/null
    rm -f "$log"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

.venv/bin/python -m pytest -m "not slow" -p no:cacheprovider \
    tests/unit tests/architecture tests/types tests/contract tests/api >"$log" 2>&1 &
first=$!
suite tests --ignore=tests/unit --ignore=tests/architecture --ignore=tests/types --ignore=tests/contract \
    --ignore=tests/api --ignore=tests/cases --ignore=tests/chaos
second_code=$?
wait "$first"
first_code=$?
first=
cat "$log"
suite tests/cases tests/chaos
cases_code=$?
echo "unit, architecture, types, contract, api: $first_code; service, cli: $second_code; cases, chaos: $cases_code (0 is good)"
[ "$first_code$second_code$cases_code" = 000 ]
