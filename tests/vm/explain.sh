# SPDX-License-Identifier: Apache-2.0
# What `weft explain` and `weft doctor` say about ipip and wireguard, about a network card of VMware, and about tables of the kernel that are
# full: their limits belong to the whole machine, so no other test may change them.
. /lib.sh

# explain NODE CODE TEXT FROM TO: the exit code, and part of what is printed.
explain() {
    /opt/bin/ip netns exec "$1" weft explain "$4" "$5" --subnet-file "/run/$1/subnet.env" --socket "/run/$1/weft.sock" >/tmp/explained 2>&1
    code=$?
    cat /tmp/explained
    [ $code = "$2" ] && grep -qF "$3" /tmp/explained
}

# doctor CHECK TEXT, in the host's namespace.
doctor() { weft doctor --only "$1" >/tmp/found 2>&1; cat /tmp/found; grep -qF "$2" /tmp/found; }
sound() { weft doctor --only "$1" >/tmp/found 2>&1; }

FLAGS=--ip-masq
cluster "{\"Network\":\"10.244.0.0/16\",\"Backend\":{\"Type\":\"$BACKEND\"}}"
reach pods
from=$(pod4 n1) to=$(pod4 n3)
check "$BACKEND works" explain n1 0 "works as far as this node can tell" "$from" "$to"
case $BACKEND in
ipip)
    check "the tunnel of ipip is shown" explain n1 0 "ipip" "$from" "$to"
    stop n1 KILL
    ip -n n1 route del "$(net n3)" || die "delete the route"
    check "a route of ipip that is missing is named" explain n1 2 "the kernel has no route to $to" "$from" "$to"
    ;;
wireguard)
    check "the tunnel of wireguard is shown" explain n1 0 "wireguard" "$from" "$to"
    stop n1 KILL
    ip -n n1 link del flannel-wg || die "delete the device"
    check "a device of wireguard that is missing is named" explain n1 2 "the kernel has no route to $to" "$from" "$to"
    ;;
esac

# --- tables of the whole machine ---

check "the connection tracking table is sound" sound conntrack
max=$(cat /proc/sys/net/netfilter/nf_conntrack_max)
full() { # Every ping adds an entry, in the namespace of n2, whose traffic rules track connections.
    pings n2 "$(pod4 n3)"
    [ "$(/opt/bin/ip netns exec n2 cat /proc/sys/net/netfilter/nf_conntrack_count)" -ge 2 ]
}
eventually "connections are tracked" 60 full
echo 2 >/proc/sys/net/netfilter/nf_conntrack_max
tracked() { /opt/bin/ip netns exec n2 weft doctor --only conntrack >/tmp/found 2>&1; cat /tmp/found; grep -qF nf_conntrack_max /tmp/found; }
check "a full connection tracking table is named" tracked
echo "$max" >/proc/sys/net/netfilter/nf_conntrack_max
check "the neighbour table is sound" sound neighbours
for n in 1 2 3 4 5 6 7 8 9; do
    ip neigh add "192.0.2.$n" lladdr "02:00:00:00:00:0$n" dev br0 nud stale || die "add a neighbour"
done
echo 9 >/proc/sys/net/ipv4/neigh/default/gc_thresh3
check "a full neighbour table is named" doctor neighbours gc_thresh3

# --- a network card of VMware ---

ip link set eth0 up || die "no network card"
ip route add default dev eth0 || die "make the card the uplink"
check "a card without a tunnel is sound" sound offload
ip link add flannel.9 type vxlan id 9 dstport 4789 dev eth0 || die "make a vxlan device"
check "a card that may spoil checksums is named" doctor offload "flannel.9 leaves the checksums of packets to eth0"
