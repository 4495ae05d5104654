// SPDX-License-Identifier: Apache-2.0
//! The kernel lacks the module of the backend.

use crate::facts::NodeFacts;
use crate::facts::store::Module;
use crate::finding::{NodeFinding, finding};

/// The kernel lacks what the backend of net-conf needs.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let Some(Ok(net_conf)) = &facts.store.net_conf else { return Vec::new() };
    let Some(Module { name: module, is_there: Some(false) }) = net_conf.module else { return Vec::new() };
    let evidence = format!(
        "net-conf has the backend {}, and this kernel has no module {module}: it is not loaded, not built in, and not in /lib/modules",
        net_conf.backend
    );
    vec![finding(
        evidence,
        format!("install the package with the module {module} for this kernel, or choose another backend"),
    )]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::store::ExaminedNetConf;
    use crate::sources::StoreAnswer;

    #[test]
    fn a_module_that_is_missing_is_found_only_if_this_is_known() {
        for (has, found) in [(Some(false), true), (Some(true), false), (None, false)] {
            let mut facts = NodeFacts::with_store(StoreAnswer::NotAsked);
            let (networks, backend) = (weft_subnet::cidr::Subnets::default(), "wireguard".to_owned());
            facts.store.net_conf = Some(Ok(ExaminedNetConf {
                networks,
                backend,
                module: Some(Module { name: "wireguard", is_there: has }),
            }));
            assert_eq!(check(&facts).len(), usize::from(found), "{has:?}");
        }
    }
}
