// SPDX-License-Identifier: Apache-2.0
//! The programs of flannel's images. weft's image has links with their names, so that it can stand in a manifest that was written for
//! flannel. The name by which weft was started chooses the command.

use std::path::PathBuf;

use clap::Args;
use weft_subnet::env::USUAL_FILE;

/// The names of the programs, and the command of weft that each one means.
const PROGRAMS: [(&str, &str); 4] = [
    ("flanneld", "agent"),
    ("install-conf", "install-conf"),
    ("mk-docker-opts.sh", "docker-opts"),
    // Init containers copy the plugin and the CNI configuration with it.
    ("cp", "cp"),
];

/// Returns the command that a program of flannel's images means. `None` if the name is not one of theirs.
pub fn command(program: &str) -> Option<&'static str> {
    PROGRAMS.iter().find(|(name, _)| *name == program).map(|(_, command)| *command)
}

/// `weft install-conf`.
#[derive(Debug, Clone, Args)]
pub struct InstallConf {
    /// The CNI configuration to copy.
    #[arg(value_name = "SOURCE")]
    pub from: PathBuf,
    /// Its place, such as /etc/cni/net.d/10-flannel.conflist.
    #[arg(value_name = "TARGET")]
    pub to: PathBuf,
}

/// `cp`.
#[derive(Debug, Clone, Args)]
pub struct Copy {
    /// Has no effect: a file that is in the way is always replaced.
    #[arg(short = 'f', long = "force")]
    _force: bool,
    /// What to copy where.
    #[command(flatten)]
    pub files: InstallConf,
}

/// `weft docker-opts`. The flags are those of flannel's script `mk-docker-opts.sh`.
#[derive(Debug, Clone, Args)]
pub struct DockerOptions {
    /// The subnet file of the agent. Without it, its variables are read from the environment.
    #[arg(short = 'f', default_value = USUAL_FILE, value_name = "FILE")]
    pub subnet_file: PathBuf,
    /// The file to write.
    #[arg(short = 'd', default_value = "/run/docker_opts.env", value_name = "FILE")]
    pub output: PathBuf,
    /// Write each option as a variable of its own, such as DOCKER_OPT_MTU.
    #[arg(short = 'i')]
    pub individual: bool,
    /// Write all options into one variable. Without -i and -c, both forms are written.
    #[arg(short = 'c')]
    pub combined: bool,
    /// Do not write --ip-masq.
    #[arg(short = 'm')]
    pub without_ip_masq: bool,
    /// The name of the variable with all options.
    #[arg(short = 'k', default_value = "DOCKER_OPTS", value_name = "NAME")]
    pub key: String,
}
