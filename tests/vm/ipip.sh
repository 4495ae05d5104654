# SPDX-License-Identifier: Apache-2.0
# ipip: every peer through flannel.ipip; a device that flannel left is adopted, its stale routes are removed.
. /lib.sh

# What flannel leaves on n1 when it is stopped: the device, and a route without protocol to a peer that is gone since.
adopted() {
    ip -n n1 link add flannel.ipip type ipip local 10.99.0.1 || die "leftover device"
    ip -n n1 link set flannel.ipip mtu 1480 up
    ip -n n1 route add 10.244.250.0/24 via 10.99.0.77 dev flannel.ipip onlink || die "leftover route"
    left=$(index n1 flannel.ipip)
}

topology
config '{"Network":"10.244.0.0/16","Backend":{"Type":"ipip"}}'
adopted
# n1 comes last: a first list without any peer is suspicious, and nothing is removed because of it.
for n in n2 n3 n1; do
    start $n
    eventually "$n has its subnet" 90 grep -q ^FLANNEL_MTU= "/run/$n/subnet.env"
done
for n in n1 n2 n3; do pod $n; done

for n in n1 n2 n3; do
    eventually "$n device" 60 shows "remote any local $(public $n)|mtu 1480" ip -n $n -d link show flannel.ipip
    check "$n mtu" [ "$(value $n FLANNEL_MTU)" = 1480 ]
    for m in n1 n2 n3; do
        [ $n = $m ] || eventually "$n route to $m" 60 route $n "$(net $m)" "via $(public $m)|dev flannel.ipip|onlink"
    done
done
check "adopted the device" [ "$(index n1 flannel.ipip)" = "$left" ]
eventually "stale route removed" 60 empty ip -n n1 route show 10.244.250.0/24
reach pods

heals_route "route heals" n1 "$(net n2)" "via 10.99.0.2|dev flannel.ipip|onlink"
ip -n n1 link del flannel.ipip || die "delete the device"
eventually "device heals" 60 shows "remote any local 10.99.0.1" ip -n n1 -d link show flannel.ipip
eventually "its routes heal" 60 route n1 "$(net n3)" "via 10.98.0.3|dev flannel.ipip|onlink"
reach healed
ip -n n2 link set flannel.ipip down || die "device down"
eventually "device comes up again" 60 shows "state UNKNOWN" ip -n n2 link show flannel.ipip
eventually "routes come back with it" 60 route n2 "$(net n1)" "via 10.99.0.1|dev flannel.ipip|onlink"

restarts n1 flannel.ipip
finish
