# SPDX-License-Identifier: Apache-2.0
# host-gw between n1 and n2. n3 is behind a router: no node can be its gateway, and that must not disturb the others. At the end
# n1 takes over from a flannel with wireguard.
. /lib.sh

cluster '{"Network":"10.244.0.0/16","IPv6Network":"fd10:244::/48","EnableIPv6":true,"Backend":{"Type":"host-gw"}}'
eventually "n1 to n2" 60 route n1 "$(net n2)" "via 10.99.0.2|dev eth0"
eventually "n2 to n1" 60 route n2 "$(net n1)" "via 10.99.0.1|dev eth0"
eventually "n1 to n2 v6" 60 route6 n1 "$(net6 n2)" "via fd99::2|dev eth0"
eventually "n2 to n1 v6" 60 route6 n2 "$(net6 n1)" "via fd99::1|dev eth0"
check "no route to a node behind the router" empty ip -n n1 route show "$(net n3)"
check "mtu" [ "$(value n1 FLANNEL_MTU)" = 1500 ]
eventually "pods n1 to n2" 60 pings n1 "$(pod4 n2)"
eventually "pods n1 to n2 v6" 60 pings n1 "$(pod6 n2)"
heals_route "route heals" n1 "$(net n2)" "via 10.99.0.2|dev eth0"
ip -n n1 -6 route del "$(net6 n2)" || die "no v6 route to delete"
eventually "v6 route heals" 60 route6 n1 "$(net6 n2)" "via fd99::2|dev eth0"
ip -n n1 link set eth0 down || die "uplink down"
ip -n n1 link set eth0 up || die "uplink up"
eventually "routes come back with the uplink" 60 route n1 "$(net n2)" "via 10.99.0.2|dev eth0"

# --- what flannel's wireguard leaves when it ends by SIGKILL ---

left() { # left DEVICE ADDRESS NETWORK
    ip -n n1 link add "$1" type wireguard || die "device $1"
    ip -n n1 addr add "$2" dev "$1"; ip -n n1 link set "$1" up
    ip -n n1 route add "$3" dev "$1" || die "route of $1"
}
stop n1 TERM || die "n1 did not end with 0"
left flannel-wg "$(base n1)/32" 10.244.0.0/16
left flannel-wg-v6 "$(base6 n1)/128" fd10:244::/48
echo "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI= 10.99.0.2:51820 $(net n2)" >/tmp/peers
ip netns exec n1 /opt/bin/wg peers flannel-wg /tmp/peers || die "peer of flannel-wg"
# subnet.env is flannel's: another file than the one that weft wrote.
cp /run/n1/subnet.env /run/n1/env && mv /run/n1/env /run/n1/subnet.env
start n1
for device in flannel-wg flannel-wg-v6; do eventually "flannel's $device goes" 100 no_link n1 $device; done
for n in n1 n2 n3; do stop $n TERM || die "$n did not end with 0"; done
pass "agents end"
