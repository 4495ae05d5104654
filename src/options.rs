// SPDX-License-Identifier: Apache-2.0
//! The options of the agent, and the store that they name. In the program, only `cli.rs` makes them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use weft_backends::register::TYPES;
use weft_backends::traffic_rules::Masquerade;
use weft_subnet::dir::DirStore;
use weft_subnet::etcd::{EtcdOptions, EtcdStore};
#[cfg(feature = "kube")]
use weft_subnet::kube::{KubeOptions, KubeStore};
use weft_subnet::source::Source;

use crate::firewall::choice::Choice;

/// Options of `weft agent`.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Options {
    /// The store that contains the leases.
    pub store: Store,
    /// How the uplink is chosen.
    pub uplink: UplinkChoice,
    /// `--subnet-file`.
    pub subnet_file: PathBuf,
    /// `--socket`.
    pub socket: PathBuf,
    /// `--healthz-ip` and `--healthz-port`. `None` if the port is 0.
    pub health: Option<std::net::SocketAddr>,
    /// `--resync`: the shortest time between two audits.
    pub resync: Duration,
    /// `--no-nexthop-objects` turns it off.
    pub nexthop_objects: bool,
    /// `--hold-removals`. Zero means that nothing is held.
    pub hold_removals: Duration,
    /// `--change-grace`: how long the devices of an earlier backend stay after the last peer needed them.
    pub change_grace: Duration,
    /// `--allow-extension`.
    pub net_conf_commands: NetConfCommands,
    /// `--on-lost-lease`.
    pub on_lost_lease: OnLostLease,
    /// `--manage-sysctls`.
    pub manage_sysctls: bool,
    /// `--tx-checksum-off`.
    pub tx_checksum_off: bool,
    /// `--state-dir`. `None` means that peers are not saved.
    pub state_dir: Option<PathBuf>,
    /// flannel's place of the private key of WireGuard: WIREGUARD_KEY_FILE, or `wgkey` beside the subnet file.
    pub wireguard_key: PathBuf,
    /// `--probe`: whether peers are asked if packets reach them.
    pub probe: bool,
    /// How long a fault of this node must last before it is reported to the store.
    pub unwell_after: Duration,
    /// Traffic rules and the fences.
    pub rules: RuleOptions,
    /// `--cni-conf` and `--cni-conf-dir`. `None` means that another program writes the CNI configuration.
    pub cni: Option<CniOptions>,
}

impl Options {
    /// Returns the options of an agent that has its store and its files in this directory, and does nothing that is not asked for: no
    /// probes, no traffic rules and no sysctls. Tests, the simulator and benches start from these.
    pub fn minimal(dir: &Path) -> Options {
        Options {
            store: Store::Dir(dir.into()),
            uplink: UplinkChoice::default(),
            subnet_file: dir.join("subnet.env"),
            socket: dir.join("socket"),
            health: None,
            resync: Duration::from_secs(3600),
            nexthop_objects: true,
            hold_removals: Duration::from_secs(300),
            change_grace: Duration::ZERO,
            net_conf_commands: NetConfCommands::Refuse,
            on_lost_lease: OnLostLease::Hold,
            manage_sysctls: false,
            tx_checksum_off: false,
            state_dir: None,
            wireguard_key: "/nonexistent/wgkey".into(),
            probe: false,
            unwell_after: Duration::from_secs(30),
            rules: RuleOptions::default(),
            cni: None,
        }
    }
}

/// The CNI configuration that is published as soon as pods can be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CniOptions {
    /// The file with its contents.
    pub conf: PathBuf,
    /// The directory in which the container runtime looks for it.
    pub dir: PathBuf,
}

/// Traffic rules and the fences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleOptions {
    /// `--firewall`.
    pub firewall: Choice,
    /// `--ip-masq` with `--ip-masq-fully-random-disable`. Exceptions come from net-conf.
    pub masquerade: Option<Masquerade>,
    /// `--iptables-forward-rules`.
    pub forward: bool,
    /// `--iptables-resync`: the time between two checks of the rules. nftables also reports changes at once.
    pub resync: Duration,
    /// `--fail-closed`, `--ip-blackhole-route`.
    pub fences: Fences,
    /// `--guard-tunnel`.
    pub guard: bool,
}

impl Default for RuleOptions {
    /// Returns options without rules and without fences.
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

/// Which packets this host does not forward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fences {
    /// `--fail-closed`: packets for a peer that does not exist, which only the default route would take.
    pub fail_closed: bool,
    /// `--ip-blackhole-route`: packets to unused addresses of the own subnet.
    pub blackhole: bool,
}

/// A store.
#[derive(Debug, Clone)]
pub enum Store {
    /// `--etcd-*`.
    Etcd(EtcdOptions),
    /// `--store dir:PATH`.
    Dir(PathBuf),
    /// `--kube-*`.
    #[cfg(feature = "kube")]
    Kube(Box<KubeOptions>),
}

impl Store {
    /// Opens the store.
    ///
    /// # Errors
    /// Its options are wrong.
    pub fn open(&self) -> anyhow::Result<Box<dyn Source>> {
        Ok(match self {
            Store::Etcd(options) => Box::new(EtcdStore::new(options.clone()).context("etcd store")?),
            Store::Dir(path) => Box::new(DirStore::new(path.clone(), TYPES)),
            #[cfg(feature = "kube")]
            Store::Kube(options) => Box::new(KubeStore::new((**options).clone()).context("kubernetes store")?),
        })
    }

    /// Opens the store for a command. Unlike the agent, a command does not create the directory of a store, because a typing
    /// error in its path would create an empty one.
    ///
    /// # Errors
    /// Its options are wrong, or it is a directory that does not exist.
    pub fn open_existing(&self) -> anyhow::Result<Box<dyn Source>> {
        if let Store::Dir(path) = self {
            anyhow::ensure!(path.is_dir(), "--store dir:{0}: {0} is no directory", path.display());
        }
        self.open()
    }
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
    /// `--wireguard-port`.
    pub wireguard_port: Option<u16>,
}

/// What the agent does with the commands of the backend extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetConfCommands {
    /// It runs none, and takes no lease in such a network.
    Refuse,
    /// It runs them.
    Run,
}

/// What the agent does if another node owns its subnet (`--on-lost-lease`). The comments of the values are shown by `--help`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum OnLostLease {
    /// Keep forwarding; the node is not ready.
    Hold,
    /// Take a new subnet and rewrite the subnet file.
    Reacquire,
    /// End with exit code 1.
    Exit,
}
