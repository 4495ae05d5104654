// SPDX-License-Identifier: Apache-2.0
//! The net-conf: the configuration of the whole network (docs/flannel-formats.md, "Net-conf").

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::cidr::{Family, Subnets, address, bits, size};
use crate::json::Members;

/// A net-conf for messages. It suits most networks.
pub const EXAMPLE: &str = r#"{"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan"}}"#;

/// A validated net-conf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetConf {
    /// The cluster's networks. A family that is disabled is `None`.
    pub networks: Subnets,
    /// The range of IPv4 subnets, if IPv4 is enabled.
    pub v4: Option<Range<Ipv4Net, Ipv4Addr>>,
    /// The range of IPv6 subnets, if IPv6 is enabled.
    pub v6: Option<Range<Ipv6Net, Ipv6Addr>>,
    /// `EnableNFTables`; `None` if it is absent.
    pub nftables: Option<bool>,
    /// `MasqueradeExcept` and `MasqueradeToNodes`.
    pub masquerade: MasqueradeExceptions,
    /// `Backend.Type` in lower case. Without `Backend` it is `udp`, as in flannel.
    pub backend_type: String,
    /// The `Backend` object as raw JSON, or `{}` if it is absent. Each backend parses its own options.
    pub backend: Box<str>,
    /// The first names that are not known, outside of `Backend`, shortened. They are ignored, as flannel does.
    pub unknown: Vec<String>,
}

/// The names that do not belong to one family.
const NAMES: [&str; 6] =
    ["EnableIPv4", "EnableIPv6", "EnableNFTables", "MasqueradeExcept", "MasqueradeToNodes", "Backend"];

/// Destinations for which pods keep their own source address although masquerading is on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MasqueradeExceptions {
    /// `MasqueradeExcept`: destinations outside the cluster's network.
    pub except: Vec<IpNet>,
    /// `MasqueradeToNodes: false`: the published addresses of all nodes are such destinations.
    pub except_nodes: bool,
}

/// The range from which subnets of one family are allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Range<N, A> {
    /// The network that contains the range.
    pub network: N,
    /// `SubnetLen`: prefix length of a subnet.
    pub len: u8,
    /// `SubnetMin`: address of the first subnet.
    pub min: A,
    /// `SubnetMax`: address of the last subnet.
    pub max: A,
}

/// The reason why a net-conf is refused. The message names the key and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadNetConf {
    /// The text is not JSON, or a value has the wrong type.
    #[error("net-conf is not valid: {0}")]
    Json(String),
    /// `EnableIPv4` and `EnableIPv6` are both false.
    #[error("none defined stack: set EnableIPv4 or EnableIPv6 to true in net-conf")]
    NoFamily,
    /// An enabled family has no network. As in flannel, a network of length 0 counts as absent.
    #[error("{key} is missing: set it in net-conf to the range that pods get their addresses from, e.g. {example}")]
    Missing {
        /// `Network` or `IPv6Network`.
        key: &'static str,
        /// A network of that family.
        example: &'static str,
    },
    /// A subnet would have only one or two addresses.
    #[error(
        "{key} {len} is too long: it must be less than /{limit}, so that a subnet has room for a node and its pods"
    )]
    SubnetTooSmall {
        /// `SubnetLen` or `IPv6SubnetLen`.
        key: &'static str,
        /// The configured length.
        len: u64,
        /// The first length that is too long: 31 or 127.
        limit: u8,
    },
    /// The network would contain fewer than four subnets.
    #[error("{key} {len} is too short: {network} must hold at least four subnets, so it must be /{shortest} or longer")]
    TooFewSubnets {
        /// `SubnetLen` or `IPv6SubnetLen`.
        key: &'static str,
        /// The configured length.
        len: u64,
        /// The network.
        network: IpNet,
        /// The shortest allowed length: that of the network plus 2.
        shortest: u8,
    },
    /// The network has no room for four subnets of four addresses.
    #[error("{key} {network} is too small: it must be a /{longest} or larger")]
    NetworkTooSmall {
        /// `Network` or `IPv6Network`.
        key: &'static str,
        /// The network.
        network: IpNet,
        /// The longest allowed length: 28 or 124.
        longest: u8,
    },
    /// `SubnetMin` or `SubnetMax` is outside the network.
    #[error("{key} {address} is outside {network}: set it to a subnet's first address inside, or leave it out")]
    OutOfNetwork {
        /// The key.
        key: &'static str,
        /// The configured address.
        address: IpAddr,
        /// The network.
        network: IpNet,
    },
    /// `SubnetMin` or `SubnetMax` is not the first address of a subnet.
    #[error("{key} {address} is not on a /{len} boundary: the subnet that holds it begins at {boundary}")]
    NotOnBoundary {
        /// The key.
        key: &'static str,
        /// The configured address.
        address: IpAddr,
        /// The length of a subnet.
        len: u8,
        /// First address of the subnet that contains `address`.
        boundary: IpAddr,
    },
    /// `SubnetMin` is greater than `SubnetMax`. flannel accepts this, and then never finds a free subnet.
    #[error("{min_key} {min} is greater than {max_key} {max}: swap them, or leave one out")]
    Reversed {
        /// `SubnetMin` or `IPv6SubnetMin`.
        min_key: &'static str,
        /// The configured value or the default.
        min: IpAddr,
        /// `SubnetMax` or `IPv6SubnetMax`.
        max_key: &'static str,
        /// The configured value or the default.
        max: IpAddr,
    },
    /// Larger than [`MAX_NET_CONF_BYTES`].
    #[error("net-conf is not valid: it is larger than {MAX_NET_CONF_BYTES} bytes")]
    TooLarge,
    /// `Backend` has no `Type`.
    #[error("unknown backend type: set Backend.Type in net-conf, e.g. {{\"Type\": \"vxlan\"}}")]
    NoBackendType,
}

impl From<serde_json::Error> for BadNetConf {
    fn from(cause: serde_json::Error) -> BadNetConf {
        BadNetConf::Json(crate::text::sentence(&cause.to_string()))
    }
}

/// The largest net-conf in bytes. A usual one has a few hundred bytes. The rest is room for a long `MasqueradeExcept`.
pub const MAX_NET_CONF_BYTES: usize = 64 << 10;

/// Returns the text of net-conf as a store contains it. A text that is too large is cut, so that it takes little memory. [`NetConf::parse`]
/// refuses it.
pub fn net_conf_text(value: &[u8]) -> String {
    String::from_utf8_lossy(value.get(..=MAX_NET_CONF_BYTES).unwrap_or(value)).into_owned()
}

/// The keys and defaults of one family.
struct Keys {
    family: Family,
    network: &'static str,
    example: &'static str,
    len: &'static str,
    min: &'static str,
    max: &'static str,
    /// Default length of a subnet, unless the network is too small for four of them.
    default_len: u8,
}

const V4: Keys = Keys {
    family: Family::V4,
    network: "Network",
    example: "10.244.0.0/16",
    len: "SubnetLen",
    min: "SubnetMin",
    max: "SubnetMax",
    default_len: 24,
};

const V6: Keys = Keys {
    family: Family::V6,
    network: "IPv6Network",
    example: "fd00:10:244::/48",
    len: "IPv6SubnetLen",
    min: "IPv6SubnetMin",
    max: "IPv6SubnetMax",
    default_len: 64,
};

impl NetConf {
    /// Parses a net-conf, fills in the defaults, and validates it as flannel does in etcd mode.
    pub fn parse(text: &str) -> Result<NetConf, BadNetConf> {
        if text.len() > MAX_NET_CONF_BYTES {
            return Err(BadNetConf::TooLarge);
        }
        let conf: Members = serde_json::from_str(text)?;
        let flag = |key, default| Ok::<bool, BadNetConf>(conf.get(key)?.unwrap_or(default));
        let (v4_enabled, v6_enabled) = (flag("EnableIPv4", true)?, flag("EnableIPv6", false)?);
        let nftables = conf.get("EnableNFTables")?;
        let masquerade = MasqueradeExceptions {
            except: conf.get("MasqueradeExcept")?.unwrap_or_default(),
            except_nodes: !flag("MasqueradeToNodes", true)?,
        };
        let v4 = read_family::<Ipv4Net, Ipv4Addr>(&conf, &V4)?;
        let v6 = read_family::<Ipv6Net, Ipv6Addr>(&conf, &V6)?;
        let (backend_type, backend) = read_backend(&conf)?;
        if !v4_enabled && !v6_enabled {
            return Err(BadNetConf::NoFamily);
        }
        let v4 = if v4_enabled { Some(v4.validate(&V4)?) } else { None };
        let v6 = if v6_enabled { Some(v6.validate(&V6)?) } else { None };
        let networks = Subnets { v4: v4.as_ref().map(|r| r.network), v6: v6.as_ref().map(|r| r.network) };
        if backend_type.is_empty() {
            return Err(BadNetConf::NoBackendType);
        }
        let of_families = [V4, V6].into_iter().flat_map(|keys| [keys.network, keys.len, keys.min, keys.max]);
        let unknown = conf.unknown(&of_families.chain(NAMES).collect::<Vec<_>>());
        Ok(NetConf { networks, v4, v6, nftables, masquerade, backend_type, backend, unknown })
    }

    /// Returns the names of the keys in which two net-confs differ, with options of the backend as `Backend.Port`. The
    /// result is empty if both mean the same, whatever their spelling.
    pub fn differing_keys(&self, other: &NetConf) -> Vec<String> {
        let mut keys: Vec<String> = Vec::new();
        let mut differ = |key: &str, is_different: bool| {
            if is_different {
                keys.push(key.to_owned());
            }
        };
        differ("EnableIPv4", self.v4.is_some() != other.v4.is_some());
        if let (Some(a), Some(b)) = (&self.v4, &other.v4) {
            a.compare(b, &V4, &mut differ);
        }
        differ("EnableIPv6", self.v6.is_some() != other.v6.is_some());
        if let (Some(a), Some(b)) = (&self.v6, &other.v6) {
            a.compare(b, &V6, &mut differ);
        }
        differ("EnableNFTables", self.nftables != other.nftables);
        differ("MasqueradeExcept", self.masquerade.except != other.masquerade.except);
        differ("MasqueradeToNodes", self.masquerade.except_nodes != other.masquerade.except_nodes);
        differ("Backend.Type", self.backend_type != other.backend_type);
        keys.extend(options_that_differ(&self.backend, &other.backend));
        keys
    }
}

impl<N: PartialEq, A: PartialEq> Range<N, A> {
    fn compare(&self, other: &Range<N, A>, keys: &Keys, differ: &mut impl FnMut(&str, bool)) {
        differ(keys.network, self.network != other.network);
        differ(keys.len, self.len != other.len);
        differ(keys.min, self.min != other.min);
        differ(keys.max, self.max != other.max);
    }
}

/// Returns `Backend.Type` in lower case, which is empty if it is absent, and the raw `Backend` object.
fn read_backend(conf: &Members) -> Result<(String, Box<str>), BadNetConf> {
    match conf.raw("Backend") {
        None => Ok(("udp".to_owned(), "{}".into())),
        Some("null") => Ok((String::new(), "{}".into())),
        Some(raw) => {
            let named = |cause| BadNetConf::Json(crate::text::sentence(&format!("Backend: {cause}")));
            let options: Members = serde_json::from_str(raw).map_err(named)?;
            let kind: Option<String> = options.get("Type").map_err(named)?;
            Ok((kind.unwrap_or_default().to_lowercase(), raw.into()))
        }
    }
}

/// Returns the names of the options in which two `Backend` objects differ, without `Type`.
fn options_that_differ(ours: &str, theirs: &str) -> Vec<String> {
    let (Ok(a), Ok(b)) = (serde_json::from_str::<Members>(ours), serde_json::from_str::<Members>(theirs)) else {
        return if ours == theirs { Vec::new() } else { vec!["Backend".to_owned()] };
    };
    let (a_values, b_values) = (a.canonical(), b.canonical());
    let value = |text: Option<&&str>| text.and_then(|t| serde_json::from_str::<serde_json::Value>(t).ok());
    let names: std::collections::BTreeSet<&String> = a_values.keys().chain(b_values.keys()).collect();
    names
        .into_iter()
        .filter(|name| *name != "type" && value(a_values.get(*name)) != value(b_values.get(*name)))
        .filter_map(|name| Some(format!("Backend.{}", a.spelling(name).or_else(|| b.spelling(name))?)))
        .collect()
}

/// The keys of one family as they are written. Only their types have been checked.
struct Unchecked<N, A> {
    network: Option<N>,
    len: Option<u64>,
    min: Option<A>,
    max: Option<A>,
}

fn read_family<N, A>(conf: &Members, keys: &Keys) -> Result<Unchecked<N, A>, BadNetConf>
where
    N: serde::de::DeserializeOwned,
    A: serde::de::DeserializeOwned,
{
    Ok(Unchecked {
        network: conf.get(keys.network)?,
        len: conf.get(keys.len)?,
        min: conf.get_pointer(keys.min)?,
        max: conf.get_pointer(keys.max)?,
    })
}

impl Unchecked<Ipv4Net, Ipv4Addr> {
    fn validate(self, keys: &Keys) -> Result<Range<Ipv4Net, Ipv4Addr>, BadNetConf> {
        let network = self.network.unwrap_or_default().trunc();
        let written = Written { len: self.len, min: self.min.map(IpAddr::V4), max: self.max.map(IpAddr::V4) };
        let Span { len, first, last } = validate(keys, IpNet::V4(network), &written)?;
        // The values are addresses of the network, so they fit into 32 bits.
        let v4 = |bits: u128| Ipv4Addr::from(bits as u32);
        Ok(Range { network, len, min: v4(first), max: v4(last) })
    }
}

impl Unchecked<Ipv6Net, Ipv6Addr> {
    fn validate(self, keys: &Keys) -> Result<Range<Ipv6Net, Ipv6Addr>, BadNetConf> {
        let network = self.network.unwrap_or_default().trunc();
        let written = Written { len: self.len, min: self.min.map(IpAddr::V6), max: self.max.map(IpAddr::V6) };
        let Span { len, first, last } = validate(keys, IpNet::V6(network), &written)?;
        Ok(Range { network, len, min: Ipv6Addr::from(first), max: Ipv6Addr::from(last) })
    }
}

/// The keys about the subnets of one family as they are written.
struct Written {
    len: Option<u64>,
    min: Option<IpAddr>,
    max: Option<IpAddr>,
}

/// The subnets of one family.
struct Span {
    len: u8,
    /// The address of the first subnet as a number, and that of the last one.
    first: u128,
    last: u128,
}

/// Validates one family. The checks and their order are flannel's.
fn validate(keys: &Keys, network: IpNet, written: &Written) -> Result<Span, BadNetConf> {
    if network.prefix_len() == 0 {
        return Err(BadNetConf::Missing { key: keys.network, example: keys.example });
    }
    let len = subnet_len(keys, network, written.len.unwrap_or(0))?;
    let step = size(keys.family, len);
    let bound = |key, address: Option<IpAddr>, default: u128| {
        // As in flannel, an unspecified address means that the key is absent.
        let Some(address) = address.filter(|a| !a.is_unspecified()) else { return Ok(default) };
        if !network.contains(&address) {
            return Err(BadNetConf::OutOfNetwork { key, address, network });
        }
        Ok(bits(address))
    };
    // By default the first subnet is not used: its first address is the network's own address, which old systems treat
    // as a broadcast address.
    let first = bound(keys.min, written.min, bits(network.network()) + step)?;
    let last = bound(keys.max, written.max, bits(network.broadcast()) - (step - 1))?;
    for (key, value) in [(keys.min, first), (keys.max, last)] {
        if value % step != 0 {
            let (address, boundary) = (address(keys.family, value), address(keys.family, value - value % step));
            return Err(BadNetConf::NotOnBoundary { key, address, len, boundary });
        }
    }
    if first > last {
        let (min, max) = (address(keys.family, first), address(keys.family, last));
        return Err(BadNetConf::Reversed { min_key: keys.min, min, max_key: keys.max, max });
    }
    Ok(Span { len, first, last })
}

fn subnet_len(keys: &Keys, network: IpNet, len: u64) -> Result<u8, BadNetConf> {
    let (prefix, all) = (network.prefix_len(), network.max_prefix_len());
    if len == 0 {
        return if prefix > all - 4 {
            Err(BadNetConf::NetworkTooSmall { key: keys.network, network, longest: all - 4 })
        } else {
            Ok(keys.default_len.max(prefix + 2))
        };
    }
    match u8::try_from(len) {
        Ok(short) if short < prefix.saturating_add(2) && short <= all - 2 => {
            Err(BadNetConf::TooFewSubnets { key: keys.len, len, network, shortest: prefix + 2 })
        }
        Ok(fits) if fits <= all - 2 => Ok(fits),
        _ => Err(BadNetConf::SubnetTooSmall { key: keys.len, len, limit: all - 1 }),
    }
}
