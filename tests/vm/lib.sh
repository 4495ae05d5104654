# SPDX-License-Identifier: Apache-2.0
# Nodes as network namespaces, and the words in which the scenarios are written. busybox sh.
#
#   n1 -- br0 -- n2        10.99.0.0/24, fd99::/64
#          |
#          rt -- n3        10.98.0.0/24, fd98::/64: behind a router, so n3 is not on the link of n1 and n2.
#                          With ONE_LINK=yes, n3 is on their link, because host-gw reaches no other nodes.
#
# With P6=2001:db8: the IPv6 addresses of the nodes begin with that instead of fd.
#
# A pod pN hangs behind a veth pair at every node, addressed from that node's subnet.env.
. /env # NEXTHOPS=yes|no
P6=${P6:-fd}

# Debian's busybox runs its own applets of these names first, whatever PATH says.
ip() { /opt/bin/ip "$@"; }
ping() { /opt/bin/ping "$@"; }

pass() { echo "weft-vm: PASS $1"; }

die() {
    echo "weft-vm: FAIL $*"
    for n in n1 n2 n3; do
        [ -e "/run/netns/$n" ] || continue
        # A scenario may have stopped the agent, which then answers nothing.
        kill -CONT "$(cat "/run/$n/pid")" 2>/dev/null
        echo "--- $n: ip -d link, addr, route, neigh, fdb, agent"
        ip -n $n -d link; ip -n $n -br addr; ip -n $n route; ip -n $n -6 route; ip -n $n nexthop
        ip -n $n neigh show nud permanent; ip -n $n -6 neigh show nud permanent; bridge -n $n fdb
        cat "/run/$n/subnet.env" "/run/$n/log" 2>/dev/null | tail -n 60
        weft status --socket "/run/$n/weft.sock" 2>&1 | head -n 40
    done
    head -c 4000 /store/* 2>/dev/null
    dmesg | tail -n 20
    echo "weft-vm: END 1"
    poweroff -f
}

# check NAME COMMAND...: one try.
check() {
    name=$1; shift
    "$@" >/tmp/out 2>&1 || { cat /tmp/out; die "$name: $*"; }
    pass "$name"
}

# eventually NAME SECONDS COMMAND...: until it succeeds.
eventually() {
    name=$1; limit=$(($(date +%s) + $2)); shift 2
    until "$@" >/tmp/out 2>&1; do
        [ "$(date +%s)" -lt $limit ] || { cat /tmp/out; die "$name: $*"; }
        sleep 0.1
    done
    pass "$name"
}

# shows TEXT COMMAND...: the output, as one line, holds every word group of TEXT separated by '|'.
shows() {
    want=$1; shift
    got=" $("$@" | tr '\n\\' '  ' | tr -s ' ') "
    old=$IFS; IFS='|'
    for part in $want; do
        case "$got" in *" $part "*) ;; *) IFS=$old; echo "no '$part' in: $got"; return 1 ;; esac
    done
    IFS=$old
}

empty() { [ -z "$("$@")" ]; }
fails() { ! "$@"; }
status() { weft status --socket "/run/$1/weft.sock"; } # status NODE
status_json() { weft status --socket "/run/$1/weft.sock" -o json; } # status_json NODE
no_link() { ! ip -n "$1" link show "$2"; } # no_link NODE DEVICE
leaves_by() { shows "dev $3" ip -n "$1" route get "$2"; } # leaves_by NODE ADDRESS DEVICE

# --- topology ---

wire() { # wire NAMESPACE DEVICE BRIDGE
    ip link add "v$1" type veth peer name "$2" netns "$1"
    ip link set "v$1" master "$3" up
}

namespace() {
    ip netns add "$1"
    # No duplicate address detection: the addresses are needed now.
    ip netns exec "$1" sh -c 'for s in all default; do echo 0 >/proc/sys/net/ipv6/conf/$s/accept_dad; done
        echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv6/conf/all/forwarding'
    ip -n "$1" link set lo up
}

topology() {
    ip link add br0 type bridge && ip link set br0 up
    ip link add br1 type bridge && ip link set br1 up
    namespace rt; wire rt a0 br0
    ip link add vrt1 type veth peer name b0 netns rt && ip link set vrt1 master br1 up
    ip -n rt addr add 10.99.0.254/24 dev a0; ip -n rt addr add "${P6}99::fe/64" dev a0 nodad; ip -n rt link set a0 up
    ip -n rt addr add 10.98.0.254/24 dev b0; ip -n rt addr add "${P6}98::fe/64" dev b0 nodad; ip -n rt link set b0 up
    node 1 99 br0; node 2 99 br0
    if [ "$(segment n3)" = 99 ]; then node 3 99 br0; else node 3 98 br1; fi
}

node() { # node NUMBER SEGMENT BRIDGE
    namespace "n$1"; wire "n$1" eth0 "$3"
    ip -n "n$1" addr add "10.$2.0.$1/24" dev eth0; ip -n "n$1" addr add "$P6$2::$1/64" dev eth0 nodad
    ip -n "n$1" link set eth0 up
    ip -n "n$1" route add default via "10.$2.0.254"; ip -n "n$1" -6 route add default via "$P6$2::fe"
    mkdir -p "/run/n$1"
}

segment() { case ${ONE_LINK:-no}$1 in non3) echo 98 ;; *) echo 99 ;; esac; }
public() { echo "10.$(segment "$1").0.${1#n}"; }
public6() { echo "$P6$(segment "$1")::${1#n}"; }

# --- agents ---

config() { mkdir -p /store; echo "$1" >/store/config.json; }

# With BY_ADDRESS=yes an agent finds its uplink by the address, wherever that is.
uplink() { if [ "${BY_ADDRESS:-no}" = yes ]; then public "$1"; else echo eth0; fi; }

start() { # start NODE, with FLAGS and with the store that STORE_FLAGS names; the program is $AGENT, or weft
    set -- "$1" $FLAGS ${STORE_FLAGS:---store dir:/store} --iface "$(uplink "$1")" --subnet-file "/run/$1/subnet.env" --socket "/run/$1/weft.sock"
    [ "$NEXTHOPS" = yes ] || set -- "$@" --no-nexthop-objects
    node=$1; shift
    # The program, not the function: $! must be the agent.
    /opt/bin/ip netns exec "$node" "${AGENT:-weft}" agent "$@" >>"/run/$node/log" 2>&1 &
    echo $! >"/run/$node/pid"
}

stop() { # stop NODE SIGNAL
    pid=$(cat "/run/$1/pid")
    kill "-$2" "$pid"
    wait "$pid"
}

# The agents take their subnets one after the other, as they would on machines that were switched on one by one.
cluster() {
    topology
    config "$1"
    for n in n1 n2 n3; do
        start $n
        eventually "$n has its subnet" 90 grep -q ^FLANNEL_MTU= "/run/$n/subnet.env"
    done
    for n in n1 n2 n3; do pod $n; done
}

value() { sed -n "s/^$2=//p" "/run/$1/subnet.env"; }                                       # value NODE KEY
net() { value "$1" FLANNEL_SUBNET | sed 's,1/24$,0/24,'; }                                 # 10.244.7.0/24
base() { value "$1" FLANNEL_SUBNET | sed 's,1/24$,0,'; }                                   # 10.244.7.0
net6() { value "$1" FLANNEL_IPV6_SUBNET | sed 's,1/64$,/64,'; }                            # fd10:7::/64
base6() { value "$1" FLANNEL_IPV6_SUBNET | sed 's,1/64$,,'; }                              # fd10:7::
pod4() { value "$1" FLANNEL_SUBNET | sed 's,1/24$,2,'; }                                   # 10.244.7.2
pod6() { value "$1" FLANNEL_IPV6_SUBNET | sed 's,1/64$,2,'; }                              # fd10:7::2
index() { ip -n "$1" -o link show "$2" | cut -d: -f1; }
mac() { ip -n "$1" -o link show "$2" | sed 's/.*link.ether \([^ ]*\).*/\1/'; }
has_nexthop() { case "$1" in *nhid*) true ;; *) false ;; esac; }
ours() { if [ "$NEXTHOPS" = yes ]; then has_nexthop "$1"; else ! has_nexthop "$1"; fi; }

pod() { # pod NODE: behind a veth, addressed from subnet.env
    p=p${1#n}
    ip netns add "$p"
    ip -n "$1" link add cni0 type veth peer name eth0 netns "$p"
    mtu=$(value "$1" FLANNEL_MTU)
    ip netns exec "$p" sh -c 'for s in all default eth0; do echo 0 >/proc/sys/net/ipv6/conf/$s/accept_dad; done'
    ip -n "$1" link set cni0 mtu "$mtu" up; ip -n "$p" link set lo up; ip -n "$p" link set eth0 mtu "$mtu" up
    if [ -n "$(value "$1" FLANNEL_SUBNET)" ]; then
        ip -n "$1" addr add "$(value "$1" FLANNEL_SUBNET)" dev cni0
        ip -n "$p" addr add "$(pod4 "$1")/24" dev eth0
        ip -n "$p" route add default via "$(value "$1" FLANNEL_SUBNET | cut -d/ -f1)"
    fi
    [ -n "$(value "$1" FLANNEL_IPV6_SUBNET)" ] || return 0
    ip -n "$1" addr add "$(value "$1" FLANNEL_IPV6_SUBNET)" dev cni0 nodad
    ip -n "$p" addr add "$(pod6 "$1")/64" dev eth0 nodad
    ip -n "$p" -6 route add default via "$(value "$1" FLANNEL_IPV6_SUBNET | cut -d/ -f1)"
}

# --- what every backend must show ---

pings() { ip netns exec "p${1#n}" ping -q -c 1 -W 3 "$2"; }

reach() { # reach NAME: every pod reaches every other
    for a in n1 n2 n3; do for b in n1 n2 n3; do
        [ $a = $b ] && continue
        [ -z "$(value $b FLANNEL_SUBNET)" ] || eventually "$1 $a to $b" 60 pings $a "$(pod4 $b)"
        [ -z "$(value $b FLANNEL_IPV6_SUBNET)" ] || eventually "$1 $a to $b v6" 60 pings $a "$(pod6 $b)"
    done; done
}

# A route is as expected, is ours (protocol 90), and uses a nexthop object exactly when it should: IPv4 with them switched on.
route() { # route NODE PREFIX TEXT
    shows "$3|proto 90" ip -n "$1" route show "$2" && ours "$got"
}
route6() { shows "$3|proto 90" ip -n "$1" -6 route show "$2" && ! has_nexthop "$got"; }

# A deleted route comes back by itself.
heals_route() { # heals_route NAME NODE PREFIX TEXT
    ip -n "$2" route del "$3" || die "$1: no route to delete"
    eventually "$1" 60 route "$2" "$3" "$4"
}

# A restart keeps the device and every entry, and loses no packet.
restarts() { # restarts NODE DEVICE
    before=$(index "$1" "$2"); [ -n "$before" ] || die "restart: no $2"
    restarts_quietly "$1"
    check "restart keeps the device" [ "$(index "$1" "$2")" = "$before" ]
}

restarts_quietly() {
    routes=$(ip -n "$1" route; ip -n "$1" -6 route show proto 90)
    subnet=$(value "$1" FLANNEL_SUBNET)
    ip netns exec p1 ping -q -i 0.1 -c 60 "$(pod4 n3)" >/tmp/ping 2>&1 &
    ping=$!
    stop "$1" TERM || die "agent did not end with 0"
    check "entries stay while the agent is away" [ "$(ip -n "$1" route; ip -n "$1" -6 route show proto 90)" = "$routes" ]
    start "$1"
    eventually "restart ready" 60 ready "$1"
    wait $ping
    check "restart loses no packet" shows "0% packet loss,|60 received," cat /tmp/ping
    check "restart keeps the subnet" [ "$(value "$1" FLANNEL_SUBNET)" = "$subnet" ]
    check "restart keeps the routes" [ "$(ip -n "$1" route; ip -n "$1" -6 route show proto 90)" = "$routes" ]
}

# How many echo requests a pod has heard.
echoes() { ip netns exec "p${1#n}" sed -n 's/^Icmp: \([0-9].*\)/\1/p' /proc/net/snmp | cut -d' ' -f9; }

ready() { status_json "$1" | tr -d ' \n' | grep -q '"ready":true'; }

# --- traffic ---

# flows PAIR...: 100 packets per second from pod to pod for each pair of nodes such as n1:n2, in every family. `no_loss` ends them.
flows() {
    rm -f /tmp/flows /tmp/flows.*
    list=
    for pair in "$@"; do
        from=${pair%:*}; to=${pair#*:}; way="p${from#n},p${to#n}"
        list="$list $way,$(pod4 "$to")"
        [ -z "$(value "$to" FLANNEL_IPV6_SUBNET)" ] || list="$list $way,$(pod6 "$to")"
    done
    # One processor plays all nodes, so the queue of packets that wait for it is shared, too.
    echo 20000 >/proc/sys/net/core/netdev_max_backlog
    /opt/bin/traffic flows /tmp/flows 300 $list >/tmp/flows.log 2>&1 &
    flows=$!
    # The packets are sent on time, even while an agent starts.
    renice -n -20 -p $flows >/dev/null
    eventually "packets arrive" 120 [ -e /tmp/flows.started ]
}

# measured WORD: a figure of the flows' report.
measured() { head -n 1 /tmp/flows | sed -n "s/.*$1 \([0-9.]*\).*/\1/p"; }

end_flows() { touch /tmp/flows.stop; wait $flows || { cat /tmp/flows.log; die "the program of the flows"; }; cat /tmp/flows; }

# no_loss NAME: ends the flows, which lost nothing at 90 packets per second or more.
no_loss() {
    end_flows
    check "$1 under 90 packets per second or more, or this machine is too slow" [ "$(measured rate)" -ge 90 ]
    check "$1 loses no packet" shows "lost 0|ended stopped" head -n 1 /tmp/flows
}

# capture NODE...: begins to count what passes the uplinks.
capture() {
    captures=
    for n in "$@"; do
        rm -f /tmp/capture-$n /tmp/capture-$n.*
        /opt/bin/traffic capture /tmp/capture-$n 800 $n eth0 10.244.0.0/16 fd10::/16 >/tmp/capture-$n.log 2>&1 &
        captures="$captures $!"
        eventually "the uplink of $n is watched" 60 [ -e /tmp/capture-$n.started ]
    done
}
end_capture() { # end_capture NODE...
    for n in "$@"; do touch /tmp/capture-$n.stop; done
    for pid in $captures; do wait "$pid" || die "the program of the capture"; done
    for n in "$@"; do cat /tmp/capture-$n; done
}
# seen NODE WORD: how many frames of a kind the capture counted.
seen() { head -n 1 "/tmp/capture-$1" | sed -n "s/.*$2 \([0-9]*\).*/\1/p"; }

# All agents end with 0 on SIGTERM and leave the data path alone.
finish() {
    for n in n1 n2 n3; do stop $n TERM || die "$n did not end with 0"; done
    pass "agents end"
    to=$(pod4 n3)
    check "data path outlives the agents" pings n1 "${to:-$(pod6 n3)}"
}
