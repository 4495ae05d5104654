// SPDX-License-Identifier: Apache-2.0
//! The programs that use the UDP port of the tunnel.

use std::collections::BTreeSet;
use std::fs;

use crate::processes::{Process, ProcessList};

/// Returns the programs that have a UDP socket on this port in our namespace, if there is a port. The kernel's own sockets, such as those of vxlan
/// devices, belong to no process. A socket that several processes share, such as a program and its workers, counts for the one with the
/// lowest number.
pub(super) fn read(port: Option<u16>, processes: &ProcessList) -> Vec<String> {
    let Some(port) = port else { return Vec::new() };
    let mut sockets = BTreeSet::new();
    for file in ["udp", "udp6"] {
        // Without IPv6 in the kernel there is no second file.
        let text = fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
        sockets.extend(text.lines().skip(1).filter_map(|line| socket_on(line, port)));
    }
    if sockets.is_empty() {
        return Vec::new();
    }
    let mut all: Vec<&Process> = processes.all().collect();
    all.sort_unstable_by_key(|process| process.pid);
    let mut users = Vec::new();
    for process in all {
        // A socket that was found is not looked for in later processes.
        if process.files().filter(|file| sockets.remove(&*file.to_string_lossy())).count() > 0 {
            users.push(process.to_string());
        }
    }
    users
}

/// Returns how /proc/PID/fd shows the socket of a line of /proc/net/udp, if the socket is bound to this port.
fn socket_on(line: &str, port: u16) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let bound = u16::from_str_radix(words.get(1)?.rsplit(':').next()?, 16).ok()?;
    (bound == port).then(|| Some(format!("socket:[{}]", words.get(9)?))).flatten()
}
