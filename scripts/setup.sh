#!/bin/sh
# Makes .venv beside pyproject.toml and installs the project with its tools. Safe to repeat: it does
# nothing when neither the place nor pyproject.toml changed since the last success.
# FLUXMESH_PYTHON=/path/to/python picks the interpreter.
set -eu

cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/.setup-stamp
log=$(mktemp)
trap 'rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

speaker=setup
. scripts/common.sh

# An interpreter is asked, never judged by its name: a version manager's shim may exist and not run.
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
makes_venvs() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

candidates() { printf '%s\n' ${FLUXMESH_PYTHON:+"$FLUXMESH_PYTHON"} python3.13 python3.12 python3.11 python3; }

# Prints the first recent interpreter for which the check "$1" holds.
find_python() {
    for name in $(candidates); do
        if recent "$name" && "$1" "$name"; then
            command -v "$name"
            return 0
        fi
    done
    return 1
}

# Debian keeps ensurepip in a package of its own, one for each Python version.
install_venv_module() {
    versioned=python$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv
    command -v apt-get >/dev/null 2>&1 || return 1
    say "$1 lacks ensurepip; installing python3-venv"
    # The first try may only lack a fresh package list, so what it says is not shown.
    apt_install python3-venv >"$log" 2>&1 && makes_venvs "$1" && return 0
    quietly as_root apt-get update || return 1
    { quietly apt_install python3-venv && makes_venvs "$1"; } || quietly apt_install "$versioned" || return 1
    makes_venvs "$1"
}

choose_python() {
    find_python makes_venvs && return 0
    python=$(find_python true) || die "Python 3.11 or newer is needed and none was found on PATH;" \
        "install one (Debian, Ubuntu: apt-get install python3 python3-venv) and run this again"
    install_venv_module "$python" || die "$python cannot make virtual environments;" \
        "install its venv module (Debian, Ubuntu: apt-get install python3-venv) and run this again"
    printf '%s\n' "$python"
}

# pip wants a cache below HOME; without a usable HOME it is told to keep none.
if [ -z "${HOME:-}" ] || [ ! -d "$HOME" ] || [ ! -w "$HOME" ]; then
    [ -n "${PIP_CACHE_DIR:-}" ] || export PIP_NO_CACHE_DIR=1
fi

# Of two set-ups of one checkout at once the second waits, and finds it done: both would install over each other.
if command -v flock >/dev/null 2>&1; then
    exec 9<.
    flock 9
fi

wanted="$(pwd) $(cksum <pyproject.toml)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && recent "$venv/bin/python"; then
    exit 0
fi

# A .venv that is broken, too old or moved from elsewhere is made anew: its scripts name the old place.
case "$(cat "$stamp" 2>/dev/null)" in
    "" | "$(pwd) "*) moved=no ;;
    *) moved=yes ;;
esac
if [ "$moved" = yes ] || ! recent "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(choose_python)
    say "making $venv with $python"
    rm -rf "$venv"
    quietly "$python" -m venv "$venv" || die "could not make $venv"
fi

say "installing the project and its tools"
quietly "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet -e '.[dev]' ||
    die "pip could not install the project; its message stands above"
printf '%s\n' "$wanted" >"$stamp"
