// SPDX-License-Identifier: Apache-2.0
//! The CNI specification, 0.1.0 to 1.1.0: versions, results, errors.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The versions that we speak, oldest first.
pub const VERSIONS: [Version; 7] = [
    Version(0, 1, 0),
    Version(0, 2, 0),
    Version(0, 3, 0),
    Version(0, 3, 1),
    Version(0, 4, 0),
    Version(1, 0, 0),
    Version(1, 1, 0),
];

/// A version of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u16, pub u16, pub u16);

impl Version {
    /// What a configuration without `cniVersion` means.
    pub const OLDEST: Version = VERSIONS[0];
    /// The newest one.
    pub const NEWEST: Version = VERSIONS[6];

    /// Reads `1.0.0`; `None` when it is no version.
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

/// Error codes of the specification.
pub mod code {
    /// The configuration's version is not one of ours.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// A field's value is not supported.
    pub const UNSUPPORTED_FIELD: u32 = 2;
    /// The container is unknown.
    pub const UNKNOWN_CONTAINER: u32 = 3;
    /// A CNI_* variable is missing or wrong.
    pub const ENVIRONMENT: u32 = 4;
    /// A file could not be read or written, a program not started.
    pub const IO: u32 = 5;
    /// The configuration is no JSON.
    pub const DECODE: u32 = 6;
    /// The configuration is wrong.
    pub const CONFIG: u32 = 7;
    /// The network namespace is wrong.
    pub const NETNS: u32 = 8;
    /// Something that passes: the runtime should call again.
    pub const TRY_AGAIN: u32 = 11;
    /// STATUS: no pod can be added now.
    pub const NOT_AVAILABLE: u32 = 50;
    /// STATUS: nor may the present ones have full connectivity.
    pub const LIMITED: u32 = 51;
    /// Everything else (what other plugins call internal).
    pub const OTHER: u32 = 999;
}

/// What a failing plugin prints on standard output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    /// See [`code`].
    pub code: u32,
    /// One sentence.
    pub msg: String,
    /// More of it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
}

impl Error {
    /// An error without details.
    pub fn new(code: u32, msg: impl Into<String>) -> Error {
        Error { code, msg: msg.into(), details: String::new() }
    }

    /// A failed system call on an object.
    pub fn io(what: impl fmt::Display, error: impl fmt::Display) -> Error {
        Error::new(code::IO, format!("{what}: {error}"))
    }

    /// The same with details.
    #[must_use]
    pub fn details(mut self, details: impl Into<String>) -> Error {
        self.details = details.into();
        self
    }

    /// What goes to standard output.
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

/// An interface that a plugin made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its hardware address.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// Bytes; only in 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Path of the network namespace; empty on the host.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ip {
    /// Address and length, host bits kept.
    pub address: IpNet,
    /// Gateway, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Index into the interfaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
}

/// A route inside the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Destination.
    pub dst: IpNet,
    /// Next hop; the gateway of the address when missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
    /// `mtu`, `advmss`, `priority`, `table`, `scope`: only in 1.1.0.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// What a successful ADD prints.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Success {
    /// Interfaces; empty from an IPAM plugin.
    pub interfaces: Vec<Interface>,
    /// Addresses.
    pub ips: Vec<Ip>,
    /// Routes.
    pub routes: Vec<Route>,
    /// Name service, passed on as it is.
    pub dns: Map<String, Value>,
}

impl Success {
    /// Reads a result of any version.
    ///
    /// # Errors
    /// [`code::DECODE`] when it is none.
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

    /// The result in the form of a version. 0.1.0 and 0.2.0 know one address of each family, and no interfaces.
    pub fn render(&self, version: Version) -> Value {
        let mut all = Map::new();
        all.insert("cniVersion".to_owned(), json!(version.to_string()));
        if version < Version(0, 3, 0) {
            for (key, v6) in [("ip4", false), ("ip6", true)] {
                if let Some(ip) = self.ips.iter().find(|ip| ip.address.addr().is_ipv6() == v6) {
                    let ours = |route: &&Route| route.dst.addr().is_ipv6() == v6;
                    let routes = self.routes.iter().filter(ours).map(|r| Route { more: Map::new(), ..r.clone() });
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

/// One family of a result of 0.1.0 and 0.2.0.
#[derive(Serialize, Deserialize)]
struct OldIp {
    ip: IpNet,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gateway: Option<IpAddr>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    routes: Vec<Route>,
}

// Plugins written in Go print null for an empty list.
fn list<T: serde::de::DeserializeOwned>(all: &mut Map<String, Value>, key: &str) -> Result<Vec<T>, serde_json::Error> {
    match all.remove(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(value) => serde_json::from_value(value),
    }
}
