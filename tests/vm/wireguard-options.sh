# SPDX-License-Identifier: Apache-2.0
# wireguard: net-conf names other ports. n1 reads it seconds before n2 and n3, under 100 packets per second. What was on the way to an old port is lost.
ONE_LINK=yes
. /lib.sh

FLAGS="--hold-removals=0s"
PORTS=',"ListenPort":51900,"ListenPortV6":51901'
wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
conf() { # conf OPTIONS
    echo "{\"EnableIPv6\":true,\"Network\":\"10.244.0.0/16\",\"IPv6Network\":\"fd10::/48\",\"Backend\":{\"Type\":\"wireguard\"$1}}"
}
# An agent that is stopped reads nothing. Its devices carry packets as before.
pause() { for n in "$@"; do kill -STOP "$(cat /run/$n/pid)" || die "pause $n"; done; }
resume() { for n in "$@"; do kill -CONT "$(cat /run/$n/pid)" || die "resume $n"; done; }
listens() { shows "port $3 peers" wg "$1" show "$2"; } # listens NODE DEVICE PORT
# At most five packets of each flow are lost: those on the way to a port that is given up.
few_lost() { # few_lost NAME FLOWS
    end_flows
    check "$1 under 90 packets per second or more, or this machine is too slow" [ "$(measured rate)" -ge 90 ]
    check "$1 loses no more than what is on the way" [ "$(measured lost)" -le $((5 * $2)) ]
}

cluster "$(conf "")"
reach separate

# --- other ports: nothing but WireGuard itself answers n2, and nothing but it answers n1 from n3 ---

flows n2:n1 n1:n3
pause n2 n3
config "$(conf "$PORTS")"
eventually "n1 has the other port" 60 listens n1 flannel-wg 51900
eventually "n1 has the other port for IPv6" 60 listens n1 flannel-wg-v6 51901
sleep 5
resume n2 n3
for n in n2 n3; do
    eventually "$n has the other port" 60 listens $n flannel-wg 51900
    eventually "$n has the other port for IPv6" 60 listens $n flannel-wg-v6 51901
done
sleep 3
few_lost "other ports" 4
reach ports
finish
