# SPDX-License-Identifier: Apache-2.0
# The agent of n1 is restarted, killed and upgraded while pods send 100 packets per second with wireguard: none is lost, and none is seen in
# clear text on the uplinks. Before, the cluster has vxlan, where the same capture sees vxlan and the addresses of pods.
. /lib.sh # DUAL=yes|no

FLAGS="--change-grace=3s --hold-removals=0s"
conf() { # conf TYPE
    [ "$DUAL" = no ] || v6='"EnableIPv6":true,"IPv6Network":"fd10::/48",'
    echo "{$v6\"Network\":\"10.244.0.0/16\",\"Backend\":{\"Type\":\"$1\"}}"
}
v6=
cluster "$(conf vxlan)"
reach vxlan
capture n1
flows n1:n2 n2:n1
sleep 2
no_loss vxlan
end_capture n1
check "the capture sees vxlan" [ "$(seen n1 vxlan)" -ge 200 ]
check "the capture sees the addresses of pods in vxlan" [ "$(seen n1 clear)" -ge 200 ]

config "$(conf wireguard)"
for n in n1 n2 n3; do eventually "$n has changed to wireguard" 200 no_link $n flannel.1; done
reach wireguard
flows n1:n2
ip -n n1 link set flannel-wg down || die "device down"
eventually "the device comes up again" 60 shows "dev flannel-wg proto 90" ip -n n1 route show 10.244.0.0/16
end_flows
check "the count sees packets that are lost" [ "$(measured lost)" -gt 0 ]
reach repaired
capture n1 n3
left=$(index n1 flannel-wg)
for event in term kill upgrade; do
    flows n1:n2 n2:n1 n1:n3 n3:n1
    case $event in
    kill) stop n1 KILL ;;
    *) stop n1 TERM || die "n1 did not end with 0" ;;
    esac
    if [ $event = upgrade ]; then
        AGENT=/run/weft-2
        cp /opt/bin/weft $AGENT || die "the other program"
    fi
    start n1
    eventually "$event: n1 is ready again" 120 ready n1
    # The first audits of the new agent are a part of the time.
    sleep 5
    no_loss $event
    check "$event keeps the device" [ "$(index n1 flannel-wg)" = "$left" ]
done
check "the other program runs" [ "$(readlink "/proc/$(cat /run/n1/pid)/exe")" = /run/weft-2 ]
end_capture n1 n3
for n in n1 n3; do
    check "the capture sees wireguard on $n" [ "$(seen $n wireguard)" -ge 1000 ]
    check "no address of a pod leaves $n in clear text" [ "$(seen $n clear)" = 0 ]
    check "no vxlan leaves $n" [ "$(seen $n vxlan)" = 0 ]
done
finish
