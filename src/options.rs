// SPDX-License-Identifier: Apache-2.0
//! What the agent is told to do: a plain value, made by `cli.rs` alone.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use weft_backends::masq::Masquerade;

use crate::firewall::choice::Choice;

/// Options of `weft agent`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where leases are.
    pub store: Store,
    /// Choice of the external interface.
    pub uplink: UplinkChoice,
    /// `--subnet-file`.
    pub subnet_file: PathBuf,
    /// `--socket`.
    pub socket: PathBuf,
    /// `--healthz-ip`, `--healthz-port` (port 0 = off).
    pub health: Option<std::net::SocketAddr>,
    /// `--resync`: shortest time between audits.
    pub resync: Duration,
    /// `--no-nexthop-objects` turns it off.
    pub nexthop_objects: bool,
    /// `--hold-removals`; zero = off.
    pub hold_removals: Duration,
    /// `--on-lost-lease`.
    pub on_lost_lease: OnLostLease,
    /// `--manage-sysctls`.
    pub manage_sysctls: bool,
    /// `--state-dir`; `None` = nothing is saved.
    pub state_dir: Option<PathBuf>,
    /// So long a fault of this node lasts before it is told to the store.
    pub unwell_after: Duration,
    /// Traffic rules and the fences.
    pub rules: RuleOptions,
    /// `--cni-conf`, `--cni-conf-dir`: none = the CNI configuration is somebody else's.
    pub cni: Option<CniOptions>,
}

/// The CNI configuration that is published once pods can be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CniOptions {
    /// What it is to say.
    pub conf: PathBuf,
    /// Where the container runtime looks for it.
    pub dir: PathBuf,
}

/// Traffic rules and the fences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleOptions {
    /// `--firewall`.
    pub firewall: Choice,
    /// `--ip-masq`, and `--ip-masq-fully-random-disable` in it. Exceptions come from net-conf.
    pub masquerade: Option<Masquerade>,
    /// `--iptables-forward-rules`.
    pub forward: bool,
    /// `--iptables-resync`: how often rules are looked at. nftables tells of changes besides.
    pub resync: Duration,
    /// `--fail-closed`, `--ip-blackhole-route`.
    pub fences: Fences,
    /// `--guard-tunnel`.
    pub guard: bool,
}

impl Default for RuleOptions {
    /// No rules, no fences.
    fn default() -> RuleOptions {
        RuleOptions {
            firewall: Choice::Auto,
            masquerade: None,
            forward: false,
            resync: Duration::from_secs(5),
            fences: Fences::default(),
            guard: false,
        }
    }
}

/// What this host does not forward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fences {
    /// Packets for a missing peer, which only the default route would take.
    pub fail_closed: bool,
    /// Packets to unused addresses of our own subnet.
    pub blackhole: bool,
}

/// Which store.
#[derive(Debug, Clone)]
pub enum Store {
    /// `--etcd-*`.
    Etcd(weft_subnet::etcd::EtcdOptions),
    /// `--store dir:PATH`.
    Dir(PathBuf),
    /// `--kube-*`.
    #[cfg(feature = "kube")]
    Kube(Box<weft_subnet::kube::KubeOptions>),
}

/// `--iface*` and `--public-ip*` (docs/flannel-formats.md, "Interface and public address").
#[derive(Debug, Clone, Default)]
pub struct UplinkChoice {
    /// `--iface`, in order: names or addresses.
    pub ifaces: Vec<String>,
    /// `--iface-regex`, in order.
    pub regexes: Vec<String>,
    /// `--iface-can-reach`.
    pub can_reach: Option<IpAddr>,
    /// `--public-ip`.
    pub public_ip: Option<Ipv4Addr>,
    /// `--public-ipv6`.
    pub public_ipv6: Option<Ipv6Addr>,
}

/// What to do when another node owns our subnet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLostLease {
    /// Keep forwarding, not ready.
    Hold,
    /// Take a new subnet, rewrite subnet.env.
    Reacquire,
    /// End with an exit code that is not 0.
    Exit,
}
