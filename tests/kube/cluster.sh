#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# cluster.sh DIRECTORY: runs a Kubernetes cluster in namespaces of this machine, as root. etcd, API server, controller manager and scheduler share
# one network namespace. Each node (node.sh) has namespaces and cgroups of its own. These variables describe the cluster:
#   BIN      the directory of tools/kube-binaries      TREE    the source tree
#   PROXIES  mode of kube-proxy on n1, n2, ...         IMAGES  archives that every node imports
#   FAMILY   ipv4, ipv6, or dual (both)                GRACE   seconds after which a silent node is not ready
#   DNS      address of the cluster's DNS service, or empty
# It prints "ready" when the nodes are started. Then it reads orders, one on each line, and prints "done" after each:
#   off NODE    power off: everything on the node is killed        on NODE    power on: with the same disk and an empty /run
# It ends when its input ends, and leaves nothing behind.
set -eu
[ "${1:-}" = inside ] || exec unshare --net --mount --propagation private "$0" inside "$@"
dir=$2
pki=$dir/pki log=$dir/log
api=10.77.0.1 server=10.77.0.1
# With IPv6 alone, no node has an IPv4 address.
if [ "$FAMILY" = ipv6 ]; then api=fd77::1 server='[fd77::1]'; fi
export DIR=$dir
mkdir -p "$pki" "$log" "$dir/run" "$dir/mem"
# The lock is held while anything of this cluster runs. tools/clean-lab looks at it.
exec 9>"$dir/lock"
flock --nonblock 9
exec 3>&1 >>"$log/cluster" 2>&1

# cgroups: prints the cgroup of this shell in every hierarchy, one on each line.
cgroups() {
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        # In version 2 a group that has processes cannot have children, except the root.
        echo /sys/fs/cgroup
        return
    fi
    local names path mount
    while IFS=: read -r _ names path; do
        [ -n "$names" ] || continue
        mount=$(awk -v n="$names" '$3 == "cgroup" && index("," $4 ",", "," n ",") { print $2; exit }' /proc/self/mounts)
        [ -z "$mount" ] || echo "$mount${path%/}"
    done </proc/self/cgroup
}
cgroup_name="weft-kube-$$"
declare -A holder
mapfile -t parents < <(cgroups)

# enter_cgroups NODE: moves the calling subshell into new cgroups of this node.
enter_cgroups() {
    local parent group file
    for parent in "${parents[@]}"; do
        group=$parent/$cgroup_name-$1
        mkdir -p "$group"
        if [ -e "$parent/cgroup.controllers" ]; then
            for file in $(cat "$parent/cgroup.controllers"); do echo "+$file" >"$parent/cgroup.subtree_control" || true; done
            # The kubelet makes children of the node's root group, so that group itself must have no process.
            mkdir "$group/node"
        fi
        for file in cpuset.cpus cpuset.mems; do
            if [ -e "$parent/cpuset.cpus" ] && [ -z "$(cat "$group/$file")" ]; then cat "$parent/$file" >"$group/$file"; fi
        done
        echo 0 >"$group/cgroup.procs"
    done
}

# leave_no_cgroup NAME: removes cgroups whose processes were killed. The last process may not have ended yet.
leave_no_cgroup() {
    local parent try
    for try in $(seq 600); do
        for parent in "${parents[@]}"; do
            find "$parent" -depth -type d -path "$parent/$1*" -exec rmdir {} + 2>/dev/null || true
        done
        for parent in "${parents[@]}"; do
            if compgen -G "$parent/$1*" >/dev/null; then sleep 0.05; continue 2; fi
        done
        return 0
    done
    echo "cgroups $1 stay"
}

teardown() {
    local node
    for node in "${!holder[@]}"; do
        # The process that started the node waits for it, and then ends, too.
        kill -9 "$(cat "$dir/run/$node.pid")" || kill -9 "${holder[$node]}"
        wait "${holder[$node]}"
    done
    # shellcheck disable=SC2046 # a list of words
    kill -9 $(jobs -p)
    wait
    leave_no_cgroup "$cgroup_name-"
    umount "$dir/mem"
    cd /
    rm -rf --one-file-system "$dir"
}
finish() {
    # The test reads the logs before it ends the input.
    [ $? = 0 ] || { echo failed >&3; cat >/dev/null || true; }
    set +e
    teardown
}
trap finish EXIT

# start NAME PROGRAM...: starts a program that ends with this shell, however that ends.
start() {
    local name=$1
    shift
    setpriv --pdeathsig KILL "$@" </dev/null >>"$log/$name" 2>&1 3>&- &
}

# certificate NAME SUBJECT [ALTERNATIVE NAMES]: makes NAME.key and NAME.pem.
certificate() {
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2"
    printf 'subjectAltName=%s\n' "${3:-DNS:$1}" >"$1.san"
    openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile "$1.san" -out "$1.pem"
}

# user NAME SUBJECT [ALTERNATIVE NAMES]: makes a certificate, and the kubeconfig NAME.conf that uses it.
user() {
    certificate "$@"
    cat >"$1.conf" <<END
{"apiVersion": "v1", "kind": "Config", "current-context": "c",
 "clusters": [{"name": "c", "cluster": {"server": "https://$server:6443", "certificate-authority": "$pki/ca.pem"}}],
 "users": [{"name": "u", "user": {"client-certificate": "$pki/$1.pem", "client-key": "$pki/$1.key"}}],
 "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}
END
}

credentials() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca
    openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out sa.key
    certificate api /CN=kube-apiserver \
        "IP:10.77.0.1,IP:fd77::1,IP:127.0.0.1,IP:10.96.0.1,IP:fd00:10:96::1,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
    certificate api-to-kubelet /O=system:masters/CN=kube-apiserver-kubelet-client
    user admin /O=system:masters/CN=admin
    user controller-manager /CN=system:kube-controller-manager
    user scheduler /CN=system:kube-scheduler
    user proxy /CN=system:kube-proxy
    local node
    for node in $nodes; do
        user "kubelet-$node" "/O=system:nodes/CN=system:node:$node" "DNS:$node,IP:10.77.0.1${node#n},IP:fd77::1${node#n}"
    done
}

control_plane() {
    local services=10.96.0.0/16 pods=10.244.0.0/16 mask=--node-cidr-mask-size=24
    case $FAMILY in
    dual)
        services=$services,fd00:10:96::/112 pods=$pods,fd00:10:244::/48
        mask="--node-cidr-mask-size-ipv4=24 --node-cidr-mask-size-ipv6=64"
        ;;
    ipv6) services=fd00:10:96::/112 pods=fd00:10:244::/48 mask=--node-cidr-mask-size=64 ;;
    esac
    # The data need not survive a crash of this machine.
    start etcd "$BIN/etcd" --data-dir "$dir/mem/etcd" --unsafe-no-fsync --log-level warn
    start apiserver "$BIN/kube-apiserver" --etcd-servers http://127.0.0.1:2379 --advertise-address $api --secure-port 6443 \
        --tls-cert-file "$pki/api.pem" --tls-private-key-file "$pki/api.key" --client-ca-file "$pki/ca.pem" \
        --authorization-mode Node,RBAC --enable-admission-plugins NodeRestriction --allow-privileged=true \
        --service-cluster-ip-range $services --service-account-issuer https://kubernetes.default.svc \
        --service-account-key-file "$pki/sa.key" --service-account-signing-key-file "$pki/sa.key" \
        --kubelet-client-certificate "$pki/api-to-kubelet.pem" --kubelet-client-key "$pki/api-to-kubelet.key" \
        --kubelet-certificate-authority "$pki/ca.pem" --kubelet-preferred-address-types InternalIP
    local try
    for try in $(seq 600); do
        if "$BIN/kubectl" --kubeconfig "$pki/admin.conf" get --raw /readyz >/dev/null 2>&1; then break; fi
        [ "$try" != 600 ] || { echo "the API server is not ready"; exit 1; }
        sleep 0.2
    done
    # With the default of 20 requests a second, nodes get their pod CIDRs five seconds later.
    # shellcheck disable=SC2086 # a list of words
    start controller-manager "$BIN/kube-controller-manager" --kubeconfig "$pki/controller-manager.conf" --leader-elect=false \
        --allocate-node-cidrs --cluster-cidr $pods --service-cluster-ip-range $services $mask --root-ca-file "$pki/ca.pem" \
        --service-account-private-key-file "$pki/sa.key" --use-service-account-credentials --bind-address 127.0.0.1 \
        --kube-api-qps 500 --kube-api-burst 1000 --node-monitor-grace-period "${GRACE}s"
    start scheduler "$BIN/kube-scheduler" --kubeconfig "$pki/scheduler.conf" --leader-elect=false --bind-address 127.0.0.1
    touch "$dir/run/api"
}

on() {
    local node=$1 index=${1#n} addresses=
    ip netns add "$node"
    # The port of the bridge has the name of the node, so that a test can set it down.
    # A machine has the same MAC address after a boot.
    ip link add "$node" type veth peer name eth0 address "02:00:0a:4d:00:1$index" netns "$node"
    ip link set "$node" master br0 up
    ip -n "$node" link set lo up
    ip -n "$node" link set eth0 up
    if [ "$FAMILY" != ipv6 ]; then
        ip -n "$node" addr add "10.77.0.1$index/24" dev eth0
        ip -n "$node" route add default via 10.77.0.1
        addresses=10.77.0.1$index
    fi
    if [ "$FAMILY" != ipv4 ]; then
        ip -n "$node" addr add "fd77::1$index/64" dev eth0 nodad
        ip -n "$node" route add default via fd77::1
        addresses=${addresses:+$addresses,}fd77::1$index
    fi
    local proxy
    proxy=$(cut -d ' ' -f "$index" <<<"$PROXIES")
    (
        enter_cgroups "$node"
        export NODE=$node ADDRESSES=$addresses PROXY=$proxy
        # unshare is killed when this shell ends, and the node is killed with it.
        # shellcheck disable=SC2016 # for the inner shell
        exec setpriv --pdeathsig KILL nsenter --net="/run/netns/$node" unshare --cgroup sh -c '
            [ ! -e "$0/node" ] || echo 0 >"$0/node/cgroup.procs"
            exec unshare --mount --pid --uts --ipc --fork --kill-child --propagation private "$TREE/tests/kube/node.sh"
        ' "${parents[0]}/$cgroup_name-$node" </dev/null >>"$log/$node" 2>&1 3>&-
    ) &
    holder[$node]=$!
}
off() {
    # When the first process of a PID namespace ends, the kernel kills all others.
    kill -9 "$(cat "$dir/run/$1.pid")"
    wait "${holder[$1]}" || true
    rm "$dir/run/$1.pid"
    unset "holder[$1]"
    ip link del "$1"
    ip netns del "$1"
    # The kubelet would need three seconds more at its start for each cgroup of an old container.
    leave_no_cgroup "$cgroup_name-$1"
}

mount -t tmpfs tmpfs "$dir/mem"
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add br0 type bridge
ip link set br0 up
[ "$FAMILY" = ipv6 ] || ip addr add 10.77.0.1/24 dev br0
[ "$FAMILY" = ipv4 ] || ip addr add fd77::1/64 dev br0 nodad
# The rules of this machine must not filter packets between the nodes.
for file in iptables ip6tables; do
    if [ -e /proc/sys/net/bridge/bridge-nf-call-$file ]; then echo 0 >/proc/sys/net/bridge/bridge-nf-call-$file; fi
done

nodes=
for proxy in $PROXIES; do nodes="$nodes n$((${nodes:+$(wc -w <<<"$nodes")} + 1))"; done
cd "$pki"
credentials
mkdir "$dir/mem/images"
# shellcheck disable=SC2086 # a list of words
cp $IMAGES "$dir/mem/images"
# busybox is the program of the pause container and of the test pods.
root=$dir/mem/busybox
mkdir -p "$root/bin"
cp /bin/busybox "$root/bin"
for name in sh cat cp echo hostname httpd kill mkdir mv nc ping printf sleep tail; do ln -s busybox "$root/bin/$name"; done
printf '#!/bin/sh\nexec sleep 2147483647\n' >"$root/pause"
chmod +x "$root/pause"
"$TREE/tools/image" "$dir/mem/images/pause.tar" pause:1 "$root" /pause
"$TREE/tools/image" "$dir/mem/images/weft-test.tar" weft-test:1 "$root" /bin/busybox
for node in $nodes; do on "$node"; done
control_plane
echo ready >&3

while read -r order node; do
    case $order in
    on | off) "$order" "$node" ;;
    *) echo "unknown order $order"; exit 1 ;;
    esac
    echo done >&3
done
