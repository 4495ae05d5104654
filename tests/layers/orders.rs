// SPDX-License-Identifier: Apache-2.0
//! The order of the modules of each crate, and of the files of some directories.

use super::Layers;

/// Each crate, and each directory with an order of its own.
pub const ALL: &[Layers] = &[
    Layers {
        dir: "src",
        parent_is_above: false,
        order: "
            # Tools that know nothing of leases.
            async_socket debt files instance log probe processes
            # What the operator sees. The modules above hand values to it.
            observe
            # The kernel, its firewall, and what the flags say.
            firewall options conflist subnet_file kernel
            # What should be in the kernel, and how it gets there.
            saved uplink plan conflicts pass sysctls offload data_path extension
            # The own lease, and the node that has one.
            lease node agent
            # The command line.
            cli commands lib main
        ",
    },
    Layers {
        dir: "src/kernel",
        parent_is_above: false,
        order: "
            machine sysctl errno wireguard typed kinds link_messages encode decode nexthop guard fence linux
            wireguard_port wireguard_peers links observe batch replace write monitor fake
        ",
    },
    Layers {
        dir: "src/firewall",
        parent_is_above: false,
        order: "
            forward_chain error packet_filter nft iptables iptables_forward
            # What chooses, keeps and watches the rules.
            choice reconciler foreign_chains other_programs guard fake
        ",
    },
    Layers {
        dir: "src/observe",
        parent_is_above: false,
        order: "
            # What is shown.
            entries fault problem status history preview mesh readiness metrics
            # Where it is shown.
            http clients_by_age socket health fault_events node_condition systemd report
        ",
    },
    Layers {
        dir: "src/node",
        parent_is_above: false,
        order: "
            # What a part of the node knows of events and times.
            event schedule audit
            # The store, and what it says.
            rate_limit peers net_conf store own_lease saved
            # Changes while packets flow.
            clear_text port change key_change
            # The kernel, and the host.
            wireguard sysctls host rules data_path extension subnet_file probes
            # What all of it comes to.
            status mesh passes tests
        ",
    },
    Layers {
        dir: "backends/src",
        parent_is_above: false,
        order: "
            mac name overhead skip commands identity wireguard_key wireguard_peer link state tunnel host family options
            backend underlay_mtu alloc extension host_gw ipip udp vxlan wireguard register devices index owner diff
            traffic_rules lib
        ",
    },
    Layers {
        dir: "benches/converge/src",
        parent_is_above: false,
        order: "
            peers watch site options about measure targets table plots store process kube docs floor rows shape storm
            udp wireguard main
        ",
    },
    Layers {
        dir: "cni/src",
        parent_is_above: false,
        order: "
            conf_dir spec attachments subnet_env env iptables masquerade conf plugin render bridge wait record hostlocal
            program veth delegate status gc flannel lib main
        ",
    },
    Layers {
        dir: "doctor/src",
        parent_is_above: true,
        order: "
            # Tools that know nothing of the node that is examined.
            finding processes programs sysctl namespaces
            # What several of the modules below know of links, files and rules.
            known_links subnet_file saved_rules remedies kernel
            # `weft doctor pods` and `weft explain`.
            pods explain
            # `weft doctor`: what the caller says, what is read, what is decided.
            sources facts checks lib
        ",
    },
    Layers {
        dir: "doctor/src/kernel",
        parent_is_above: true,
        order: "
            ends entries ask ipset ipvs tracked queues rules nft links
        ",
    },
    Layers {
        dir: "doctor/src/kernel/nft",
        parent_is_above: true,
        order: "
            attributes instruction chance decode set registers text walk read tests
        ",
    },
    Layers {
        dir: "doctor/src/pods",
        parent_is_above: true,
        order: "
            facts findings
        ",
    },
    Layers {
        dir: "doctor/src/explain",
        parent_is_above: true,
        order: "
            facts explanation pod read render rule_steps shared_steps mtu_steps pod_steps port_steps route_text route_steps
            steps legacy_tables rules pod_rules ipvs tests
        ",
    },
    Layers {
        dir: "doctor/src/facts",
        parent_is_above: true,
        order: "
            arp_tables bridge_vlans other_networks certificates checksums clashes counters early_clock store cni_plugins cni_files runtime filters ipsec k3s_flannel limits
            locks memory_kills modules
            pod_addresses port_users policy_rules
            # The tables of the kernel are read once, and these read them.
            tables forwarding path_links offload duplicates pod_links other_pods self_assigned virtual_nat ways
            ipv6_sysctls unserved other_rules tunnel host_firewalls tunnel_rules tunnel_nat own_pods pod_way peer_port underlay
        ",
    },
    Layers {
        dir: "doctor/src/checks",
        parent_is_above: true,
        order: "
            addresses agent arp_rules br_netfilter bridge bridge_subnet certificates checksum clock cni conntrack device
            disk duplicate_address firewall forwarding ipsec ipv6 kernel leftovers limits locks managed masquerade mtu
            neighbours network offload other_agent port rp_filter services store subnet_file traffic_control underlay
            uplink
        ",
    },
    Layers {
        dir: "lab/src",
        parent_is_above: false,
        order: "
            backend_kind process network netns cni store options node ping cluster fault report change measure shell lib
        ",
    },
    Layers {
        dir: "netlink/src",
        parent_is_above: false,
        order: "
            wire socket generic ethtool hash rt rtnl nftables lib
        ",
    },
    Layers {
        dir: "sim/src",
        parent_is_above: false,
        order: "
            chance timeline disk kernel shared wire agent nodes net_conf hostile event scenario api pb etcd server store
            machine cluster walk check lossless run shrink lib main
        ",
    },
    Layers {
        dir: "subnet/src",
        parent_is_above: false,
        order: "
            cidr text json net_conf allocate attrs backend_types connected lease env outside old_defects evidence hold
            source retry dir etcd kube peers saved_peers lib
        ",
    },
    Layers {
        dir: "subnet/src/etcd",
        parent_is_above: false,
        order: "
            call_failure tls client keys leases own_key alarm renew acquire watch
        ",
    },
    Layers {
        dir: "subnet/src/kube",
        parent_is_above: false,
        order: "
            annotations node publish conf
            # Requests, and those about Nodes.
            proxy client node_list watch_stream watch own_node fault_event fake
        ",
    },
    Layers {
        dir: "udp/src",
        parent_is_above: false,
        order: "
            counters packet icmp echo routes error device shared outgoing incoming tunnel lib
        ",
    },
];
