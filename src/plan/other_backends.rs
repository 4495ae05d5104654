// SPDX-License-Identifier: Apache-2.0
//! Peers whose backend type is not ours, and the backends that reach them, with the default options of their type.

use std::collections::{BTreeMap, HashMap};

use weft_backends::backend::Backend;
use weft_backends::options::BadOption;
use weft_backends::register;
use weft_subnet::lease::Id;
use weft_subnet::net_conf::NetConf;

/// The backends that peers have needed so far. A key is the backend's own name and not a peer's text, so their number is limited.
#[derive(Default)]
pub(super) struct OtherBackends(BTreeMap<&'static str, Box<dyn Backend>>);

impl OtherBackends {
    /// Returns the backend of a peer's type, and makes it if no peer has needed it before. An unknown type is not remembered, so its
    /// error is made again each time.
    pub(super) fn get_or_make(&mut self, kind: &str, net_conf: &NetConf) -> Result<&dyn Backend, BadOption> {
        let known = match self.0.keys().find(|known| **known == kind) {
            Some(known) => *known,
            None => {
                let made = register::make_for_lease(kind, net_conf)?;
                let kind = made.kind();
                self.0.insert(kind, made);
                kind
            }
        };
        Ok(&*self.0[known])
    }

    /// Returns the backend of this type, if a peer has needed it.
    pub(super) fn get(&self, kind: &str) -> Option<&dyn Backend> {
        self.0.get(kind).map(|backend| &**backend)
    }

    /// Removes all backends, because they were made for another net-conf.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

/// The peers that are reached by a backend of another type than ours.
#[derive(Default)]
pub(super) struct OtherTypes {
    by_id: HashMap<Id, &'static str>,
    /// How many of these peers each type has. The MTU follows from the types alone, and is asked for once per peer, so it must not search
    /// among the peers.
    counts: BTreeMap<&'static str, usize>,
}

impl OtherTypes {
    /// Sets the type of a peer.
    pub(super) fn insert(&mut self, id: &Id, kind: &'static str) {
        self.remove(id);
        self.by_id.insert(id.clone(), kind);
        *self.counts.entry(kind).or_default() += 1;
    }

    /// Removes a peer, because it is gone, or is reached by our own backend, or is not reached.
    pub(super) fn remove(&mut self, id: &Id) {
        let Some(kind) = self.by_id.remove(id) else { return };
        let count = self.counts.entry(kind).or_default();
        *count = count.saturating_sub(1);
        if *count == 0 {
            self.counts.remove(kind);
        }
    }

    /// Removes all peers.
    pub(super) fn clear(&mut self) {
        *self = OtherTypes::default();
    }

    /// Returns the type of this peer.
    pub(super) fn get(&self, id: &Id) -> Option<&'static str> {
        self.by_id.get(id).copied()
    }

    /// Iterates over the peers.
    pub(super) fn ids(&self) -> impl Iterator<Item = &Id> {
        self.by_id.keys()
    }

    /// Returns the number of peers.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Iterates over the types, each once.
    pub(super) fn kinds(&self) -> impl Iterator<Item = &'static str> {
        self.counts.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_peers_call_their_types_is_not_kept() {
        let net_conf = NetConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#).unwrap();
        let mut others = OtherBackends::default();
        for n in 0..1000 {
            let kind = format!("type {n} {}", "x".repeat(1000));
            let reason = others.get_or_make(&kind, &net_conf).err().unwrap().to_string();
            assert!(reason.starts_with("unknown backend type \"type ") && reason.len() < 200, "{reason}");
        }
        assert_eq!(others.get_or_make("vxlan", &net_conf).unwrap().kind(), "vxlan");
        assert_eq!((others.0.len(), others.get("ipip").is_some()), (1, false));
    }

    #[test]
    fn a_type_is_named_while_a_peer_has_it() {
        let mut types = OtherTypes::default();
        let [a, b] = ["a", "b"].map(Id::from);
        let kinds = |types: &OtherTypes| types.kinds().collect::<Vec<_>>();
        types.insert(&a, "vxlan");
        types.insert(&a, "vxlan");
        types.insert(&b, "vxlan");
        types.remove(&a);
        assert_eq!((kinds(&types), types.len(), types.get(&a)), (vec!["vxlan"], 1, None));
        types.insert(&b, "ipip");
        assert_eq!((kinds(&types), types.get(&b)), (vec!["ipip"], Some("ipip")));
        types.remove(&b);
        types.remove(&b);
        assert_eq!((kinds(&types), types.len()), (vec![], 0));
    }
}
