# SPDX-License-Identifier: Apache-2.0
# Measures wireguard with many peers: a program that knows all peers (the floor), weft, and flanneld if it is there, each on n1 after the other. The
# peers are leases in etcd without machines, except n2, which has a device and a pod, and no agent.
. /lib.sh # IDLE=yes|no: whether the time after the handshakes is measured, too
. /flannel.sh

PEERS=1000
ADDS=5
N2=500
FLAGS="--hold-removals=0s"
wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
key() { wg "$1" show flannel-wg | sed -n 's/^device \([^ ]*\) .*/\1/p'; }
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
# Gives the peer of the number N2 the key and the address of n2.
as_n2() { sed "s,$(printf %04d $N2)BCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmA=,$n2_key,; s,172\\.16\\.$((N2 / 256))\\.$((N2 % 256))\\([^0-9]\\),10.99.0.2\\1,"; }
fill() {
    at=0
    while [ $at -lt $PEERS ]; do
        { echo; lease $at $((at + 99)) puts | as_n2; echo; echo; } | ctl txn >/tmp/txn || die "leases"
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

# --- n2 ---

subnet_n2="10.$((130 + N2 / 256)).$((N2 % 256))"
# A device by hand that accepts whatever subnet n1 gets. Packets to n2 that nobody awaits are refused, however many they are.
device_n2() { # device_n2 KEY-OF-N1
    echo "$1 10.99.0.1:51820 10.248.0.0/13" >/tmp/peer-n1
    wg n2 peers-without-handshakes flannel-wg /tmp/peer-n1
    ip -n n2 addr add "$subnet_n2.0/32" dev flannel-wg; ip -n n2 link set flannel-wg up
    ip -n n2 route add 10.128.0.0/9 dev flannel-wg || die "route of n2"
    ip netns exec n2 sh -c 'echo 0 >/proc/sys/net/ipv4/icmp_ratelimit'
    echo "FLANNEL_SUBNET=$subnet_n2.1/24
FLANNEL_MTU=1420" >/run/n2/subnet.env
    pod n2
}
# Adds a device with this private key, and without peers.
device() { # device NODE PRIVATE-KEY
    ip -n "$1" link add flannel-wg mtu 1420 type wireguard || die "device of $1"
    printf %s "$2" >"/run/$1/wgkey"; chmod 600 "/run/$1/wgkey"
    wg "$1" key flannel-wg "/run/$1/wgkey"; wg "$1" port flannel-wg 51820
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
memory() { awk "/^$2:/ { print \$2 / 1024 }" "/proc/$1/status"; } # memory PID FIELD: in MB
all_peers() { shows "peers $1" wg n1 show flannel-wg; }
# A line for the table of `make bench`. The last argument is the name of its row there.
figure() { echo "figure: $*"; } # figure PROGRAM VALUE ROW
since() { awk "BEGIN { print ($2 - $1) * 1000 }"; } # since BEGIN END: in ms, both in seconds since boot
median() { sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'; }

starts() { # starts PROGRAM COMMAND: cold start and memory of what COMMAND starts on n1
    wg n1 answers "$subnet_n2.1" >/tmp/answered &
    answers=$!
    sleep 1
    begin=$(clock); booted=$(cut -d' ' -f1 /proc/uptime)
    $2 n1
    pid=$(cat /run/n1/pid)
    eventually "$1 has its subnet" 300 grep -q ^FLANNEL_MTU= /run/n1/subnet.env
    settled "$pid"
    eventually "$1 has all peers" 120 all_peers $PEERS
    wait $answers || die "$1: no packet came back from n2"
    figure "$1" $(((worked - begin) * 10)) "cold start"
    figure "$1" "$(since "$booted" "$(cat /tmp/answered)")" "cold start, first packet through the tunnel"
    figure "$1" $(($(ticks "$pid") * 10)) "cold start, CPU"
    figure "$1" "$(memory "$pid" VmRSS)" "memory"
    figure "$1" "$(memory "$pid" VmHWM)" "memory, peak"
}
# The kernel begins handshakes with some peers of weft, which have no machines, until it gives up after 90 s. Here they go on.
adds() { # adds PROGRAM
    : >/tmp/adds
    for n in $(seq $PEERS $((PEERS + ADDS - 1))); do
        wg n1 reaches "10.$((130 + n / 256)).$((n % 256)).9" >/tmp/reached &
        waits=$!
        sleep 2
        put "$n"
        wait $waits || die "$1: no peer $n"
        since "$began" "$(cat /tmp/reached)" >>/tmp/adds
    done
    echo "$1: new peers were reached after $(tr '\n' ' ' </tmp/adds) ms"
    figure "$1" "$(median </tmp/adds)" "add p50"
}
restart() { # restart PROGRAM COMMAND: ends it by SIGTERM and starts it again, while pods of n1 and n2 send to each other
    [ -e /run/netns/p1 ] || pod n1
    flows n1:n2 n2:n1
    sleep 2
    stop n1 TERM || die "$1 did not end with 0"
    $2 n1
    settled "$(cat /run/n1/pid)"
    eventually "$1 has all peers again" 300 all_peers $((PEERS + ADDS))
    end_flows
    figure "$1" "$(measured sent)" "packets sent over a restart"
    figure "$1" "$(measured lost)" "packets lost over a restart"
}
idle() { # idle PROGRAM
    pid=$(cat /run/n1/pid)
    before=$(ticks "$pid"); from=$(clock)
    sleep 60
    figure "$1" "$(awk "BEGIN { print 100 * ($(ticks "$pid") - $before) / ($(clock) - $from) }")" "CPU idle"
    # The interval in seconds is the cost of an audit in ms.
    [ "$1" != weft ] || echo "an audit of weft takes $(audit_s) ms, and a dump of the device $(wg n1 dump flannel-wg 5) us"
}
measure() { # measure PROGRAM COMMAND
    starts "$1" "$2"
    [ "$IDLE$1" != yesweft ] || { eventually "weft has compared the peers" 60 audited; sleep 95; }
    adds "$1"
    [ "$IDLE" = no ] || idle "$1"
    restart "$1" "$2"
}
audit_s() { status_json n1 | tr -d ' \n' | sed -n 's/.*"wireguard_audit_s":\([0-9.]*\).*/\1/p'; }
audited() { [ -n "$(audit_s)" ] && [ "$(audit_s)" != 3.0 ]; }

topology
device n1 AAIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eH2A=
device n2 CAIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eH2A=
n2_key=$(key n2)
[ -n "$n2_key" ] || die "n2 has no key"
device_n2 "$(key n1)"
etcd_on_router '{"Network":"10.128.0.0/9","SubnetLen":24,"SubnetMin":"10.250.0.0","SubnetMax":"10.254.0.0","Backend":{"Type":"wireguard"}}'
fill

lease 0 $((PEERS - 1)) peers | as_n2 >/tmp/peers
ip -n n1 link set flannel-wg up
begin=$(clock)
wg n1 peers flannel-wg /tmp/peers
figure floor $((($(clock) - begin) * 10)) "cold start"
check "the floor has all peers" all_peers $PEERS
echo "a dump of the device takes $(wg n1 dump flannel-wg 5) us"
ip -n n1 link del flannel-wg
if [ "$IDLE" = yes ]; then
    # How much slower this machine is than a real one: run the same there.
    awk 'BEGIN { for (n = 0; n < 1000; n++) print "route add 10." 130 + int(n / 256) "." n % 256 ".0/24 via 10.98.0.254" }' | ip -n n3 -batch - || die "routes"
    begin=$(clock)
    for _ in 1 2 3 4 5 6 7 8 9 10; do ip -n n3 route show >/tmp/routes; done
    echo "ten lists of 1,000 routes by ip took $(($(clock) - begin)) hundredths of a second"
fi

measure weft start
[ -e /opt/bin/flanneld ] || exit 0
subnet=$(value n1 FLANNEL_SUBNET)
stop n1 TERM || die "n1 did not end with 0"
ip -n n1 link del flannel-wg
rm /run/n1/subnet.env
for n in $(seq $PEERS $((PEERS + ADDS - 1))); do ctl del "/coreos.com/network/subnets/10.$((130 + n / 256)).$((n % 256)).0-24" >/dev/null; done
measure flanneld flannel
check "flanneld has the subnet of weft, so the pod has the right address" [ "$(value n1 FLANNEL_SUBNET)" = "$subnet" ]
