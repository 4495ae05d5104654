// SPDX-License-Identifier: Apache-2.0
//! Backends of peers whose type is not ours, with that type's defaults.

use std::collections::BTreeMap;

use weft_backends::backend::{self, Backend, BadOption};
use weft_subnet::network::Network;

/// The backends that peers needed so far, by their own names: what a peer calls a type is not kept.
#[derive(Default)]
pub(super) struct Others(BTreeMap<&'static str, Box<dyn Backend>>);

impl Others {
    /// The backend of a peer's type. A type that does not exist fails anew each time: that costs little, and keeps nothing.
    pub(super) fn of(&mut self, kind: &str, network: &Network) -> Result<&dyn Backend, BadOption> {
        let known = match self.0.keys().find(|known| **known == kind) {
            Some(known) => *known,
            None => {
                let made = backend::make_for_lease(kind, network)?;
                let kind = made.kind();
                self.0.insert(kind, made);
                kind
            }
        };
        Ok(&*self.0[known])
    }

    /// The backend of this type if a peer needed it.
    pub(super) fn made(&self, kind: &str) -> Option<&dyn Backend> {
        self.0.get(kind).map(|backend| &**backend)
    }

    /// Another network: the backends are made again when they are needed.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_peers_call_their_types_is_not_kept() {
        let network = Network::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#).unwrap();
        let mut others = Others::default();
        for n in 0..1000 {
            let reason = others.of(&format!("type {n} {}", "x".repeat(1000)), &network).err().unwrap().to_string();
            assert!(reason.starts_with("unknown backend type \"type ") && reason.len() < 200, "{reason}");
        }
        assert_eq!(others.of("vxlan", &network).unwrap().kind(), "vxlan");
        assert_eq!((others.0.len(), others.made("ipip").is_some()), (1, false));
    }
}
