# SPDX-License-Identifier: Apache-2.0
# wireguard with the real flanneld on n2, and weft on n1 and n3. Then n2 changes to weft and back.
. /lib.sh
. /flannel.sh

wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
key() { wg "$1" show flannel-wg | sed -n 's/^device \([^ ]*\) .*/\1/p'; }

cluster_with_flannel '{"EnableIPv6":true,"Network":"10.244.0.0/16","IPv6Network":"fd10::/48","Backend":{"Type":"wireguard"}}'
for n in n1 n2 n3; do check "$n mtu" [ "$(value $n FLANNEL_MTU)" = 1420 ]; done
reach pods

# The keys and blanks of both leases, without what differs.
form() { ctl get --print-value-only --prefix "/coreos.com/network/subnets/$(base "$1")-24" | sed 's/"PublicKey":"[^"]*"/KEY/g; s/"PublicIP[^,]*,//g'; }
check "lease bytes are flannel's" [ "$(form n1)" = "$(form n2)" ]
[ -n "$(form n1)" ] || die "no lease"

# --- flanneld to weft ---

# flannel ends by a signal under packets between these pairs, and weft starts at once.
change() { # change SIGNAL PAIR...
    signal=$1; shift
    before=$(key n2)
    flows "$@"
    stop n2 $signal
    began=$(cut -d' ' -f1 /proc/uptime)
    weft_on n2
    eventually "n2 has its device with weft" 60 ip -n n2 link show flannel-wg
    device=$(cut -d' ' -f1 /proc/uptime)
    eventually "n2 is ready with weft" 300 ready n2
    # The first audits of the agent are a part of the time.
    sleep 5
}
renewed() { now=$(index n2 flannel-wg); [ -n "$now" ] && [ "$now" != "$left" ]; }
# arrives_after BEGIN SECONDS: the longest gap ended at most so long after BEGIN.
arrives_after() { awk "BEGIN { late = $(measured gap_ended) - $1; print late; exit late > $2 }"; }

left=$(index n2 flannel-wg)
change KILL n1:n2 n2:n1 n3:n2 n2:n3
no_loss "flannel killed, then weft"
check "flannel's device is adopted" [ "$(index n2 flannel-wg)" = "$left" ]
check "with its key" [ "$(key n2)" = "$before" ]
reach weft

# flannel deletes its device when it ends by SIGTERM. Without a handshake by weft, n1 and n3 would go on with the sessions of that device for
# 15 s: their pods send, and those of n2 do not.
stop n2 TERM || die "n2 did not end with 0"
flannel n2
eventually "flannel has its device again" 60 renewed
reach flannel-again
change TERM n1:n2 n3:n2
end_flows
check "without a device packets are lost" [ "$(measured lost)" -gt 0 ]
# The time until the device is that of this slow machine.
check "packets arrive at most 1.5 s after weft has made the device" arrives_after "$device" 1.5
echo "packets arrived $(cat /tmp/out) s after the device was there, and $(arrives_after "$began" 0) s after the start of weft"
reach weft-again

# --- and back ---

stop n2 TERM || die "n2 did not end with 0"
flannel n2
sleep 5
reach flannel
check "the key is the same" [ "$(key n2)" = "$before" ]
