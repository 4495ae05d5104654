# SPDX-License-Identifier: Apache-2.0
# wireguard with two nodes behind one NAT: n1 and n2 have the public address of the router, and a port each. n3 is outside.
. /lib.sh

wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
NAT=10.98.0.254

port() { case $1 in n3) echo 51820 ;; *) echo 5183${1#n} ;; esac; }
endpoint() { case $1 in n3) echo 10.98.0.3:51820 ;; *) echo "$NAT:$(port "$1")" ;; esac; }
launch() { # launch NODE: starts the agent, with a directory for its state
    FLAGS="--state-dir /run/$1/state"
    [ "$1" = n3 ] || FLAGS="$FLAGS --public-ip $NAT --wireguard-port $(port "$1")"
    start "$1"
    eventually "$1 has its subnet" 90 grep -q ^FLANNEL_MTU= "/run/$1/subnet.env"
}

topology
# Nothing that comes from outside reaches n1 and n2 but by the two ports.
/opt/bin/ip netns exec rt /opt/bin/nft -f - <<END || die "rules of the router"
table ip nat {
    chain pre { type nat hook prerouting priority -100;
        ip daddr $NAT udp dport 51831 dnat to 10.99.0.1
        ip daddr $NAT udp dport 51832 dnat to 10.99.0.2
    }
    chain post { type nat hook postrouting priority 100;
        ip saddr 10.99.0.0/24 masquerade
    }
}
table ip filter {
    chain forward { type filter hook forward priority 0; policy drop;
        iifname a0 accept
        ct state established,related accept
        ct status dnat accept
    }
}
END
config '{"Network":"10.244.0.0/16","Backend":{"Type":"wireguard"}}'
for n in n1 n2 n3; do launch $n; done
for n in n1 n2 n3; do pod $n; done
leases() { [ "$(ls /store/subnets | grep -c -v '^\.')" = "$1" ]; }
check "three leases" leases 3
for n in n1 n2 n3; do
    check "$n listens on its port" shows "port $(port $n) peers" wg $n show flannel-wg
    for m in n1 n2 n3; do
        [ $n = $m ] || eventually "$n peer $m" 60 shows "allowed $(net $m)" wg $n show flannel-wg
    done
done
# Before a packet was heard, an endpoint is that of the lease.
check "the lease has the port" grep -rqF "\"PublicIP\":\"$NAT\"" /store/subnets
check "n3 reaches n1 by the NAT" shows "endpoint $(endpoint n1)" wg n3 show flannel-wg
reach pods

# A machine that is installed again knows only its address and its port.
for n in n1 n2; do
    before=$(value $n FLANNEL_SUBNET)
    stop $n TERM || die "$n did not end with 0"
    ip -n $n link del flannel-wg
    rm -r /run/$n/state /run/$n/subnet.env /run/$n/wgkey
    launch $n
    [ "$(value $n FLANNEL_SUBNET)" = "$before" ] || die "$n had $before and has $(value $n FLANNEL_SUBNET)"
done
pass "each node has its own lease after it was installed again"
check "three leases" leases 3
reach again
for n in n1 n2 n3; do check "$n is ready" ready $n; done
finish
