# SPDX-License-Identifier: Apache-2.0
# What the scripts of this folder share. They run inside the container that tests/deploy_deb.rs starts, and write their result to /out/log.
# shellcheck shell=bash
set -u
exec >/out/log 2>&1

fail() { echo "FAIL $*"; systemctl status weft; journalctl -u weft --no-pager | tail -n 40; exit 1; }
# check NAME COMMAND...
check() {
    local name=$1
    shift
    "$@" || fail "$name: $*"
    echo "PASS $name"
}
# within SECONDS NAME COMMAND...: waits for a condition.
within() {
    local end=$((SECONDS + $1)) name=$2
    shift 2
    until "$@"; do
        [ $SECONDS -lt $end ] || fail "$name, waited for: $*"
        sleep 0.2
    done
    echo "PASS $name"
}
