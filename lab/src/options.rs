// SPDX-License-Identifier: Apache-2.0
//! The options of a lab.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::backend_kind::BackendKind;
use super::cni::Pods;
use super::netns::has_ipv6;
use super::store::StoreKind;

/// The families of the pods' network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Families {
    /// IPv4 only.
    #[default]
    V4,
    /// IPv6 only. This needs the directory store, because flannel's etcd keys require IPv4.
    V6,
    /// IPv4 and IPv6.
    Dual,
}

/// The options of a lab, which are also the flags of `weft lab`.
#[derive(Debug, Clone, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub struct LabOptions {
    /// Number of nodes, 2 to 200
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=200))]
    pub nodes: u8,
    /// Pods on each node, 1 to 100; wired by the CNI plugin: `cni`, `cni-veth`, `cni:3`
    #[arg(long, default_value = "2")]
    pub pods: Pods,
    /// How nodes reach each other's pods
    #[arg(long, value_enum, default_value_t)]
    pub backend: BackendKind,
    /// Where the leases are
    #[arg(long, value_enum, default_value_t)]
    pub store: StoreKind,
    /// IPv6 beside IPv4
    #[arg(long)]
    pub ipv6: bool,
    /// Put a router between two halves of the nodes
    #[arg(long)]
    pub router: bool,
    /// Peers on the same link are reached without the tunnel
    #[arg(long)]
    pub direct_routing: bool,
    /// Plain routes in place of nexthop objects
    #[arg(long)]
    pub no_nexthop_objects: bool,
    /// Then change to this backend while every pod pings every other one, and back; shows what was lost
    #[arg(long, value_enum, value_name = "TYPE")]
    pub change_backend: Option<BackendKind>,
    /// Leave the cluster running at the end, until Ctrl-C
    #[arg(long)]
    pub keep: bool,
    /// IPv6 without IPv4; only for tests.
    #[arg(skip)]
    pub only_ipv6: bool,
    /// Path of the agent's binary; `None` means this program.
    #[arg(skip)]
    pub exe: Option<PathBuf>,
    /// Path of a weft binary that starts the processes of the lab; `None` means `exe`.
    #[arg(skip)]
    pub launcher: Option<PathBuf>,
    /// Additional flags for every agent.
    #[arg(skip)]
    pub agent_flags: Vec<String>,
}

impl Default for LabOptions {
    fn default() -> Self {
        LabOptions {
            nodes: 3,
            pods: Pods { count: 1, ..Pods::default() },
            backend: BackendKind::default(),
            store: StoreKind::default(),
            ipv6: false,
            router: false,
            direct_routing: false,
            no_nexthop_objects: false,
            change_backend: None,
            keep: false,
            only_ipv6: false,
            exe: None,
            launcher: None,
            agent_flags: Vec::new(),
        }
    }
}

impl LabOptions {
    /// Returns the families of the pods' network.
    pub fn families(&self) -> Families {
        match (self.only_ipv6, self.ipv6) {
            (true, _) => Families::V6,
            (false, true) => Families::Dual,
            (false, false) => Families::V4,
        }
    }

    /// Returns the net-conf of the lab.
    pub fn net_conf(&self) -> String {
        let mut backend = serde_json::json!({ "Type": self.backend.wire() });
        if self.direct_routing {
            backend["DirectRouting"] = true.into();
        }
        self.net_conf_with(&backend)
    }

    /// Returns the net-conf of the lab with this `Backend` object.
    pub fn net_conf_with(&self, backend: &serde_json::Value) -> String {
        let mut conf = serde_json::json!({ "Backend": backend });
        if self.families() != Families::V6 {
            conf["Network"] = "10.244.0.0/16".into();
        } else {
            conf["EnableIPv4"] = false.into();
        }
        if self.families() != Families::V4 {
            conf["EnableIPv6"] = true.into();
            conf["IPv6Network"] = "fd00:10:244::/48".into();
        }
        conf.to_string()
    }

    /// Checks that the options can be combined and that this machine can do what they ask for, before anything is created.
    ///
    /// # Errors
    /// The message names the options that exclude each other, or what the machine lacks.
    pub fn check(&self) -> Result<()> {
        if [Some(self.backend), self.change_backend].contains(&Some(BackendKind::HostGw)) && self.router {
            bail!("--backend host-gw needs all nodes on one link: leave --router out");
        }
        if self.change_backend == Some(self.backend) {
            bail!("--change-backend {}: the lab begins with this backend, so name another one", self.backend.wire());
        }
        if self.backend == BackendKind::HostGw && self.direct_routing {
            bail!("--direct-routing is for tunnels: host-gw always routes directly");
        }
        if matches!(self.backend, BackendKind::Udp | BackendKind::Wireguard) && self.direct_routing {
            bail!("--direct-routing is for vxlan and ipip: {} has one route for all peers", self.backend.wire());
        }
        let mut kinds = [Some(self.backend), self.change_backend].into_iter().flatten();
        let only_v4 = kinds.find(|kind| matches!(kind, BackendKind::Ipip | BackendKind::Udp));
        if let Some(kind) = only_v4.filter(|_| self.families() != Families::V4) {
            bail!("--backend {} carries IPv4 only: leave --ipv6 out", kind.wire());
        }
        if self.families() != Families::V4 && !has_ipv6() {
            bail!(
                "--ipv6: the kernel of this machine has no IPv6 (often ipv6.disable=1 in /proc/cmdline): leave --ipv6 out"
            );
        }
        if self.families() == Families::V6 && self.store == StoreKind::Etcd {
            bail!("etcd keys need IPv4 (as flannel's): IPv6 alone works with the directory store");
        }
        Ok(())
    }

    /// Returns the path of the agent's binary.
    ///
    /// # Errors
    /// The path of this program is unknown.
    pub fn agent_exe(&self) -> Result<PathBuf> {
        match &self.exe {
            Some(path) => Ok(path.clone()),
            None => std::env::current_exe().context("find this program's own file"),
        }
    }

    /// Returns the path of the weft binary that starts the processes of the lab.
    ///
    /// # Errors
    /// The path of this program is unknown.
    pub fn launcher(&self) -> Result<PathBuf> {
        self.launcher.clone().map_or_else(|| self.agent_exe(), Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_exclude_each_other_are_refused_with_the_one_to_leave_out() {
        let of = |backend| LabOptions { backend, ..LabOptions::default() };
        let to = |kind| LabOptions { change_backend: Some(kind), ..LabOptions::default() };
        for (options, words) in [
            (LabOptions { router: true, ..of(BackendKind::HostGw) }, "leave --router out"),
            (LabOptions { router: true, ..to(BackendKind::HostGw) }, "leave --router out"),
            (to(BackendKind::Vxlan), "the lab begins with this backend"),
            (LabOptions { direct_routing: true, ..of(BackendKind::HostGw) }, "host-gw always routes directly"),
            (LabOptions { direct_routing: true, ..of(BackendKind::Udp) }, "udp has one route for all peers"),
            (LabOptions { direct_routing: true, ..of(BackendKind::Wireguard) }, "wireguard has one route"),
            (LabOptions { ipv6: true, ..of(BackendKind::Ipip) }, "--backend ipip carries IPv4 only"),
            (LabOptions { ipv6: true, ..to(BackendKind::Udp) }, "--backend udp carries IPv4 only"),
        ] {
            let refused = options.check().unwrap_err().to_string();
            assert!(refused.contains(words), "{words}: {refused}");
        }
        for options in [
            LabOptions { router: true, direct_routing: true, ..LabOptions::default() },
            LabOptions { direct_routing: true, ..of(BackendKind::Ipip) },
            to(BackendKind::HostGw),
            of(BackendKind::Udp),
        ] {
            options.check().unwrap();
        }
    }
}
