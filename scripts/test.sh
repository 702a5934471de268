#!/bin/sh
# The whole suite. With arguments, one pytest that gets them. Without: what needs the processor runs in two halves beside each
# other; then the cases, which watch the clock and mostly wait, alone and in two groups beside each other. The output of the
# first of two is shown when the second has ended.
set -u

cd "$(dirname "$0")/.."
# Hundreds of processes are started: without byte code on the disk each of them compiles the whole package anew.
unset PYTHONDONTWRITEBYTECODE

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
    if [ -n "$first" ]; then
        kill "$first" 2>/dev/null
        wait "$first"
        cat "$log"
    fi
    rm -f "$log"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

begin() { # the first of two
    # Not `suite`: the process that a signal must reach is pytest itself.
    .venv/bin/python -m pytest -m "not slow" -p no:cacheprovider "$@" >"$log" 2>&1 &
    first=$!
}

end() { # what the first came to, after the second
    wait "$first"
    code=$?
    first=
    cat "$log"
    return "$code"
}

# ignoring FOLDER... : the rest of the suite
ignoring() {
    for path; do
        printf -- '--ignore=%s ' "$path"
    done
}

quick="tests/unit tests/architecture tests/types tests/contract tests/api tests/cli/test_s*.py"
timed="tests/cases tests/chaos"
# The two groups take about the same time; a new file is in the second one.
deaths="tests/cases/test_crowd.py tests/cases/test_deaths.py tests/cases/test_keys.py tests/cases/test_outages.py
    tests/cases/test_redis_cases.py tests/cases/test_replicas.py tests/cases/test_shutdown.py tests/cases/test_timeouts.py"

# The lists are to be split into words.
# shellcheck disable=SC2046,SC2086
{
    begin $quick
    suite tests $(ignoring $quick $timed)
    second_code=$?
    end
    first_code=$?

    begin $deaths
    suite $(ls -d $timed 2>/dev/null) $(ignoring $deaths)
    cases_code=$?
    end
    deaths_code=$?
}
echo "unit, architecture, types, contract, api and a part of cli: $first_code; service, cli: $second_code;" \
    "cases: $cases_code and $deaths_code (0 is good)"
[ "$first_code$second_code$cases_code$deaths_code" = 0000 ]
