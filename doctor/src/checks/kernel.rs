// SPDX-License-Identifier: Apache-2.0
//! The kernel lacks the module of the backend.

use crate::facts::NodeFacts;
use crate::facts::modules::{ModuleState, NeededModule};
use crate::finding::{NodeFinding, finding, some_of};

/// The kernel lacks what the backend of net-conf, or of the agent, needs.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let Some(NeededModule { backend, name, state }) = &facts.module else { return Vec::new() };
    let found = match state {
        ModuleState::There | ModuleState::Unknown => return Vec::new(),
        ModuleState::Missing => finding(
            format!(
                "the backend is {backend}, and this kernel has no module {name}: it is not loaded, not built in, and not in /lib/modules"
            ),
            format!("install the package with the module {name} for this kernel, or choose another backend"),
        ),
        ModuleState::Gone { running, others } => finding(
            format!(
                "the backend is {backend}, and its module {name} is not loaded and cannot be loaded: /lib/modules has no modules for the kernel \
                 {running}, which runs now, but it has some for {}, as after an upgrade of the kernel",
                some_of(others.iter().map(String::as_str))
            ),
            format!(
                "restart this machine, so that it starts the newer kernel; if it starts {running} again, install the modules of that kernel"
            ),
        ),
    };
    vec![found]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_that_is_missing_is_found_only_if_this_is_known() {
        let gone = ModuleState::Gone { running: "6.1.21-v8+".to_owned(), others: vec!["6.6.20-rpt-rpi-v8".to_owned()] };
        for (state, words) in [
            (ModuleState::There, None),
            (ModuleState::Unknown, None),
            (ModuleState::Missing, Some(["has no module wireguard", "install the package"])),
            (
                gone,
                Some([
                    "no modules for the kernel 6.1.21-v8+, which runs now, but it has some for 6.6.20-rpt-rpi-v8",
                    "restart this machine",
                ]),
            ),
        ] {
            let module =
                Some(NeededModule { backend: "wireguard".to_owned(), name: "wireguard", state: state.clone() });
            let found = check(&NodeFacts { module, ..NodeFacts::default() });
            assert_eq!(found.len(), usize::from(words.is_some()), "{state:?}");
            for (found, [evidence, remedy]) in found.iter().zip(words) {
                assert!(found.evidence.contains(evidence) && found.remedy.contains(remedy), "{found:?}");
            }
        }
        assert_eq!(check(&NodeFacts::default()), [], "the backend is not known");
    }
}
