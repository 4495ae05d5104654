#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The life of the Debian package on a machine with systemd: installation, configuration, upgrade under traffic, removal and purge. It runs
# inside the container that tests/deploy_deb.rs starts. /packages has old.deb and new.deb.
. /scenario-lib.sh

main_pid() { systemctl show --property MainPID --value weft; }
runs_anew() { [ "$(main_pid)" != 0 ] && [ "$(main_pid)" != "$1" ] && systemctl --quiet is-active weft; }
is() { [ "$(eval "$1")" = "$2" ]; }

# Another node, with a pod that answers.
ip netns add peer
ip link add eth0 type veth peer name eth0 netns peer
ip addr add 192.168.70.1/24 dev eth0
ip link set eth0 up
ip route add default via 192.168.70.2
ip -n peer link set lo up
ip -n peer link set eth0 up
ip -n peer addr add 192.168.70.2/24 dev eth0
ip -n peer addr add 10.244.9.1/32 dev lo
ip -n peer route add 10.244.0.0/16 via 192.168.70.1

# The plugins of Debian 11 and Ubuntu 22.04 contain flannel's. Two packages with one file cannot be installed together, unless one says so.
mkdir -p /tmp/plugins/DEBIAN /tmp/plugins/usr/lib/cni
for name in bridge flannel; do echo theirs >/tmp/plugins/usr/lib/cni/$name; done
printf '%s\n' 'Package: containernetworking-plugins' 'Version: 0.9.1+ds1-1' 'Architecture: all' 'Maintainer: a test <test@weft.example>' \
    'Description: older plugins' >/tmp/plugins/DEBIAN/control
check "older plugins" dpkg-deb --build /tmp/plugins /tmp/plugins.deb
check "installation of older plugins" dpkg -i /tmp/plugins.deb
check "installation" dpkg -i /packages/old.deb
check "another installation of older plugins" dpkg -i /tmp/plugins.deb
check "the plugin is weft's, beside older plugins" is "readlink /usr/lib/cni/flannel" ../weft/weft-cni
check "the first installation starts nothing" is "systemctl is-active weft" inactive
check "the first installation enables nothing" is "systemctl is-enabled weft" disabled
check "the password is for root alone" is "stat -c %a /etc/default/weft" 600
check "systemd accepts the unit" is "systemd-analyze verify --man=no weft.service 2>&1 | grep weft" ""
check "udev's rule for the devices is there" test -e /lib/systemd/network/10-flannel.link
check "the plugins are where Debian's runtimes look" /usr/lib/cni/weft-veth </dev/null
check "the drop-ins are there" test -e /usr/share/doc/weft/examples/weft-udp.conf -a -e /usr/share/doc/weft/examples/weft-extension.conf

mkdir -p /var/lib/weft/subnets
echo '{"Network":"10.244.0.0/16","Backend":{"Type":"host-gw"}}' >/var/lib/weft/config.json
echo '{"PublicIP":"192.168.70.2","PublicIPv6":null,"BackendType":"host-gw"}' >/var/lib/weft/subnets/10.244.9.0-24.json
echo 'WEFT_ARGS=--store dir:/var/lib/weft' >>/etc/default/weft
check "the agent becomes ready" systemctl enable --now weft
check "weft status" weft status
within 120 "the pod of the other node answers" ping -q -c 1 -W 1 10.244.9.1

before=$(main_pid)
ping -i 0.05 10.244.9.1 >/tmp/ping &
ping=$!
check "upgrade" dpkg -i /packages/new.deb
within 120 "the upgrade starts the new agent" runs_anew "$before"
within 120 "the new agent answers" weft status
within 120 "packets are answered after the upgrade" later /tmp/ping $(($(last /tmp/ping) + 20))
kill -INT $ping
wait $ping
tail -n 2 /tmp/ping
check "no packet is lost by the upgrade" no_gap /tmp/ping
check "the configuration is kept" grep -q '^WEFT_ARGS=' /etc/default/weft
check "it is still for root alone" is "stat -c %a /etc/default/weft" 600

before=$(main_pid)
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
check "an upgrade where the administrator forbids restarts" dpkg -i /packages/old.deb
# The postinst does not wait for a restart, so one may not have begun yet.
check "no restart is queued" is "systemctl list-jobs | grep -c weft.service" 0
check "the agent runs on" is main_pid "$before"
rm /usr/sbin/policy-rc.d

sed -i '/^WEFT_ARGS=/d' /etc/default/weft
echo 'FLANNELD_ETCD_ENDPOINTS=http://192.168.70.99:2379' >>/etc/default/weft
systemctl --no-block restart weft
check "an upgrade while the store is away does not wait" timeout 240 dpkg -i /packages/new.deb
check "routes stay while the store is away" ping -q -c 1 -W 30 10.244.9.1

check "removal" dpkg -r weft
check "removal stops the agent" is "systemctl is-active weft" inactive
check "pods keep their network" ping -q -c 1 -W 30 10.244.9.1
check "removal keeps the configuration" test -e /etc/default/weft
# Saved by an agent with another store, by one that was killed while it changed its key, and by one that was killed while it wrote.
(cd /var/lib/weft && touch peers-0123456789abcdef extension-0123456789abcdef weft.wireguard.key weft.wireguard.key.next .weft-Abc123)
check "purge" dpkg -P weft
# The directory store may be on a file system of the whole cluster.
check "purge keeps the directory store" is "ls -A /var/lib/weft | tr '\n' ' '" ".lock config.json subnets "
check "purge keeps the leases" test -e /var/lib/weft/subnets/10.244.9.0-24.json
rm -r /var/lib/weft/.lock /var/lib/weft/config.json /var/lib/weft/subnets
check "another installation" dpkg -i /packages/new.deb
check "another purge" dpkg -P weft
left=$(find / -xdev '(' -name '*weft*' -o -name '10-flannel.link' ')' -not -path '/proc/*' -not -path '/run/*' -not -path '/var/log/*' -not -path '/var/cache/*')
check "purge leaves nothing" test -z "$left"
echo END
