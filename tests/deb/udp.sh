#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A restart of the agent with the backend udp, whose device and socket systemd keeps meanwhile. It runs inside the container that
# tests/deploy_deb.rs starts. /packages has new.deb.
. /scenario-lib.sh

ifindex() { cat /sys/class/net/flannel0/ifindex; }
keeps_both() { [ "$(systemctl show --property NFileDescriptorStore --value weft)" = 2 ]; }
subnet() { sed -n 's/^FLANNEL_SUBNET=\(.*\)\.1\/.*/\1/p' "$1"; }

# Another node on the same LAN, whose agent this script starts.
ip netns add peer
ip link add eth0 type veth peer name eth0 netns peer
ip addr add 192.168.70.1/24 dev eth0
ip link set eth0 up
ip -n peer link set lo up
ip -n peer link set eth0 up
ip -n peer addr add 192.168.70.2/24 dev eth0
ip route add default via 192.168.70.2
ip -n peer route add default via 192.168.70.1

check "installation" dpkg -i /packages/new.deb
check "the drop-in of the package" install -D -m 0644 /usr/share/doc/weft/examples/weft-udp.conf /etc/systemd/system/weft.service.d/udp.conf
systemctl daemon-reload
mkdir -p /var/lib/weft /run/peer
echo '{"Network":"10.244.0.0/16","Backend":{"Type":"udp"}}' >/var/lib/weft/config.json
echo 'WEFT_ARGS=--store dir:/var/lib/weft' >>/etc/default/weft
check "the agent becomes ready" systemctl enable --now weft
ip netns exec peer weft agent --store dir:/var/lib/weft --state-dir /run/peer --subnet-file /run/peer/subnet.env --socket /run/peer/weft.sock >/tmp/peer.log 2>&1 &
within 120 "the other agent is ready" test -e /run/peer/subnet.env
own=$(subnet /run/flannel/subnet.env).0 far=$(subnet /run/peer/subnet.env).0
within 120 "the other node answers by the tunnel" ping -q -c 1 -W 1 -I "$own" "$far"
within 120 "systemd keeps the device and the socket" keeps_both

before=$(ifindex)
ping -i 0.01 -I "$own" "$far" >/tmp/ping &
ping=$!
within 120 "packets are answered" later /tmp/ping 0
for _ in 1 2 3; do
    check "a restart" systemctl restart weft
    within 120 "packets are answered after it" later /tmp/ping $(($(last /tmp/ping) + 100))
done
kill -INT $ping
wait $ping
tail -n 2 /tmp/ping
check "no packet is lost by restarts" no_gap /tmp/ping
check "the device is the same one" [ "$(ifindex)" = "$before" ]
within 120 "it is kept again" keeps_both
echo END
