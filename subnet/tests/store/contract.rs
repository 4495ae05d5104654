// SPDX-License-Identifier: Apache-2.0
//! The tests that every store must pass.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::mpsc;
use weft_backends::register::TYPES;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::connected::Connected;
use weft_subnet::evidence::Evidence;
use weft_subnet::lease::{Id, Lease, Record};
use weft_subnet::net_conf::{NetConf, Range};
use weft_subnet::source::{Error, Event, LeaseRequest, RecordChange, Source};

/// A store that can be opened several times, and that can be changed from outside.
pub trait SharedStore {
    /// Opens the store as the node that is described by [`request`] with this number.
    fn open_for(&self, last: u8) -> Box<dyn Source>;

    fn open(&self) -> Box<dyn Source> {
        self.open_for(1)
    }

    /// Writes a value without the store. `name` is `config` or `subnets/<key>`.
    async fn put(&self, name: &str, value: &str);

    /// How long its next event is waited for.
    fn patience(&self) -> Duration {
        PATIENCE
    }
}

/// How long a test waits for a server. The machine may be busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A TTL of leases that a test waits for. A busy machine does not stand still for so long.
pub const SHORT_TTL: Duration = Duration::from_secs(6);

pub fn net_conf(len: u8, max: &str) -> NetConf {
    let net = "10.5.0.0/16".parse().unwrap();
    NetConf {
        networks: Subnets { v4: Some(net), v6: None },
        v4: Some(Range { network: net, len, min: "10.5.1.0".parse().unwrap(), max: max.parse().unwrap() }),
        v6: None,
        nftables: None,
        masquerade: Default::default(),
        backend_type: "vxlan".into(),
        backend: "{}".into(),
        unknown: Vec::new(),
    }
}

/// Returns what the node with this number publishes. The MAC of node 1 ends with 44.
pub fn attrs(last: u8) -> Attrs {
    let data = format!(r#"{{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:{:02x}"}}"#, last.wrapping_add(0x43));
    Attrs {
        public_ip: Some([192, 0, 2, last].into()),
        backend_type: "vxlan".into(),
        backend_data: Some(data.into()),
        ..Attrs::default()
    }
}

pub fn request(last: u8) -> LeaseRequest {
    let (net_conf, connected) = (net_conf(24, "10.5.255.0"), Connected::default());
    LeaseRequest { net_conf, attrs: attrs(last), previous: None, was: None, connected }
}

/// Returns what the node with this number knows after a boot: only its address.
pub fn booted(last: u8) -> Evidence {
    Evidence { public: vec![(attrs(last).public_ip, None)], ..Evidence::none(TYPES) }
}

pub fn subnet(text: &str) -> Subnets {
    Subnets { v4: Some(text.parse().unwrap()), v6: None }
}

/// Waits, but not for ever. `what` did not come if the test fails. The limit is that of the whole wait: a store reports every few seconds
/// that it was answered, and a limit for each event would never end.
pub async fn within<T>(limit: Duration, what: &str, wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(limit, wait).await.unwrap_or_else(|_| panic!("{what} did not come within {limit:?}"))
}

/// Returns the next event of a server, of any kind.
pub async fn any(events: &mut mpsc::Receiver<Event>) -> Event {
    within(PATIENCE, "another event", events.recv()).await.expect("the store must go on")
}

/// Waits until a server reports an event of which this is true.
pub async fn until(events: &mut mpsc::Receiver<Event>, what: &str, is: impl Fn(&Event) -> bool) -> Event {
    until_within(events, PATIENCE, what, is).await
}

/// Does the same for any store, with this limit.
pub async fn until_within(
    events: &mut mpsc::Receiver<Event>,
    limit: Duration,
    what: &str,
    is: impl Fn(&Event) -> bool,
) -> Event {
    let wait = async {
        loop {
            let event = events.recv().await.expect("the store must go on");
            if is(&event) {
                return event;
            }
        }
    };
    within(limit, what, wait).await
}

/// Returns the next event of a server that reports a change.
pub async fn next(events: &mut mpsc::Receiver<Event>) -> Event {
    next_within(events, PATIENCE).await
}

/// Does the same for any store, with this limit.
pub async fn next_within(events: &mut mpsc::Receiver<Event>, limit: Duration) -> Event {
    let is_change = |event: &Event| !matches!(event, Event::Answered | Event::Unreachable(_) | Event::Renewed(_));
    until_within(events, limit, "a list, a change or a net-conf", is_change).await
}

/// Returns the first list with this number of records. An API server answers lists from a cache that may lag behind the last write. Then
/// the watch reports what is missing.
pub async fn first_list(events: &mut mpsc::Receiver<Event>, count: usize, limit: Duration) -> Vec<Record> {
    let first = next_within(events, limit).await;
    let Event::Snapshot { mut records, reset: false } = first else { panic!("a snapshot comes first, not {first:?}") };
    while records.len() < count {
        let event = next_within(events, limit).await;
        let Event::Changes(changes) = event else { panic!("the missing records, not {event:?}") };
        records.extend(changes.iter().filter_map(RecordChange::written).cloned());
    }
    records
}

/// Runs `body` while the store is watched.
pub async fn watching<F: Future<Output = ()>>(store: &dyn Source, body: impl FnOnce(mpsc::Receiver<Event>) -> F) {
    let (out, events) = mpsc::channel(64);
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body(events) => {}
    }
}

pub async fn creates_a_lease_and_takes_it_over_later(shared: &impl SharedStore) {
    let store = shared.open();
    assert!(store.own(&booted(1)).await.unwrap().is_none());
    let first = store.acquire(&request(1)).await.unwrap();
    assert_eq!(first.attrs, attrs(1));
    if !store.capabilities().assigned {
        assert_eq!(&*first.id, first.subnets.to_key());
    }
    let mut other = request(1);
    other.attrs.backend_data = Some(r#"{"VNI":2,"VtepMAC":"c6:d2:32:6f:8f:44"}"#.into());
    let again = shared.open().acquire(&other).await.unwrap();
    assert_eq!((again.subnets, &again.attrs, &again.age), (first.subnets, &other.attrs, &first.age));
    assert_eq!(store.own(&booted(1)).await.unwrap(), Some(again));
    assert_eq!(store.list().await.unwrap().len(), 1);
}

pub async fn the_previous_subnet_is_taken_again(shared: &impl SharedStore) {
    let store = shared.open();
    let wanted = subnet("10.5.77.0/24");
    let mine = store.acquire(&LeaseRequest { previous: Some(wanted), ..request(1) }).await.unwrap();
    assert_eq!(mine.subnets, wanted);
    let other = store.acquire(&LeaseRequest { previous: Some(wanted), ..request(2) }).await.unwrap();
    assert_ne!(other.subnets, wanted, "taken by another");
    let unfit = store.acquire(&LeaseRequest { previous: Some(subnet("10.5.88.0/25")), ..request(3) }).await.unwrap();
    assert_eq!(unfit.subnets.v4.unwrap().prefix_len(), 24);
}

/// Our pods use one of them. Another one, which an earlier run left behind, would cut them off.
pub async fn of_several_leases_of_ours_that_of_our_pods_is_taken(shared: &impl SharedStore) {
    let subnets = ["10.5.7.0/24", "10.5.8.0/24", "10.5.9.0/24"].map(subnet);
    for ours in subnets {
        shared.put(&format!("subnets/{}", ours.to_key()), &attrs(1).to_wire()).await;
    }
    for ours in subnets {
        let store = shared.open();
        let own = store.own(&Evidence::of(TYPES, ours, &attrs(1))).await.unwrap();
        assert_eq!(own.map(|own| own.subnets), Some(ours));
        let request = LeaseRequest { previous: Some(ours), was: Some(attrs(1)), ..request(1) };
        assert_eq!(store.acquire(&request).await.unwrap().subnets, ours);
    }
}

pub async fn reports_that_there_is_no_free_subnet(shared: &impl SharedStore) {
    let store = shared.open();
    let small = |last| LeaseRequest { net_conf: net_conf(24, "10.5.2.0"), ..request(last) };
    store.acquire(&small(1)).await.unwrap();
    store.acquire(&small(2)).await.unwrap();
    let error = store.acquire(&small(3)).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "out of subnets: every subnet between 10.5.1.0 and 10.5.2.0 is leased, or holds addresses of nodes"
    );
}

/// If a subnet contains the LAN or the address of another node, other nodes set it aside, or are cut off by it.
pub async fn no_subnet_contains_addresses_of_nodes(shared: &impl SharedStore) {
    let store = shared.open();
    let net_conf = net_conf(24, "10.5.4.0");
    let lan = [("10.5.1.0/24".parse().unwrap(), "lan0".into())];
    let connected = Connected::new(&net_conf.networks, lan);
    let with = |last, ip: &str, previous| {
        let attrs = Attrs { public_ip: ip.parse().ok(), ..attrs(last) };
        LeaseRequest { attrs, net_conf: net_conf.clone(), previous, was: None, connected: connected.clone() }
    };
    // Of four subnets, the first is the LAN and the second contains the address of this node. It takes the fourth. A later node takes
    // the third.
    let own = store.acquire(&with(1, "10.5.2.9", Some(subnet("10.5.4.0/24")))).await.unwrap();
    assert_eq!(own.subnets, subnet("10.5.4.0/24"));
    let second = store.acquire(&with(2, "192.0.2.2", Some(subnet("10.5.1.0/24")))).await.unwrap();
    assert_eq!(second.subnets, subnet("10.5.3.0/24"), "not the one that it had, which lies over its LAN");
    let error = store.acquire(&with(3, "192.0.2.3", Some(subnet("10.5.2.0/24")))).await.unwrap_err();
    assert!(matches!(error, Error::OutOfSubnets { .. }), "{error}");
}

pub async fn an_incompatible_lease_is_deleted(shared: &impl SharedStore) {
    let store = shared.open();
    let old = store.acquire(&request(1)).await.unwrap();
    let longer = LeaseRequest { net_conf: net_conf(26, "10.5.255.0"), ..request(1) };
    let new = store.acquire(&longer).await.unwrap();
    assert_eq!(new.subnets.v4.unwrap().prefix_len(), 26);
    let left: Vec<_> = store.list().await.unwrap().into_iter().map(|record| record.id).collect();
    assert_eq!(left, [new.id]);
    assert_ne!(old.subnets, new.subnets);
}

pub async fn a_family_that_is_turned_on_or_off_leaves_the_subnet_of_the_other(shared: &impl SharedStore) {
    let store = shared.open();
    let single = store.acquire(&request(1)).await.unwrap();
    let net = "fd00:12::/48".parse().unwrap();
    let (min, max) = ("fd00:12:0:1::".parse().unwrap(), "fd00:12:0:18::".parse().unwrap());
    let mut dual = LeaseRequest { was: Some(attrs(1)), ..request(1) };
    dual.net_conf.networks.v6 = Some(net);
    dual.net_conf.v6 = Some(Range { network: net, len: 64, min, max });
    let both = store.acquire(&dual).await.unwrap();
    assert_eq!((both.subnets.v4, both.subnets.v6.is_some()), (single.subnets.v4, true));
    let again = store.acquire(&LeaseRequest { was: Some(attrs(1)), ..request(1) }).await.unwrap();
    assert_eq!(again.subnets, single.subnets);
    let left: Vec<_> = store.list().await.unwrap().into_iter().map(|record| record.id).collect();
    assert_eq!(left, [again.id]);
}

/// The pods of the node still use the lease that does not fit net-conf.
pub async fn a_lease_that_no_other_can_replace_is_kept(shared: &impl SharedStore) {
    let store = shared.open();
    let single = store.acquire(&request(1)).await.unwrap();
    let net = "fd00:12::/48".parse().unwrap();
    let only = "fd00:12:0:1::".parse().unwrap();
    let dual = |last| {
        let mut dual = LeaseRequest { was: Some(attrs(last)), ..request(last) };
        dual.net_conf.networks.v6 = Some(net);
        dual.net_conf.v6 = Some(Range { network: net, len: 64, min: only, max: only });
        dual
    };
    let other = shared.open_for(2).acquire(&dual(2)).await.unwrap();
    let error = store.acquire(&dual(1)).await.unwrap_err();
    assert!(matches!(error, Error::OutOfSubnets { .. }), "{error}");
    let ids = async || store.list().await.unwrap().into_iter().map(|record| record.id).collect::<BTreeSet<_>>();
    assert_eq!(ids().await, BTreeSet::from([single.id.clone(), other.id.clone()]));
    store.remove(&other.id).await.unwrap();
    let both = store.acquire(&dual(1)).await.unwrap();
    assert_eq!((both.subnets.v4, both.subnets.v6), (single.subnets.v4, other.subnets.v6));
    assert_eq!(ids().await, BTreeSet::from([both.id]), "the new one replaces the old one");
}

pub async fn many_leases_of_ours_are_replaced_by_one(shared: &impl SharedStore) {
    for number in 0..200 {
        shared.put(&format!("subnets/10.5.{number}.64-26"), &attrs(1).to_wire()).await;
    }
    let store = shared.open();
    let lease = store.acquire(&LeaseRequest { was: Some(attrs(1)), ..request(1) }).await.unwrap();
    let left: Vec<_> = store.list().await.unwrap().into_iter().map(|record| record.id).collect();
    assert_eq!(left, [lease.id]);
}

pub async fn nodes_that_start_together_get_distinct_subnets(shared: &impl SharedStore) {
    let tasks = tokio::task::LocalSet::new();
    // There are 24 subnets for 20 nodes, so collisions are certain.
    let racers: Vec<_> = (1..=20)
        .map(|last| {
            let store = shared.open();
            let request = LeaseRequest { net_conf: net_conf(24, "10.5.24.0"), ..request(last) };
            tasks.spawn_local(async move { store.acquire(&request).await.unwrap().subnets })
        })
        .collect();
    tasks.await;
    let mut got = BTreeSet::new();
    for racer in racers {
        got.insert(racer.await.unwrap());
    }
    assert_eq!(got.len(), 20);
    assert_eq!(shared.open().list().await.unwrap().len(), 20);
}

pub async fn dual_stack_nodes_that_start_together_share_no_subnet(shared: &impl SharedStore) {
    let net = "fd00:12::/48".parse().unwrap();
    let (min, max) = ("fd00:12:0:1::".parse().unwrap(), "fd00:12:0:18::".parse().unwrap());
    let tasks = tokio::task::LocalSet::new();
    for last in 1..=12 {
        let store = shared.open();
        let mut request = LeaseRequest { net_conf: net_conf(24, "10.5.24.0"), ..request(last) };
        request.net_conf.networks.v6 = Some(net);
        request.net_conf.v6 = Some(Range { network: net, len: 64, min, max });
        tasks.spawn_local(async move { store.acquire(&request).await.unwrap() });
    }
    tasks.await;
    let leases: Vec<_> = shared.open().list().await.unwrap().into_iter().map(|record| record.lease.unwrap()).collect();
    assert_eq!(leases.len(), 12);
    for (at, one) in leases.iter().enumerate() {
        assert!(leases[..at].iter().all(|other| !other.subnets.overlaps(&one.subnets)), "{}", one.id);
    }
}

pub async fn retakes_what_was_deleted(shared: &impl SharedStore) {
    let store = shared.open();
    let lease = store.acquire(&request(1)).await.unwrap();
    store.remove(&lease.id).await.unwrap();
    assert!(matches!(store.remove(&lease.id).await, Err(Error::Missing(_))));
    let again = store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.unwrap();
    assert_eq!((again.subnets, again.attrs), (lease.subnets, attrs(1)));
}

pub async fn retakes_only_what_is_ours(shared: &impl SharedStore) {
    let store = shared.open();
    let lease = store.acquire(&request(1)).await.unwrap();
    let moved = store.retake(&lease.subnets, &attrs(1), &attrs(7)).await.unwrap();
    assert_eq!(moved.attrs, attrs(7));
    assert_eq!(moved.age, lease.age, "a rewrite does not make it younger");
}

/// A lease that another address was published for belongs to another node. (In Kubernetes it belongs to the node with its name.)
pub async fn a_lease_with_another_address_is_not_retaken(shared: &impl SharedStore) {
    let store = shared.open();
    let lease = store.acquire(&request(1)).await.unwrap();
    store.retake(&lease.subnets, &attrs(1), &attrs(7)).await.unwrap();
    let error = store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.unwrap_err();
    assert!(matches!(&error, Error::Taken { owner, .. } if owner == "192.0.2.7"), "{error}");
}

/// Our lease is gone. A record of a larger subnet does not keep us from ours, because every node sets it aside. A lease of another node
/// that shares one half of ours does.
pub async fn only_a_lease_of_the_same_length_keeps_us_out(shared: &impl SharedStore) {
    let store = shared.open();
    shared.put("subnets/10.5.0.0-16", &attrs(9).to_wire()).await;
    shared.put("subnets/10.5.7.0-26", &attrs(8).to_wire()).await;
    let ours = subnet("10.5.7.0/24");
    assert_eq!(store.retake(&ours, &attrs(1), &attrs(1)).await.unwrap().subnets, ours);
    let dual = |v4: &str, v6: &str| Subnets { v4: v4.parse().ok(), v6: v6.parse().ok() };
    shared.put("subnets/10.5.8.0-24&fd00:12:0:8::-64", &attrs(9).to_wire()).await;
    for ours in [dual("10.5.8.0/24", "fd00:12:0:9::/64"), dual("10.5.9.0/24", "fd00:12:0:8::/64")] {
        let error = store.retake(&ours, &attrs(1), &attrs(1)).await.unwrap_err();
        assert!(matches!(&error, Error::Taken { owner, .. } if owner == "192.0.2.9"), "{error}");
    }
    let free = dual("10.5.9.0/24", "fd00:12:0:9::/64");
    assert_eq!(store.retake(&free, &attrs(1), &attrs(1)).await.unwrap().subnets, free);
    // Another lease of ours, which an earlier run left behind, does not keep us out, either.
    shared.put("subnets/10.5.10.0-24&fd00:12:0:a::-64", &attrs(1).to_wire()).await;
    let half = dual("10.5.10.0/24", "fd00:12:0:b::/64");
    assert_eq!(store.retake(&half, &attrs(1), &attrs(1)).await.unwrap().subnets, half);
}

/// Every node sets such a lease aside. So it takes no subnet, and ours does not give way to it although it is older.
pub async fn a_lease_outside_network_takes_no_subnet(shared: &impl SharedStore) {
    let store = shared.open();
    shared.put("subnets/10.0.0.0-8", &attrs(9).to_wire()).await;
    let only = LeaseRequest { net_conf: net_conf(24, "10.5.1.0"), ..request(1) };
    let lease = store.acquire(&only).await.unwrap();
    assert_eq!(lease.subnets, subnet("10.5.1.0/24"));
    let restarted = LeaseRequest { was: Some(attrs(1)), ..only };
    assert_eq!(shared.open().acquire(&restarted).await.unwrap(), lease);
}

/// It does not say that the subnet belongs to another node. But what cannot be read is not deleted as if it were certainly ours.
pub async fn an_unreadable_value_under_our_key_is_written_again_and_not_released(shared: &impl SharedStore) {
    let store = shared.open();
    let lease = store.acquire(&request(1)).await.unwrap();
    shared.put(&format!("subnets/{}", lease.id), "no lease").await;
    let error = store.release(&lease).await.unwrap_err();
    assert!(matches!(&error, Error::Taken { owner, .. } if owner == "an unreadable value"), "{error}");
    assert_eq!(store.list().await.unwrap().len(), 1);
    let again = store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.unwrap();
    assert_eq!((again.subnets, &again.attrs), (lease.subnets, &attrs(1)));
    assert_eq!(store.own(&booted(1)).await.unwrap(), Some(again));
}

pub async fn releases_only_what_is_ours(shared: &impl SharedStore) {
    let store = shared.open();
    let lease = store.acquire(&request(1)).await.unwrap();
    store.retake(&lease.subnets, &attrs(1), &attrs(2)).await.unwrap();
    assert!(matches!(store.release(&lease).await, Err(Error::Taken { .. })));
    let lease = store.own(&booted(2)).await.unwrap().unwrap();
    // Its record says something else now, and names our device all the same.
    let data = r#"{"VNI":2,"VtepMAC":"c6:d2:32:6f:8f:45"}"#;
    let changed = Attrs { backend_data: Some(data.into()), ..attrs(2) };
    store.retake(&lease.subnets, &attrs(2), &changed).await.unwrap();
    store.release(&lease).await.unwrap();
    assert!(matches!(store.release(&lease).await, Err(Error::Missing(_))));
    assert!(store.list().await.unwrap().is_empty());
}

/// If two nodes publish the same address, each keeps its own lease over restarts in any order.
pub async fn two_nodes_with_one_address_keep_their_own_leases(shared: &impl SharedStore) {
    let store = shared.open();
    let of = |last: u8| LeaseRequest { attrs: Attrs { public_ip: attrs(1).public_ip, ..attrs(last) }, ..request(last) };
    let first = store.acquire(&of(1)).await.unwrap();
    let second = shared.open_for(2).acquire(&of(2)).await.unwrap();
    assert_ne!(first.subnets, second.subnets, "the second node has a device of its own");
    let restarted = |lease: &Lease, last| LeaseRequest { previous: Some(lease.subnets), ..of(last) };
    for (lease, last) in [(&second, 2), (&first, 1), (&second, 2)] {
        let request = restarted(lease, last);
        assert_eq!(store.own(&Evidence::of(TYPES, lease.subnets, &lease.attrs)).await.unwrap().as_ref(), Some(lease));
        assert_eq!(store.acquire(&request).await.unwrap(), *lease);
        assert_eq!(store.retake(&lease.subnets, &lease.attrs, &request.attrs).await.unwrap(), *lease);
    }
    // The lease of the other node is neither rewritten nor released.
    let error = store.retake(&first.subnets, &second.attrs, &second.attrs).await.unwrap_err();
    let words =
        format!("subnet {} belongs to another node that publishes our address 192.0.2.1, too, now", first.subnets);
    assert_eq!(error.to_string(), words);
    let theirs = Lease { attrs: second.attrs.clone(), ..first.clone() };
    assert!(matches!(store.release(&theirs).await, Err(Error::Taken { .. })));
    // After a boot, nothing distinguishes the two nodes.
    let booted = Evidence { public: vec![(attrs(1).public_ip, None)], ..Evidence::none(TYPES) };
    assert_eq!(store.own(&booted).await.unwrap(), None, "it may be either one's");
    store.remove(&second.id).await.unwrap();
    let again = shared.open().acquire(&restarted(&second, 2)).await.unwrap();
    assert_eq!(again.subnets, second.subnets, "not the first one's, though it has our address");
    assert_eq!(store.list().await.unwrap().len(), 2);
}

/// Nodes of wireguard behind one NAT have one public address, and each has a port of its own. Nothing else distinguishes them after a boot.
pub async fn nodes_behind_one_nat_keep_their_own_leases(shared: &impl SharedStore) {
    let store = shared.open();
    let published = |last: u8, port: u16| {
        let key = weft_backends::wireguard_key::PublicKey([last; 32]);
        let backend_data = Some(format!(r#"{{"PublicKey":"{key}","Port":{port}}}"#).into());
        Attrs { backend_type: "wireguard".into(), backend_data, ..attrs(1) }
    };
    let of = |last: u8, port: u16| LeaseRequest { attrs: published(last, port), ..request(last) };
    let first = store.acquire(&of(1, 51820)).await.unwrap();
    let second = shared.open_for(2).acquire(&of(2, 51822)).await.unwrap();
    assert_ne!(first.subnets, second.subnets);
    let booted = |port| {
        let (public, ports) = (vec![(attrs(1).public_ip, None)], vec![[Some(port), None]]);
        Evidence { public, ports, ..Evidence::none(TYPES) }
    };
    assert_eq!(store.own(&booted(51820)).await.unwrap().as_ref(), Some(&first));
    assert_eq!(store.own(&booted(51822)).await.unwrap().as_ref(), Some(&second));
    assert_eq!(store.own(&booted(51823)).await.unwrap(), None, "a third node behind the NAT is new");
    // Each gets its own lease again although its key is another one now.
    let restarted = |lease: &Lease, last, port| LeaseRequest { was: Some(lease.attrs.clone()), ..of(last, port) };
    assert_eq!(shared.open_for(2).acquire(&restarted(&second, 7, 51822)).await.unwrap().subnets, second.subnets);
    assert_eq!(store.acquire(&restarted(&first, 8, 51820)).await.unwrap().subnets, first.subnets);
    assert_eq!(store.list().await.unwrap().len(), 2);
}

/// The address of a node changed while its agent was not running.
pub async fn a_renumbered_node_keeps_its_lease(shared: &impl SharedStore) {
    let store = shared.open();
    let lease = store.acquire(&request(1)).await.unwrap();
    let moved = Attrs { public_ip: attrs(9).public_ip, ..attrs(1) };
    let request = LeaseRequest { attrs: moved.clone(), previous: Some(lease.subnets), ..request(1) };
    let again = store.acquire(&request).await.unwrap();
    assert_eq!((again.subnets, &again.attrs, &again.age), (lease.subnets, &moved, &lease.age));
    assert_eq!(store.list().await.unwrap().len(), 1);
}

pub async fn changes_are_reported_in_order(shared: &impl SharedStore) {
    let (store, other) = (shared.open(), shared.open());
    let first = other.acquire(&request(1)).await.unwrap();
    watching(&*store, |mut events| async move {
        let limit = shared.patience();
        let records = first_list(&mut events, 1, limit).await;
        assert_eq!(records.iter().map(|record| &record.id).collect::<Vec<_>>(), [&first.id]);
        let second = shared.open_for(2).acquire(&request(2)).await.unwrap();
        let Event::Changes(changes) = next_within(&mut events, limit).await else { panic!("a change") };
        assert_eq!(changes.len(), 1);
        assert_eq!(changes[0].written().unwrap().lease.as_ref().unwrap(), &second);
        other.remove(&second.id).await.unwrap();
        let gone = |id: &Id| Event::Changes(vec![RecordChange::Removed(id.clone())]);
        assert_eq!(next_within(&mut events, limit).await, gone(&second.id));
        other.remove(&first.id).await.unwrap();
        // The directory store may report the removal of the second lease twice, if its host had no inotify instance and got one between
        // the removal and the reading that noticed it. The order of new changes is the same.
        let mut last = next_within(&mut events, limit).await;
        if last == gone(&second.id) {
            last = next_within(&mut events, limit).await;
        }
        assert_eq!(last, gone(&first.id));
    })
    .await;
}

pub async fn a_bad_entry_does_not_affect_others(shared: &impl SharedStore) {
    let store = shared.open();
    let good = store.acquire(&request(1)).await.unwrap();
    shared.put("subnets/garbage", "{}").await;
    shared.put("subnets/10.5.200.0-24", "no json").await;
    watching(&*store, |mut events| async move {
        for record in first_list(&mut events, 3, shared.patience()).await {
            assert_eq!(record.lease.is_ok(), record.id == good.id, "{record:?}");
        }
    })
    .await;
    let wanted = LeaseRequest { previous: Some(subnet("10.5.200.0/24")), ..request(2) };
    let other = shared.open_for(2).acquire(&wanted).await.unwrap();
    assert_ne!(other.subnets, subnet("10.5.200.0/24"), "its name says that it is taken");
}

pub async fn a_change_of_net_conf_is_reported(shared: &impl SharedStore) {
    let store = shared.open();
    assert!(matches!(store.config().await, Err(Error::NoNetConf { .. })));
    shared.put("config", r#"{"Network":"10.5.0.0/16"}"#).await;
    assert_eq!(store.config().await.unwrap(), r#"{"Network":"10.5.0.0/16"}"#);
    watching(&*store, |mut events| async move {
        assert!(matches!(next_within(&mut events, shared.patience()).await, Event::Snapshot { .. }));
        shared.put("config", r#"{"Network":"10.6.0.0/16"}"#).await;
        loop {
            // A file may be read while it is being written.
            match next_within(&mut events, shared.patience()).await {
                Event::Config(text) if text.is_empty() => {}
                event => {
                    assert_eq!(event, Event::Config(r#"{"Network":"10.6.0.0/16"}"#.into()));
                    break;
                }
            }
        }
    })
    .await;
}
