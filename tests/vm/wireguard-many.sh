# SPDX-License-Identifier: Apache-2.0
# Measures wireguard with many peers, which are leases in etcd without machines: a program that knows all peers (the floor), weft and flanneld,
# each on n1 after the other.
. /lib.sh
. /flannel.sh

PEERS=1000
ADDS=5
FLAGS="--hold-removals=0s"
wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
clock() { read -r seconds _ </proc/uptime; echo "${seconds%.*}${seconds#*.}"; } # hundredths of a second since boot

# --- leases ---

# Public keys that no machine has. Their first half differs, by which the agent knows a peer.
lease() { # lease FIRST LAST FORMAT: one line for each peer
    awk -v first="$1" -v last="$2" -v form="$3" 'BEGIN { for (n = first; n <= last; n++) {
        key = sprintf("%04dBCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmA=", n); subnet = 130 + int(n / 256) "." n % 256; public = "172.16." int(n / 256) "." n % 256
        if (form == "peers") print key, public ":51820", "10." subnet ".0/24"
        else {
            value = "{\x27PublicIP\x27:\x27" public "\x27,\x27PublicIPv6\x27:null,\x27BackendType\x27:\x27wireguard\x27,\x27BackendData\x27:{\x27PublicKey\x27:\x27" key "\x27,\x27Port\x27:51820}}"
            gsub("\x27", "\\\"", value)
            print "put /coreos.com/network/subnets/10." subnet ".0-24 \"" value "\""
        }
    } }'
}
fill() {
    at=0
    while [ $at -lt $PEERS ]; do
        { echo; lease $at $((at + 99)) puts; echo; echo; } | ctl txn >/tmp/txn || die "leases"
        at=$((at + 100))
    done
}
# put PEER: without the start of a program, which takes longer than all that is measured
put() {
    lease "$1" "$1" puts >/tmp/put
    key=$(cut -d' ' -f2 /tmp/put | tr -d '\n' | base64 | tr -d '\n')
    value=$(sed 's/^[^"]*"//; s/"$//; s/\\"/"/g' /tmp/put | tr -d '\n' | base64 | tr -d '\n')
    echo "{\"key\":\"$key\",\"value\":\"$value\"}" >/tmp/body
    began=$(cut -d' ' -f1 /proc/uptime)
    /opt/bin/ip netns exec rt busybox wget -q -O /tmp/answer --post-data "$(cat /tmp/body)" $STORE/v3/kv/put || die "put"
}

# --- what is measured ---

ticks() { read -r line </proc/$1/stat; set -- $line; echo $((${14} + ${15})); } # ticks PID: its CPU time in hundredths of a second
# settled PID: waits until it used less than a tenth of the processor for 2 s. Then $worked is the time at which it did so last.
settled() {
    before=$(ticks "$1"); worked=$(clock)
    until [ $(($(clock) - worked)) -ge 200 ]; do
        sleep 0.2
        now=$(ticks "$1")
        [ $((now - before)) -lt 2 ] || worked=$(clock)
        before=$now
    done
}
memory() { sed -n "s/^$2:[^0-9]*\([0-9]*\) kB/\1/p" "/proc/$1/status"; } # memory PID FIELD
all_peers() { shows "peers $1" wg n1 show flannel-wg; }
row() { echo "figure: $*"; }
median() { sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'; }

measure() { # measure PROGRAM COMMAND: cold start, memory, new peers and idle time of what COMMAND starts on n1
    begin=$(clock); $2 n1
    pid=$(cat /run/n1/pid)
    eventually "$1 has its subnet" 300 grep -q ^FLANNEL_MTU= /run/n1/subnet.env
    settled "$pid"
    eventually "$1 has all peers" 120 all_peers $PEERS
    row "$1 cold start $((worked - begin)) hundredths of a second, CPU $(ticks "$pid")"
    row "$1 memory $(memory "$pid" VmRSS) kB, peak $(memory "$pid" VmHWM) kB"
    # weft begins handshakes. Until they are given up after 90 s, the kernel works.
    [ "$1" = flanneld ] || { eventually "$1 has compared the peers" 60 audited; sleep 95; }
    : >/tmp/adds
    for n in $(seq $PEERS $((PEERS + ADDS - 1))); do
        wg n1 reaches "10.$((130 + n / 256)).$((n % 256)).9" >/tmp/reached &
        waits=$!
        sleep 2
        put "$n"
        wait $waits || die "$1: no peer $n"
        awk "BEGIN { print ($(cat /tmp/reached) - $began) * 1000 }" >>/tmp/adds
    done
    row "$1 new peer $(median </tmp/adds) ms of $(tr '\n' ' ' </tmp/adds)"
    idle=$(ticks "$pid"); since=$(clock)
    sleep 60
    row "$1 idle $(($(ticks "$pid") - idle)) of $(($(clock) - since)) hundredths of a second"
}
audit_s() { status_json n1 | tr -d ' \n' | sed -n 's/.*"wireguard_audit_s":\([0-9.]*\).*/\1/p'; }
audited() { [ -n "$(audit_s)" ] && [ "$(audit_s)" != 3.0 ]; }

topology
etcd_on_router '{"Network":"10.128.0.0/9","SubnetLen":24,"SubnetMin":"10.250.0.0","SubnetMax":"10.254.0.0","Backend":{"Type":"wireguard"}}'
fill
lease 0 $((PEERS - 1)) peers >/tmp/peers
ip -n n1 link add flannel-wg mtu 1420 type wireguard || die "device"
printf %s AAIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eH2A= >/tmp/key
wg n1 key flannel-wg /tmp/key; wg n1 port flannel-wg 51820
ip -n n1 link set flannel-wg up
begin=$(clock)
wg n1 peers flannel-wg /tmp/peers
row "floor cold start $(($(clock) - begin)) hundredths of a second"
row "floor dump $(wg n1 dump flannel-wg 5) us"
ip -n n1 link del flannel-wg
# How much slower this machine is than a real one: run the same there.
awk 'BEGIN { for (n = 0; n < 1000; n++) print "route add 10." 130 + int(n / 256) "." n % 256 ".0/24 via 10.99.0.254" }' | ip -n n2 -batch - || die "routes"
begin=$(clock)
for _ in 1 2 3 4 5 6 7 8 9 10; do ip -n n2 route show >/tmp/routes; done
row "ten lists of 1,000 routes by ip $(($(clock) - begin)) hundredths of a second"

measure weft start
row "weft audit $(audit_s) ms, beside a dump of $(wg n1 dump flannel-wg 5) us"
stop n1 TERM || die "n1 did not end with 0"
ip -n n1 link del flannel-wg
rm /run/n1/subnet.env
for n in $(seq $PEERS $((PEERS + ADDS - 1))); do ctl del "/coreos.com/network/subnets/10.$((130 + n / 256)).$((n % 256)).0-24" >/dev/null; done
measure flanneld flannel
