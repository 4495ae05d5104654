# SPDX-License-Identifier: Apache-2.0
# wireguard with one device for both families, with the real flanneld on n2, and weft on n1 and n3. The agents of weft follow the changes of net-conf.
#
# flannel publishes for IPv6 the port of the device that it does not have in these modes (51821), and listens on ListenPort (51820).
P6=2001:db8: # auto chooses IPv6 only between addresses that are not private.
. /lib.sh
. /flannel.sh

FLAGS="--hold-removals=0s --change-grace=3s"
wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
conf() { # conf OPTIONS
    echo "{\"EnableIPv6\":true,\"Network\":\"10.244.0.0/16\",\"IPv6Network\":\"fd10::/48\",\"Backend\":{\"Type\":\"wireguard\"$1}}"
}
# The port that the lease of a node names for IPv6.
port6() { ctl get --print-value-only --prefix "/coreos.com/network/subnets/$(base "$1")-24" | sed 's/.*"BackendV6Data":{[^}]*"Port":\([0-9]*\)}.*/\1/'; }
has_port6() { [ "$(port6 "$1")" = "$2" ]; } # has_port6 NODE PORT
endpoint() { if [ "$1" = ipv4 ]; then echo "$(public "$2"):51820"; else echo "[$(public6 "$2")]:51820"; fi; } # endpoint FAMILY NODE
# mode NAME FAMILY OPTIONS: all nodes reach each other over this family.
mode() {
    net_conf "$(conf "$3")" || die "net-conf"
    # flannel reads net-conf only when it starts.
    stop n2 TERM || die "n2 did not end with 0"
    flannel n2
    for n in n1 n2 n3; do
        for m in n1 n2 n3; do
            [ $n = $m ] || eventually "$1: $n peer $m" 100 shows "endpoint $(endpoint "$2" $m) allowed $(net $m),$(net6 $m)" wg $n show flannel-wg
        done
        eventually "$1: $n has one device" 100 no_link $n flannel-wg-v6
    done
    reach "$1"
}

cluster_with_flannel "$(conf "")"
reach separate
mode ipv4 ipv4 ',"Mode":"ipv4"'
mode ipv6 ipv6 ',"Mode":"ipv6"'
check "flannel's lease names a port on which it does not listen" has_port6 n2 51821
eventually "weft's lease names its port for both families" 30 has_port6 n1 51820
mode auto ipv6 ',"Mode":"auto"'
mode "ipv6 with one port" ipv6 ',"Mode":"ipv6","ListenPortV6":51820'
check "flannel's lease names one port" has_port6 n2 51820
for n in n1 n3; do stop $n TERM || die "$n did not end with 0"; done
check "data path outlives the agents" pings n1 "$(pod4 n3)"
