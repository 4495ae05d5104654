# SPDX-License-Identifier: Apache-2.0
# A cluster with the real flanneld on n2, and weft on n1 and n3. The leases are in an etcd on the router, which `start` uses, too.

STORE=http://10.99.0.254:2379
STORE_FLAGS="--etcd-endpoints $STORE"
ctl() { /opt/bin/ip netns exec rt etcdctl --endpoints $STORE "$@"; }
net_conf() { ctl put /coreos.com/network/config "$1"; }

flannel() { # flannel NODE
    # The program, not the function: $! must be the agent.
    WIREGUARD_KEY_FILE="/run/$1/wgkey" /opt/bin/ip netns exec "$1" flanneld --etcd-endpoints=$STORE --iface=eth0 \
        --subnet-file="/run/$1/subnet.env" --iptables-forward-rules=false >>"/run/$1/log" 2>&1 &
    echo $! >"/run/$1/pid"
}

etcd_on_router() { # etcd_on_router NET-CONF
    /opt/bin/ip netns exec rt etcd --data-dir /tmp/etcd --listen-client-urls $STORE --advertise-client-urls $STORE \
        --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
        --initial-cluster default=http://127.0.0.1:2380 >/tmp/etcd.log 2>&1 &
    eventually "etcd answers" 300 net_conf "$1"
}

cluster_with_flannel() { # cluster_with_flannel NET-CONF
    topology
    etcd_on_router "$1"
    flannel n2
    eventually "n2 has its subnet" 300 grep -q ^FLANNEL_MTU= /run/n2/subnet.env
    for n in n1 n3; do
        start $n
        eventually "$n has its subnet" 300 grep -q ^FLANNEL_MTU= "/run/$n/subnet.env"
    done
    for n in n1 n2 n3; do pod $n; done
}
