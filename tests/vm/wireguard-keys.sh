# SPDX-License-Identifier: Apache-2.0
# wireguard: endpoints that change, keys over restarts and reboots, and secrets that are shown nowhere.
. /lib.sh

PSK=CQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQk=

wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
key() { wg "$1" show flannel-wg | sed -n 's/^device \([^ ]*\) .*/\1/p'; } # key NODE
# peer NODE OF TEXT: what NODE's device says of the peer OF.
peer() { shows "$3" sh -c "/opt/bin/ip netns exec $1 /opt/bin/wg show flannel-wg | grep -F 'peer $(key "$2") '"; }
peers() { shows "peers $2" wg "$1" show flannel-wg; } # peers NODE COUNT

FLAGS="-v 6 --healthz-ip=127.0.0.1 --healthz-port=8081"
cluster '{"Network":"10.244.0.0/16","Backend":{"Type":"wireguard"}}'
for n in n1 n2 n3; do for m in n1 n2 n3; do
    [ $n = $m ] || eventually "$n peer $m" 300 peer $n $m "allowed $(net $m)"
done; done

# --- roaming ---

stop n3 TERM || die "n3 did not end with 0"
wg n3 port flannel-wg 7777
check "n3 has another port" pings n3 "$(pod4 n1)"
check "its endpoint is learned" peer n1 n3 "endpoint 10.98.0.3:7777"
# Some audits of peers, and one of everything.
sleep 20
check "a learned endpoint stays" peer n1 n3 "endpoint 10.98.0.3:7777"
check "n1 reaches it there" pings n1 "$(pod4 n3)"
start n3
eventually "n3 has its port again" 300 shows "port 51820" wg n3 show flannel-wg
# Its first packet tells n1 where it is now. Without one, n1 would write the endpoint of the lease 180 s after the last handshake.
eventually "n3 is heard from its port" 300 pings n3 "$(pod4 n1)"
reach returned

# --- keys ---

before=$(key n2)
stop n2 TERM || die "n2 did not end with 0"
# What a reboot leaves: no /run, no devices.
rm /run/n2/wgkey
ip -n n2 link del flannel-wg
start n2
eventually "n2 after a reboot" 300 peer n2 n1 "allowed $(net n1)"
check "the key outlives a reboot" [ "$(key n2)" = "$before" ]
reach rebooted
stop n2 TERM || die "n2 did not end with 0"
rm /run/n2/wgkey /var/lib/weft/*.wireguard.key
ip -n n2 link del flannel-wg
start n2
eventually "n2 with another key" 300 peer n2 n1 "allowed $(net n1)"
[ "$(key n2)" != "$before" ] || die "the key is the old one"
eventually "n1 has the new peer" 300 peer n1 n2 "allowed $(net n2)"
eventually "one peer for each lease" 300 peers n1 2
reach changed

# --- secrets ---

touch /tmp/preshared
config "{\"Network\":\"10.244.0.0/16\",\"Backend\":{\"Type\":\"wireguard\",\"PSK\":\"$PSK\",\"PersistentKeepaliveInterval\":25}}"
for n in n1 n2 n3; do for m in n1 n2 n3; do
    [ $n = $m ] || eventually "$n has the preshared key for $m" 300 peer $n $m "keepalive 25|psk yes"
done; done
ip -n n1 link del flannel-wg || die "delete the device"
eventually "n1 heals with it" 300 peer n1 n2 "keepalive 25|psk yes"
reach preshared
check "status shows the sessions" sh -c 'weft status --socket /run/n1/weft.sock | grep -q "flannel-wg: last handshake .* ago, received"'
# What an agent says, and its history, which is saved at the end, at the latest. With a directory as the store, no peers are saved.
for n in n1 n2 n3; do
    status_json $n >/tmp/status-$n
    weft history --socket /run/$n/weft.sock >/tmp/history-$n || die "history of $n"
    ip netns exec $n busybox wget -qO /tmp/metrics-$n http://127.0.0.1:8081/metrics || die "metrics of $n"
    grep -q weft_peers /tmp/metrics-$n || die "no metrics of $n"
done
finish
check "the history is saved" [ "$(find /var/lib/weft -name "history-*" -newer /tmp/preshared | wc -l)" = 3 ]
for n in n1 n2 n3; do
    for secret in "$(cat /run/$n/wgkey)" "$PSK"; do
        [ ${#secret} = 44 ] || die "no secret to look for"
        ! grep -qF "$secret" /tmp/status-$n /tmp/history-$n /tmp/metrics-$n "/run/$n/log" /var/lib/weft/history-* || die "a secret of $n is shown"
    done
done
pass "no secret is shown"
