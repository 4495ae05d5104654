# SPDX-License-Identifier: Apache-2.0
# wireguard: the key of a node, and the preshared key of all, change under 100 packets per second in each direction. None
# is lost.
. /lib.sh

PSK=CQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQk=

wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
key() { wg "$1" show flannel-wg | sed -n 's/^device \([^ ]*\) .*/\1/p'; } # key NODE
# peer NODE OF TEXT: what NODE's device says of the peer OF.
peer() { shows "$3" sh -c "/opt/bin/ip netns exec $1 /opt/bin/wg show flannel-wg | grep -F 'peer $(key "$2") '"; }
conf() { echo "{\"Network\":\"10.244.0.0/16\",\"Backend\":{\"Type\":\"wireguard\"$1}}"; } # conf OPTIONS

FLAGS=
cluster "$(conf "")"
reach pods

# --- the key of a node ---

for round in 1 2; do
    before=$(key n2)
    flows n1:n2 n2:n1
    weft rotate-key --socket /run/n2/weft.sock >/tmp/key || die "rotate-key"
    check "round $round: the new key is in use" [ "$(cat /tmp/key)" = "$(key n2)" ]
    [ "$(key n2)" != "$before" ] || die "the key is the old one"
    sleep 3
    no_loss "round $round: rotate-key"
    for n in n1 n3; do
        eventually "round $round: one peer for each lease on $n" 60 shows "peers 2" wg $n show flannel-wg
        eventually "round $round: $n has the new key" 60 peer $n n2 "allowed $(net n2)|handshake yes"
    done
    eventually "round $round: n2 is ready" 60 ready n2
done
subnet=$(value n2 FLANNEL_SUBNET); before=$(key n2)
check "both places have one key" grep -qF "$(cat /run/n2/wgkey)" /var/lib/weft/*.wireguard.key
check "nothing is left beside them" empty sh -c 'ls /run/n2 /var/lib/weft | grep next'
stop n2 KILL
start n2
eventually "n2 is ready again" 60 ready n2
check "a restart keeps the new key" [ "$(key n2)" = "$before" ]
check "a restart keeps the subnet" [ "$(value n2 FLANNEL_SUBNET)" = "$subnet" ]

# --- the preshared key of all ---

flows n1:n2 n2:n1
config "$(conf ",\"PSK\":\"$PSK\"")"
for n in n1 n2 n3; do for m in n1 n2 n3; do
    [ $n = $m ] || eventually "$n has the preshared key for $m" 60 peer $n $m "psk yes"
done; done
sleep 3
no_loss "another preshared key"
# A session that begins now needs the same key on both sides.
for n in n1 n2 n3; do ip -n $n link set flannel-wg down; done
reach preshared
finish
