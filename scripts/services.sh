#!/bin/sh
# Sees to the servers that the tests start for themselves: only their programs are needed, none is left running.
# Safe to repeat: it does nothing when they are there.
set -eu

cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
speaker=services
. scripts/common.sh

if command -v redis-server >/dev/null 2>&1 || command -v valkey-server >/dev/null 2>&1; then
    exit 0
fi

advice="install it (Debian, Ubuntu: apt-get install redis-server) and run this again"
command -v apt-get >/dev/null 2>&1 || die "the tests need redis-server;" "$advice"
say "redis-server is missing; installing it"
# RUNLEVEL=1 keeps the package from starting a server of its own.
export RUNLEVEL=1
apt_install redis-server >"$log" 2>&1 || {
    quietly as_root apt-get update && quietly apt_install redis-server
} || die "redis-server could not be installed;" "$advice"
command -v redis-server >/dev/null 2>&1 || die "redis-server is not on PATH;" "$advice"
