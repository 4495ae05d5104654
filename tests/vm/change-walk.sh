# SPDX-License-Identifier: Apache-2.0
# The backend changes while the agents run, under 100 packets per second between the pods of all pairs of nodes: from vxlan to host-gw, ipip,
# wireguard, udp, vxlan and vxlan with another VNI, and with IPv6 from vxlan to host-gw, wireguard, vxlan and vxlan with another VNI. None is lost.
. /env # DUAL=yes|no
ONE_LINK=yes
. /lib.sh

# A pass takes up to 3 s in this machine.
FLAGS="--change-grace=12s --hold-removals=0s"
# to_wireguard NAME DEVICES: the default grace time of a minute leaves a second handshake its time (docs/adr/020-live-change.md).
to_wireguard() {
    restart_all --change-grace=60s
    change "$1" wireguard '{"Type":"wireguard"}' "$2" 1420
    restart_all --change-grace=12s
}
restart_all() { # restart_all GRACE
    FLAGS="$1 --hold-removals=0s"
    for n in n1 n2 n3; do
        stop $n TERM || die "$n did not end with 0"
        start $n
        eventually "$n is ready again" 60 ready $n
    done
}
conf() { # conf BACKEND
    [ "$DUAL" = no ] || v6='"EnableIPv6":true,"IPv6Network":"fd10::/48",'
    echo "{$v6\"Network\":\"10.244.0.0/16\",\"Backend\":$1}"
}
v6=
# devices NODE: its devices of backends, in order
devices() { ip -n "$1" -o link show | sed -n 's/^[0-9]*: \(flannel[^:@]*\).*/\1/p' | sort | tr '\n' ' '; }
has_devices() { [ "$(devices "$1")" = "$2" ]; } # has_devices NODE DEVICES
has_mtu() { [ "$(value "$1" FLANNEL_MTU)" = "$2" ]; } # has_mtu NODE MTU
followed() { # followed NODE TYPE: its lease names this type and no other
    status_json "$1" | tr -d ' \n' >/tmp/status && grep -q "\"backend\":\"$2\"" /tmp/status && ! grep -q other_ways /tmp/status
}

# change NAME TYPE BACKEND DEVICES MTU
change() {
    # Each pair in one direction for each family, or in both: the machine cannot encrypt more.
    if [ "$DUAL" = yes ]; then flows n1:n2 n2:n3 n3:n1; else flows n1:n2 n2:n1 n1:n3 n3:n1 n2:n3 n3:n2; fi
    config "$(conf "$3")"
    for n in n1 n2 n3; do
        eventually "$1: $n names $2 and no other way" 200 followed $n "$2"
        eventually "$1: $n has only the devices of $2" 200 has_devices $n "$4"
        eventually "$1: mtu of $n" 60 has_mtu $n "$5"
    done
    sleep 2
    no_loss "$1"
    reach "$1"
}

cluster "$(conf '{"Type":"vxlan"}')"
reach vxlan
if [ "$DUAL" = yes ]; then
    # ipip and udp have no IPv6.
    change "vxlan to host-gw" host-gw '{"Type":"host-gw"}' "" 1500
    to_wireguard "host-gw to wireguard" "flannel-wg flannel-wg-v6 "
    change "wireguard to vxlan" vxlan '{"Type":"vxlan"}' "flannel-v6.1 flannel.1 " 1430
    change "vxlan to VNI 7" vxlan '{"Type":"vxlan","VNI":7}' "flannel-v6.7 flannel.7 " 1430
else
    change "vxlan to host-gw" host-gw '{"Type":"host-gw"}' "" 1500
    change "host-gw to ipip" ipip '{"Type":"ipip"}' "flannel.ipip " 1480
    to_wireguard "ipip to wireguard" "flannel-wg "
    change "wireguard to udp" udp '{"Type":"udp"}' "flannel0 " 1472
    change "udp to vxlan" vxlan '{"Type":"vxlan"}' "flannel.1 " 1450
    change "vxlan to VNI 7" vxlan '{"Type":"vxlan","VNI":7}' "flannel.7 " 1450
fi
finish
