// SPDX-License-Identifier: Apache-2.0
//! A list of CNI plugins, as a container runtime reads it.

use serde_json::Value;
use weft_cni::conf_dir::is_multus;

/// Why a runtime would not load a configuration.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotAList {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("it has no `name`")]
    NoName,
    #[error("it has no `plugins`")]
    NoPlugins,
    #[error("plugin {0} has no `type`")]
    NoType(usize),
}

/// The parts of a list that say whose it is.
#[derive(Debug)]
pub(super) struct List {
    name: String,
    /// Not empty. Each has a type.
    plugins: Vec<Value>,
}

impl List {
    /// Reads a list.
    ///
    /// # Errors
    /// A runtime would not load this text. The runtime reports a fault only in its own log, so the agent reports it as well.
    pub(super) fn parse(text: &[u8]) -> Result<List, NotAList> {
        let mut list: Value = serde_json::from_slice(text)?;
        let name = list["name"].as_str().filter(|name| !name.is_empty()).ok_or(NotAList::NoName)?.to_owned();
        // In an array there is no key to take.
        let plugins = match list.get_mut("plugins").map(Value::take) {
            Some(Value::Array(plugins)) if !plugins.is_empty() => plugins,
            _ => return Err(NotAList::NoPlugins),
        };
        match plugins.iter().position(|plugin| kind(plugin).is_empty()) {
            Some(at) => Err(NotAList::NoType(at + 1)),
            None => Ok(List { name, plugins }),
        }
    }

    /// Returns the types of the plugins that this list has and `ours` does not, if it is `ours` otherwise: it has the same name and our
    /// first plugin, which connects the pods. It is empty for every other list.
    pub(super) fn added_to(&self, ours: &List) -> Vec<&str> {
        let has = |list: &List, wanted: &str| list.plugins.iter().any(|plugin| kind(plugin) == wanted);
        if !self.is_like(ours) {
            return Vec::new();
        }
        self.plugins.iter().map(kind).filter(|added| !has(ours, added)).collect()
    }

    /// True if the list has the name of `ours`, and our first plugin.
    pub(super) fn is_like(&self, ours: &List) -> bool {
        let first = ours.plugins.first().map(kind);
        self.name == ours.name && self.plugins.iter().any(|plugin| Some(kind(plugin)) == first)
    }

    /// True if each plugin of `ours` is in this list as it is in `ours`.
    pub(super) fn contains(&self, ours: &List) -> bool {
        ours.plugins.iter().all(|plugin| self.plugins.contains(plugin))
    }
}

/// True if this configuration, a list or a single plugin, is that of Multus.
pub(super) fn is_of_multus(text: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<Value>(text) else { return false };
    let plugins = value["plugins"].as_array().into_iter().flatten();
    plugins.chain([&value]).any(|plugin| is_multus(kind(plugin)))
}

fn kind(plugin: &Value) -> &str {
    plugin["type"].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> List {
        List::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_list_to_which_another_program_added_plugins_is_known() {
        let ours = list(r#"{"name":"cbr0","plugins":[{"type":"flannel","delegate":{"mtu":1}},{"type":"portmap"}]}"#);
        for (text, added, contains) in [
            // Another order of keys and plugins is the same.
            (
                r#"{"plugins":[{"type":"istio-cni"},{"type":"portmap"},{"delegate":{"mtu":1},"type":"flannel"}],"name":"cbr0"}"#,
                vec!["istio-cni"],
                true,
            ),
            (
                r#"{"name":"cbr0","plugins":[{"type":"flannel"},{"type":"portmap"},{"type":"linkerd-cni"}]}"#,
                vec!["linkerd-cni"],
                false,
            ),
            (r#"{"name":"cbr0","plugins":[{"type":"flannel","delegate":{"mtu":1}},{"type":"portmap"}]}"#, vec![], true),
            (r#"{"name":"cbr0","plugins":[{"type":"flannel"}]}"#, vec![], false),
            (r#"{"name":"cbr1","plugins":[{"type":"flannel"},{"type":"istio-cni"}]}"#, vec![], false),
            (r#"{"name":"cbr0","plugins":[{"type":"bridge"},{"type":"istio-cni"}]}"#, vec![], false),
        ] {
            let list = list(text);
            assert_eq!((list.added_to(&ours), list.contains(&ours)), (added, contains), "{text}");
        }
    }

    #[test]
    fn multus_is_known_in_a_list_and_alone() {
        assert!(is_of_multus(br#"{"name":"m","type":"multus-shim"}"#));
        assert!(is_of_multus(br#"{"name":"m","plugins":[{"type":"multus"}]}"#));
        for other in [&br#"{"name":"multus","type":"bridge"}"#[..], b"{", b"[]", br#"{"name":"m","plugins":[{}]}"#] {
            assert!(!is_of_multus(other));
        }
    }
}
