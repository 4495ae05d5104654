// SPDX-License-Identifier: Apache-2.0
//! The flags of `weft cleanup`.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};

use super::flags::{CniDirFlag, PlaceFlags};

/// `weft cleanup`.
#[derive(Debug)]
pub struct CleanupTask {
    /// The subnet file of the instance.
    pub subnet_file: PathBuf,
    /// The socket on which its agent would answer.
    pub socket: PathBuf,
    /// The directory that may contain its CNI configuration.
    pub cni_conf_dir: PathBuf,
    /// The directory that may contain its saved peers.
    pub state_dir: PathBuf,
    /// Also remove devices that have flannel's names but not our mark.
    pub flannel_devices: bool,
    /// The parts to remove. Empty = everything.
    pub only: Vec<Part>,
}

/// A part of what the agent wrote, for `weft cleanup --only`. Pods keep their network without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// The traffic rules.
    Rules,
    /// The fence of `--fail-closed` and `--ip-blackhole-route`.
    Fence,
    /// The tunnel guard.
    Guard,
}

#[derive(Args)]
pub(super) struct CleanupFlags {
    #[command(flatten)]
    place: PlaceFlags,
    #[command(flatten)]
    cni: CniDirFlag,
    /// Also remove devices that flanneld made. Their names are such as flannel.1, flannel.ipip, flannel0 and flannel-wg.
    #[arg(long, action = ArgAction::SetTrue)]
    flannel_devices: bool,
    /// Remove only these parts, separated by commas; devices, routes and files stay, and flanneld may run [default: everything].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS", conflicts_with = "flannel_devices")]
    only: Vec<Part>,
}

impl From<CleanupFlags> for CleanupTask {
    fn from(flags: CleanupFlags) -> CleanupTask {
        CleanupTask {
            socket: flags.place.instance.socket(),
            subnet_file: flags.place.instance.subnet_file,
            cni_conf_dir: flags.cni.cni_conf_dir,
            state_dir: PathBuf::from(flags.place.state_dir),
            flannel_devices: flags.flannel_devices,
            only: flags.only,
        }
    }
}
