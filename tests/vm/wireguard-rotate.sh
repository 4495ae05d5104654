# SPDX-License-Identifier: Apache-2.0
# wireguard: the key of a node, and the preshared key of all, change under 100 packets per second in each direction. None
# is lost, also when sessions begin with the new keys.
. /lib.sh

PSK_A=CQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQk=
PSK_B=CgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgo=

wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
key() { wg "$1" show flannel-wg | sed -n 's/^device \([^ ]*\) .*/\1/p'; } # key NODE
# peer NODE OF TEXT: what NODE's device says of the peer OF.
peer() { shows "$3" sh -c "/opt/bin/ip netns exec $1 /opt/bin/wg show flannel-wg | grep -F 'peer $(key "$2") '"; }
conf() { echo "{\"Network\":\"10.244.0.0/16\",\"Backend\":{\"Type\":\"wireguard\"$1}}"; } # conf OPTIONS

FLAGS=
cluster "$(conf ",\"PSK\":\"$PSK_A\"")"
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

uptime() { cut -d' ' -f1 /proc/uptime; }
preshared() { wg "$1" all-have flannel-wg "$2"; } # preshared NODE KEY
for n in n1 n2 n3; do eventually "$n has the first preshared key" 60 preshared $n "$PSK_A"; done
capture n1
flows n1:n2 n2:n1
config "$(conf ",\"PSK\":\"$PSK_B\"")"
for n in n1 n2 n3; do eventually "$n has the other preshared key" 60 preshared $n "$PSK_B"; done
changed=$(uptime)
# The kernel renews a session that is used after 120 s, and ends it after 180 s. So the last packets take sessions that began with the other key.
sleep 190
no_loss "another preshared key"
end_capture n1
# answers INITIATOR RESPONDER: after the change, a handshake of the one is answered by the other.
answers() {
    awk "\$2 < $changed { next }
        \$1 == \"initiation\" && \$3 == \"$(public "$1")\" { begun = 1 }
        \$1 == \"response\" && \$3 == \"$(public "$2")\" && begun { found = 1 }
        END { exit !found }" /tmp/capture-n1
}
renewed() { answers n1 n2 || answers n2 n1; }
check "sessions begin with the other preshared key" renewed
# A session that begins now needs the same key on both sides.
for n in n1 n2 n3; do ip -n $n link set flannel-wg down; done
reach preshared
finish
