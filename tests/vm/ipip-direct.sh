# SPDX-License-Identifier: Apache-2.0
# ipip with DirectRouting: on the link without the tunnel, behind the router through it.
. /lib.sh

cluster '{"Network":"10.244.0.0/16","Backend":{"Type":"ipip","DirectRouting":true}}'
direct() { eventually "$1 to $2 direct" 60 route "$1" "$(net "$2")" "via $(public "$2")|dev eth0"; }
tunnel() { eventually "$1 to $2 tunnel" 60 route "$1" "$(net "$2")" "via $(public "$2")|dev flannel.ipip|onlink"; }
direct n1 n2; direct n2 n1
tunnel n1 n3; tunnel n2 n3; tunnel n3 n1; tunnel n3 n2
reach pods
heals_route "direct route heals" n1 "$(net n2)" "via 10.99.0.2|dev eth0"
heals_route "tunnel route heals" n3 "$(net n2)" "via 10.99.0.2|dev flannel.ipip|onlink"
restarts n3 flannel.ipip
finish
