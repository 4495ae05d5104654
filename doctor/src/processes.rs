// SPDX-License-Identifier: Apache-2.0
//! Which network namespaces have processes in them, and which processes mention a container.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The host's PID namespace, whose number is fixed in the kernel (PROC_PID_INIT_INO of linux/proc_ns.h). A process in
/// another PID namespace does not see every process.
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Device and inode of a namespace.
pub type Id = (u64, u64);

/// The processes of this machine.
#[derive(Debug, Default)]
pub struct Processes {
    /// The network namespaces that have threads in them, each with a path to it.
    pub netns: BTreeMap<Id, PathBuf>,
    /// The control groups and the command line of each process, as one text. They contain the IDs of running
    /// containers.
    pub texts: Vec<String>,
}

/// Reads /proc. A process that ends meanwhile is ignored.
///
/// # Errors
/// /proc cannot be read.
pub fn read() -> io::Result<Processes> {
    let mut all = Processes::default();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let number = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.parse::<u32>().is_ok());
        if !number {
            continue;
        }
        // The threads of a process may be in different namespaces.
        for task in fs::read_dir(path.join("task")).into_iter().flatten().flatten() {
            let netns = task.path().join("ns/net");
            if let Ok(id) = id(&netns) {
                all.netns.entry(id).or_insert(netns);
            }
        }
        // Our own command line may contain the ID that somebody asks about.
        if path.file_name().is_some_and(|name| *name != *std::process::id().to_string()) {
            let text = |file: &str| fs::read(path.join(file)).unwrap_or_default();
            let texts = [text("cgroup"), text("cmdline")].concat();
            all.texts.push(String::from_utf8_lossy(&texts).into_owned());
        }
    }
    Ok(all)
}

/// Returns the device and inode of a namespace file.
pub fn id(path: &Path) -> io::Result<Id> {
    fs::metadata(path).map(|about| (about.dev(), about.ino()))
}

/// Returns a sentence for people if this program does not see all processes of the host.
pub fn unreadable() -> Option<String> {
    let ours = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    (ours != Path::new(HOST_PID_NAMESPACE))
        .then(|| "processes of the host: run weft doctor on the host itself, or with hostPID".to_owned())
}

/// Returns one of these programs that runs in our PID namespace, with its number.
pub fn running(names: &[&str]) -> Option<String> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok()).find_map(|pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        names.contains(&name.trim_end()).then(|| format!("{} (pid {pid})", name.trim_end()))
    })
}
