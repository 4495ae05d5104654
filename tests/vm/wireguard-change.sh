# SPDX-License-Identifier: Apache-2.0
# A change from vxlan to wireguard while the agents of n1 and n2 run. The agent of n3 is dead: its lease and its data path stay as they
# are, like those of a node with flannel, which follows no change.
. /lib.sh

# Clear text ends ten grace times after the change. This grace time leaves 1 s for the first handshake, and not more than 5 s as the default does.
# If the handshakes of both nodes cross, the kernel keeps 128 packets until the next one, so only ten packets per second are sent here.
FLAGS="--hold-removals=0s --change-grace=12s --healthz-ip=127.0.0.1 --healthz-port=8081"
metrics() { ip netns exec "$1" busybox wget -qO- http://127.0.0.1:8081/metrics; } # metrics NODE

cluster '{"Network":"10.244.0.0/16","Backend":{"Type":"vxlan"}}'
reach vxlan
stop n3 KILL
ip netns exec p1 ping -q -i 0.1 -c 300 "$(pod4 n2)" >/tmp/ping12 2>&1 &
one=$!
ip netns exec p2 ping -q -i 0.1 -c 300 "$(pod4 n1)" >/tmp/ping21 2>&1 &
other=$!
config '{"Network":"10.244.0.0/16","Backend":{"Type":"wireguard"}}'
for pair in "n1 n2" "n2 n1"; do
    set -- $pair
    eventually "$1 sends to $2 by wireguard" 100 leaves_by "$1" "$(pod4 "$2")" flannel-wg
done
eventually "n1 marks the node that does not follow" 30 shows "vxlan programmed, NOT ENCRYPTED" status n1
check "the metric of the alert WeftPeersNotEncrypted counts it" shows "weft_peers_not_encrypted 1" metrics n1
check "n1 names it" shows "1 nodes still need the earlier vxlan: $(base n3)-24" status n1
check "its pods are still reached" pings n1 "$(pod4 n3)"

# Whoever may write leases publishes one of the earlier type.
sed "s/10\.98\.0\.3/10.98.0.254/; s/\"VtepMAC\":\"../\"VtepMAC\":\"06/" "/store/subnets/$(base n3)-24.json" >/tmp/lease
mv /tmp/lease /store/subnets/10.244.250.0-24.json
eventually "a new lease of the earlier type is set aside" 30 shows "1 nodes are set aside,|10.244.250.0-24" status n1
check "packets for its subnet do not leave in clear text" leaves_by n1 10.244.250.2 flannel-wg
rm /store/subnets/10.244.250.0-24.json

wait $one; wait $other
check "the change loses no packet of n1" shows "0% packet loss,|300 received," cat /tmp/ping12
check "the change loses no packet of n2" shows "0% packet loss,|300 received," cat /tmp/ping21
for n in n1 n2; do eventually "clear text ends on $n" 200 no_link $n flannel.1; done
# The pass that removes the device goes on for a while, and what the agent says comes after it.
eventually "the metric counts no node again" 60 shows "weft_peers_not_encrypted 0" metrics n1
check "packets to the node that does not follow are not sent" fails pings n1 "$(pod4 n3)"
eventually "n1 names it as set aside" 60 shows "1 nodes are set aside,|$(base n3)-24" status n1
check "n1 reaches n2" pings n1 "$(pod4 n2)"
start n3
eventually "n3 follows" 100 leaves_by n3 "$(pod4 n1)" flannel-wg
reach followed

# --- routes that flannel's vxlan left inside Network (rke2#9338) ---

stop n2 TERM || die "n2 did not end with 0"
ip -n n2 link add flannel.1 type vxlan id 1 dev eth0 dstport 8472 nolearning
ip -n n2 link set flannel.1 up
ip -n n2 route add "$(net n1)" via "$(base n1)" dev flannel.1 onlink
# subnet.env is flannel's: another file than the one that weft wrote.
cp /run/n2/subnet.env /run/n2/env && mv /run/n2/env /run/n2/subnet.env
check "the longer route leads into clear text" leaves_by n2 "$(pod4 n1)" flannel.1
start n2
eventually "flannel's route goes" 100 leaves_by n2 "$(pod4 n1)" flannel-wg
check "no route is longer than that to Network" empty ip -n n2 route show "$(net n1)"
reach encrypted
finish
