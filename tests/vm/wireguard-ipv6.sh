# SPDX-License-Identifier: Apache-2.0
# wireguard in a cluster without IPv4.
. /lib.sh

FLAGS="--hold-removals=0s"
wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
cluster '{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd10::/48","Backend":{"Type":"wireguard"}}'
for n in n1 n2 n3; do
    check "$n mtu" [ "$(value $n FLANNEL_MTU)" = 1420 ]
    check "$n has no IPv4 subnet" [ -z "$(value $n FLANNEL_SUBNET)" ]
    check "$n has no device for IPv4" sh -c "! /opt/bin/ip -n $n link show flannel-wg"
    for m in n1 n2 n3; do
        [ $n = $m ] && continue
        eventually "$n peer $m" 300 shows "endpoint [$(public6 $m)]:51821 allowed $(net6 $m)" wg $n show flannel-wg-v6
    done
done
reach only
before=$(index n2 flannel-wg-v6)
stop n2 KILL
start n2
eventually "n2 answers again" 60 weft status --socket /run/n2/weft.sock
check "the device outlives kill -9" [ "$(index n2 flannel-wg-v6)" = "$before" ]
reach again
finish
