// SPDX-License-Identifier: Apache-2.0
//! The flannel that is a part of k3s. It has no process of its own, so it is known by the file that k3s writes for it at each start, unless flannel is
//! switched off (`flannel-backend: none`). The file of an earlier start stays.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::processes::{Process, ProcessList, age};

/// net-conf of the flannel in k3s.
pub(crate) const FILE: &str = "/var/lib/rancher/k3s/agent/etc/flannel/net-conf.json";
/// The names of its process.
const NAMES: [&str; 3] = ["k3s-server", "k3s-agent", "k3s"];

/// Returns k3s with its process ID, if it runs flannel in this network namespace.
pub(super) fn read(processes: &ProcessList) -> Option<String> {
    let runs_flannel =
        |process: &&Process| age(process.pid).is_some_and(|age| was_written_within(Path::new(FILE), age));
    processes.here(&NAMES).into_iter().find(runs_flannel).map(ToString::to_string)
}

/// Returns true if a file was written within this time.
fn was_written_within(file: &Path, time: Duration) -> bool {
    let modified = fs::metadata(file).and_then(|about| about.modified());
    modified.is_ok_and(|modified| modified.elapsed().is_ok_and(|since| since <= time))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn only_a_file_that_was_written_since_the_start_of_k3s_shows_its_flannel() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("net-conf.json");
        let hours = |number: u64| Duration::from_secs(number * 3600);
        assert!(!was_written_within(&file, hours(9)), "there is no file");
        File::create(&file).unwrap().set_modified(SystemTime::now() - hours(2)).unwrap();
        for (started, is_written) in [(1, false), (3, true)] {
            assert_eq!(was_written_within(&file, hours(started)), is_written, "k3s started {started} h ago");
        }
        File::create(&file).unwrap().set_modified(SystemTime::now() + hours(2)).unwrap();
        assert!(!was_written_within(&file, hours(9)), "the clock was set back");
    }
}
