#!/bin/sh
# The whole suite. With arguments, one pytest that gets them. Without: what needs the processor runs in two lanes beside each
# other; then what watches the clock and mostly waits, alone, in four. The output of a lane is shown when all of its stage
# have ended.
set -u

cd "$(dirname "$0")/.."
# Hundreds of processes are started: without byte code on the disk each of them compiles the whole package anew.
unset PYTHONDONTWRITEBYTECODE

if [ "$#" -gt 0 ]; then
    exec .venv/bin/python -m pytest -m "not slow" tests "$@"
fi

logs=$(mktemp -d)
lanes=
number=0
show() { # what each lane came to, in the order in which they were begun
    for lane in $lanes; do
        wait "${lane%:*}" || failed=1
        cat "$logs/${lane#*:}"
    done
    lanes=
}
stop() {
    for lane in $lanes; do
        kill "${lane%:*}" 2>/dev/null
    done
    show
    rm -rf "$logs"
}
failed=0
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

begin() { # a lane
    number=$((number + 1))
    # The process that a signal must reach is pytest itself.
    .venv/bin/python -m pytest -m "not slow" -p no:cacheprovider "$@" >"$logs/$number" 2>&1 &
    lanes="$lanes $!:$number"
}

# ignoring PATH... : the rest of the suite
ignoring() {
    for path; do
        printf -- '--ignore=%s ' "$path"
    done
}

# The lanes of a stage take about the same time; a new file is in the last of the stage that its folder belongs to.
quick="tests/unit tests/architecture tests/types tests/sim tests/contract tests/api tests/cli/test_s*.py
    tests/cli/test_demo_mesh.py"
timed="tests/cases tests/chaos tests/mesh tests/net tests/stealing"
deaths="tests/cases/test_crowd.py tests/cases/test_deaths.py tests/cases/test_keys.py tests/cases/test_outages.py
    tests/cases/test_redis_cases.py tests/cases/test_replicas.py tests/cases/test_shutdown.py tests/cases/test_timeouts.py"

# The lists are to be split into words.
# shellcheck disable=SC2046,SC2086
{
    begin $quick
    begin tests $(ignoring $quick $timed)
    show

    begin $deaths
    begin tests/mesh tests/chaos
    begin tests/stealing
    begin tests/cases $(ignoring $deaths)
    show
}
[ "$failed" = 0 ]
