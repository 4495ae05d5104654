# SPDX-License-Identifier: Apache-2.0
# A change from vxlan to wireguard with the real flanneld on n2, which does not follow, and weft on n1 and n3.
. /lib.sh
. /flannel.sh

# Clear text ends ten grace times after the change.
FLAGS="--change-grace=12s"
conf() { echo "{\"Network\":\"10.244.0.0/16\",\"Backend\":{\"Type\":\"$1\"}}"; } # conf TYPE

cluster_with_flannel "$(conf vxlan)"
reach vxlan

net_conf "$(conf wireguard)" || die "net-conf"
eventually "n1 sends to n3 by wireguard" 100 leaves_by n1 "$(pod4 n3)" flannel-wg
eventually "n1 marks flannel's node" 30 shows "programmed, NOT ENCRYPTED|1 nodes still need the earlier vxlan: $(base n2)-24" status n1
check "n1 still reaches flannel's node" pings n1 "$(pod4 n2)"
stop n1 TERM || die "n1 did not end with 0"
start n1
eventually "n1 is ready again" 60 ready n1
check "after a restart n1 still reaches flannel's node" pings n1 "$(pod4 n2)"
check "after a restart n1 still marks it" shows "programmed, NOT ENCRYPTED" status n1
for n in n1 n3; do eventually "clear text ends on $n" 200 no_link $n flannel.1; done
check "packets to flannel's node are not sent" fails pings n1 "$(pod4 n2)"
# The pass that removes the device goes on for a while, and what the agent says comes after it.
eventually "n1 names flannel's node as set aside" 60 shows "1 nodes are set aside,|$(base n2)-24" status n1
check "n1 reaches n3" pings n1 "$(pod4 n3)"

# flannel follows when it is restarted, and leaves the routes of its earlier device, which are longer (rke2#9338).
stop n2 TERM
flannel n2
eventually "flannel has its new device" 100 ip -n n2 link show flannel-wg
check "flannel would go on in clear text" leaves_by n2 "$(pod4 n1)" flannel.1
ip -n n2 link del flannel.1 || die "flannel's earlier device"
reach restarted
