// SPDX-License-Identifier: Apache-2.0
//! What a call means: names, hardware addresses and settings, all of them from the configuration and the environment.

use std::path::PathBuf;
use std::thread::ScopedJoinHandle;

use serde_json::{Map, Value};

use weft_netlink::hash::stable;

use crate::delegate;
use crate::env::{Request, Verb};
use crate::hostlocal::{self, Reservation};
use crate::plugin::Call;
use crate::rtnl::Rtnl;
use crate::spec::{Error, Version, code};

/// First word of the alias of a host's end; network, container id and interface follow.
pub const ALIAS: &str = "weft-veth";
/// Longest alias, bytes (IFALIASZ of linux/if.h, less the terminating zero).
const ALIAS_LEN: usize = 255;

/// One call, understood.
pub struct Plan<'a> {
    /// Container, namespace, interface.
    pub request: &'a Request,
    /// For the result.
    pub version: Version,
    /// Name of the network.
    pub network: &'a str,
    /// Name of the host's end.
    pub host: String,
    /// Its hardware address.
    pub host_mac: [u8; 6],
    /// The pod's hardware address.
    pub pod_mac: [u8; 6],
    /// Of the host's end: says whose it is.
    pub alias: String,
    /// Of both ends, bytes.
    pub mtu: Option<u32>,
    /// A default route in the pod; else the routes of the IPAM plugin.
    pub default_route: bool,
    /// The whole configuration, which the IPAM plugin gets too.
    pub conf: Value,
    ipam: &'a str,
}

impl<'a> Plan<'a> {
    /// Reads the configuration.
    ///
    /// # Errors
    /// [`code::CONFIG`], naming the member.
    pub fn new(call: &'a Call) -> Result<Plan<'a>, Error> {
        let wrong = |text: String| Error::new(code::CONFIG, format!("weft-veth: {text}"));
        let request = &call.request;
        let ipam = call.conf.get("ipam").and_then(|ipam| ipam.get("type")).and_then(Value::as_str).unwrap_or_default();
        if ipam.is_empty() {
            return Err(wrong("`ipam` with a `type` is needed, such as host-local".to_owned()));
        }
        let mtu = match call.conf.get("mtu") {
            None | Some(Value::Null) => None,
            Some(value) => Some(
                value
                    .as_u64()
                    .and_then(|mtu| u32::try_from(mtu).ok())
                    .filter(|mtu| *mtu == 0 || (68..=65535).contains(mtu))
                    .ok_or_else(|| wrong(format!("mtu {value} is none")))?,
            ),
        };
        let default_route = match call.conf.get("isDefaultGateway") {
            None | Some(Value::Null) => true,
            Some(Value::Bool(given)) => *given,
            Some(value) => return Err(wrong(format!("isDefaultGateway {value} is not true or false"))),
        };
        let seed = format!("{} {}", request.container, request.ifname);
        let pod_mac = match given_mac(&call.conf, &request.args) {
            None => mac(&seed, b'p'),
            Some(text) => parse_mac(&text).ok_or_else(|| wrong(format!("mac {text:?} is no unicast address")))?,
        };
        Ok(Plan {
            request,
            version: call.version,
            network: &call.name,
            host: host_name(&request.container, &request.ifname),
            host_mac: mac(&seed, b'h'),
            pod_mac,
            alias: alias(&call.name, &seed),
            mtu: mtu.filter(|mtu| *mtu != 0),
            default_route,
            conf: Value::Object(call.conf.clone()),
            ipam,
        })
    }

    /// Calls the IPAM plugin for this attachment.
    ///
    /// # Errors
    /// Its own.
    pub fn ipam(&self, verb: Verb) -> Result<Vec<u8>, Error> {
        delegate::call(self.ipam, &self.conf, verb, self.request)
    }

    /// Gives the addresses back. What host-local has written down is removed here, under its own lock, as it would do itself: to
    /// start it costs more than all the rest of DEL but the kernel's part. Where nothing is found it has the last word.
    ///
    /// # Errors
    /// A file cannot be removed; or the IPAM plugin's own.
    pub fn release(&self) -> Result<(), Error> {
        let request = self.request;
        let ours =
            |r: &Reservation| r.container == request.container && r.ifname.as_deref() == Some(request.ifname.as_str());
        let given = match self.reservations() {
            Some(dir) => hostlocal::release(&dir, ours)?.iter().any(ours),
            None => false,
        };
        if given { Ok(()) } else { self.ipam(Verb::Del).map(drop) }
    }

    /// Where host-local keeps the addresses of this network, if it does.
    pub fn reservations(&self) -> Option<PathBuf> {
        hostlocal::dir(self.conf.get("ipam")?.as_object()?, self.network)
    }

    /// Calls the IPAM plugin to give back what another attachment of this network has.
    ///
    /// # Errors
    /// Its own.
    pub fn ipam_release(&self, container: &str, ifname: &str) -> Result<(), Error> {
        let request = Request {
            container: container.to_owned(),
            ifname: ifname.to_owned(),
            netns: String::new(),
            ..self.request.clone()
        };
        delegate::call(self.ipam, &self.conf, Verb::Del, &request).map(drop)
    }

    /// Could a pod be added now?
    ///
    /// # Errors
    /// [`code::NOT_AVAILABLE`], or the IPAM plugin's own.
    pub fn status(&self) -> Result<Vec<u8>, Error> {
        let not_ready = |error: Error| Error::new(code::NOT_AVAILABLE, error.msg).details(error.details);
        delegate::find(self.ipam, &self.request.path).map_err(not_ready)?;
        Rtnl::open().map_err(not_ready)?;
        self.ipam(Verb::Status).map(|_| Vec::new())
    }
}

/// Waits for a call that runs beside us.
pub fn joined<T>(thread: ScopedJoinHandle<'_, Result<T, Error>>) -> Result<T, Error> {
    thread.join().unwrap_or_else(|_| Err(Error::new(code::OTHER, "the call of the IPAM plugin ended abnormally")))
}

/// Name of the host's end of a pair. NetworkManager and udev leave `veth*` alone; `vethw` is nobody else's.
pub fn host_name(container: &str, ifname: &str) -> String {
    let hash = stable(format!("{container} {ifname}").bytes());
    let letter = |n: u32| char::from(b"abcdefghijklmnopqrstuvwxyz234567"[(hash >> (5 * n)) as usize & 31]);
    "vethw".chars().chain((0..10).map(letter)).collect()
}

fn alias(network: &str, seed: &str) -> String {
    let mut alias = format!("{ALIAS} {network} {seed}");
    while alias.len() > ALIAS_LEN {
        alias.pop();
    }
    alias
}

fn mac(seed: &str, end: u8) -> [u8; 6] {
    let hash = stable(seed.bytes().chain([b' ', end])).to_be_bytes();
    // Unicast, administered locally.
    [(hash[0] & 0xfc) | 2, hash[1], hash[2], hash[3], hash[4], hash[5]]
}

/// In the order of the bridge plugin: capability, `args`, CNI_ARGS, configuration.
fn given_mac(conf: &Map<String, Value>, args: &str) -> Option<String> {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).filter(|mac| !mac.is_empty()).map(str::to_owned);
    let pairs = args.split(';').filter_map(|pair| pair.split_once('='));
    text(conf.get("runtimeConfig").and_then(|config| config.get("mac")))
        .or_else(|| text(conf.get("args").and_then(|args| args.get("cni")?.get("mac"))))
        .or_else(|| pairs.filter(|(key, _)| *key == "MAC").map(|(_, mac)| mac.to_owned()).next())
        .or_else(|| text(conf.get("mac")))
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut parts = text.split([':', '-']).map(|part| u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2));
    let mut mac = [0; 6];
    for byte in &mut mac {
        *byte = parts.next()??;
    }
    (parts.next().is_none() && mac[0] & 1 == 0 && mac != [0; 6]).then_some(mac)
}

/// As `ip link` prints it.
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_stable_short_and_apart() {
        assert_eq!(host_name("c1", "eth0"), host_name("c1", "eth0"));
        let names: BTreeSet<String> = (0..20_000).map(|n| host_name(&format!("c{n}"), "eth0")).collect();
        assert_eq!(names.len(), 20_000);
        assert!(names.iter().all(|name| name.len() == 15 && name.starts_with("vethw")), "fits IFNAMSIZ");
        assert_ne!(mac("c1 eth0", b'h'), mac("c1 eth0", b'p'));
        assert_eq!(mac("c1 eth0", b'h')[0] & 3, 2, "local, unicast");
        assert_eq!(alias(&"n".repeat(300), "c1 eth0").len(), ALIAS_LEN);
    }

    #[test]
    fn the_first_mac_that_is_given_counts() {
        let conf = json!({"mac": "02:00:00:00:00:04", "args": {"cni": {"mac": "02:00:00:00:00:02"}},
            "runtimeConfig": {"mac": "02:00:00:00:00:01"}});
        let rows = [
            (conf.clone(), "MAC=02:00:00:00:00:03", Some("02:00:00:00:00:01")),
            (json!({"mac": "02:00:00:00:00:04"}), "IgnoreUnknown=1;MAC=02:00:00:00:00:03", Some("02:00:00:00:00:03")),
            (json!({"mac": "02:00:00:00:00:04"}), "", Some("02:00:00:00:00:04")),
            (json!({"runtimeConfig": {"mac": ""}}), "", None),
        ];
        for (conf, args, mac) in rows {
            assert_eq!(given_mac(conf.as_object().unwrap(), args).as_deref(), mac, "{conf} {args}");
        }
        assert_eq!(parse_mac("0a:00:00:00:00:ff"), Some([10, 0, 0, 0, 0, 255]));
        for bad in
            ["01:00:00:00:00:00", "0a:00:00:00:00", "0a:00:00:00:00:00:00", "zz:00:00:00:00:00", "00:00:00:00:00:00"]
        {
            assert_eq!(parse_mac(bad), None, "{bad}");
        }
    }
}
