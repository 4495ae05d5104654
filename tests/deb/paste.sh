#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs the commands of docs/install.md for Debian and for any Linux with systemd, as they stand. It runs inside the container that
# tests/deploy_deb.rs starts. /packages has the files of a release, and the commands as debian.sh and linux.sh.
. /scenario-lib.sh

# This machine is the one with etcd on the page.
ip netns add router
ip link add eth0 type veth peer name eth0 netns router
ip address add 10.0.0.1/24 dev eth0
ip link set eth0 up
ip -n router link set eth0 up
ip route add default via 10.0.0.2
client=http://10.0.0.1:2379 peer=http://127.0.0.1:2380
etcd --data-dir /tmp/etcd --listen-client-urls $client --advertise-client-urls $client --listen-peer-urls $peer \
    --initial-advertise-peer-urls $peer --initial-cluster default=$peer >/tmp/etcd.log 2>&1 &
within 120 "etcd answers" etcdctl --endpoints $client get x
leases() { etcdctl --endpoints $client get --prefix --keys-only /coreos.com/network/subnets/ | grep -c 10.244.; }

cp -r /packages /root/release
cd /root/release || fail "no release"
check "the commands for Debian" bash -e debian.sh
check "the node has a lease" [ "$(leases)" = 1 ]
check "the plugin is where other runtimes look" test -x /opt/cni/bin/flannel
weft cleanup
check "purge" dpkg --purge weft

check "the commands for any Linux" bash -e linux.sh
check "the agent runs by its unit" systemctl --quiet is-active weft
check "the program is the one of the release" cmp /usr/local/bin/weft weft-*-linux-amd64
check "the node has its lease again" [ "$(leases)" = 1 ]
check "the configuration is for root alone" [ "$(stat -c %a /etc/default/weft)" = 600 ]
echo END
