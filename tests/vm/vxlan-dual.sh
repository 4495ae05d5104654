# SPDX-License-Identifier: Apache-2.0
# vxlan with both families: two devices, 70 bytes for the IPv6 underlay.
. /lib.sh

cluster '{"Network":"10.244.0.0/16","IPv6Network":"fd10:244::/48","EnableIPv6":true,"Backend":{"Type":"vxlan"}}'
entries() { # entries NODE PEER
    eventually "$1 route to $2" 60 route "$1" "$(net "$2")" "via $(base "$2")|dev flannel.1|onlink"
    eventually "$1 v6 route to $2" 60 route6 "$1" "$(net6 "$2")" "via $(base6 "$2")|dev flannel-v6.1|onlink"
    eventually "$1 v6 neighbour of $2" 60 shows "lladdr $(mac "$2" flannel-v6.1) PERMANENT" ip -n "$1" -6 neigh show "$(base6 "$2")" dev flannel-v6.1
    eventually "$1 v6 fdb of $2" 60 fdb6 "$1" "$2"
}
fdb6() { bridge -n "$1" fdb show dev flannel-v6.1 | grep "^$(mac "$2" flannel-v6.1) " >/tmp/fdb; shows "dst $(public6 "$2")|self permanent" cat /tmp/fdb; }

for n in n1 n2 n3; do
    eventually "$n device" 60 shows "vxlan id 1|local $(public $n)|mtu 1450" ip -n $n -d link show flannel.1
    eventually "$n v6 device" 60 shows "vxlan id 1|local $(public6 $n)|mtu 1430" ip -n $n -d link show flannel-v6.1
    check "$n mtu" [ "$(value $n FLANNEL_MTU)" = 1430 ]
    for m in n1 n2 n3; do [ $n = $m ] || entries $n $m; done
done
reach pods

heals_route "route heals" n1 "$(net n2)" "via $(base n2)|dev flannel.1|onlink"
ip -n n1 -6 route del "$(net6 n2)" || die "no v6 route to delete"
eventually "v6 route heals" 60 route6 n1 "$(net6 n2)" "via $(base6 n2)|dev flannel-v6.1|onlink"
was=$(mac n1 flannel-v6.1)
ip -n n1 link del flannel-v6.1 || die "delete the v6 device"
eventually "v6 device heals with its MAC" 60 shows "link/ether $was" ip -n n1 link show flannel-v6.1
for m in n2 n3; do entries n1 $m; done
reach healed
restarts n1 flannel-v6.1
finish
