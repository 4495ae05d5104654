# SPDX-License-Identifier: Apache-2.0
# The machine itself: an older kernel, its tunnels, namespaces, nexthop objects, and our binary. Without these nothing else proves anything.
. /lib.sh

check "kernel 6.1" grep -q 'Linux version 6\.1\.' /proc/version
# A local address, because the module's own tunl0 has any-to-any already.
check "link ipip" ip link add t-ipip type ipip local 127.0.0.1
for kind in dummy bridge veth; do
    check "link $kind" ip link add "t-$kind" type $kind
done
check "link vxlan" ip link add t-vxlan type vxlan id 7 dev t-dummy dstport 8472 nolearning
check "ip -d shows ipip" shows "remote any local 127.0.0.1" ip -d link show t-ipip
topology
eventually "ping on one link" 60 ip netns exec n1 ping -q -c 1 -W 1 10.99.0.2
eventually "ping through the router" 60 ip netns exec n1 ping -q -c 1 -W 1 10.98.0.3
eventually "ping6 through the router" 60 ip netns exec n1 ping -q -c 1 -W 1 fd98::3
ip -n n1 nexthop add id 4000000001 via 10.99.0.2 dev eth0 protocol 90 || die "nexthop object"
check "route over a nexthop object" ip -n n1 route add 10.244.9.0/24 nhid 4000000001 protocol 90
check "the route shows its gateway" shows "via 10.99.0.2|dev eth0|proto 90" ip -n n1 route show 10.244.9.0/24
check "weft starts" weft --version
