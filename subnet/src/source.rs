// SPDX-License-Identifier: Apache-2.0
//! The interface of a store. etcd, the directory and Kubernetes implement the trait [`Source`]. One suite of tests runs against each.

use std::cell::RefCell;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::allocate::{self, Taken};
use crate::attrs::Attrs;
use crate::backend_types::BackendTypes;
use crate::cidr::{Family, Subnets};
use crate::connected::Connected;
use crate::evidence::Evidence;
use crate::lease::{Id, Lease, Record};
use crate::net_conf::NetConf;
use crate::outside::random;

/// How often [`Source::keep`] reports that the lease is kept, for a store whose leases do not expire.
const KEEP_INTERVAL: Duration = Duration::from_secs(60);

/// A future on the current thread.
pub type Local<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// How a store differs from others, as far as the agent and the tests must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// A lease expires if its owner does not renew it.
    pub expires: bool,
    /// Subnets are assigned, as pod CIDRs in Kubernetes. [`Source::acquire`] waits for that.
    pub assigned: bool,
}

/// Why a store refuses writes although it answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alarm {
    /// What is wrong with it, for people.
    pub what: String,
    /// What to do, in one line.
    pub remedy: String,
}

/// Why an operation on a store failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store cannot be reached, or its answer was an error. Another attempt may succeed.
    #[error("{what}")]
    Unavailable {
        /// Operation and object, e.g. `read /coreos.com/network/config from http://10.0.0.1:2379`.
        what: String,
        /// The cause.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// The store refused the operation. Only other credentials, rights or settings help; the cause names them.
    #[error("{what}")]
    Refused {
        /// Operation and object, as above.
        what: String,
        /// The answer of the store, and the remedy.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The object does not exist, such as net-conf or a lease.
    #[error("{0} does not exist")]
    Missing(String),
    /// Nobody has written net-conf yet, or the agent looks in a wrong place.
    #[error("{place} does not exist: {remedy}")]
    NoNetConf {
        /// The key or the file.
        place: String,
        /// The command to type.
        remedy: String,
    },
    /// Another node owns the subnet now.
    #[error("subnet {subnet} belongs to {owner} now")]
    Taken {
        /// The subnet.
        subnet: Subnets,
        /// The published address of the owner, for messages.
        owner: String,
    },
    /// There is no free subnet between SubnetMin and SubnetMax.
    #[error("out of subnets: every subnet between {min} and {max} is leased, or holds addresses of nodes")]
    OutOfSubnets {
        /// SubnetMin of each enabled family.
        min: String,
        /// SubnetMax of each enabled family.
        max: String,
    },
    /// This store cannot do what was asked. The sentence says why, and names the remedy.
    #[error("{0}")]
    Invalid(String),
}

/// What a node wants from its store.
#[derive(Debug, Clone)]
pub struct LeaseRequest {
    /// The validated net-conf.
    pub net_conf: NetConf,
    /// What the lease is to contain.
    pub attrs: Attrs,
    /// The subnet that our pods use, if it is known. It is taken again if it is free and net-conf allows it.
    pub previous: Option<Subnets>,
    /// The content of the lease that [`Source::own`] found, or that was ours until now.
    pub was: Option<Attrs>,
    /// The host's own addresses and networks. No subnet is chosen that overlaps them.
    pub connected: Connected,
}

// A build with Kubernetes as its only store never chooses a subnet.
#[cfg_attr(not(any(feature = "etcd", feature = "dir")), allow(dead_code))]
impl LeaseRequest {
    /// Returns what shows that a lease is ours. The identity that we are about to publish is that of our device, or of the lease that
    /// was found to be ours. So a lease with another identity belongs to another node.
    pub(crate) fn evidence(&self, types: BackendTypes) -> Evidence {
        let was = self.was.as_ref().unwrap_or(&self.attrs);
        Evidence { previous: self.previous, ..Evidence::of(types, Subnets::default(), was).with_next(&self.attrs) }
    }

    /// Chooses a subnet of each enabled family: the previous one if it is free and net-conf allows it, then that of a lease that is ours
    /// (`ours`), otherwise a random free one. So pods keep their IPv4 addresses when net-conf turns IPv6 on or off.
    ///
    /// The chosen subnet contains no published address of `nodes`, which are the other leases. Otherwise those nodes would set our lease aside,
    /// or we would cut them off.
    pub(crate) fn choose<'a>(
        &self,
        mut taken: Vec<Subnets>,
        nodes: impl Iterator<Item = &'a Attrs>,
        ours: impl Iterator<Item = Subnets>,
    ) -> Result<Subnets, Error> {
        taken.extend(nodes.map(Attrs::public_addresses));
        taken.push(self.attrs.public_addresses());
        taken.extend(self.connected.iter().map(Subnets::from));
        // Every node sets a lease aside that is not inside Network. So such a lease does not take a subnet.
        taken.retain(|subnets| {
            subnets.iter().any(|net| self.net_conf.networks.iter().any(|network| network.contains(&net)))
        });
        let had: Vec<Subnets> = self.previous.into_iter().chain(ours).collect();
        // Whoever may write leases may write many that look like ours.
        let kept = |family: Family| {
            let taken = Taken::of(family, &taken);
            let is_free = |net: &IpNet| allocate::fits(&self.net_conf, *net) && !taken.overlaps(*net);
            had.iter().filter_map(|had| had.of(family)).find(is_free).map(Subnets::from).unwrap_or_default()
        };
        let kept = Subnets { v4: kept(Family::V4).v4, v6: kept(Family::V6).v6 };
        allocate::complete(&self.net_conf, &kept, &taken, &mut random).ok_or_else(|| self.out_of_subnets())
    }

    /// Returns the error that names the range without a free subnet.
    fn out_of_subnets(&self) -> Error {
        let (v4, v6) = (self.net_conf.v4.as_ref(), self.net_conf.v6.as_ref());
        let join = |v4: Option<String>, v6: Option<String>| v4.into_iter().chain(v6).collect::<Vec<_>>().join(",");
        Error::OutOfSubnets {
            min: join(v4.map(|range| range.min.to_string()), v6.map(|range| range.min.to_string())),
            max: join(v4.map(|range| range.max.to_string()), v6.map(|range| range.max.to_string())),
        }
    }
}

/// What messages name as the owner if the value is not a lease.
pub(crate) const UNREADABLE: &str = "an unreadable value";

/// What happened to one record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordChange {
    /// It was written: it is new, or has another value.
    Written(Record),
    /// The record with this id was removed.
    Removed(Id),
}

impl RecordChange {
    /// Returns the record that was written.
    pub fn written(&self) -> Option<&Record> {
        if let RecordChange::Written(record) = self { Some(record) } else { None }
    }

    /// Returns the id of the record that was removed.
    pub fn removed(&self) -> Option<&Id> {
        if let RecordChange::Removed(id) = self { Some(id) } else { None }
    }
}

/// What the watch of a store reports. Events are in the order of the changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// All records. This is the first event, and comes again whenever changes may have been missed.
    Snapshot {
        /// All records, including unreadable ones.
        records: Vec<Record>,
        /// True if this is another store than before: it was wiped or restored, or its cluster id is different.
        reset: bool,
    },
    /// Records that changed together.
    Changes(Vec<RecordChange>),
    /// The net-conf changed. This is its JSON text.
    Config(String),
    /// The store answered, or the watch showed that it is alive.
    Answered,
    /// The store does not answer. This is reported at once, and then at most once a minute.
    Unreachable(String),
    /// Our lease could not be renewed, for the reason in the text. This is reported at once, and then at most once a minute, whatever else the
    /// store answers.
    NotRenewed(String),
    /// Our lease was renewed and expires after this time. `None` if it never expires, as a reservation or in a directory.
    Renewed(Option<Duration>),
}

/// The net-conf that a store returned or reported last. Its watch reports only a different one.
#[derive(Debug, Default)]
pub(crate) struct LastNetConf(RefCell<Option<String>>);

impl LastNetConf {
    /// Remembers the text that [`Source::config`] returns.
    pub(crate) fn set(&self, text: &str) {
        *self.0.borrow_mut() = Some(text.to_owned());
    }

    /// Reports the text if it differs from the last one. Returns false if nobody receives the events any more.
    pub(crate) async fn report(&self, text: String, out: &mpsc::Sender<Event>) -> bool {
        let before = self.0.borrow_mut().replace(text.clone());
        match before {
            Some(before) if before != text => out.send(Event::Config(text)).await.is_ok(),
            _ => true,
        }
    }
}

/// A lasting fault of a node, or its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultNotice {
    /// The kind of the fault, as the reason of a Kubernetes Event: `UplinkFault`.
    pub fault: &'static str,
    /// What is wrong, in one sentence. At the end, what was wrong.
    pub text: String,
    /// True if the fault has ended.
    pub is_over: bool,
    /// How often a fault of this kind was written, with this notice.
    pub count: u64,
}

impl FaultNotice {
    /// Returns the reason of a Kubernetes Event: that of the fault, with `Ended` when it is over.
    pub fn reason(&self) -> String {
        format!("{}{}", self.fault, if self.is_over { "Ended" } else { "" })
    }
}

/// A store of leases.
///
/// All methods may be called again after an error. All have a time limit, except [`Source::watch`] and [`Source::keep`], which run until
/// they are dropped, and [`Source::acquire`] if subnets are assigned, which waits for the assignment.
pub trait Source {
    /// Returns the name of the store for messages, such as `etcd http://127.0.0.1:2379 /coreos.com/network` or `dir /var/lib/weft`.
    fn describe(&self) -> String;
    /// Returns a text that identifies the store, without asking it. Two stores with the same text count as one. `None` if the leases of
    /// this store need not be saved.
    fn fingerprint(&self) -> Local<'_, Option<String>> {
        Box::pin(async { None })
    }
    /// Returns what is not as it should be although the store works: one sentence with the remedy, for `weft status`.
    fn remark(&self) -> Option<String> {
        None
    }
    /// Returns how this store differs from others.
    fn capabilities(&self) -> Capabilities;
    /// Reads the JSON text of net-conf.
    ///
    /// # Errors
    /// [`Error::NoNetConf`] if there is none.
    fn config(&self) -> Local<'_, Result<String, Error>>;
    /// Finds the lease that is ours already. If there are several, returns the one with the best [`Evidence`]. The agent calls this before
    /// it acquires a lease, because the lease names the VTEP MAC to use.
    fn own<'a>(&'a self, evidence: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>>;
    /// Acquires a lease: one that is ours already, or the previous subnet, or a free one. A write fails if what was read has changed.
    fn acquire<'a>(&'a self, request: &'a LeaseRequest) -> Local<'a, Result<Lease, Error>>;
    /// Acquires exactly this subnet again: creates the lease if the subnet is free, and rewrites it if it is ours. If subnets are assigned,
    /// the one that is assigned now is taken, whatever it was before.
    ///
    /// The agent calls this when its lease was deleted, when the store was wiped, and to publish changed attributes. `was` is the content of
    /// our lease so far. It is the evidence, together with the subnet and the new attributes.
    ///
    /// # Errors
    /// [`Error::Taken`] if the subnet belongs to another node.
    fn retake<'a>(&'a self, subnets: &'a Subnets, was: &'a Attrs, attrs: &'a Attrs) -> Local<'a, Result<Lease, Error>>;
    /// Deletes our lease.
    ///
    /// # Errors
    /// [`Error::Taken`] if it belongs to another node now, [`Error::Missing`] if it does not exist.
    fn release<'a>(&'a self, lease: &'a Lease) -> Local<'a, Result<(), Error>>;
    /// Reads all records, for `weft lease ls`.
    fn list(&self) -> Local<'_, Result<Vec<Record>, Error>>;
    /// Returns why the store refuses writes although it answers, if it says so, for `weft doctor`.
    fn alarm(&self) -> Local<'_, Result<Option<Alarm>, Error>> {
        Box::pin(async { Ok(None) })
    }
    /// Deletes a record of any node, for `weft lease rm`.
    fn remove<'a>(&'a self, id: &'a str) -> Local<'a, Result<(), Error>>;
    /// Reports all records and then all changes to `out`, until `out` is closed. After an error it waits, connects again, and reads all
    /// records again if that is necessary.
    fn watch(&self, out: mpsc::Sender<Event>) -> Local<'_, ()>;
    /// Renews our lease until the future is dropped, and reports [`Event::Renewed`]. A lease that is gone or belongs to another node is not
    /// renewed. The agent learns of that from the watch.
    ///
    /// The default is for stores whose leases do not expire: it writes nothing, and reports each minute that the lease is kept.
    fn keep<'a>(&'a self, _lease: &'a Lease, out: mpsc::Sender<Event>) -> Local<'a, ()> {
        Box::pin(async move {
            while out.send(Event::Renewed(None)).await.is_ok() {
                tokio::select! {
                    () = sleep(KEEP_INTERVAL) => {}
                    () = out.closed() => return,
                }
            }
        })
    }
    /// Returns the published addresses (IPv4, IPv6) that an administrator has set for this node in the store. They take precedence over
    /// `--public-ip`. The agent calls this before it chooses the uplink.
    fn chosen(&self) -> Local<'_, Result<[Option<IpAddr>; 2], Error>> {
        Box::pin(async { Ok([None, None]) })
    }
    /// Publishes in the store whether this node's network works. `fault` says why it does not. Nothing is written if the store says the
    /// same already.
    fn health<'a>(&'a self, _fault: Option<&'a str>) -> Local<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }
    /// Returns how long a fault of this node lasts before a notice of it is written. `None` means that this store takes no notices.
    fn notices_after(&self) -> Option<Duration> {
        None
    }
    /// Writes a notice of a fault of this node for people who look at the cluster.
    fn write_notice<'a>(&'a self, _notice: &'a FaultNotice) -> Local<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_subnet_contains_an_ipv6_address_of_a_node() {
        let conf = r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/48","IPv6SubnetMax":"fd00:0:0:3::"}"#;
        let at = |ip: &str| Attrs { public_ipv6: ip.parse().ok(), ..Attrs::default() };
        let request = LeaseRequest {
            net_conf: NetConf::parse(conf).unwrap(),
            attrs: at("fd00:0:0:1::1"),
            previous: Some(Subnets { v4: None, v6: "fd00:0:0:2::/64".parse().ok() }),
            was: None,
            connected: Connected::default(),
        };
        let peer = at("fd00:0:0:2::9");
        let choose = |nodes: &[&Attrs]| {
            let chosen = request.choose(Vec::new(), nodes.iter().copied(), std::iter::empty());
            chosen.map(|subnets| subnets.to_string())
        };
        assert_eq!(choose(&[]).unwrap(), "fd00:0:0:2::/64");
        assert_eq!(choose(&[&peer]).unwrap(), "fd00:0:0:3::/64", "neither our address nor that of the peer is inside");
        assert!(matches!(choose(&[&peer, &at("fd00:0:0:3::3")]), Err(Error::OutOfSubnets { .. })));
    }

    #[test]
    fn the_first_of_the_subnets_that_this_node_had_is_kept_with_which_nothing_overlaps() {
        let net_conf = NetConf::parse(r#"{"Network":"10.5.0.0/16","SubnetMax":"10.5.4.0"}"#).unwrap();
        let (attrs, connected) = (Attrs::default(), Connected::default());
        let request = LeaseRequest { net_conf, attrs, previous: None, was: None, connected };
        let subnets = |text: &str| Subnets::from(text.parse::<IpNet>().unwrap());
        // There are no other ones between SubnetMin and SubnetMax.
        let ours = ["10.5.4.0/24", "10.5.2.0/24", "10.5.1.0/24", "10.5.3.0/24"].map(subnets);
        // Some are nested, and some share their first or their last address.
        let others = ["10.5.4.0/30", "10.5.4.0/25", "10.5.2.0/23", "10.5.2.7/32", "10.5.0.0/23", "10.5.1.128/25"];
        let others = others.map(subnets);
        for number in 0..1 << others.len() {
            let numbered = others.iter().enumerate().filter(|(bit, _)| number & (1 << bit) != 0);
            let taken: Vec<Subnets> = numbered.map(|(_, other)| *other).collect();
            let free = ours.iter().find(|own| !taken.iter().any(|other| other.overlaps(own))).copied();
            let kept = request.choose(taken.clone(), std::iter::empty(), ours.into_iter()).ok();
            assert_eq!(kept, free, "{taken:?}");
        }
    }

    /// A store with very many leases may send a change for each of them at once.
    #[test]
    fn a_change_needs_no_more_memory_than_its_record() {
        assert_eq!(size_of::<RecordChange>(), size_of::<Record>());
    }
}
