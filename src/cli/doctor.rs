// SPDX-License-Identifier: Apache-2.0
//! The flags and the tasks of `weft doctor`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Subcommand};

use weft_backends::vxlan::LINUX_PORT;
use weft_doctor::checks::CHECKS;
use weft_doctor::pods::Sources;
use weft_doctor::sources::CniSources;

use super::build::{self, Env};
use super::duration::duration;
use super::flags::{CniDirFlag, FormFlags, PlaceFlags, StoreFlags};
use super::{Exit, Task};
use crate::options::Store;

/// `weft doctor`: what is examined, and how the answer is printed.
#[derive(Debug)]
pub struct DoctorTask {
    /// The socket on which the agent may answer.
    pub socket: PathBuf,
    /// The subnet file of the instance.
    pub subnet_file: PathBuf,
    /// The checks to run; empty = all.
    pub only: Vec<String>,
    /// The UDP port of the vxlan device.
    pub port: u16,
    /// The directory of the agent's state.
    pub state_dir: PathBuf,
    /// The files of CNI.
    pub cni: CniSources,
    /// The store to examine, if it is to be examined.
    pub store: Option<Store>,
    /// Print JSON.
    pub json: bool,
}

/// Flags of `weft doctor`.
#[derive(Args, Debug, Clone)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DoctorFlags {
    /// What to do instead of examining this node.
    #[command(subcommand)]
    pub command: Option<DoctorCommand>,
    #[command(flatten)]
    place: PlaceFlags,
    /// Checks to run, separated by commas, as `weft doctor list` names them [default: all].
    #[arg(long, value_delimiter = ',', value_parser = CHECKS.map(|check| check.name), value_name = "CHECKS")]
    pub only: Vec<String>,
    /// UDP port of the vxlan device.
    #[arg(long, default_value_t = LINUX_PORT, value_name = "PORT")]
    pub port: u16,
    #[command(flatten)]
    conf_dir: CniDirFlag,
    #[command(flatten)]
    plugins: PluginFlags,
    /// Also examine the store that the flags of the store name: its answers, net-conf and certificates.
    /// With it, the flags of the store are also read from the environment, as `weft agent` does.
    #[arg(long, action = ArgAction::SetTrue)]
    pub check_store: bool,
    #[command(flatten)]
    pub(super) store: StoreFlags,
    #[command(flatten)]
    form: FormFlags,
}

/// Flags that say where CNI plugins are, and where host-local keeps its addresses.
#[derive(Args, Debug, Clone)]
struct PluginFlags {
    /// Directories of CNI plugins, separated by colons.
    #[arg(long, default_value = "/opt/cni/bin:/usr/lib/cni", value_name = "DIRS")]
    cni_path: String,
    /// Directory in which host-local keeps the addresses of pods.
    #[arg(long, default_value = "/var/lib/cni/networks", value_name = "DIR")]
    networks: PathBuf,
}

/// The subcommands of `weft doctor`.
#[derive(Subcommand, Debug, Clone)]
pub enum DoctorCommand {
    /// List what deleted pods left behind: addresses of host-local, records of the CNI plugin, veth pairs.
    Pods(PodsFlags),
    /// List the checks.
    List,
}

/// `weft doctor pods`.
#[derive(Args, Debug, Clone)]
pub struct PodsFlags {
    /// Remove what is certainly left behind; what is in doubt stays.
    #[arg(long)]
    pub fix: bool,
    /// Age from which a file counts as left behind: a younger one may belong to a pod that is being started.
    #[arg(long, default_value = "10m", value_parser = duration, value_name = "DURATION")]
    older_than: Duration,
    #[command(flatten)]
    plugins: PluginFlags,
    /// Directory of the CNI plugin's records.
    #[arg(long, default_value = "/var/lib/cni/flannel", value_name = "DIR")]
    records: PathBuf,
    /// The runtime's cache of results.
    #[arg(long, default_value = "/var/lib/cni/results", value_name = "DIR")]
    results: PathBuf,
    /// Directory of named network namespaces.
    #[arg(long, default_value = "/run/netns", value_name = "DIR")]
    netns: PathBuf,
}

impl DoctorFlags {
    /// Returns the task that these flags describe.
    ///
    /// # Errors
    /// The flags of the store do not fit together.
    pub(super) fn task(self, env: Env<'_>) -> Result<Task, Exit> {
        Ok(match self.command {
            Some(DoctorCommand::Pods(flags)) => {
                let fix = flags.fix;
                Task::DoctorPods(flags.into(), fix)
            }
            Some(DoctorCommand::List) => Task::DoctorList,
            None => Task::Doctor(Box::new(DoctorTask {
                socket: self.place.instance.socket(),
                subnet_file: self.place.instance.subnet_file,
                only: self.only,
                port: self.port,
                state_dir: PathBuf::from(self.place.state_dir),
                cni: CniSources {
                    conf_dir: self.conf_dir.cni_conf_dir,
                    path: std::env::split_paths(&self.plugins.cni_path).collect(),
                    networks: self.plugins.networks,
                },
                store: if self.check_store { Some(build::store(self.store, env)?) } else { None },
                json: self.form.is_json(),
            })),
        })
    }
}

impl From<PodsFlags> for Sources {
    fn from(flags: PodsFlags) -> Sources {
        Sources {
            networks: flags.plugins.networks,
            records: flags.records,
            results: flags.results,
            netns: flags.netns,
            plugins: flags.plugins.cni_path,
            min_age: flags.older_than,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::path::Path;

    use super::*;
    use crate::cli::parse_from;

    fn task(line: &str) -> Result<Task, Exit> {
        parse_from(line.split(' ').map(OsString::from), |_| None)
    }

    #[test]
    fn each_flag_of_doctor_reaches_its_own_field() {
        let line = "weft doctor --only disk,kernel --port 4789 --cni-conf-dir /conf --cni-path /a:/b --networks /networks \
                    --state-dir /state --socket /s --subnet-file /f.env -o json --check-store --store dir:/x";
        let Ok(Task::Doctor(all)) = task(line) else { panic!("doctor") };
        // Its fields are moved one by one.
        let all = *all;
        assert_eq!((all.only, all.port, all.json), (vec!["disk".to_owned(), "kernel".to_owned()], 4789, true));
        assert_eq!((all.state_dir.as_path(), all.socket.as_path()), (Path::new("/state"), Path::new("/s")));
        assert_eq!((all.subnet_file.as_path(), all.cni.conf_dir.as_path()), (Path::new("/f.env"), Path::new("/conf")));
        assert_eq!((all.cni.path, all.cni.networks), (vec!["/a".into(), "/b".into()], PathBuf::from("/networks")));
        assert!(matches!(all.store, Some(Store::Dir(path)) if path == Path::new("/x")));
        let Ok(Task::Doctor(usual)) = task("weft doctor") else { panic!("doctor") };
        assert_eq!((usual.only.len(), usual.port, usual.json, usual.store.is_none()), (0, 8472, false, true));
        let exit = task("weft doctor --only nonsense").unwrap_err();
        assert!(exit.text.contains("--only"), "{}", exit.text);
        assert!(task("weft doctor --check-store --store dir:").unwrap_err().text.contains("--store"));
        assert!(matches!(task("weft doctor list"), Ok(Task::DoctorList)));
    }

    #[test]
    fn each_flag_of_doctor_pods_reaches_its_own_field() {
        let line = "weft doctor pods --fix --older-than 5m --networks /networks --records /records --results /results \
                    --netns /netns --cni-path /a:/b";
        let Ok(Task::DoctorPods(all, fix)) = task(line) else { panic!("doctor pods") };
        let places = [&all.networks, &all.records, &all.results, &all.netns].map(|place| place.to_str());
        assert_eq!(places, ["/networks", "/records", "/results", "/netns"].map(Some));
        assert_eq!((all.plugins.as_str(), all.min_age, fix), ("/a:/b", Duration::from_secs(300), true));
        let Ok(Task::DoctorPods(usual, fix)) = task("weft doctor pods") else { panic!("doctor pods") };
        assert_eq!(
            (usual.min_age, fix),
            (Duration::from_secs(600), false),
            "nothing is removed unless it is asked for"
        );
    }
}
