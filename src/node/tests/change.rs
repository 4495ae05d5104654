// SPDX-License-Identifier: Apache-2.0
//! Another backend while the agent runs: what the node writes into the kernel and into its lease, and in which order.

use std::io::ErrorKind;
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::state::{Key, Name, ObservedValue, Route, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::{Id, Lease, Record};
use weft_subnet::saved_peers::{Head, Saved};
use weft_subnet::source::{Event, LeaseRequest, RecordChange};

use super::tick::wake_ups;
use super::wireguard::head;
use super::{CONFIG, Cause, TestNode, VXLAN, lease, local, machine, vxlan_lease};
use crate::kernel::{Notice, Outcome, RouteInfo};
use crate::options::{OnLostLease, RuleOptions};
use crate::plan::{ExtraBackend, ParsedConf};

const VNI_7: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":7}}"#;
const PEER: &str = "10.5.2.0-24";

fn vxlan(vni: u32) -> Attrs {
    Attrs {
        public_ip: Some([192, 168, 0, 2].into()),
        backend_type: "vxlan".into(),
        backend_data: Some(format!(r#"{{"VNI":{vni},"VtepMAC":"02:00:00:00:00:02"}}"#).into()),
        ..Attrs::default()
    }
}

fn host_gw() -> Attrs {
    lease(PEER, "192.168.0.2").attrs
}

impl TestNode {
    /// The peer writes this into its lease.
    async fn peer_says(&mut self, attrs: Attrs) {
        let lease = Lease { attrs, ..lease(PEER, "192.168.0.2") };
        let record = Record { id: Id::from(PEER), lease: Ok(lease) };
        self.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record)])]).await;
        self.node.tick().await;
    }

    async fn net_conf(&mut self, text: &str) {
        self.node.store_changed(vec![Event::Config(text.to_owned())]).await;
        self.node.tick().await;
    }

    /// The store accepts what the node wants to write. Returns the type of the lease, its data and the types of its other ways.
    async fn accepted(&mut self) -> (String, String, Vec<String>) {
        self.answer().await;
        for _ in 0..3 {
            self.node.tick().await;
        }
        let attrs = self.node.plan.own().attrs.clone();
        let others = attrs.other_ways().into_iter().map(|way| way.backend_type).collect();
        (attrs.backend_type, attrs.backend_data.unwrap_or_default().into(), others)
    }

    /// Returns the device that the packets to the peer leave by.
    fn device(&self) -> String {
        self.device_to("10.5.2.0/24")
    }

    /// Returns the device that packets to this subnet leave by.
    fn device_to(&self, net: &str) -> String {
        let key = Key::Route(net.parse().unwrap(), 0);
        match self.kernel.entries().get(&key).map(|seen| seen.value.clone()) {
            Some(Value::Route(Route::Unicast { dev, .. })) => dev.to_string(),
            other => format!("{other:?}"),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.kernel.entries().get(&Key::Link(Name::new(name).unwrap())).is_some()
    }

    fn writes(&self) -> usize {
        self.store.retakes.borrow().len()
    }
}

#[tokio::test]
async fn the_device_stands_before_the_lease_names_it_and_packets_follow_the_lease_of_the_peer() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.net_conf(VXLAN).await;
        assert!(test.asked(1).await);
        let asked = test.store.retakes.borrow()[0].clone();
        assert_eq!((asked.backend_type.as_str(), test.has("flannel.1")), ("vxlan", true));
        assert_eq!(asked.other_ways().iter().map(|way| way.backend_type.as_str()).collect::<Vec<_>>(), ["host-gw"]);
        assert_eq!(test.device(), "eth0", "the lease of the peer names host-gw alone");
        // The peer has the new lease, too. It is not known yet whether it knows ours, which the store has not accepted.
        test.peer_says(vxlan(1).with_other_ways(&[host_gw()])).await;
        assert_eq!(test.device(), "eth0");
        let fdb = |key: &Key| matches!(key, Key::Fdb(..));
        assert!(
            test.kernel.entries().iter().any(|(key, _)| fdb(key)),
            "entries for the new way stand before its routes"
        );
        let (kind, data, _) = test.accepted().await;
        assert_eq!((kind.as_str(), data.contains(r#""VNI":1"#), test.device().as_str()), ("vxlan", true, "flannel.1"));
        // Nobody needs host-gw any more, and the grace time is over: the lease names vxlan alone.
        assert!(test.asked(2).await);
        assert_eq!(test.accepted().await.2, [""; 0]);
        assert_eq!((test.writes(), test.node.plan.is_changing(), test.node.plan.mtu()), (2, false, 1450));
        let env = std::fs::read_to_string(&test.file).unwrap();
        assert!(env.contains("FLANNEL_MTU=1450"), "{env}");
    })
    .await;
}

#[tokio::test]
async fn a_change_ends_although_the_store_publishes_the_address_that_an_administrator_chose() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.store.overwrite.set(Some([203, 0, 113, 7].into()));
        test.net_conf(VXLAN).await;
        assert!(test.asked(1).await);
        test.peer_says(vxlan(1).with_other_ways(&[host_gw()])).await;
        test.accepted().await;
        assert_eq!(test.node.plan.own().attrs.public_ip, Some([203, 0, 113, 7].into()));
        assert_eq!(test.device(), "flannel.1");
        assert!(test.asked(2).await);
        test.accepted().await;
        assert!(!test.node.plan.is_changing());
    })
    .await;
}

#[tokio::test]
async fn another_vni_is_a_change_with_two_devices_and_one_mac() {
    local(async {
        let mut test = of_vni_1();
        test.node.start(peer_of_vni_1()).await;
        test.answer().await;
        assert_eq!(test.device(), "flannel.1");
        let before = test.writes();
        test.net_conf(VNI_7).await;
        assert!(test.asked(before + 1).await);
        assert_eq!((test.has("flannel.1"), test.has("flannel.7"), test.device().as_str()), (true, true, "flannel.1"));
        let (_, data, others) = test.accepted().await;
        assert_eq!((data.as_str(), others.len()), (r#"{"VNI":7,"VtepMAC":"02:00:00:00:00:01"}"#, 1));
        assert!(
            test.node.change_warnings()[0].contains("1 nodes still need the earlier vxlan: 10.5.2.0-24 (192.168.0.2)")
        );
        test.peer_says(vxlan(7).with_other_ways(&[vxlan(1)])).await;
        assert_eq!(test.device(), "flannel.7");
        // Back again, before the earlier device went: it needs nothing new.
        assert_eq!(test.accepted().await.2, [""; 0]);
        test.net_conf(VXLAN).await;
        test.net_conf(VNI_7).await;
        assert_eq!(
            (test.device().as_str(), test.node.net_conf.text.as_str()),
            ("flannel.7", VNI_7),
            "packets never left VNI 7"
        );
        // The call that is open asks for VNI 1, and the next one for VNI 7 again.
        assert!(test.accepted().await.1.contains(r#""VNI":1"#));
        assert!(test.accepted().await.1.contains(r#""VNI":7"#));
        assert_eq!(test.device(), "flannel.7");
    })
    .await;
}

/// A node of VNI 1, whose peer has VNI 1, too.
fn of_vni_1() -> TestNode {
    TestNode::of_vxlan(vxlan_lease(), OnLostLease::Hold)
}

fn peer_of_vni_1() -> Vec<Event> {
    let records = vec![Record { id: PEER.into(), lease: Ok(Lease { attrs: vxlan(1), ..lease(PEER, "192.168.0.2") }) }];
    vec![Event::Snapshot { records, reset: false }]
}

/// A node that has changed to VNI 7. A net-conf that wants another port for VNI 1 waits until no peer needs the device of VNI 1.
async fn with_postponed_net_conf() -> TestNode {
    let mut test = of_vni_1();
    test.node.start(peer_of_vni_1()).await;
    test.answer().await;
    let before = test.writes();
    test.net_conf(VNI_7).await;
    assert!(test.asked(before + 1).await);
    test.accepted().await;
    test.net_conf(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":1,"Port":4789}}"#).await;
    test
}

#[tokio::test]
async fn a_net_conf_that_an_earlier_device_prevents_is_applied_when_that_device_goes() {
    local(async {
        let mut test = with_postponed_net_conf().await;
        let problem = test.node.net_conf.not_applied.clone().unwrap_or_default();
        assert!(problem.contains("cannot be applied while packets go through flannel.1"), "{problem}");
        test.peer_says(vxlan(7).with_other_ways(&[vxlan(1)])).await;
        test.accepted().await;
        assert_eq!(test.node.net_conf.not_applied, None, "no peer needs VNI 1 any more");
    })
    .await;
}

/// A node with a new disk knows nothing of the backends before. Its lease would go on naming one of them, and the peers would keep theirs for it.
#[tokio::test]
async fn a_start_that_knows_no_earlier_backend_takes_it_out_of_the_lease() {
    local(async {
        let mut own = lease("10.5.1.0-24", "192.168.0.1");
        own.attrs = own.attrs.with_other_ways(&[vxlan(1)]);
        let mut test = TestNode::of((CONFIG, own.clone()), OnLostLease::Hold, RuleOptions::default());
        test.node.full_pass(Cause::Start).await;
        let records = vec![Record { id: own.id.clone(), lease: Ok(own) }];
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        assert!(test.asked(1).await);
        assert_eq!(test.accepted().await.2, [""; 0]);
    })
    .await;
}

/// The agent ended before it knew whether the store had accepted its lease with the next backend, and starts while the store is away. Peers may
/// send by both backends.
#[tokio::test]
async fn without_the_store_both_backends_stand_and_packets_go_the_way_of_the_saved_lease() {
    local(async {
        let own = lease("10.5.1.0-24", "192.168.0.1");
        let mut test = TestNode::altered((VXLAN, own), OnLostLease::Hold, RuleOptions::default(), |started| {
            started.earlier = vec![ExtraBackend::new(ParsedConf::parse(CONFIG).unwrap(), started.host.clone())];
            let peer = Lease { attrs: vxlan(1).with_other_ways(&[host_gw()]), ..lease(PEER, "192.168.0.2") };
            started.saved = Some(Saved { head: head(&started.own), peers: vec![peer] });
        });
        test.node.start(Vec::new()).await;
        assert_eq!((test.has("flannel.1"), test.device().as_str()), (true, "eth0"));
        let has_fdb = test.kernel.entries().keys().any(|key| matches!(key, Key::Fdb(..)));
        assert!(has_fdb, "packets of the peer may come by vxlan");
        assert_eq!(test.renewals().await, (0, None), "the store has not said yet that the lease is still ours");
        // The store answers.
        test.answer().await;
        assert_eq!(
            test.renewals().await,
            (1, Some("10.5.9.0-24".to_owned())),
            "otherwise the lease would end after its time"
        );
        let LeaseRequest { attrs: asked, was, .. } = test.store.requests.borrow()[0].clone();
        assert_eq!((asked.backend_type.as_str(), asked.other_ways()[0].backend_type.as_str()), ("vxlan", "host-gw"));
        assert_eq!(was.map(|was| was.backend_type).as_deref(), Some("host-gw"));
        for _ in 0..3 {
            test.node.tick().await;
        }
        assert_eq!(test.device(), "flannel.1", "the peer can know our lease now");
    })
    .await;
}

#[tokio::test]
async fn an_earlier_backend_stays_until_the_leases_of_the_peers_are_known() {
    local(async {
        let mut test = of_vni_1();
        test.node.full_pass(crate::pass::Cause::Start).await;
        test.net_conf(VNI_7).await;
        assert!(test.asked(1).await);
        test.accepted().await;
        assert!(test.node.plan.is_changing(), "a peer may need VNI 1");
    })
    .await;
}

#[tokio::test]
async fn an_earlier_backend_stays_while_a_peer_prefers_it_although_packets_to_this_peer_go_the_new_way() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.net_conf(VXLAN).await;
        assert!(test.asked(1).await);
        test.peer_says(host_gw().with_other_ways(&[vxlan(1)])).await;
        assert_eq!(test.accepted().await.0, "vxlan");
        assert_eq!((test.device().as_str(), test.node.plan.is_changing()), ("flannel.1", true));
        // Without host-gw in our lease, the packets of this peer would have no way.
        test.peer_says(vxlan(1).with_other_ways(&[host_gw()])).await;
        assert!(test.asked(2).await);
        assert_eq!(test.accepted().await.2, [""; 0]);
        assert!(!test.node.plan.is_changing());
    })
    .await;
}

#[tokio::test]
async fn a_new_link_is_used_by_an_earlier_backend_too() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.net_conf(VXLAN).await;
        assert!(test.asked(1).await);
        assert_eq!(test.accepted().await.0, "vxlan");
        test.peer_says(Attrs { public_ip: Some([192, 168, 9, 2].into()), ..host_gw() }).await;
        assert_eq!(test.via("10.5.2.0/24"), None, "host-gw needs a common link with the peer");
        let mut with = machine("192.168.0.1");
        with.routes.push(RouteInfo { net: "192.168.9.0/24".parse().unwrap(), ..with.routes[1].clone() });
        test.kernel.set_machine(with);
        test.node.kernel_changed(vec![Notice::Routes]).await;
        assert_eq!(test.via("10.5.2.0/24"), Some([192, 168, 9, 2].into()));
    })
    .await;
}

/// host-gw needs a common link with the peer. Nothing shows before the change which peers have none.
#[tokio::test]
async fn a_peer_on_another_link_is_reached_by_vxlan_after_a_change_to_host_gw_and_its_node_is_named() {
    local(async {
        let (far, subnet) = ("10.5.3.0-24", "10.5.3.0/24");
        let far_vxlan = Attrs {
            public_ip: Some([192, 168, 9, 3].into()),
            backend_data: Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:03"}"#.into()),
            ..vxlan(1)
        };
        let far_is = |attrs: Attrs| Record { id: far.into(), lease: Ok(Lease { attrs, ..lease(far, "192.168.9.3") }) };
        let mut test = of_vni_1();
        let near_is = Record { id: PEER.into(), lease: Ok(Lease { attrs: vxlan(1), ..lease(PEER, "192.168.0.2") }) };
        let records = vec![near_is, far_is(far_vxlan.clone())];
        test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
        test.answer().await;
        let before = test.writes();
        test.net_conf(CONFIG).await;
        assert!(test.asked(before + 1).await);
        assert_eq!(test.accepted().await, ("host-gw".to_owned(), String::new(), vec!["vxlan".to_owned()]));
        // Both peers follow.
        let far_host_gw = lease(far, "192.168.9.3").attrs.with_other_ways(&[far_vxlan]);
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(far_is(far_host_gw))])]).await;
        test.peer_says(host_gw().with_other_ways(&[vxlan(1)])).await;
        assert_eq!((test.device().as_str(), test.via("10.5.2.0/24")), ("eth0", Some([192, 168, 0, 2].into())));
        assert_eq!(test.device_to(subnet), "flannel.1", "the first way that reaches the peer counts");
        let entries = test.kernel.entries();
        let far_address = Value::Fdb([192, 168, 9, 3].into());
        assert!(entries.iter().any(|(key, seen)| matches!(key, Key::Fdb(..)) && seen.value == far_address));
        let status = test.node.status();
        let named =
            "1 nodes still need the earlier vxlan: 10.5.3.0-24 (192.168.9.3). They are down, cannot use host-gw, ";
        assert!(status.problems.iter().any(|problem| problem.text.contains(named)), "{:?}", status.problems);
        assert_eq!((status.other_ways, test.writes()), (vec!["vxlan".to_owned()], before + 1));
        assert_eq!(test.node.plan.mtu(), 1450, "pods must not send larger packets than the tunnel carries");
        // This node gets a link to the network of the peer. Nobody needs vxlan any more.
        let mut with = machine("192.168.0.1");
        with.routes.push(RouteInfo { net: "192.168.9.0/24".parse().unwrap(), ..with.routes[1].clone() });
        test.kernel.set_machine(with);
        test.node.kernel_changed(vec![Notice::Routes]).await;
        assert_eq!(test.via(subnet), Some([192, 168, 9, 3].into()));
        assert!(test.asked(before + 2).await);
        assert_eq!((test.accepted().await.2, test.has("flannel.1")), (Vec::new(), false));
    })
    .await;
}

#[tokio::test]
async fn a_backend_that_cannot_work_here_is_reported_and_the_node_stays_on_the_old_one() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let link = Key::Link(Name::new("flannel.1").unwrap());
        test.kernel.fail(link, Some(Outcome::Retry("the kernel has no vxlan".into())));
        test.net_conf(VXLAN).await;
        let wanted = "net-conf: the backend vxlan cannot work on this node: link flannel.1: the kernel has no vxlan. The node stays on \
                      host-gw, and tries again";
        assert_eq!((test.node.net_conf.not_applied.as_deref(), test.writes()), (Some(wanted), 0));
        assert_eq!(test.node.device_problem(), None, "the node is ready with the backend that it has");
        // The store sends net-conf again when it is read again.
        let passes = test.kernel.observations();
        test.node.store_changed(vec![Event::Config(VXLAN.to_owned())]).await;
        assert_eq!(test.kernel.observations(), passes, "the change has begun already");
        // The peer can, and says how it is reached otherwise. Then it says only the new way.
        test.peer_says(vxlan(1).with_other_ways(&[host_gw()])).await;
        assert_eq!((test.device().as_str(), test.node.plan.mtu()), ("eth0", 1500));
        // The operator takes the change back.
        test.net_conf(CONFIG).await;
        assert_eq!((test.node.net_conf.not_applied.as_deref(), test.node.plan.is_changing()), (None, false));
        assert_eq!(test.device(), "eth0");
        // With the module, the next try succeeds.
        test.net_conf(VXLAN).await;
        test.kernel.fail(link, None);
        test.node.full_pass(crate::pass::Cause::Audit).await;
        assert!(test.asked(1).await);
        assert_eq!(test.node.net_conf.not_applied, None);
    })
    .await;
}

#[tokio::test]
async fn the_lease_does_not_name_the_next_backend_while_the_kernel_cannot_be_read() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.apply_net_conf(VXLAN);
        test.kernel.break_dumps(Some(ErrorKind::Interrupted));
        test.node.full_pass(Cause::Audit).await;
        assert_eq!((test.node.plan.net_conf().backend_type.as_str(), test.has("flannel.1")), ("host-gw", false));
        test.kernel.break_dumps(None);
        test.node.full_pass(Cause::Audit).await;
        assert_eq!((test.node.plan.net_conf().backend_type.as_str(), test.has("flannel.1")), ("vxlan", true));
    })
    .await;
}

/// The next backend looks at the devices of this machine for its identity.
#[tokio::test]
async fn a_change_that_began_while_the_kernel_could_not_be_read_is_tried_again() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.kernel.break_dumps(Some(ErrorKind::Interrupted));
        test.net_conf(VXLAN).await;
        test.node.full_pass(Cause::Audit).await;
        let problem = test.node.net_conf.not_applied.clone().unwrap_or_default();
        assert!(problem.starts_with("net-conf: the backend vxlan cannot work on this node: "), "{problem}");
        test.kernel.break_dumps(None);
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(test.node.net_conf.not_applied, None);
        assert_eq!(test.node.plan.net_conf().backend_type, "host-gw", "the device is not made yet");
        test.node.full_pass(Cause::Audit).await;
        assert_eq!((test.node.plan.net_conf().backend_type.as_str(), test.has("flannel.1")), ("vxlan", true));
    })
    .await;
}

#[tokio::test]
async fn the_earlier_backend_stays_while_a_peer_needs_it_and_for_the_grace_time() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.net_conf(VXLAN).await;
        test.accepted().await;
        assert_eq!(test.device(), "eth0", "the peer is down, or runs flannel");
        assert_eq!(test.node.status().other_ways, ["host-gw"]);
        test.net_conf(CONFIG).await;
        test.node.tick().await;
        assert!(test.has("flannel.1"), "its lease still names vxlan");
        let (grace, begin) = (Duration::from_millis(600), Instant::now());
        test.node.context.options.change_grace = grace;
        assert_eq!(test.accepted().await.0, "host-gw");
        while test.has("flannel.1") {
            assert!(begin.elapsed() < Duration::from_secs(60), "the device stays for ever");
            tokio::time::sleep(Duration::from_millis(5)).await;
            test.node.tick().await;
        }
        assert!(begin.elapsed() >= grace, "packets may still arrive until the grace time is over");
    })
    .await;
}

#[tokio::test]
async fn with_the_default_grace_time_wireguard_can_repeat_a_handshake_before_packets_need_it() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.context.options.change_grace = Duration::from_secs(60);
        test.net_conf(VXLAN).await;
        test.peer_says(vxlan(1).with_other_ways(&[host_gw()])).await;
        let begin = tokio::time::Instant::now();
        test.accepted().await;
        let step = test.node.next_step_of_change().expect("packets will go the new way");
        assert!(step - begin > Duration::from_millis(5_340), "the kernel repeats a handshake after at most 5.34 s");
        assert_eq!(test.device(), "eth0");
    })
    .await;
}

#[tokio::test]
async fn a_postponed_net_conf_that_was_taken_back_is_not_applied() {
    local(async {
        let mut test = with_postponed_net_conf().await;
        test.net_conf(VNI_7).await;
        // The device that prevented it goes.
        test.peer_says(vxlan(7).with_other_ways(&[vxlan(1)])).await;
        test.accepted().await;
        assert!(!test.has("flannel.1"));
        assert_eq!((test.node.net_conf.text.as_str(), test.node.plan.is_changing()), (VNI_7, false));
    })
    .await;
}

#[tokio::test]
async fn peers_get_their_time_anew_when_our_lease_has_to_be_written_again() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.context.options.change_grace = Duration::from_secs(60);
        test.net_conf(VXLAN).await;
        test.accepted().await;
        let first = test.node.next_step_of_change().expect("packets will go the new way");
        // Somebody writes our lease as it was. Peers cannot know yet that the new way works.
        let own = test.node.plan.own().clone();
        let theirs = Lease { attrs: lease(&own.id, "192.168.0.1").attrs, ..own };
        let record = Record { id: theirs.id.clone(), lease: Ok(theirs) };
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record)])]).await;
        assert_eq!(test.node.next_step_of_change(), None);
        // The lease is as it was before, so no pass follows.
        test.answer().await;
        assert!(test.node.next_step_of_change().is_some_and(|step| step > first));
    })
    .await;
}

#[tokio::test]
async fn the_grace_time_of_an_earlier_backend_begins_with_the_lease_of_its_last_user() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.net_conf(VXLAN).await;
        test.accepted().await;
        test.node.context.options.change_grace = Duration::from_secs(60);
        assert_eq!(test.node.next_step_of_change(), None, "the peer needs host-gw");
        let lease = Lease { attrs: vxlan(1).with_other_ways(&[host_gw()]), ..lease(PEER, "192.168.0.2") };
        let record = Record { id: Id::from(PEER), lease: Ok(lease) };
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record)])]).await;
        assert!(test.node.next_step_of_change().is_some(), "the node wakes up at its end");
    })
    .await;
}

/// Peers may not know the backend of a moment ago yet. The one before it never stopped.
#[tokio::test]
async fn a_change_that_is_taken_back_at_once_leaves_packets_where_they_were() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.net_conf(VXLAN).await;
        assert!(test.asked(1).await);
        test.peer_says(vxlan(1).with_other_ways(&[host_gw()])).await;
        assert_eq!(test.device(), "eth0");
        test.net_conf(CONFIG).await;
        assert_eq!((test.device().as_str(), test.node.net_conf.text.as_str()), ("eth0", CONFIG));
        // The call that was open has written the lease with vxlan.
        assert_eq!((test.accepted().await.0.as_str(), test.device().as_str()), ("vxlan", "eth0"));
        assert_eq!((test.accepted().await.0.as_str(), test.device().as_str()), ("host-gw", "eth0"));
    })
    .await;
}

#[tokio::test]
async fn a_backend_that_was_taken_back_stays_until_our_lease_no_longer_prefers_it() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.net_conf(VXLAN).await;
        assert!(test.asked(1).await);
        test.net_conf(CONFIG).await;
        // The peer has taken the change back, too, and has vxlan for as long as our lease names it.
        test.peer_says(host_gw().with_other_ways(&[vxlan(1)])).await;
        assert!(test.has("flannel.1"), "the open call asks for a lease that names vxlan first");
        assert_eq!(test.accepted().await.0, "vxlan");
        assert!(test.has("flannel.1"), "packets of the peer may come by vxlan");
        assert_eq!(test.accepted().await.0, "host-gw");
        assert_eq!((test.accepted().await.2, test.has("flannel.1")), (Vec::new(), false));
    })
    .await;
}

#[tokio::test]
async fn a_second_change_within_seconds_leaves_packets_on_the_first_backend_until_peers_know_the_others() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.net_conf(VXLAN).await;
        assert!(test.asked(1).await);
        test.peer_says(vxlan(1).with_other_ways(&[host_gw()])).await;
        test.net_conf(VNI_7).await;
        assert_eq!((test.device().as_str(), test.node.net_conf.text.as_str()), ("eth0", VNI_7));
        assert!(test.accepted().await.1.contains(r#""VNI":1"#));
        assert_eq!(test.device(), "eth0");
        let (_, data, others) = test.accepted().await;
        assert_eq!((data.contains(r#""VNI":7"#), others), (true, vec!["vxlan".to_owned(), "host-gw".to_owned()]));
        assert_eq!((test.device().as_str(), test.writes()), ("flannel.1", 2), "peers know all ways of our lease now");
        // And back to the second one, which is in use.
        test.net_conf(VXLAN).await;
        assert_eq!((test.device().as_str(), test.node.net_conf.text.as_str()), ("flannel.1", VXLAN));
    })
    .await;
}

/// The store accepted our lease a moment before the agent was started again.
#[tokio::test]
async fn a_restart_within_seconds_of_a_change_leaves_packets_where_they_were() {
    local(async {
        let mut own = vxlan_lease();
        own.attrs = own.attrs.with_other_ways(&[lease("10.5.1.0-24", "192.168.0.1").attrs]);
        let records =
            [own.clone(), Lease { attrs: vxlan(1).with_other_ways(&[host_gw()]), ..lease(PEER, "192.168.0.2") }];
        let mut test = TestNode::altered((VXLAN, own), OnLostLease::Hold, RuleOptions::default(), |started| {
            started.earlier = vec![ExtraBackend::new(ParsedConf::parse(CONFIG).unwrap(), started.host.clone())];
            started.sends_earlier = true;
        });
        test.node.context.options.change_grace = Duration::from_secs(60);
        let begin = Instant::now();
        let records = records.into_iter().map(|lease| Record { id: lease.id.clone(), lease: Ok(lease) }).collect();
        test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
        assert_eq!(test.device(), "eth0");
        let step = test.node.next_step_of_change().expect("packets will go the new way");
        assert!(step - begin > Duration::from_secs(5) && test.writes() == 0);
        test.node.continue_change(step);
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(test.device(), "flannel.1");
    })
    .await;
}

#[tokio::test]
async fn whether_packets_still_go_an_earlier_way_is_saved_at_once() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.context.options.change_grace = Duration::from_secs(60);
        let reader = test.saves();
        let saves = async |test: &mut TestNode, wanted: (&str, bool)| {
            // The next write of other changes would wait for half a minute.
            let deadline = Instant::now() + Duration::from_secs(25);
            let is_wanted = |head: Head| (head.own.attrs.backend_type.as_str(), head.sends_earlier) == wanted;
            while !reader.read_head().is_some_and(is_wanted) {
                assert!(Instant::now() < deadline, "{wanted:?} is not saved");
                test.node.tick().await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        saves(&mut test, ("host-gw", false)).await;
        test.net_conf(VXLAN).await;
        test.answer().await;
        saves(&mut test, ("vxlan", true)).await;
        let step = test.node.next_step_of_change().expect("packets will go the new way");
        test.node.continue_change(step);
        saves(&mut test, ("vxlan", false)).await;
    })
    .await;
}

/// The next backend has its device, but cannot be used.
#[tokio::test]
async fn the_device_of_a_backend_that_is_given_up_goes_although_net_conf_cannot_be_read() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let address = Key::Addr(Name::new("flannel.1").unwrap(), "10.5.1.0/32".parse().unwrap());
        test.kernel.fail(address, Some(Outcome::Fatal("not permitted".into())));
        test.net_conf(VXLAN).await;
        assert_eq!((test.has("flannel.1"), test.writes()), (true, 0));
        test.net_conf("{").await;
        assert!(!test.has("flannel.1"));
        assert!(test.node.net_conf.not_applied.as_ref().is_some_and(|problem| problem.contains("the new net-conf")));
    })
    .await;
}

/// Net-conf changed from host-gw to vxlan, the store accepted our lease with vxlan, and net-conf was changed back. The agent was killed
/// before it knew the one or the other. It begins where the peers are, and packets stay on the backend that they never left.
#[tokio::test(start_paused = true)]
async fn a_change_that_was_taken_back_while_the_agent_was_away_ends_with_the_first_backend() {
    local(async {
        let (grace, third) = (Duration::from_secs(60), "10.5.3.0-24");
        let mut own = vxlan_lease();
        own.attrs = own.attrs.with_other_ways(&[lease("10.5.1.0-24", "192.168.0.1").attrs]);
        let mut test = TestNode::altered((VXLAN, own.clone()), OnLostLease::Hold, RuleOptions::default(), |started| {
            started.earlier = vec![ExtraBackend::new(ParsedConf::parse(CONFIG).unwrap(), started.host.clone())];
            (started.sends_earlier, started.wanted) = (true, Some(CONFIG.to_owned()));
        });
        test.node.context.options.change_grace = grace;
        // One peer has not followed, and the other one has not read yet that the change was taken back.
        let still = vxlan(1).with_other_ways(&[host_gw()]);
        let still = Attrs { public_ip: Some([192, 168, 0, 3].into()), ..still };
        let peers = [lease(PEER, "192.168.0.2"), Lease { attrs: still, ..lease(third, "192.168.0.3") }];
        let leases = std::iter::once(own).chain(peers);
        let records = leases.map(|lease| Record { id: lease.id.clone(), lease: Ok(lease) }).collect();
        test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
        test.node.tick().await;
        let via = |test: &TestNode| [test.via("10.5.2.0/24"), test.via("10.5.3.0/24")];
        let reached = [2, 3].map(|last| Some([192, 168, 0, last].into()));
        assert_eq!((test.device().as_str(), via(&test)), ("eth0", reached));
        let may_send_by_vxlan = test.kernel.entries().keys().any(|key| matches!(key, Key::Fdb(..)));
        assert!(test.has("flannel.1") && may_send_by_vxlan, "the lease that peers know names vxlan");
        assert!(test.asked(1).await);
        assert_eq!(test.accepted().await, ("host-gw".to_owned(), String::new(), vec!["vxlan".to_owned()]));
        let record = Record { id: third.into(), lease: Ok(lease(third, "192.168.0.3")) };
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record)])]).await;
        wake_ups(&mut test, grace * 2).await;
        assert!(test.asked(2).await);
        assert_eq!(test.accepted().await, ("host-gw".to_owned(), String::new(), Vec::new()));
        assert_eq!((test.has("flannel.1"), test.node.plan.is_changing(), via(&test)), (false, false, reached));
        assert_eq!(test.node.net_conf.not_applied, None);
    })
    .await;
}

/// Otherwise packets of a peer that went back for a while would be lost when it follows again.
#[tokio::test(start_paused = true)]
async fn the_grace_time_of_an_earlier_backend_begins_anew_when_a_peer_needed_it_meanwhile() {
    local(async {
        let grace = Duration::from_secs(60);
        let followed = || vxlan(1).with_other_ways(&[host_gw()]);
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.net_conf(VXLAN).await;
        test.accepted().await;
        test.node.context.options.change_grace = grace;
        test.peer_says(followed()).await;
        test.peer_says(host_gw()).await;
        wake_ups(&mut test, grace * 2).await;
        assert!(test.has("flannel.1") && test.node.plan.is_changing(), "the peer needs host-gw");
        test.peer_says(followed()).await;
        wake_ups(&mut test, grace - Duration::from_secs(1)).await;
        assert!(test.node.plan.is_changing(), "packets of the peer may still come by host-gw");
        wake_ups(&mut test, Duration::from_secs(2)).await;
        assert!(!test.node.plan.is_changing());
    })
    .await;
}

/// Peers that have read our lease as it is in the store know only the earlier way.
#[tokio::test]
async fn packets_go_the_earlier_way_while_our_lease_with_the_new_one_cannot_be_written() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.own_lease.lost = Some("subnet 10.5.1.0/24 belongs to 192.168.0.7 now".to_owned());
        test.net_conf(VXLAN).await;
        assert!(test.asked(0).await, "a lease that is lost is not written");
        assert_eq!(test.node.plan.net_conf().backend_type, "vxlan");
        test.peer_says(vxlan(1).with_other_ways(&[host_gw()])).await;
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(test.device(), "eth0");
    })
    .await;
}

/// It is as this agent would make it, so there is nothing to write that could be refused.
#[tokio::test]
async fn a_device_of_another_agent_does_not_count_as_that_of_the_next_backend() {
    local(async {
        let ipip = CONFIG.replace("host-gw", "ipip");
        let (link, own) = (Key::Link(Name::new("flannel.ipip").unwrap()), lease("10.5.1.0-24", "192.168.0.1"));
        let mut other = TestNode::of((&ipip, own), OnLostLease::Hold, RuleOptions::default());
        other.node.full_pass(Cause::Start).await;
        let made = other.kernel.entries().get(&link).cloned().expect("a device");
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.kernel.disturb(link, Some(ObservedValue { mark: false, ..made }), false);
        test.net_conf(&ipip).await;
        assert!(test.asked(0).await, "peers would send to the other agent");
        let problem = test.node.net_conf.not_applied.clone().unwrap_or_default();
        assert!(problem.contains("another program made the device flannel.ipip"), "{problem}");
    })
    .await;
}
