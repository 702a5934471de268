# Shared by the scripts beside it, which source it after setting `log` (a scratch file) and `speaker`.

say() { printf '%s: %s\n' "$speaker" "$*" >&2; }

die() {
    say "$@"
    exit 1
}

# Runs a command with its output kept back, and shows it only if the command fails.
quietly() {
    if "$@" >"$log" 2>&1; then
        return 0
    else
        code=$?
        cat "$log" >&2
        return "$code"
    fi
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1; then
        sudo -n "$@"
    elif command -v sudo >/dev/null 2>&1 && [ -t 0 ]; then
        sudo "$@"
    else
        return 1
    fi
}

apt_install() { as_root env DEBIAN_FRONTEND=noninteractive ${RUNLEVEL:+RUNLEVEL="$RUNLEVEL"} apt-get install -y --no-install-recommends "$1"; }
