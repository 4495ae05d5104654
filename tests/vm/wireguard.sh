# SPDX-License-Identifier: Apache-2.0
# wireguard over IPv4. n1 begins with the device and the key that flannel left.
. /lib.sh

PRIVATE=AAIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eH2A=
PUBLIC=B6N8vBQgk8i3VdwbEOhstCY3StFqqFPtC9/AsrhtHHw=

wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
key() { wg "$1" show flannel-wg | sed -n 's/^device \([^ ]*\) .*/\1/p'; } # key NODE
# peer NODE OF TEXT: what NODE's device says of the peer OF.
peer() { shows "$3" sh -c "/opt/bin/ip netns exec $1 /opt/bin/wg show flannel-wg | grep -F 'peer $(key "$2") '"; }
peers() { shows "peers $2" wg "$1" show flannel-wg; } # peers NODE COUNT

topology
config '{"Network":"10.244.0.0/16","Backend":{"Type":"wireguard"}}'
printf %s "$PRIVATE" >/run/n1/wgkey
ip -n n1 link add flannel-wg type wireguard || die "flannel's device"
wg n1 key flannel-wg /run/n1/wgkey
ip -n n1 link set flannel-wg mtu 1420 up
left=$(index n1 flannel-wg)
FLAGS=
for n in n1 n2 n3; do
    start $n
    eventually "$n has its subnet" 300 grep -q ^FLANNEL_MTU= "/run/$n/subnet.env"
done
for n in n1 n2 n3; do pod $n; done

for n in n1 n2 n3; do
    eventually "$n device" 300 shows "wireguard|mtu 1420" ip -n $n -d link show flannel-wg
    check "$n mtu" [ "$(value $n FLANNEL_MTU)" = 1420 ]
    eventually "$n route" 300 shows "dev flannel-wg proto 90 scope link" ip -n $n route show 10.244.0.0/16
    eventually "$n address" 300 shows "inet $(base $n)/32" ip -n $n -4 addr show dev flannel-wg
    for m in n1 n2 n3; do
        [ $n = $m ] || eventually "$n peer $m" 300 peer $n $m "endpoint $(public $m):51820|allowed $(net $m)|keepalive 0|psk no"
    done
done
check "adopted the device" [ "$(index n1 flannel-wg)" = "$left" ]
check "adopted the key" [ "$(key n1)" = "$PUBLIC" ]
check "the lease names the key" grep -rqF "\"BackendData\":{\"PublicKey\":\"$PUBLIC\",\"Port\":51820}" /store
eventually "a handshake without traffic" 300 peer n1 n2 "handshake yes"
reach pods

# --- what others break ---

wg n1 remove-peer flannel-wg "$(key n2)"
eventually "a removed peer comes back" 300 peer n1 n2 "allowed $(net n2)"
wg n1 remove-allowed flannel-wg "$(key n3)" "$(net n3)"
eventually "a removed prefix comes back" 300 peer n1 n3 "allowed $(net n3)"
reach repaired
ip -n n2 route del 10.244.0.0/16 || die "delete the route"
eventually "a removed route comes back" 300 shows "dev flannel-wg proto 90" ip -n n2 route show 10.244.0.0/16
ip -n n2 link del flannel-wg || die "delete the device"
eventually "device heals" 300 peer n2 n1 "allowed $(net n1)"
eventually "its route heals" 300 shows "dev flannel-wg proto 90" ip -n n2 route show 10.244.0.0/16
reach healed
ip -n n2 link set flannel-wg down || die "device down"
eventually "device comes up again" 300 shows "dev flannel-wg proto 90" ip -n n2 route show 10.244.0.0/16
reach up

restarts n1 flannel-wg
stop n1 KILL
start n1
eventually "ready after a kill" 300 ready n1
check "a kill keeps the device" [ "$(index n1 flannel-wg)" = "$left" ]
finish
