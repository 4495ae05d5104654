// SPDX-License-Identifier: Apache-2.0
//! The flags. flannel's flags have its names and defaults (docs/flannel-formats.md, "Flags and environment"). Flags that only weft has are under
//! their own heading.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, ValueEnum};
use weft_subnet::env::USUAL_FILE;

use super::duration::{boolean, duration};
use crate::firewall::choice::Choice;
use crate::log::Format;
use crate::options::OnLostLease;

/// Heading of the flags that flannel does not have.
const OURS: &str = "Flags that only weft has";

/// Heading of flannel's flags for Kubernetes.
#[cfg(feature = "kube")]
const KUBE: &str = "Kubernetes";
#[cfg(not(feature = "kube"))]
const KUBE: &str = "Kubernetes (not in this build)";

/// Flags that choose the store.
#[derive(Debug, Clone, Args)]
pub struct StoreFlags {
    /// Where leases are kept: etcd, or dir:PATH.
    #[arg(long, default_value = "etcd", value_name = "etcd|dir:PATH", help_heading = OURS)]
    pub store: String,
    /// How long a lease lives in etcd without renewal; change it only in tests.
    #[arg(long, default_value = "24h", value_parser = duration, value_name = "DURATION", help_heading = OURS)]
    pub etcd_lease_ttl: Duration,
    /// Comma-separated list of etcd endpoints.
    #[arg(long, default_value = "http://127.0.0.1:4001,http://127.0.0.1:2379", value_name = "URLS")]
    pub etcd_endpoints: String,
    /// Prefix of every key in etcd.
    #[arg(long, default_value = "/coreos.com/network", value_name = "PREFIX")]
    pub etcd_prefix: String,
    /// Private key of the client certificate for etcd.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "FILE")]
    pub etcd_keyfile: String,
    /// Client certificate for etcd.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "FILE")]
    pub etcd_certfile: String,
    /// Certificate authority that signed etcd's certificate; without it those of the system are believed.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "FILE")]
    pub etcd_cafile: String,
    /// User name for etcd.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "NAME")]
    pub etcd_username: String,
    /// Password for etcd.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PASSWORD")]
    pub etcd_password: String,
    /// Renew the lease at the latest this many minutes before it ends.
    #[arg(long, default_value_t = 60, allow_hyphen_values = true, value_name = "MINUTES")]
    pub subnet_lease_renew_margin: i64,
    #[command(flatten)]
    pub(super) kube: KubeFlags,
}

/// Flags that choose the uplink and the published address.
#[derive(Debug, Clone, Args)]
pub struct UplinkFlags {
    /// Interface (name or IP) for traffic between nodes; may be repeated, and the first one that exists is used.
    #[arg(long, action = ArgAction::Append, value_name = "NAME|IP")]
    pub iface: Vec<String>,
    /// Regular expression for --iface, compared with addresses first and then with names; tried after --iface.
    #[arg(long, action = ArgAction::Append, value_name = "REGEX")]
    pub iface_regex: Vec<String>,
    /// Use the interface by which this IP is reached; tried after --iface and --iface-regex.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "IP")]
    pub iface_can_reach: String,
    /// IPv4 address to publish to the other nodes [default: the interface's].
    #[arg(long, default_value = "", hide_default_value = true, value_name = "IP")]
    pub public_ip: String,
    /// IPv6 address to publish to the other nodes [default: the interface's].
    #[arg(long, default_value = "", hide_default_value = true, value_name = "IP")]
    pub public_ipv6: String,
    /// UDP port of this node's wireguard device instead of net-conf's ListenPort, for nodes behind one public address; 0 = ListenPort.
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "PORT", help_heading = OURS)]
    pub wireguard_port: u16,
}

/// The flag that chooses between an answer for people and one for programs.
#[derive(Debug, Clone, Args)]
pub struct FormFlags {
    /// Form of the answer.
    #[arg(long, short = 'o', default_value = "text", value_parser = ["text", "json"], value_name = "FORM")]
    output: String,
}

impl FormFlags {
    /// Returns true for an answer in JSON.
    pub fn is_json(&self) -> bool {
        self.output == "json"
    }
}

/// Flags that say which agent of this machine is meant.
#[derive(Debug, Clone, Args)]
pub struct InstanceFlags {
    /// File that tells container runtimes the subnet and the MTU. Each agent of a machine needs a file of its own.
    #[arg(long, default_value = USUAL_FILE, value_name = "FILE")]
    pub subnet_file: PathBuf,
    /// Socket on which the agent answers `weft status` [default: weft.sock beside a file subnet.env, else weft-NAME.sock].
    #[arg(long, value_name = "FILE", help_heading = OURS)]
    socket: Option<PathBuf>,
}

impl InstanceFlags {
    /// Returns the value of `--socket`, or else the socket that belongs to `--subnet-file`.
    pub fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| weft_subnet::env::socket(&self.subnet_file))
    }
}

/// Flags that say where the files of an instance are.
#[derive(Debug, Clone, Args)]
pub struct PlaceFlags {
    /// Which agent.
    #[command(flatten)]
    pub instance: InstanceFlags,
    /// Directory of the saved peers, which are used if the store is away at the start, and of the history; empty = save neither.
    #[arg(long, default_value = "/var/lib/weft", value_name = "DIR", help_heading = OURS)]
    pub state_dir: String,
}

/// Flags for the CNI configuration.
#[derive(Debug, Clone, Args)]
pub struct CniFlags {
    /// CNI configuration to publish as soon as pods can be reached, so that the node is not ready before; empty = publish none.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "FILE", help_heading = OURS)]
    pub cni_conf: String,
    #[command(flatten)]
    pub(super) dir: CniDirFlag,
}

/// The flag for the directory of the container runtime.
#[derive(Debug, Clone, Args)]
pub struct CniDirFlag {
    /// Directory in which the container runtime looks for CNI configurations.
    #[arg(long, default_value = "/etc/cni/net.d", value_name = "DIR", help_heading = OURS)]
    pub cni_conf_dir: PathBuf,
}

/// `weft install-cni`.
#[derive(Debug, Clone, Args)]
pub struct InstallFlags {
    /// The plugin to install.
    #[arg(long, default_value = "/weft-cni", value_name = "FILE")]
    pub from: PathBuf,
    /// Directory in which the container runtime looks for plugins; the plugin gets the names flannel and weft-veth there.
    #[arg(long, default_value = "/opt/cni/bin", value_name = "DIR")]
    pub bin_dir: PathBuf,
    /// Also install this program there as weft, so that `weft status`, `cleanup` and `doctor` can be run on the node.
    #[arg(long, value_name = "FILE")]
    pub agent: Option<PathBuf>,
}

/// Flags for how the agent runs.
#[derive(Debug, Clone, Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct RunFlags {
    /// Address of /healthz, /readyz, /metrics and /mesh.
    #[arg(long, default_value = "0.0.0.0", value_name = "IP")]
    pub healthz_ip: String,
    /// Port of /healthz, /readyz, /metrics and /mesh; 0 = off.
    #[arg(long, default_value_t = 0, value_name = "PORT")]
    pub healthz_port: u16,
    /// Shortest time between two comparisons of everything with the kernel; in large clusters it is longer.
    #[arg(long, default_value = "10s", value_parser = duration, value_name = "DURATION", help_heading = OURS)]
    pub resync: Duration,
    /// Write plain routes even where the kernel has nexthop objects.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL", help_heading = OURS)]
    pub no_nexthop_objects: bool,
    /// How long peers are kept when many leases vanish at once; 0 = off.
    #[arg(long, default_value = "5m", value_parser = duration, value_name = "DURATION", help_heading = OURS)]
    pub hold_removals: Duration,
    /// How long the devices of an earlier backend stay after a change of the backend, when no peer needs them any more.
    #[arg(long, default_value = "1m", value_parser = duration, value_name = "DURATION", help_heading = OURS)]
    pub change_grace: Duration,
    /// Run the commands of the backend extension; whoever may write net-conf then runs programs as the user of this agent.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL", help_heading = OURS)]
    pub allow_extension: bool,
    /// What to do if another node owns this node's subnet.
    #[arg(long, value_enum, default_value_t = OnLostLease::Hold, value_name = "ACTION", help_heading = OURS)]
    pub on_lost_lease: OnLostLease,
    /// Set the sysctls that forwarding needs; false = only report them.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL", help_heading = OURS)]
    pub manage_sysctls: bool,
    /// Compute the checksums of packets on this host, and do not leave those of tunnel devices to the network card.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL", help_heading = OURS)]
    pub tx_checksum_off: bool,
    /// Ask the peers all the time whether packets reach them, by at most five ICMP echo requests a second.
    #[arg(long, value_enum, default_value_t = Switch::On, value_name = "on|off", help_heading = OURS)]
    pub probe: Switch,
    /// How long the node must lack its device, lease or rules before its condition says so; for tests.
    #[arg(long, default_value = "30s", value_parser = duration, hide = true)]
    pub unwell_after: Duration,
}

/// `--probe`, `--kube-events`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Do it.
    On,
    /// Do not.
    Off,
}

/// Flags for the log and the version, as in flannel.
#[derive(Debug, Clone, Args)]
pub struct LogFlags {
    /// Verbosity of the log: 0 = changes of this node, 1 = passes, 4 = messages to the kernel, 6 = libraries as well.
    #[arg(long = "v", short = 'v', default_value_t = 0, value_name = "LEVEL")]
    pub v: u8,
    /// Form of the log: lines for people, or a JSON object on each line.
    #[arg(long, value_enum, default_value_t = Format::Text, value_name = "FORMAT", help_heading = OURS)]
    pub log_format: Format,
    /// Has no effect; accepted because flannel has this flag.
    #[arg(long = "vmodule", default_value = "", hide_default_value = true, value_name = "PATTERNS")]
    pub vmodule: String,
    /// Has no effect; accepted because flannel has this flag.
    #[arg(long = "log_backtrace_at", default_value = "", hide_default_value = true, value_name = "FILE:LINE")]
    pub log_backtrace_at: String,
    /// Print the version to stderr and end.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL")]
    pub version: bool,
}

/// Flags for masquerading.
#[derive(Debug, Clone, Args)]
pub struct MasqFlags {
    /// Masquerade traffic from pods to addresses outside the pod network.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL")]
    pub ip_masq: bool,
    /// Masquerade without choosing source ports at random.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL")]
    pub ip_masq_fully_random_disable: bool,
}

/// Flags for the fence and the tunnel guard.
#[derive(Debug, Clone, Args)]
pub struct FenceFlags {
    /// Drop forwarded packets to unused addresses of this node's subnet.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL")]
    pub ip_blackhole_route: bool,
    /// Answer a pod's packet for a missing peer with an ICMP error instead of using the default route [default: true; false if called as flanneld].
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL", help_heading = OURS)]
    pub fail_closed: Option<bool>,
    /// Accept tunnel packets only from addresses of peers; takes effect as soon as every node has this flag.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL", help_heading = OURS)]
    pub guard_tunnel: bool,
}

/// Flags for the traffic rules.
#[derive(Debug, Clone, Args)]
pub struct RuleFlags {
    #[command(flatten)]
    pub(super) masq: MasqFlags,
    #[command(flatten)]
    pub(super) fence: FenceFlags,
    /// Seconds between two checks of the traffic rules.
    #[arg(long, default_value_t = 5, value_name = "SECONDS")]
    pub iptables_resync: u64,
    /// Accept forwarded packets of pods.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL")]
    pub iptables_forward_rules: bool,
    /// Which packet filter gets the traffic rules; auto = as EnableNFTables in net-conf says, or else what this machine uses.
    #[arg(long, value_enum, default_value_t = Choice::Auto, value_name = "KIND", help_heading = OURS)]
    pub firewall: Choice,
}

/// Flags for Kubernetes.
#[derive(Debug, Clone, Args)]
pub struct KubeFlags {
    /// Keep the leases in the Kubernetes API.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL", help_heading = KUBE)]
    pub kube_subnet_mgr: bool,
    /// URL of the Kubernetes API.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "URL", help_heading = KUBE)]
    pub kube_api_url: String,
    /// Prefix of the annotations on Nodes.
    #[arg(long, default_value = "flannel.alpha.coreos.com", value_name = "PREFIX", help_heading = KUBE)]
    pub kube_annotation_prefix: String,
    /// Credentials for the Kubernetes API.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "FILE", help_heading = KUBE)]
    pub kubeconfig_file: String,
    /// File with net-conf in Kubernetes mode.
    #[arg(long, default_value = "/etc/kube-flannel/net-conf.json", value_name = "FILE", help_heading = KUBE)]
    pub net_config_path: String,
    /// Report in the Node's condition NetworkUnavailable whether the network works.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true",
        value_parser = boolean, action = ArgAction::Set, value_name = "BOOL", help_heading = KUBE)]
    pub set_node_network_unavailable: bool,
    /// Write a Kubernetes Event about the Node when something is wrong with this node for some minutes, and when it is over.
    #[arg(long, value_enum, default_value_t = Switch::On, value_name = "on|off", help_heading = OURS)]
    pub kube_events: Switch,
    /// How long a fault must last before an Event says so; for tests.
    #[arg(long, default_value = "1m", value_parser = duration, hide = true)]
    pub kube_events_after: Duration,
}

/// `weft agent`.
#[derive(Debug, Clone, Args)]
pub struct AgentFlags {
    #[command(flatten)]
    pub(super) store: StoreFlags,
    #[command(flatten)]
    pub(super) uplink: UplinkFlags,
    #[command(flatten)]
    pub(super) place: PlaceFlags,
    #[command(flatten)]
    pub(super) cni: CniFlags,
    #[command(flatten)]
    pub(super) run: RunFlags,
    #[command(flatten)]
    pub(super) log: LogFlags,
    #[command(flatten)]
    pub(super) rules: RuleFlags,
}
