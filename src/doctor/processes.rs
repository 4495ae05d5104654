// SPDX-License-Identifier: Apache-2.0
//! Which network namespaces have processes in them, and which processes speak of a container.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Inode of the first PID namespace (PROC_PID_INIT_INO of linux/proc_ns.h): who is in another one does not see every process.
const FIRST: &str = "pid:[4026531836]";

/// Device and inode of a namespace.
pub type Id = (u64, u64);

/// What processes tell.
#[derive(Debug, Default)]
pub struct Processes {
    /// Namespaces with threads in them, and a path that leads there.
    pub netns: BTreeMap<Id, PathBuf>,
    /// Control groups and command lines, one text each: they bear the ids of running containers.
    pub words: Vec<String>,
}

/// Reads /proc. A process that ends meanwhile is no error.
///
/// # Errors
/// There is no /proc.
pub fn read() -> io::Result<Processes> {
    let mut all = Processes::default();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let number = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.parse::<u32>().is_ok());
        if !number {
            continue;
        }
        // Threads may be in different namespaces.
        for task in fs::read_dir(path.join("task")).into_iter().flatten().flatten() {
            let netns = task.path().join("ns/net");
            if let Ok(id) = id(&netns) {
                all.netns.entry(id).or_insert(netns);
            }
        }
        // Our own words name whatever we are asked about.
        if path.file_name().is_some_and(|name| *name != *std::process::id().to_string()) {
            let text = |file: &str| fs::read(path.join(file)).unwrap_or_default();
            let words = [text("cgroup"), text("cmdline")].concat();
            all.words.push(String::from_utf8_lossy(&words).into_owned());
        }
    }
    Ok(all)
}

/// Device and inode of a namespace file.
pub fn id(path: &Path) -> io::Result<Id> {
    fs::metadata(path).map(|about| (about.dev(), about.ino()))
}

/// Why not every process can be seen, if so.
pub fn blind() -> Option<String> {
    let ours = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    (ours != Path::new(FIRST))
        .then(|| "processes of the host: run weft doctor on the host itself, or with hostPID".to_owned())
}
