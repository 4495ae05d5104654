# SPDX-License-Identifier: Apache-2.0
# vxlan, IPv4 alone.
. /lib.sh

cluster '{"Network":"10.244.0.0/16","Backend":{"Type":"vxlan"}}'
entries() { # entries NODE PEER
    eventually "$1 route to $2" 60 route "$1" "$(net "$2")" "via $(base "$2")|dev flannel.1|onlink"
    eventually "$1 neighbour of $2" 60 shows "lladdr $(mac "$2" flannel.1) PERMANENT" ip -n "$1" neigh show "$(base "$2")" dev flannel.1
    eventually "$1 fdb of $2" 60 fdb "$1" "$2"
}
fdb() { bridge -n "$1" fdb show dev flannel.1 | grep "^$(mac "$2" flannel.1) " >/tmp/fdb; shows "dst $(public "$2")|self permanent" cat /tmp/fdb; }

for n in n1 n2 n3; do
    eventually "$n device" 60 shows "vxlan id 1|local $(public $n)|dev eth0|dstport 8472|nolearning|mtu 1450" ip -n $n -d link show flannel.1
    eventually "$n device address" 60 shows "inet $(base $n)/32" ip -n $n addr show flannel.1
    check "$n mtu" [ "$(value $n FLANNEL_MTU)" = 1450 ]
    for m in n1 n2 n3; do [ $n = $m ] || entries $n $m; done
done
reach pods

heals_route "route heals" n1 "$(net n2)" "via $(base n2)|dev flannel.1|onlink"
bridge -n n1 fdb del "$(mac n2 flannel.1)" dev flannel.1 dst 10.99.0.2 || die "no fdb entry to delete"
eventually "fdb heals" 60 fdb n1 n2
bridge -n n1 fdb replace "$(mac n2 flannel.1)" dev flannel.1 dst 10.99.0.99 || die "no fdb entry to change"
eventually "changed fdb heals" 60 fdb n1 n2
ip -n n1 neigh del "$(base n2)" dev flannel.1 || die "no neighbour to delete"
eventually "neighbour heals" 60 shows "lladdr $(mac n2 flannel.1) PERMANENT" ip -n n1 neigh show "$(base n2)" dev flannel.1
was=$(mac n1 flannel.1)
ip -n n1 link del flannel.1 || die "delete the device"
eventually "device heals with its MAC" 60 shows "link/ether $was" ip -n n1 link show flannel.1
for m in n2 n3; do entries n1 $m; done
reach healed
restarts n1 flannel.1
finish
