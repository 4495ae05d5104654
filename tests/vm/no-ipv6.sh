# SPDX-License-Identifier: Apache-2.0
# A kernel that was booted with ipv6.disable=1: vxlan of IPv4, with traffic rules, tunnel guard and fence. At the end, net-conf wants
# IPv6, and the agent says what is missing.
. /lib.sh

doctor_is_silent() {
    # /opt/bin/ip, not the function.
    /opt/bin/ip netns exec "$1" weft doctor --subnet-file "/run/$1/subnet.env" --socket "/run/$1/weft.sock" >/tmp/doctor 2>&1
    # The count of findings is its last word, so it did examine the node.
    grep -q 'finding' /tmp/doctor && ! grep -i 'ipv6' /tmp/doctor
}

check "the kernel has no IPv6" [ ! -e /proc/sys/net/ipv6 ]
FLAGS="--ip-masq --guard-tunnel --fail-closed"
cluster '{"Network":"10.244.0.0/16","Backend":{"Type":"vxlan"}}'
reach pods
check "pod to outside is masqueraded" pings n1 10.99.0.254
heals_route "route heals" n1 "$(net n2)" "via $(base n2)|dev flannel.1|onlink"
was=$(mac n1 flannel.1)
ip -n n1 link del flannel.1 || die "delete the device"
eventually "device heals with its MAC" 60 shows "link/ether $was" ip -n n1 link show flannel.1
reach healed
# Links that come and go lead to full passes. A question for IPv6 routes is answered with those of IPv4 here. An agent that believed the
# answer would remove its own fence and write it again in each pass.
for i in 1 2 3 4 5; do ip -n n2 link add "extra$i" type bridge; ip -n n2 link del "extra$i"; done
heals_route "route heals on n2" n2 "$(net n1)" "via $(base n1)|dev flannel.1|onlink"
check "the fence stands" shows "unreachable 10.244.0.0/16" ip -n n2 route show table all
fence_writes() { weft history --socket /run/n2/weft.sock | grep -c 'fence for forwarded'; }
check "the fence was written once" [ "$(fence_writes)" = 1 ]
# This machine has no br_netfilter.
only_br_netfilter() { ! status "$1" | grep '^problem' | grep -v 'br_netfilter'; }
for n in n1 n2 n3; do
    eventually "$n is ready" 60 ready $n
    eventually "$n has no problem" 60 only_br_netfilter $n
done
eventually "a missing br_netfilter is shown" 60 shows "problem br_netfilter is not loaded:" status n2
check "doctor does not speak of IPv6" doctor_is_silent n2
restarts n1 flannel.1

stop n1 TERM || die "n1 did not end with 0"
config '{"EnableIPv6":true,"Network":"10.244.0.0/16","IPv6Network":"fd10::/48","Backend":{"Type":"vxlan"}}'
start n1
names_ipv6() { status n1 >/tmp/status 2>&1; cat /tmp/status /run/n1/log | grep -q 'ipv6.disable'; }
eventually "what is missing for IPv6 is said" 60 names_ipv6
eventually "IPv4 goes on without the agent" 60 pings n1 "$(pod4 n3)"
