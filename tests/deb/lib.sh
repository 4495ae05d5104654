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
# answered FILE: prints the numbers of the answers in the output of a ping, each once. A line of which a part is written does not count.
answered() { sed -n 's/^[0-9]* bytes from .*icmp_seq=\([0-9]*\) .* ms.*/\1/p' "$1" | sort -nu; }
# last FILE: prints the number of the last answer.
last() { answered "$1" | tail -n 1; }
# later FILE NUMBER: whether a ping with a higher number was answered.
later() { [ "$(last "$1")" -gt "$2" ]; }
# no_gap FILE: whether all pings up to the last answered one were answered. An answer that is on its way when the ping is ended is no loss.
no_gap() { answered "$1" | awk '{ last = $1 } END { exit !(NR > 0 && NR == last) }'; }
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
