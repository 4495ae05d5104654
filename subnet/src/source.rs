// SPDX-License-Identifier: Apache-2.0
//! The store seam: one trait that etcd, the directory and Kubernetes implement, and one contract test suite run against each.

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::mpsc;

use crate::allocate;
use crate::attrs::Attrs;
use crate::cidr::Subnets;
use crate::connected::Connected;
use crate::evidence::Evidence;
use crate::lease::{Id, Lease, Record};
use crate::network::Network;

/// A future on the current thread.
pub type Local<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What a store can do; the contract suite and the agent read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Leases end by themselves when their owner is silent.
    pub expires: bool,
    /// Compare-and-swap holds between machines, not only between processes of one.
    pub fenced: bool,
    /// The subnet is assigned by someone else (Kubernetes pod CIDR); acquire waits for it.
    pub assigned: bool,
}

/// Why a store said no.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store cannot be reached or answered with a fault; trying again may help.
    #[error("{what}")]
    Unavailable {
        /// Operation and object, e.g. `read /coreos.com/network/config from http://10.0.0.1:2379`.
        what: String,
        /// The cause.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// The store answered, and said no: only a change of our credentials, rights or settings helps, which the cause names.
    #[error("{what}")]
    Refused {
        /// Operation and object, as above.
        what: String,
        /// The store's word and the remedy.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Nothing is stored there (config missing, lease gone).
    #[error("{0} does not exist")]
    Missing(String),
    /// Another node owns the subnet now: a write was refused by its compare-and-swap.
    #[error("subnet {subnet} belongs to {owner} now")]
    Taken {
        /// The subnet.
        subnet: Subnets,
        /// Public address of the owner, for people.
        owner: String,
    },
    /// No free subnet between SubnetMin and SubnetMax.
    #[error("out of subnets: every subnet between {min} and {max} is leased, or holds addresses of nodes")]
    OutOfSubnets {
        /// First.
        min: String,
        /// Last.
        max: String,
    },
    /// The request itself cannot be fulfilled by this store (say why and the remedy).
    #[error("{0}")]
    Invalid(String),
}

/// What a node asks of its store.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The validated net-conf.
    pub network: Network,
    /// What the lease shall say.
    pub attrs: Attrs,
    /// The subnet that our pods use, as far as we know: taken again when it is free and compatible.
    pub previous: Option<Subnets>,
    /// What the lease says that [`Source::own`] found, or that we held until now.
    pub was: Option<Attrs>,
    /// This host's own addresses and networks: no subnet is chosen over them.
    pub connected: Connected,
}

// Kubernetes alone assigns subnets, and chooses none.
#[cfg_attr(not(any(feature = "etcd", feature = "dir")), allow(dead_code))]
impl Claim {
    /// What tells our leases from those of others. The MAC that we are about to publish is that of our device, or of the lease that
    /// was found to be ours: a lease with another one is another node's.
    pub(crate) fn evidence(&self) -> Evidence {
        let was = self.was.as_ref().unwrap_or(&self.attrs);
        Evidence { previous: self.previous, ..Evidence::of(Subnets::default(), was).or(&self.attrs) }
    }

    /// The subnet to take: the previous one when it is free and compatible, else a free one by chance. It holds none of the
    /// public addresses of `nodes`, which are the other leases: they would set ours aside, or we would cut those nodes off.
    pub(crate) fn choose<'a>(
        &self,
        mut taken: Vec<Subnets>,
        nodes: impl Iterator<Item = &'a Attrs>,
    ) -> Result<Subnets, Error> {
        let public =
            |attrs: &Attrs| Subnets { v4: attrs.public_ip.map(Into::into), v6: attrs.public_ipv6.map(Into::into) };
        taken.extend(nodes.map(public).chain([public(&self.attrs)]));
        taken.extend(self.connected.iter().map(|net| match net {
            IpNet::V4(v4) => Subnets { v4: Some(v4), v6: None },
            IpNet::V6(v6) => Subnets { v4: None, v6: Some(v6) },
        }));
        // What reaches beyond our Network is set aside by every node: it takes nothing away from us.
        taken.retain(|subnets| {
            subnets.iter().any(|net| self.network.networks.iter().any(|network| network.contains(&net)))
        });
        let free = |subnets: &Subnets| {
            allocate::is_compatible(&self.network, subnets) && !taken.iter().any(|other| other.overlaps(subnets))
        };
        let previous = self.previous.filter(free);
        previous.or_else(|| allocate::choose(&self.network, &taken, &mut random)).ok_or_else(|| self.out_of_subnets())
    }

    /// Names the range that is full.
    fn out_of_subnets(&self) -> Error {
        let (v4, v6) = (self.network.v4.as_ref(), self.network.v6.as_ref());
        let join = |v4: Option<String>, v6: Option<String>| v4.into_iter().chain(v6).collect::<Vec<_>>().join(",");
        Error::OutOfSubnets {
            min: join(v4.map(|range| range.min.to_string()), v6.map(|range| range.min.to_string())),
            max: join(v4.map(|range| range.max.to_string()), v6.map(|range| range.max.to_string())),
        }
    }
}

/// Any 64 bits.
pub fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

/// The owner of a value that is no lease, for people.
pub(crate) const UNREADABLE: &str = "an unreadable value";

/// What the watch of a store reports, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The complete set of records, at start and whenever events may have been missed. `reset` says that this is another
    /// store than before (wiped and restored, another cluster id, revision went backwards).
    Snapshot {
        /// All of them, unparsable ones included.
        records: Vec<Record>,
        /// Another store than before.
        reset: bool,
    },
    /// These changed together (one watch response): `Ok` a record put, `Err` the id of one deleted.
    Changes(Vec<Result<Record, Id>>),
    /// The net-conf changed: its raw JSON text.
    Config(String),
    /// The store answered or the watch showed a sign of life: resets "seconds since the last word".
    Word,
    /// The store does not answer; said when it starts, and at most once a minute after.
    Trouble(String),
    /// Our lease was kept alive and has now this many seconds to live; `None` does not expire (reservation, directory).
    Kept(Option<Duration>),
}

/// A store of leases. All methods may be called again after an error; none blocks without a time limit except
/// [`Source::watch`] (runs until dropped) and [`Source::acquire`] where [`Capabilities::assigned`] (waits for the assignment).
pub trait Source {
    /// For people: `etcd http://127.0.0.1:2379 /coreos.com/network`, `dir /var/lib/weft`.
    fn describe(&self) -> String;
    /// What tells this store from others without asking it: two with the same words may be taken for one. `None`: its leases
    /// need not be saved.
    fn identity(&self) -> Local<'_, Option<String>> {
        Box::pin(async { None })
    }
    /// What is wrong with how this node follows the store, although it does: one sentence with the remedy, for `weft status`.
    fn remark(&self) -> Option<String> {
        None
    }
    /// What it can do.
    fn capabilities(&self) -> Capabilities;
    /// The raw JSON of net-conf. `Missing` when there is none.
    fn config(&self) -> Local<'_, Result<String, Error>>;
    /// The lease that is ours already, if any: asked before `advertise`, for the VTEP MAC. Where there are several, the one with the
    /// best proof, see [`Evidence`].
    fn own<'a>(&'a self, evidence: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>>;
    /// Takes a lease: one that is ours already, else the previous subnet, else a free one. Every write is fenced by what was read.
    fn acquire<'a>(&'a self, claim: &'a Claim) -> Local<'a, Result<Lease, Error>>;
    /// Takes exactly this subnet (again): creates it when it is free, confirms or rewrites it when it is ours, else `Taken`. Used
    /// when the own lease was deleted, or the store was wiped, and to publish changed attributes. `was` is what our lease said so
    /// far: together with the subnet and the new attributes it is the evidence. Where subnets are assigned, what is assigned now is
    /// taken, whatever it was.
    fn retake<'a>(&'a self, subnets: &'a Subnets, was: &'a Attrs, attrs: &'a Attrs) -> Local<'a, Result<Lease, Error>>;
    /// Gives our lease back: deletes it if it is still ours, else `Taken` or `Missing`.
    fn release<'a>(&'a self, lease: &'a Lease) -> Local<'a, Result<(), Error>>;
    /// All records, for `weft lease ls`.
    fn list(&self) -> Local<'_, Result<Vec<Record>, Error>>;
    /// Deletes any record by id, for `weft lease rm`.
    fn remove<'a>(&'a self, id: &'a str) -> Local<'a, Result<(), Error>>;
    /// Reports everything into `out`, beginning with a snapshot, and re-lists, re-opens and backs off by itself. Ends when `out` closes.
    fn watch(&self, out: mpsc::Sender<Event>) -> Local<'_, ()>;
    /// Keeps our lease alive until dropped: re-reads which store lease the key has now before each renewal. Reports `Event::Kept`.
    /// A lease that is gone, or is another node's now, is not renewed: the watch shows that to the agent.
    fn keep<'a>(&'a self, lease: &'a Lease, out: mpsc::Sender<Event>) -> Local<'a, ()>;
    /// Public addresses (IPv4, IPv6) by which the store's admin chooses this node's interface: they count more than
    /// `--public-ip`. Asked before the uplink is picked.
    fn chosen(&self) -> Local<'_, Result<[Option<IpAddr>; 2], Error>> {
        Box::pin(async { Ok([None, None]) })
    }
    /// Tells those who look at the store whether this node's network works; `fault` says why it does not. Writes nothing when
    /// the store says the same already.
    fn health<'a>(&'a self, _fault: Option<&'a str>) -> Local<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }
}
