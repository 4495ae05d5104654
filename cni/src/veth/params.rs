// SPDX-License-Identifier: Apache-2.0
//! Derives names, MAC addresses and settings from the configuration and the environment of a call.

use std::path::PathBuf;
use std::thread::ScopedJoinHandle;

use serde_json::{Map, Value};

use weft_netlink::hash::stable;
use weft_netlink::rtnl::Rtnl;

use crate::env::{Request, Verb};
use crate::hostlocal::{self, Reservation};
use crate::plugin::Call;
use crate::program;
use crate::spec::{Error, Version, code};

/// First word of the alias of a host's end. The network, the container ID and the name of the interface follow,
/// separated by spaces.
pub const ALIAS: &str = "weft-veth";
/// Maximum length of an alias in bytes (IFALIASZ of linux/if.h, without the terminating zero).
const ALIAS_LEN: usize = 255;

/// The parameters of one call.
pub struct Params<'a> {
    /// The verb, container, namespace and interface.
    pub request: &'a Request,
    /// The version in which to render the result.
    pub version: Version,
    /// Name of the network.
    pub network: &'a str,
    /// Name of the host's end of the pair.
    pub host: String,
    /// MAC address of the host's end.
    pub host_mac: [u8; 6],
    /// MAC address of the pod's end.
    pub pod_mac: [u8; 6],
    /// Alias of the host's end, which identifies its attachment.
    pub alias: String,
    /// MTU of both ends in bytes; `None` leaves it to the kernel.
    pub mtu: Option<u32>,
    /// True if the pod gets default routes, false if it gets the routes of the IPAM plugin.
    pub default_route: bool,
    /// The whole configuration. The IPAM plugin gets it too.
    pub conf: Value,
    ipam: &'a str,
}

impl<'a> Params<'a> {
    /// Derives the parameters from a call. For DEL and GC, those of an interface have their defaults.
    ///
    /// # Errors
    /// [`code::CONFIG`]; the message names the invalid member.
    pub fn new(call: &'a Call) -> Result<Params<'a>, Error> {
        let wrong = |text: String| Error::new(code::CONFIG, format!("weft-veth: {text}"));
        let request = &call.request;
        let ipam = call.conf.get("ipam").and_then(|ipam| ipam.get("type")).and_then(Value::as_str).unwrap_or_default();
        // With itself as its IPAM plugin, it would start itself without end.
        if ipam.is_empty() || ipam == super::TYPE {
            return Err(wrong("`ipam` with a `type` is needed, such as host-local".to_owned()));
        }
        // DEL and GC need none of the values of an interface. They must also work with values that ADD refuses.
        let is_removal = matches!(request.verb, Verb::Del | Verb::Gc);
        let member = |key: &str| call.conf.get(key).filter(|_| !is_removal);
        let mtu = match member("mtu") {
            None | Some(Value::Null) => None,
            Some(value) => Some(
                value
                    .as_u64()
                    .and_then(|mtu| u32::try_from(mtu).ok())
                    .filter(|mtu| *mtu == 0 || (68..=65535).contains(mtu))
                    .ok_or_else(|| wrong(format!("mtu {value} is not a valid MTU")))?,
            ),
        };
        let default_route = match member("isDefaultGateway") {
            None | Some(Value::Null) => true,
            Some(Value::Bool(given)) => *given,
            Some(value) => return Err(wrong(format!("isDefaultGateway {value} is not true or false"))),
        };
        let seed = format!("{} {}", request.container, request.ifname);
        let pod_mac = match requested_mac(&call.conf, &request.args).filter(|_| !is_removal) {
            None => mac(&seed, b'p'),
            Some(text) => parse_mac(&text).ok_or_else(|| wrong(format!("mac {text:?} is not a unicast address")))?,
        };
        Ok(Params {
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

    /// Checks that there is an IPAM plugin of the given type.
    ///
    /// # Errors
    /// As [`program::find`].
    pub fn check_ipam(&self) -> Result<(), Error> {
        program::find(self.ipam, &self.request.path).map(drop)
    }

    /// Calls the IPAM plugin for this attachment, and returns its standard output.
    ///
    /// # Errors
    /// The IPAM plugin's own.
    pub fn ipam(&self, verb: Verb) -> Result<Vec<u8>, Error> {
        program::run(self.ipam, &self.conf, verb, self.request)
    }

    /// Releases the addresses.
    ///
    /// Reservations of host-local are removed directly, under host-local's lock, as host-local itself would do.
    /// Starting host-local would take longer than the rest of DEL in this process. If no reservation is found, the IPAM
    /// plugin is called after all.
    ///
    /// # Errors
    /// A reservation cannot be removed, or the IPAM plugin's own error.
    pub fn release(&self) -> Result<(), Error> {
        let request = self.request;
        let ours =
            |r: &Reservation| r.container == request.container && r.ifname.as_deref() == Some(request.ifname.as_str());
        let released = match self.reservations() {
            Some(dir) => hostlocal::release(&dir, ours)?.iter().any(ours),
            None => false,
        };
        if released { Ok(()) } else { self.ipam(Verb::Del).map(drop) }
    }

    /// Returns the directory of host-local's reservations, or `None` if another IPAM plugin manages the addresses.
    pub fn reservations(&self) -> Option<PathBuf> {
        hostlocal::dir(self.conf.get("ipam")?.as_object()?, self.network)
    }

    /// Calls the IPAM plugin's DEL for another attachment of this network.
    ///
    /// # Errors
    /// The IPAM plugin's own.
    pub fn ipam_release(&self, container: &str, ifname: &str) -> Result<(), Error> {
        let request = Request {
            container: container.to_owned(),
            ifname: ifname.to_owned(),
            netns: String::new(),
            ..self.request.clone()
        };
        program::run(self.ipam, &self.conf, Verb::Del, &request).map(drop)
    }

    /// Checks whether a pod could be added now.
    ///
    /// # Errors
    /// [`code::NOT_AVAILABLE`], or the IPAM plugin's own.
    pub fn status(&self) -> Result<Vec<u8>, Error> {
        let not_ready = |error: Error| Error::new(code::NOT_AVAILABLE, error.msg).details(error.details);
        self.check_ipam().map_err(not_ready)?;
        Rtnl::open().map_err(|error| not_ready(error.into()))?;
        self.ipam(Verb::Status).map(|_| Vec::new())
    }
}

/// Waits for a thread that calls the IPAM plugin.
pub fn joined<T>(thread: ScopedJoinHandle<'_, Result<T, Error>>) -> Result<T, Error> {
    thread.join().unwrap_or_else(|_| Err(Error::new(code::OTHER, "the call of the IPAM plugin ended abnormally")))
}

/// Derives the name of the host's end of a pair. NetworkManager and udev ignore `veth*` by default, and no other
/// program uses `vethw`.
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
    // A unicast address that is locally administered.
    [(hash[0] & 0xfc) | 2, hash[1], hash[2], hash[3], hash[4], hash[5]]
}

/// Returns the MAC address that the user asks for. The order is that of the bridge plugin: capability, `args`,
/// CNI_ARGS, configuration. An empty text asks for nothing, as it does in the bridge plugin.
fn requested_mac(conf: &Map<String, Value>, args: &str) -> Option<String> {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).filter(|mac| !mac.is_empty()).map(str::to_owned);
    let pairs = args.split(';').filter_map(|pair| pair.split_once('='));
    text(conf.get("runtimeConfig").and_then(|config| config.get("mac")))
        .or_else(|| text(conf.get("args").and_then(|args| args.get("cni")?.get("mac"))))
        .or_else(|| pairs.filter(|(key, mac)| *key == "MAC" && !mac.is_empty()).map(|(_, mac)| mac.to_owned()).next())
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::plugin;

    #[test]
    fn names_and_macs_are_stable_and_unique_and_fit_their_limits() {
        // After an upgrade, DEL finds the pods of the earlier version by these.
        assert_eq!(host_name("c1", "eth0"), "vethweuqjwfs2xm");
        assert_eq!(mac("c1 eth0", b'h'), [0x32, 0x66, 0x83, 0x0b, 0x4b, 0xde]);
        let names: BTreeSet<String> = (0..20_000).map(|n| host_name(&format!("c{n}"), "eth0")).collect();
        assert_eq!(names.len(), 20_000);
        assert!(names.iter().all(|name| name.len() == 15 && name.starts_with("vethw")), "every name must fit IFNAMSIZ");
        assert_ne!(mac("c1 eth0", b'h'), mac("c1 eth0", b'p'));
        assert_eq!(mac("c1 eth0", b'h')[0] & 3, 2, "the address must be local and unicast");
        assert_eq!(alias(&"n".repeat(300), "c1 eth0").len(), ALIAS_LEN);
    }

    fn request(verb: Verb) -> Request {
        Request {
            verb,
            container: "c1".to_owned(),
            netns: String::new(),
            ifname: "eth0".to_owned(),
            args: String::new(),
            path: String::new(),
            netns_override: false,
        }
    }

    #[test]
    fn it_is_not_its_own_ipam_plugin() {
        for ipam in [json!({}), json!({"type": super::super::TYPE})] {
            let conf = json!({"name": "cbr0", "ipam": ipam});
            let error = plugin::within(request(Verb::Add), &conf, crate::veth::validate).unwrap_err();
            assert_eq!(
                (error.code, error.msg.contains("`ipam` with a `type`")),
                (code::CONFIG, true),
                "{ipam}: {error}"
            );
        }
    }

    /// Returns the parameters of a call with this member. An error is that of the configuration.
    fn with(verb: Verb, member: &str, value: Value) -> Result<(Option<u32>, bool), Error> {
        let conf = json!({"name": "cbr0", "ipam": {"type": "host-local"}, member: value});
        let conf = conf.as_object().unwrap().clone();
        let call = Call { request: request(verb), version: Version::NEWEST, name: "cbr0".to_owned(), conf };
        Params::new(&call).map(|params| (params.mtu, params.default_route))
    }

    #[test]
    fn an_mtu_is_one_that_ipv4_allows_and_0_leaves_it_to_the_kernel() {
        for (value, wanted) in [
            (json!(68), Some(68)),
            (json!(1450), Some(1450)),
            (json!(65535), Some(65535)),
            (json!(0), None),
            (Value::Null, None),
        ] {
            assert_eq!(with(Verb::Add, "mtu", value.clone()).unwrap(), (wanted, true), "{value}");
        }
        for value in [json!(1), json!(67), json!(65536), json!(4_294_967_364_u64), json!(-1), json!("1450")] {
            for verb in [Verb::Add, Verb::Check] {
                let error = with(verb, "mtu", value.clone()).unwrap_err();
                assert_eq!(error.code, code::CONFIG, "{value}: {error}");
            }
            // What an ADD refuses now may have been accepted by that of another version.
            for verb in [Verb::Del, Verb::Gc] {
                assert_eq!(with(verb, "mtu", value.clone()).unwrap(), (None, true), "{value}");
            }
        }
    }

    #[test]
    fn the_default_route_is_left_out_only_where_the_configuration_says_so() {
        for (value, wanted) in [(json!(true), true), (json!(false), false), (Value::Null, true)] {
            assert_eq!(with(Verb::Add, "isDefaultGateway", value.clone()).unwrap(), (None, wanted), "{value}");
        }
        assert_eq!(with(Verb::Add, "isDefaultGateway", json!("false")).unwrap_err().code, code::CONFIG);
        assert_eq!(with(Verb::Del, "isDefaultGateway", json!("false")).unwrap(), (None, true));
    }

    #[test]
    fn the_capability_mac_precedes_args_and_configuration() {
        let conf = json!({"mac": "02:00:00:00:00:04", "args": {"cni": {"mac": "02:00:00:00:00:02"}},
            "runtimeConfig": {"mac": "02:00:00:00:00:01"}});
        let rows = [
            (conf.clone(), "MAC=02:00:00:00:00:03", Some("02:00:00:00:00:01")),
            (
                json!({"args": {"cni": {"mac": "02:00:00:00:00:02"}}, "mac": "02:00:00:00:00:04"}),
                "MAC=02:00:00:00:00:03",
                Some("02:00:00:00:00:02"),
            ),
            (json!({"mac": "02:00:00:00:00:04"}), "IgnoreUnknown=1;MAC=02:00:00:00:00:03", Some("02:00:00:00:00:03")),
            (json!({"mac": "02:00:00:00:00:04"}), "", Some("02:00:00:00:00:04")),
            (json!({"mac": "02:00:00:00:00:04"}), "MAC=;K8S_POD_NAME=p", Some("02:00:00:00:00:04")),
            (json!({}), "MAC=", None),
            (json!({"runtimeConfig": {"mac": ""}}), "", None),
        ];
        for (conf, args, mac) in rows {
            assert_eq!(requested_mac(conf.as_object().unwrap(), args).as_deref(), mac, "{conf} {args}");
        }
        assert_eq!(parse_mac("0a:00:00:00:00:ff"), Some([10, 0, 0, 0, 0, 255]));
        for bad in
            ["01:00:00:00:00:00", "0a:00:00:00:00", "0a:00:00:00:00:00:00", "zz:00:00:00:00:00", "00:00:00:00:00:00"]
        {
            assert_eq!(parse_mac(bad), None, "{bad}");
        }
    }
}
