# SPDX-License-Identifier: Apache-2.0
# A change from vxlan to wireguard with the real flanneld on n2, which does not follow, and weft on n1 and n3.
. /lib.sh

STORE=http://10.99.0.254:2379
status() { weft status --socket "/run/$1/weft.sock"; } # status NODE
no_link() { ! ip -n "$1" link show "$2"; } # no_link NODE DEVICE
fails() { ! "$@"; }
leaves_by() { shows "dev $3" ip -n "$1" route get "$2"; } # leaves_by NODE ADDRESS DEVICE
flannel() { # flannel NODE
    # The program, not the function: $! must be the agent.
    WIREGUARD_KEY_FILE="/run/$1/wgkey" /opt/bin/ip netns exec "$1" flanneld --etcd-endpoints=$STORE --iface=eth0 \
        --subnet-file="/run/$1/subnet.env" --iptables-forward-rules=false >>"/run/$1/log" 2>&1 &
    echo $! >"/run/$1/pid"
}
weft_on() { # weft_on NODE. Clear text ends ten grace times after the change.
    /opt/bin/ip netns exec "$1" weft agent --etcd-endpoints $STORE --iface eth0 --subnet-file "/run/$1/subnet.env" \
        --socket "/run/$1/weft.sock" --state-dir "/run/$1/state" --change-grace=12s >>"/run/$1/log" 2>&1 &
    echo $! >"/run/$1/pid"
}
net_conf() { # net_conf TYPE
    ctl put /coreos.com/network/config "{\"Network\":\"10.244.0.0/16\",\"Backend\":{\"Type\":\"$1\"}}"
}

topology
/opt/bin/ip netns exec rt etcd --data-dir /tmp/etcd --listen-client-urls $STORE --advertise-client-urls $STORE \
    --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
    --initial-cluster default=http://127.0.0.1:2380 >/tmp/etcd.log 2>&1 &
ctl() { /opt/bin/ip netns exec rt etcdctl --endpoints $STORE "$@"; }
eventually "etcd answers" 300 net_conf vxlan
flannel n2
eventually "n2 has its subnet" 300 grep -q ^FLANNEL_MTU= /run/n2/subnet.env
for n in n1 n3; do
    weft_on $n
    eventually "$n has its subnet" 300 grep -q ^FLANNEL_MTU= "/run/$n/subnet.env"
done
for n in n1 n2 n3; do pod $n; done
reach vxlan

net_conf wireguard || die "net-conf"
eventually "n1 sends to n3 by wireguard" 100 leaves_by n1 "$(pod4 n3)" flannel-wg
eventually "n1 marks flannel's node" 30 shows "programmed, NOT ENCRYPTED|1 nodes still need the earlier vxlan: $(base n2)-24" status n1
check "n1 still reaches flannel's node" pings n1 "$(pod4 n2)"
stop n1 TERM || die "n1 did not end with 0"
weft_on n1
eventually "n1 is ready again" 60 ready n1
check "after a restart n1 still reaches flannel's node" pings n1 "$(pod4 n2)"
check "after a restart n1 still marks it" shows "programmed, NOT ENCRYPTED" status n1
for n in n1 n3; do eventually "clear text ends on $n" 200 no_link $n flannel.1; done
check "packets to flannel's node are not sent" fails pings n1 "$(pod4 n2)"
check "n1 names flannel's node as set aside" shows "1 nodes are set aside,|$(base n2)-24" status n1
check "n1 reaches n3" pings n1 "$(pod4 n3)"

# flannel follows when it is restarted, and leaves the routes of its earlier device, which are longer (rke2#9338).
stop n2 TERM
flannel n2
eventually "flannel has its new device" 100 ip -n n2 link show flannel-wg
check "flannel would go on in clear text" leaves_by n2 "$(pod4 n1)" flannel.1
ip -n n2 link del flannel.1 || die "flannel's earlier device"
reach restarted
