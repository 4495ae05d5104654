# SPDX-License-Identifier: Apache-2.0
# `weft lab --backend wireguard`: a cluster in one command. Its faults are left out: their pings need more than this emulated processor can
# encrypt.
. /lib.sh

weft lab --pods 1 --backend wireguard >/tmp/lab 2>&1 &
lab=$!
eventually "every pod of a lab with wireguard reaches every other one" 300 grep -q "^n3-p1  ok     ok     -" /tmp/lab
kill $lab
wait $lab || true
