# SPDX-License-Identifier: Apache-2.0
# wireguard: net-conf names other ports, then one device for both families, and then a device for each again. n1 reads it seconds before n2 and n3,
# under 100 packets per second. A change of ports loses what was on the way to the old port, and the others lose nothing. At last, another
# device of n1 has the port of net-conf.
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
leaves6_by() { shows "dev $3" ip -n "$1" -6 route get "$2"; } # leaves6_by NODE ADDRESS DEVICE
changes() { status_json "$1" >/tmp/status && grep -q other_ways /tmp/status; } # changes NODE
is_done() { status_json "$1" >/tmp/status && ! grep -q other_ways /tmp/status; } # is_done NODE
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

# --- one device for both families, and back ---

flows n1:n2 n2:n1 n2:n3
pause n2 n3
config "$(conf "$PORTS,\"Mode\":\"ipv4\"")"
eventually "n1 names both ways" 60 changes n1
sleep 10
check "n1 sends as n2 knows it" leaves6_by n1 "$(pod6 n2)" flannel-wg-v6
resume n2 n3
for n in n1 n2 n3; do eventually "$n has one device" 250 no_link $n flannel-wg-v6; done
sleep 2
no_loss "one device for both families"
reach one

flows n1:n2 n2:n1 n2:n3
pause n2 n3
config "$(conf "$PORTS")"
eventually "n1 names both ways again" 60 changes n1
sleep 10
check "n1 sends as n2 knows it again" leaves6_by n1 "$(pod6 n2)" flannel-wg
resume n2 n3
for n in n1 n2 n3; do
    eventually "$n has a device for each family" 100 listens $n flannel-wg-v6 51901
    eventually "$n names one way" 250 is_done $n
done
sleep 2
no_loss "a device for each family"
reach two

# --- a port that is taken on n1: its lease goes on to name the port that its device has, also after a restart ---

names() { grep -q "\"Port\":$2}.*\"Port\":$3}" "/store/subnets/$(base "$1")-24&"*; } # names NODE PORT PORT_V6
refuses() { shows "port 51950: the UDP port of flannel-wg is taken|flannel-wg goes on with port" status "$1"; } # refuses NODE
is_up() { shows "$2" ip -n "$1" -br link show dev "$2" up; } # is_up NODE DEVICE
ip -n n1 link add taken type vxlan id 99 dev eth0 dstport 51950 nolearning
ip -n n1 link set taken up
config "$(conf ',"ListenPort":51950,"ListenPortV6":51951')"
for n in n2 n3; do eventually "$n has the third port" 60 listens $n flannel-wg 51950; done
eventually "n1 has the third port for IPv6 and names it" 60 names n1 51900 51951
eventually "n1 says that the port is taken" 60 refuses n1
check "n1 is ready" ready n1
reach taken
# The kernel gives a port that is taken to a device that is down, and then refuses to bring it up.
ip -n n1 link set flannel-wg down
eventually "flannel-wg of n1 is up again" 60 is_up n1 flannel-wg
eventually "a device of n1 that somebody took down comes up with the port that it had" 60 listens n1 flannel-wg 51900
eventually "n1 is ready again" 60 ready n1
check "n1 still names the port that it has" names n1 51900 51951
reach up
stop n1 TERM || die "n1 did not end with 0"
start n1
eventually "n1 is ready after a restart" 60 ready n1
eventually "n1 says again that the port is taken" 60 refuses n1
check "after a restart n1 names the port that it has" names n1 51900 51951
reach restarted
ip -n n1 link del taken
eventually "n1 has the third port" 90 listens n1 flannel-wg 51950
eventually "n1 names the third port" 60 names n1 51950 51951
reach three
finish
