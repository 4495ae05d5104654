// SPDX-License-Identifier: Apache-2.0
//! The CNI specification, versions 0.1.0 to 1.1.0: versions, error codes, errors and results.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use weft_netlink::rtnl::{self, Refused};

/// The supported versions, oldest first.
pub const VERSIONS: [Version; 7] = [
    Version(0, 1, 0),
    Version(0, 2, 0),
    Version(0, 3, 0),
    Version(0, 3, 1),
    Version(0, 4, 0),
    Version(1, 0, 0),
    Version(1, 1, 0),
];

/// A version of the specification: major, minor, patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u16, pub u16, pub u16);

impl Version {
    /// The version of a configuration without `cniVersion`.
    pub const OLDEST: Version = VERSIONS[0];
    /// The newest supported version.
    pub const NEWEST: Version = VERSIONS[6];

    /// Parses a version such as `1.0.0`. Returns `None` if the text is not a version.
    pub fn parse(text: &str) -> Option<Version> {
        let mut parts = text.split('.').map(|part| part.parse::<u16>().ok());
        let version = Version(parts.next()??, parts.next()??, parts.next()??);
        parts.next().is_none().then_some(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Error codes. Those below 100 are defined by the specification.
pub mod code {
    /// The version of the configuration is not supported.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// The container is unknown.
    pub const UNKNOWN_CONTAINER: u32 = 3;
    /// A CNI_* variable is missing or invalid.
    pub const ENVIRONMENT: u32 = 4;
    /// A file could not be read or written, or a program could not be started.
    pub const IO: u32 = 5;
    /// The input is not valid JSON.
    pub const DECODE: u32 = 6;
    /// The configuration is invalid.
    pub const CONFIG: u32 = 7;
    /// The network namespace is missing or must not be used.
    pub const NETNS: u32 = 8;
    /// A temporary failure: the runtime should call again.
    pub const TRY_AGAIN: u32 = 11;
    /// STATUS: the plugin cannot add pods now.
    pub const NOT_AVAILABLE: u32 = 50;
    /// All other errors. Other plugins use it for internal errors.
    pub const OTHER: u32 = 999;
}

/// The error that a plugin prints on standard output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    /// The error code, see [`code`].
    pub code: u32,
    /// The error in one sentence.
    pub msg: String,
    /// More information; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
}

impl Error {
    /// Creates an error without details.
    pub fn new(code: u32, msg: impl Into<String>) -> Error {
        Error { code, msg: msg.into(), details: String::new() }
    }

    /// Creates an error of code [`code::IO`] for a failed operation on an object: `what` is "open FILE".
    pub fn io(what: impl fmt::Display, error: impl fmt::Display) -> Error {
        Error::new(code::IO, format!("{what}: {error}"))
    }

    /// Sets the details.
    #[must_use]
    pub fn details(mut self, details: impl Into<String>) -> Error {
        self.details = details.into();
        self
    }

    /// Returns the JSON that goes to standard output.
    pub fn render(&self, version: Version) -> String {
        let mut value = json!({"cniVersion": version.to_string(), "code": self.code, "msg": self.msg});
        if !self.details.is_empty() {
            value["details"] = json!(self.details);
        }
        value.to_string()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.msg, self.code)?;
        if self.details.is_empty() { Ok(()) } else { write!(f, ": {}", self.details) }
    }
}

impl std::error::Error for Error {}

impl From<rtnl::Error> for Error {
    fn from(error: rtnl::Error) -> Error {
        match error {
            rtnl::Error::Io { what, error } => Error::io(what, error),
            rtnl::Error::Refused(refused) => refused.into(),
        }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        Error::new(code::OTHER, refused.to_string())
    }
}

/// An interface that a plugin created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Name of the interface.
    pub name: String,
    /// MAC address; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// MTU in bytes. It is rendered only in version 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Path of the network namespace; empty for an interface on the host.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ip {
    /// The address and its prefix length. The host bits are kept.
    pub address: IpNet,
    /// The gateway, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Index into [`Success::interfaces`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
}

/// A route inside the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Destination.
    pub dst: IpNet,
    /// The next hop. If it is absent, it is the gateway of the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
    /// The members `mtu`, `advmss`, `priority`, `table` and `scope`. They are rendered only in version 1.1.0.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// The result of a successful ADD.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Success {
    /// Interfaces. The list is empty in the result of an IPAM plugin.
    pub interfaces: Vec<Interface>,
    /// Addresses of the interfaces.
    pub ips: Vec<Ip>,
    /// Routes inside the pod.
    pub routes: Vec<Route>,
    /// DNS settings, passed on unchanged.
    pub dns: Map<String, Value>,
}

impl Success {
    /// Parses a result of any version.
    ///
    /// # Errors
    /// [`code::DECODE`] if the text is not a result.
    pub fn parse(text: &[u8]) -> Result<Success, Error> {
        let wrong = |error: serde_json::Error| Error::new(code::DECODE, format!("read a plugin's result: {error}"));
        let mut all: Map<String, Value> = serde_json::from_slice(text).map_err(wrong)?;
        let mut success = Success::default();
        if let Some(Value::Object(dns)) = all.remove("dns") {
            success.dns = dns;
        }
        for family in ["ip4", "ip6"] {
            if let Some(old) = all.remove(family) {
                let old: OldIp = serde_json::from_value(old).map_err(wrong)?;
                success.ips.push(Ip { address: old.ip, gateway: old.gateway, interface: None });
                success.routes.extend(old.routes);
            }
        }
        success.interfaces = list(&mut all, "interfaces").map_err(wrong)?;
        success.ips.extend(list::<Ip>(&mut all, "ips").map_err(wrong)?);
        success.routes.extend(list::<Route>(&mut all, "routes").map_err(wrong)?);
        Ok(success)
    }

    /// Renders the result in the format of a version. Versions 0.1.0 and 0.2.0 have one address of each family and no
    /// interfaces.
    pub fn render(&self, version: Version) -> Value {
        let mut all = Map::new();
        all.insert("cniVersion".to_owned(), json!(version.to_string()));
        if version < Version(0, 3, 0) {
            for (key, v6) in [("ip4", false), ("ip6", true)] {
                if let Some(ip) = self.ips.iter().find(|ip| ip.address.addr().is_ipv6() == v6) {
                    let same_family = |route: &&Route| route.dst.addr().is_ipv6() == v6;
                    let routes =
                        self.routes.iter().filter(same_family).map(|r| Route { more: Map::new(), ..r.clone() });
                    let old = OldIp { ip: ip.address, gateway: ip.gateway, routes: routes.collect() };
                    all.insert(key.to_owned(), json!(old));
                }
            }
        } else {
            self.render_lists(version, &mut all);
        }
        all.insert("dns".to_owned(), Value::Object(self.dns.clone()));
        Value::Object(all)
    }

    fn render_lists(&self, version: Version, all: &mut Map<String, Value>) {
        let newest = version >= Version(1, 1, 0);
        let interfaces = self.interfaces.iter().map(|i| Interface { mtu: i.mtu.filter(|_| newest), ..i.clone() });
        let ips = self.ips.iter().map(|ip| {
            let mut value = json!(ip);
            if version < Version(1, 0, 0) {
                value["version"] = json!(if ip.address.addr().is_ipv6() { "6" } else { "4" });
            }
            value
        });
        let more = |route: &Route| if newest { route.more.clone() } else { Map::new() };
        let routes = self.routes.iter().map(|route| Route { more: more(route), ..route.clone() });
        all.insert("interfaces".to_owned(), json!(interfaces.collect::<Vec<_>>()));
        all.insert("ips".to_owned(), json!(ips.collect::<Vec<_>>()));
        all.insert("routes".to_owned(), json!(routes.collect::<Vec<_>>()));
    }
}

/// One family of a result in version 0.1.0 or 0.2.0.
#[derive(Serialize, Deserialize)]
struct OldIp {
    ip: IpNet,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gateway: Option<IpAddr>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    routes: Vec<Route>,
}

/// Removes a list from a result. Plugins that are written in Go encode an empty list as null.
fn list<T: serde::de::DeserializeOwned>(all: &mut Map<String, Value>, key: &str) -> Result<Vec<T>, serde_json::Error> {
    match all.remove(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(value) => serde_json::from_value(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a plugin of version 1.1.0 may say.
    fn newest() -> Value {
        json!({
            "cniVersion": "1.1.0",
            "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "mtu": 1450, "sandbox": "/run/netns/p"}],
            "ips": [
                {"address": "10.5.1.2/24", "gateway": "10.5.1.1", "interface": 0},
                {"address": "fd05::2/64", "interface": 0}
            ],
            "routes": [
                {"dst": "0.0.0.0/0", "gw": "10.5.1.1", "mtu": 1400, "priority": 7},
                {"dst": "::/0"}
            ],
            "dns": {"nameservers": ["10.96.0.10"]}
        })
    }

    fn rendered(version: &str) -> Value {
        let success = Success::parse(newest().to_string().as_bytes()).unwrap();
        success.render(Version::parse(version).unwrap())
    }

    /// A runtime that knows only an older version may refuse what that version does not have.
    #[test]
    fn a_result_has_the_members_of_its_version_and_no_others() {
        assert_eq!(rendered("1.1.0"), newest());
        let mut without = newest();
        without["interfaces"][0].as_object_mut().unwrap().remove("mtu");
        without["routes"][0] = json!({"dst": "0.0.0.0/0", "gw": "10.5.1.1"});
        without["cniVersion"] = json!("1.0.0");
        assert_eq!(rendered("1.0.0"), without);
        (without["ips"][0]["version"], without["ips"][1]["version"]) = (json!("4"), json!("6"));
        for version in ["0.3.0", "0.3.1", "0.4.0"] {
            without["cniVersion"] = json!(version);
            assert_eq!(rendered(version), without);
        }
        for version in ["0.1.0", "0.2.0"] {
            let old = json!({
                "cniVersion": version,
                "ip4": {"ip": "10.5.1.2/24", "gateway": "10.5.1.1", "routes": [{"dst": "0.0.0.0/0", "gw": "10.5.1.1"}]},
                "ip6": {"ip": "fd05::2/64", "routes": [{"dst": "::/0"}]},
                "dns": {"nameservers": ["10.96.0.10"]}
            });
            assert_eq!(rendered(version), old);
            let again = Success::parse(old.to_string().as_bytes()).unwrap();
            assert_eq!(again.render(Version::parse(version).unwrap()), old, "an old result is read as it was written");
        }
    }

    #[test]
    fn a_list_that_is_null_is_empty_and_one_that_is_none_is_refused() {
        let none = json!({"interfaces": null, "ips": null, "routes": null, "dns": null});
        assert_eq!(Success::parse(none.to_string().as_bytes()).unwrap(), Success::default());
        for wrong in [json!({"ips": {}}), json!({"routes": [{}]}), json!({"ip4": {}}), json!([])] {
            let error = Success::parse(wrong.to_string().as_bytes()).unwrap_err();
            assert_eq!(error.code, code::DECODE, "{wrong}: {error}");
        }
    }

    #[test]
    fn a_version_has_three_numbers_and_those_that_are_supported_ascend() {
        assert_eq!(Version::parse("1.10.2"), Some(Version(1, 10, 2)));
        for wrong in ["", "1.0", "1.0.0.0", "1.0.x", "v1.0.0", "1.0.70000"] {
            assert_eq!(Version::parse(wrong), None, "{wrong}");
        }
        assert!(VERSIONS.is_sorted());
        assert_eq!(
            (Version::OLDEST.to_string(), Version::NEWEST.to_string()),
            ("0.1.0".to_owned(), "1.1.0".to_owned())
        );
    }

    #[test]
    fn an_error_has_details_only_where_there_are_any() {
        let error = Error::io("open /x", "no such file");
        let printed = |error: &Error| -> Value { serde_json::from_str(&error.render(Version(0, 4, 0))).unwrap() };
        let plain = json!({"cniVersion": "0.4.0", "code": 5, "msg": "open /x: no such file"});
        assert_eq!((printed(&error), error.to_string()), (plain.clone(), "open /x: no such file (code 5)".to_owned()));
        let error = error.details("look there");
        let mut more = plain;
        more["details"] = json!("look there");
        assert_eq!(
            (printed(&error), error.to_string()),
            (more, "open /x: no such file (code 5): look there".to_owned())
        );
    }
}
