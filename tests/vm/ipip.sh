# SPDX-License-Identifier: Apache-2.0
# ipip: every peer through flannel.ipip; a device that flannel left is adopted, its stale routes are removed. Rules and tunnel guard
# of this kernel: there is no program of iptables or nftables here. At the end the uplink of n1 becomes a port of a bridge.
BY_ADDRESS=yes
. /lib.sh

# What flannel leaves on n1 when it is stopped: the device, and a route without protocol to a peer that is gone since.
adopted() {
    ip -n n1 link add flannel.ipip type ipip local 10.99.0.1 || die "leftover device"
    ip -n n1 link set flannel.ipip mtu 1480 up
    ip -n n1 route add 10.244.250.0/24 via 10.99.0.77 dev flannel.ipip onlink || die "leftover route"
    left=$(index n1 flannel.ipip)
}

# A device that is bound to a link, as agents made it before.
bound() {
    ip -n n2 link add flannel.ipip type ipip local 10.99.0.2 dev eth0 || die "bound device"
    ip -n n2 link set flannel.ipip alias "weft /run/n2/subnet.env" mtu 1480 up || die "bound device"
    old=$(index n2 flannel.ipip)
}

topology
config '{"Network":"10.244.0.0/16","Backend":{"Type":"ipip"}}'
adopted
bound
# n1 comes last: a first list without any peer is suspicious, and nothing is removed because of it.
# n2 does not say where its tunnel packets come from: until it does, the guard of the others is off.
for n in n2 n3 n1; do
    FLAGS=--ip-masq; [ $n = n2 ] || FLAGS="--ip-masq --guard-tunnel"
    start $n
    eventually "$n has its subnet" 90 grep -q ^FLANNEL_MTU= "/run/$n/subnet.env"
done
for n in n1 n2 n3; do pod $n; done

for n in n1 n2 n3; do
    # A device that is bound to a link would show it after its address.
    eventually "$n device" 60 shows "remote any local $(public $n) ttl|mtu 1480" ip -n $n -d link show flannel.ipip
    check "$n mtu" [ "$(value $n FLANNEL_MTU)" = 1480 ]
    for m in n1 n2 n3; do
        [ $n = $m ] || eventually "$n route to $m" 60 route $n "$(net $m)" "via $(public $m)|dev flannel.ipip|onlink"
    done
done
check "adopted the device" [ "$(index n1 flannel.ipip)" = "$left" ]
check "a device that is bound to a link is made again" [ "$(index n2 flannel.ipip)" != "$old" ]
eventually "stale route removed" 60 empty ip -n n1 route show 10.244.250.0/24
reach pods

heals_route "route heals" n1 "$(net n2)" "via 10.99.0.2|dev flannel.ipip|onlink"
ip -n n1 link del flannel.ipip || die "delete the device"
eventually "device heals" 60 shows "remote any local 10.99.0.1 ttl" ip -n n1 -d link show flannel.ipip
eventually "its routes heal" 60 route n1 "$(net n3)" "via 10.98.0.3|dev flannel.ipip|onlink"
reach healed
ip -n n2 link set flannel.ipip down || die "device down"
eventually "device comes up again" 60 shows "state UNKNOWN" ip -n n2 link show flannel.ipip
eventually "routes come back with it" 60 route n2 "$(net n1)" "via 10.99.0.1|dev flannel.ipip|onlink"

# --- rules ---

# rt has no way back to a pod: it answers the node alone.
check "no way back to pods" empty ip -n rt route show to match "$(pod4 n1)"
check "pod to outside is masqueraded" pings n1 10.99.0.254
# n3's pod answers the pod of n1 alone: the node's or the tunnel's address would get no answer.
gateway=$(value n3 FLANNEL_SUBNET | cut -d/ -f1)
ip -n p3 route del default && ip -n p3 route add "$(pod4 n1)" via "$gateway" || die "routes of the pod"
check "pod to pod is not masqueraded" pings n1 "$(pod4 n3)"
unanswered() { ! ip netns exec n1 ping -q -c 1 -W 1 "$(pod4 n3)"; }
check "node to pod has not the pod's address" unanswered
ip -n p3 route add default via "$gateway"
reach masqueraded

# --- tunnel guard ---

# A stranger on the link puts packets of n2's pod into the tunnel.
ip -n rt link add spoof type ipip local 10.99.0.254 remote 10.99.0.1 || die "the stranger's tunnel"
ip -n rt addr add "$(pod4 n2)/32" dev spoof
ip -n rt link set spoof up
ip -n rt route add "$(pod4 n1)" dev spoof || die "the stranger's route"
spoof() { ip netns exec rt ping -q -c 3 -i 0.2 -W 1 -I "$(pod4 n2)" "$(pod4 n1)" >/dev/null 2>&1; }
# spoofed COUNT: so many of three arrive.
spoofed() { heard=$(echoes n1); spoof; [ $(($(echoes n1) - heard)) = "$1" ]; }
guard() { # guard NODE TEXT: what it says of its guard
    status_json "$1" | tr -d '\n' | grep -q "\"guard\": *\"$2"
}
check "guard is off while n2 is silent" guard n1 "off: 1 of 2 leases"
check "spoofed packets arrive without it" spoofed 3
stop n2 TERM || die "n2 did not end with 0"
FLAGS="--ip-masq --guard-tunnel"
start n2
eventually "guard is on" 60 guard n1 "on: "
eventually "spoofed packets are dropped" 60 spoofed 0
ip -n rt link del spoof
reach guarded

# --- the address of the uplink moves to a bridge ---

kept=$(index n1 flannel.ipip)
ip -n n1 link add up0 type bridge && ip -n n1 link set up0 up || die "bridge"
ip -n n1 addr flush dev eth0 && ip -n n1 link set eth0 master up0 || die "the uplink as a port"
ip -n n1 addr add 10.99.0.1/24 dev up0 && ip -n n1 route add default via 10.99.0.254 || die "address of the bridge"
reach bridged
uplink_is() { status_json "$1" | tr -d '\n' | grep -q "\"uplink\": *\"$2 "; } # uplink_is NODE LINK
eventually "the uplink is the bridge" 120 uplink_is n1 up0
reach "on the bridge"
check "the bridge keeps the device" [ "$(index n1 flannel.ipip)" = "$kept" ]

restarts n1 flannel.ipip
finish
