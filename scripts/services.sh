#!/bin/sh
# Sees to the servers that the tests start for themselves, and to the library that gives a process a wrong clock: only
# the programs are needed, none is left running. Safe to repeat: it does nothing when they are there.
set -eu

cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
speaker=services
. scripts/common.sh

# $1: what to look for, as a command that succeeds if it is there; $2: the package (Debian, Ubuntu); $3: its name in words
see_to() {
    if eval "$1" >/dev/null 2>&1; then
        return 0
    fi
    advice="install it (Debian, Ubuntu: apt-get install $2) and run this again"
    command -v apt-get >/dev/null 2>&1 || die "the tests need $3;" "$advice"
    say "$3 is missing; installing it"
    apt_install "$2" >"$log" 2>&1 || {
        quietly as_root apt-get update && quietly apt_install "$2"
    } || die "$3 could not be installed;" "$advice"
    eval "$1" >/dev/null 2>&1 || die "$3 is not where it was looked for;" "$advice"
}

# RUNLEVEL=1 keeps the package from starting a server of its own.
export RUNLEVEL=1
see_to "command -v redis-server || command -v valkey-server" redis-server redis-server
see_to "ls /usr/lib/*/faketime/libfaketime.so.1" libfaketime libfaketime
