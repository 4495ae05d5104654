#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# node.sh: process 1 of a node that cluster.sh has started. It runs containerd, kubelet and kube-proxy. The node has a root file system of its own: that
# of the machine, with everything that the node writes in memory. So every default path is private. The variables NODE, ADDRESSES and PROXY, and
# those of cluster.sh, describe the node.
set -eu

# /proc is still that of the machine, so this is the process ID by which tests enter the node.
read -r pid _ </proc/self/stat
echo "$pid" >"$DIR/run/$NODE.pid"
hostname "$NODE"

disk=$DIR/mem/$NODE
mkdir -p "$disk/upper" "$disk/work" "$disk/containerd" "$disk/kubelet"
mount -t overlay overlay -o "lowerdir=/,upperdir=$disk/upper,workdir=$disk/work" /mnt
cd /mnt
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount --rbind /dev dev
# An overlay cannot have its files in another overlay, and containerd makes overlays.
for name in containerd kubelet; do
    mkdir -p "var/lib/$name"
    mount --bind "$disk/$name" "var/lib/$name"
done
# The overlay does not contain other file systems than the root.
for path in "$DIR" "$BIN" "$TREE"; do
    mkdir -p ".$path"
    mount --rbind "$path" ".$path"
done

if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    for name in $(cat sys/fs/cgroup/cgroup.controllers); do echo "+$name" >sys/fs/cgroup/cgroup.subtree_control; done
else
    mount -t tmpfs tmpfs sys/fs/cgroup
    while IFS=: read -r _ name _; do
        [ -n "$name" ] || continue
        mkdir "sys/fs/cgroup/${name#name=}"
        case $name in name=*) options=none,$name ;; *) options=$name ;; esac
        mount -t cgroup -o "$options" cgroup "sys/fs/cgroup/${name#name=}"
    done </proc/self/cgroup
fi
pivot_root . .
umount -l .
cd /
mount --make-rshared /

# cover PATH VALUE: puts a file in the place of a sysctl of the whole machine.
cover() {
    mkdir -p /run/cover
    echo "$2" >"/run/cover/${1##*/}"
    mount --bind "/run/cover/${1##*/}" "/proc/sys/$1"
}
# The kubelet would write these sysctls. It finds the values that it wants, and writes nothing.
cover vm/overcommit_memory 1
cover vm/panic_on_oom 0
cover kernel/panic 10
cover kernel/panic_on_oops 1
cover kernel/keys/root_maxkeys 1000000
cover kernel/keys/root_maxbytes 25000000
cover kernel/random/boot_id "$(cat /proc/sys/kernel/random/uuid)"

# At its first start, the node is a new machine.
if [ ! -e /etc/weft-kube-node ]; then
    rm -rf /etc/cni /opt/cni /var/lib/cni /var/lib/weft
    mkdir -p /etc/cni/net.d /opt/cni/bin /etc/containerd
    for name in bandwidth bridge host-local loopback portmap; do cp "/usr/lib/cni/$name" /opt/cni/bin; done
    tr -d - </proc/sys/kernel/random/uuid >/etc/machine-id
    : >/etc/resolv.conf
    # Without CAP_SYS_RESOURCE, no process may lower its OOM score.
    restrict=false
    (echo -1 >/proc/self/oom_score_adj) 2>/dev/null || restrict=true
    cat >/etc/containerd/config.toml <<END
version = 2
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.tracing"]
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "docker.io/library/pause:1"
restrict_oom_score_adj = $restrict
END
    cat >/etc/kubelet.yaml <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: $DIR/pki/ca.pem}
authorization: {mode: Webhook}
tlsCertFile: $DIR/pki/kubelet-$NODE.pem
tlsPrivateKeyFile: $DIR/pki/kubelet-$NODE.key
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
failSwapOn: false
# A full disk of this machine must not lead to evictions.
evictionHard: {imagefs.available: 0%, imagefs.inodesFree: 0%, memory.available: 0%, nodefs.available: 0%, nodefs.inodesFree: 0%}
imageGCHighThresholdPercent: 100
END
    [ -z "$DNS" ] || printf 'clusterDNS: ["%s"]\nclusterDomain: cluster.local\n' "$DNS" >>/etc/kubelet.yaml
    cat >/etc/kube-proxy.yaml <<END
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: $PROXY
hostnameOverride: $NODE
clientConnection: {kubeconfig: $DIR/pki/proxy.conf}
# A node must not change limits of the whole machine.
conntrack: {maxPerCore: 0}
END
    touch /etc/weft-kube-node
fi

# keep NAME COMMAND...: starts a command, and starts it again whenever it ends, as systemd would.
keep() {
    local name=$1
    shift
    while :; do
        "$@" >>"$DIR/log/$NODE-$name" 2>&1 </dev/null || true
        echo "$name ended, and is started again" >>"$DIR/log/$NODE-$name"
        sleep 0.5
    done &
}

keep containerd containerd
until ctr version >/dev/null 2>&1; do sleep 0.1; done
if [ ! -e /var/lib/containerd/imported ]; then
    for image in "$DIR"/mem/images/*.tar; do ctr -n k8s.io image import "$image"; done
    touch /var/lib/containerd/imported
fi
until [ -e "$DIR/run/api" ]; do sleep 0.1; done
# The time of this file is the start of the kubelet.
touch "$DIR/run/$NODE.kubelet"
keep kubelet "$BIN/kubelet" --config /etc/kubelet.yaml --kubeconfig "$DIR/pki/kubelet-$NODE.conf" --hostname-override "$NODE" \
    --node-ip "$ADDRESSES" -v 2
keep kube-proxy "$BIN/kube-proxy" --config /etc/kube-proxy.yaml
# As process 1, this shell waits for processes whose parents have ended.
wait
