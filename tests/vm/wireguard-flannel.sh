# SPDX-License-Identifier: Apache-2.0
# wireguard with the real flanneld on n2, and weft on n1 and n3. Then n2 changes to weft and back.
. /lib.sh
. /flannel.sh

# The agents ask nobody whether packets arrive, because that would begin handshakes, too.
FLAGS="--probe=off"
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

# flannel ends by a signal under packets between these pairs, and COMMAND makes the devices at once.
change() { # change SIGNAL COMMAND PAIR...
    signal=$1; command=$2; shift 2
    before=$(key n2)
    flows "$@"
    stop n2 $signal
    began=$(uptime)
    $command
    # The first audits of the agent are a part of the time.
    sleep 5
}
uptime() { cut -d' ' -f1 /proc/uptime; }
with_weft() { start n2; eventually "n2 is ready with weft" 300 ready n2; }

left=$(index n2 flannel-wg)
change KILL with_weft n1:n2 n2:n1 n3:n2 n2:n3
no_loss "flannel killed, then weft"
check "flannel's device is adopted" [ "$(index n2 flannel-wg)" = "$left" ]
check "with its key" [ "$(key n2)" = "$before" ]
reach weft

# flannel deletes its devices when it ends by SIGTERM. Without a handshake by the new device, n1 and n3 would go on with the sessions of the old one
# for 15 s: their pods send, and those of n2 do not.

renewed() { now=$(index n2 flannel-wg); [ -n "$now" ] && [ "$now" != "$left" ]; }
flannel_again() { # flannel_again NAME
    left=$(index n2 flannel-wg)
    flannel n2
    eventually "$1: flannel has its device again" 60 renewed
    reach "$1"
    for device in flannel-wg flannel-wg-v6; do
        wg n2 show $device | sed -n 's/^peer \([^ ]*\) endpoint \([^ ]*\) allowed \([^ ]*\) .*/\1 \2 \3/p' >/tmp/peers-$device
    done
}
# The least that a program does that knows nothing but etcd and the private key.
by_hand() {
    ctl get /coreos.com/network/config >/tmp/config; ctl get --prefix /coreos.com/network/subnets/ >/tmp/leases
    make_device flannel-wg 51820 "$(base n2)/32" 10.244.0.0/16
    make_device flannel-wg-v6 51821 "$(base6 n2)/128" fd10::/48
}
make_device() { # make_device DEVICE PORT ADDRESS NETWORK
    ip -n n2 link add "$1" mtu 1420 type wireguard || die "device $1"
    wg n2 key "$1" /run/n2/wgkey; wg n2 port "$1" "$2"
    ip -n n2 addr add "$3" dev "$1"; ip -n n2 link set "$1" up
    wg n2 peers "$1" "/tmp/peers-$1"
    ip -n n2 route add "$4" dev "$1" || die "route of $1"
}
by_n2() { [ "$1" = "$(public n2)" ] || [ "$1" = "$(public6 n2)" ]; }
# The handshakes that n2 has begun since flannel's end.
begun() { awk "\$1 == \"initiation\" && \$2 >= $began { print \$3 }" /tmp/capture-n2 | while read -r who; do by_n2 "$who" && echo "$who"; done; }
# A peer answers first. Where n2 has its device again only after seconds, on a slow machine, peers begin handshakes before, and nobody answers.
begins() {
    first=$(awk "\$1 == \"response\" && \$2 >= $began { print \$3; exit }" /tmp/capture-n2)
    [ -n "$first" ] && ! by_n2 "$first"
}

stop n2 TERM || die "n2 did not end with 0"
for command in by_hand with_weft; do
    flannel_again "before $command"
    capture n2
    change TERM $command n1:n2 n3:n2
    end_flows
    end_capture n2
    check "$command: without a device packets are lost" [ "$(measured lost)" -gt 0 ]
    # weft has no part in the first one.
    [ $command = with_weft ] || begins || die "the script begins no handshake, or this machine is too slow"
    check "$command: n2 begins the first handshake that is answered" begins
    # Two peers and two devices. A second attempt would come 5 s after the first.
    check "$command: n2 begins no handshake twice" [ "$(begun | wc -l)" -le 4 ]
    awk "BEGIN { print $(measured gap_ended) - $began }" >/tmp/took-$command
    [ $command = with_weft ] || { ip -n n2 link del flannel-wg; ip -n n2 link del flannel-wg-v6; }
done
# The times are shown and not judged, because an emulated processor has no time of its own. A handshake that somebody else begins, or that is begun
# twice, would be late by seconds.
echo "packets arrived $(cat /tmp/took-by_hand) s after the start of a script, and $(cat /tmp/took-with_weft) s after the start of weft"
reach weft-again

# --- and back ---

stop n2 TERM || die "n2 did not end with 0"
flannel n2
sleep 5
reach flannel
check "the key is the same" [ "$(key n2)" = "$before" ]
