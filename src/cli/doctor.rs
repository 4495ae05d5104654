// SPDX-License-Identifier: Apache-2.0
//! The flags of `weft doctor`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::duration::duration;
use crate::doctor::Places;

/// What to examine.
#[derive(Subcommand, Debug, Clone)]
pub enum DoctorCommand {
    /// List what pods that are gone left behind: addresses of host-local, records of the CNI plugin, veth pairs.
    Pods(PodsFlags),
}

/// `weft doctor pods`.
#[derive(Args, Debug, Clone)]
pub struct PodsFlags {
    /// Clear what is certainly a leak; what is in doubt stays.
    #[arg(long)]
    pub fix: bool,
    /// Leave out files younger than this: they may belong to a pod that is being started.
    #[arg(long, default_value = "10m", value_parser = duration, value_name = "TIME")]
    older_than: Duration,
    /// host-local's directory.
    #[arg(long, default_value = "/var/lib/cni/networks", value_name = "DIR")]
    networks: PathBuf,
    /// Records of the CNI plugin.
    #[arg(long, default_value = "/var/lib/cni/flannel", value_name = "DIR")]
    records: PathBuf,
    /// The runtime's cache of results.
    #[arg(long, default_value = "/var/lib/cni/results", value_name = "DIR")]
    results: PathBuf,
    /// Names of network namespaces.
    #[arg(long, default_value = "/run/netns", value_name = "DIR")]
    netns: PathBuf,
    /// Directories of CNI plugins, separated by colons; a record is cleared by its delegate.
    #[arg(long, default_value = "/opt/cni/bin:/usr/lib/cni", value_name = "DIRS")]
    cni_path: String,
}

impl From<PodsFlags> for Places {
    fn from(flags: PodsFlags) -> Places {
        Places {
            networks: flags.networks,
            records: flags.records,
            results: flags.results,
            netns: flags.netns,
            plugins: flags.cni_path,
            age: flags.older_than,
        }
    }
}
