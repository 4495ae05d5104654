// SPDX-License-Identifier: Apache-2.0
//! What a container runtime finds in its directory of CNI configurations. The agent and `weft doctor` look there as well.

use std::path::Path;

/// Files with these endings are configurations.
const ENDINGS: [&str; 3] = ["conf", "conflist", "json"];

/// Returns true if a runtime reads a file of this name as a configuration.
pub fn is_conf(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|kind| ENDINGS.iter().any(|ending| kind == *ending))
}

/// Returns true if a plugin of this type is Multus. Multus calls the configurations of other programs, so it is no network of its own.
pub fn is_multus(plugin: &str) -> bool {
    plugin.contains("multus")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_reads_only_files_with_the_endings_of_configurations() {
        assert!(["10-a.conf", "10-a.conflist", "a.json"].into_iter().all(is_conf));
        assert!(!["10-a.conf.off", "conf", ".json", "a.JSON", ""].into_iter().any(is_conf));
    }

    #[test]
    fn multus_has_several_types_of_plugins() {
        assert!(is_multus("multus") && is_multus("multus-shim"));
        assert!(!is_multus("bridge"));
    }
}
