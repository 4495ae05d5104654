# SPDX-License-Identifier: Apache-2.0
# wireguard with IPv4 and IPv6: a device for each family, and then one for both, over IPv4 and over IPv6.
. /lib.sh

# The first node finds an empty store, and would remove nothing for five minutes.
FLAGS="--hold-removals=0s --change-grace=3s"
wg() { node=$1; shift; /opt/bin/ip netns exec "$node" /opt/bin/wg "$@"; } # wg NODE COMMAND...
conf() { # conf OPTIONS
    echo "{\"EnableIPv6\":true,\"Network\":\"10.244.0.0/16\",\"IPv6Network\":\"fd10::/48\",\"Backend\":{\"Type\":\"wireguard\"$1}}"
}
cluster "$(conf "")"
for n in n1 n2 n3; do
    check "$n mtu" [ "$(value $n FLANNEL_MTU)" = 1420 ]
    for m in n1 n2 n3; do
        [ $n = $m ] && continue
        eventually "$n peer $m" 300 shows "endpoint $(public $m):51820 allowed $(net $m)" wg $n show flannel-wg
        eventually "$n v6 peer $m" 300 shows "endpoint [$(public6 $m)]:51821 allowed $(net6 $m)" wg $n show flannel-wg-v6
    done
    eventually "$n v6 route" 300 shows "dev flannel-wg-v6 proto 90 metric 1024" ip -n $n -6 route show fd10::/48
done
reach separate

# --- a node with vxlan, while packets in clear text are allowed ---

config "$(conf ",\"AllowPlaintext\":true")"
other="/store/subnets/10.244.250.0-24&fd10:0:0:fa::-64.json"
echo '{"PublicIP":"10.99.0.9","PublicIPv6":"fd99::9","BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"02:00:00:00:00:09"},
    "BackendV6Data":{"VNI":1,"VtepMAC":"02:00:00:00:06:09"}}' >/store/lease && mv /store/lease "$other"
eventually "vxlan beside wireguard" 60 shows "via 10.244.250.0 dev flannel.1" ip -n n1 route get 10.244.250.2
# Linux refuses the route to a subnet if its gateway is reached over another device, such as that with the route for all of Network.
eventually "vxlan beside wireguard v6" 60 shows "via fd10:0:0:fa:: dev flannel-v6.1" ip -n n1 -6 route get fd10:0:0:fa::2
rm "$other"
config "$(conf "")"
eventually "no vxlan beside wireguard" 60 sh -c "! /opt/bin/ip -n n1 link show flannel-v6.1"

for mode in ipv4 ipv6; do
    config "$(conf ",\"Mode\":\"$mode\"")"
    for n in n1 n2 n3; do for m in n1 n2 n3; do
        [ $n = $m ] && continue
        at="$(public $m):51820"; [ $mode = ipv4 ] || at="[$(public6 $m)]:51820"
        eventually "$mode $n peer $m" 300 shows "endpoint $at allowed $(net $m),$(net6 $m)" wg $n show flannel-wg
    done; done
    for n in n1 n2 n3; do
        eventually "$mode $n has one device" 300 sh -c "! /opt/bin/ip -n $n link show flannel-wg-v6"
        eventually "$mode $n v6 route" 300 shows "dev flannel-wg proto 90 metric 1024" ip -n $n -6 route show fd10::/48
    done
    reach $mode
done
finish
