// SPDX-License-Identifier: Apache-2.0
//! A node with WireGuard: its peers are compared often, because the kernel does not announce their changes.

use std::os::unix::fs::PermissionsExt;

use tokio::time::Instant;
use weft_backends::host::Host;
use weft_backends::identity::Secrets;
use weft_backends::state::ObservedValue;
use weft_backends::wireguard_key::PublicKey;
use weft_backends::wireguard_peer::WgPeer;
use weft_subnet::outside::wall_clock;
use weft_subnet::saved_peers::{Expiry, Head, Saved};

use super::saved::{save_all, until};
use super::*;
use crate::kernel::{Kernel, Outcome, Session};
use crate::observe::socket::{NoNewKey, Request};

const WIREGUARD: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard"}}"#;

fn with_key(key: &str, ip: &str, public: u8) -> Record {
    let mut lease = lease(key, ip);
    lease.attrs.backend_type = "wireguard".into();
    let public = PublicKey([public; 32]);
    lease.attrs.backend_data = Some(format!(r#"{{"PublicKey":"{public}","Port":51820}}"#).into());
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

async fn ready() -> TestNode {
    ready_with(WIREGUARD).await
}

async fn ready_with(conf: &str) -> TestNode {
    let own = with_key("10.5.1.0-24", "192.168.0.1", 1);
    let mut test = TestNode::of((conf, own.lease.clone().unwrap()), OnLostLease::Hold, RuleOptions::default());
    let records = vec![own, with_key("10.5.2.0-24", "192.168.0.2", 2)];
    test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
    test
}

fn peer() -> Key {
    Key::WgPeer(Name::new("flannel-wg").unwrap(), PublicKey([2; 32]).id())
}

#[tokio::test]
async fn a_peer_that_somebody_removed_comes_back_when_its_audit_is_due() {
    local(async {
        let mut test = ready().await;
        assert!(test.kernel.entries().contains_key(&peer()));
        assert_eq!(test.node.status().wireguard_audit_s, None, "nothing is compared yet");
        test.node.tick().await;
        assert_eq!(test.node.status().wireguard_audit_s, Some(3.0));
        let due = test.node.wireguard.next().expect("peers are compared from now on");
        assert!(test.node.next_wake().is_some_and(|wake| wake <= due));
        test.kernel.disturb(peer(), None, false);
        test.node.audit_wireguard(due - Duration::from_millis(1)).await;
        assert!(!test.kernel.entries().contains_key(&peer()), "not yet");
        test.node.audit_wireguard(due).await;
        assert!(test.kernel.entries().contains_key(&peer()));
        assert!(test.node.wireguard.next().is_some_and(|next| next > Instant::now()));
    })
    .await;
}

#[tokio::test]
async fn a_peer_that_somebody_removes_again_and_again_is_left_to_a_full_pass_that_comes_soon() {
    local(async {
        let mut test = ready().await;
        test.node.tick().await;
        for repair in 1..=4 {
            assert!(test.node.schedule.next_audit > Instant::now() + Duration::from_secs(60), "repair {repair}");
            test.kernel.disturb(peer(), None, false);
            let due = test.node.wireguard.next().expect("peers are compared");
            test.node.audit_wireguard(due).await;
            assert_eq!(test.kernel.entries().contains_key(&peer()), repair < 4, "repair {repair}");
        }
        assert!(test.node.schedule.next_audit <= Instant::now() + Duration::from_secs(1));
    })
    .await;
}

#[tokio::test]
async fn peers_that_somebody_added_are_removed_when_their_audit_is_due() {
    local(async {
        let mut test = ready().await;
        test.node.tick().await;
        let due = test.node.wireguard.next().expect("peers are compared from now on");
        let before = test.kernel.entries();
        let Some(ObservedValue { value: Value::WgPeer(ours), .. }) = before.get(&peer()) else { panic!("{before:?}") };
        // One is before our peer in the order of keys, and one after it.
        for key in [1, 7].map(|number| PublicKey([number; 32])) {
            let value = Value::peer(WgPeer { key, ..(**ours).clone() });
            let added = ObservedValue { value, protocol: 0, mark: false };
            test.kernel.disturb(Key::WgPeer(Name::new("flannel-wg").unwrap(), key.id()), Some(added), false);
        }
        assert_eq!(test.kernel.entries().len(), before.len() + 2);
        test.node.audit_wireguard(due).await;
        assert_eq!(test.kernel.entries(), before);
    })
    .await;
}

#[tokio::test]
async fn a_node_without_such_a_device_does_not_wake_up_for_it() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.tick().await;
        assert_eq!(test.node.wireguard.next(), None);
    })
    .await;
}

#[tokio::test]
async fn the_traffic_with_a_peer_is_shown_beside_it() {
    local(async {
        let mut test = ready().await;
        let session = Session {
            device: Name::new("flannel-wg").unwrap(),
            peer: PublicKey([2; 32]).id(),
            endpoint: None,
            handshake: None,
            received: 7,
            sent: 8,
        };
        test.kernel.set_sessions(vec![session.clone()]);
        let peers = test.node.status().peers;
        let [shown] = &peers[0].sessions[..] else { panic!("{peers:?}") };
        assert_eq!((shown.device.as_str(), shown.handshake_s, shown.received, shown.sent), ("flannel-wg", None, 7, 8));
        assert_eq!(test.node.passer.kernel().sessions(&[]).unwrap(), [], "only of the devices that are asked for");
        let handshake = Some(wall_clock() - Duration::from_secs(90));
        let endpoint = Some("203.0.113.9:1024".parse().unwrap());
        test.kernel.set_sessions(vec![Session { endpoint, handshake, ..session.clone() }]);
        let shown = test.node.status().peers[0].sessions[0].clone();
        assert_eq!(shown.endpoint.as_deref(), Some("203.0.113.9:1024"));
        assert!(shown.handshake_s.is_some_and(|age| (90..150).contains(&age)), "{shown:?}");
        assert_eq!(shown.handshake_ahead_s, 0);
        let handshake = Some(wall_clock() + Duration::from_secs(600));
        test.kernel.set_sessions(vec![Session { handshake, ..session }]);
        let shown = test.node.status().peers[0].sessions[0].clone();
        assert!((540..=600).contains(&shown.handshake_ahead_s), "the clock was set back: {shown:?}");
    })
    .await;
}

/// The plan and everything that is shown of a node contain no secret. Of these, the saved peers contain the preshared key alone, because it is a
/// part of net-conf, and only root reads that file.
#[tokio::test]
async fn entries_and_status_contain_no_secret() {
    local(async {
        let preshared = Secret::new([7; 32]);
        let conf = WIREGUARD.replace("}}", &format!(r#","PSK":"{}"}}}}"#, preshared.to_base64()));
        let mut test = ready_with(&conf).await;
        let secrets = test.node.plan.secrets().expect("there are some");
        let given = test.kernel.secrets().expect("the kernel side gets them");
        assert_eq!(given, secrets);
        assert_eq!(secrets.preshared.as_deref(), Some(&preshared));
        let forms = |secret: &Secret| [format!("{:?}", secret.expose()), secret.to_base64()];
        let (private, of_net_conf) = (forms(&secrets.private), forms(&preshared));
        let status = format!("{:?}", test.node.status());
        let entries = format!("{:?} {:?}", test.kernel.entries(), test.node.plan.host());
        for shown in [status, entries, format!("{secrets:?}")] {
            assert!(!private.iter().chain(&of_net_conf).any(|secret| shown.contains(secret)), "{shown}");
        }
        let reader = test.saves();
        save_all(&mut test).await;
        until(|| reader.read().is_ok_and(|saved| saved.is_some())).await;
        let saved = std::fs::read_to_string(reader.file()).unwrap();
        assert!(saved.contains(&of_net_conf[1]), "net-conf is saved as a whole: {saved}");
        assert!(!private.iter().any(|secret| saved.contains(secret)), "{saved}");
        assert_eq!(std::fs::metadata(reader.file()).unwrap().permissions().mode() & 0o777, 0o600);
    })
    .await;
}

/// A node whose lease names its key, which is in files.
async fn with_key_files() -> TestNode {
    let mut own = with_key("10.5.1.0-24", "192.168.0.1", 1).lease.unwrap();
    let key = weft_backends::wireguard_key::KeyPair::of(weft_backends::wireguard_key::Secret::new([1; 32]));
    own.attrs.backend_data = Some(format!(r#"{{"PublicKey":"{}","Port":51820}}"#, key.public_key()).into());
    let mut test = TestNode::of((WIREGUARD, own.clone()), OnLostLease::Hold, RuleOptions::default());
    let dir = test.file.parent().unwrap();
    test.node.context.secrets =
        acquire::SecretFiles::new(Some(&dir.join("state"))).with_wireguard_keys(&dir.join("wgkey"), &test.file);
    std::fs::write(dir.join("wgkey"), key.private().to_base64()).unwrap();
    let records = vec![Record { id: own.id.clone(), lease: Ok(own) }, with_key("10.5.2.0-24", "192.168.0.2", 2)];
    test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
    test
}

pub(super) fn rotate(test: &mut TestNode) -> tokio::sync::oneshot::Receiver<Result<String, NoNewKey>> {
    let (reply, answer) = tokio::sync::oneshot::channel();
    test.node.answer(Request::RotateKey(reply));
    answer
}

/// The device would have the new key, and our lease could not name it before the pause of the contest is over.
#[tokio::test(start_paused = true)]
async fn the_key_does_not_change_while_somebody_else_writes_our_lease_again_and_again() {
    local(async {
        let mut test = with_key_files().await;
        let ours = test.node.plan.own().clone();
        let attrs = Attrs { public_ip: "192.168.0.9".parse().ok(), ..ours.attrs.clone() };
        let theirs = Lease { attrs, ..ours.clone() };
        let written = |lease: &Lease| {
            let record = Record { id: lease.id.clone(), lease: Ok(lease.clone()) };
            vec![Event::Changes(vec![RecordChange::Written(record)])]
        };
        for number in 1..=3 {
            test.node.store_changed(written(&theirs)).await;
            assert!(test.asked(number).await, "write {number}");
            test.answer().await;
            test.node.store_changed(written(&ours)).await;
        }
        test.node.store_changed(written(&theirs)).await;
        assert!(test.node.contest_problem().is_some() && test.asked(3).await, "the pause has begun");
        let said = rotate(&mut test).try_recv().expect("an answer").unwrap_err().to_string();
        assert!(said.contains("try again when the node is ready"), "{said}");
    })
    .await;
}

/// The public key of the device.
fn device_key(test: &TestNode) -> String {
    let entries = test.kernel.entries();
    entries
        .get(&Key::Link(Name::new("flannel-wg").unwrap()))
        .unwrap()
        .value
        .to_string()
        .rsplit_once(" key ")
        .unwrap()
        .1
        .split(' ')
        .next()
        .unwrap()
        .to_owned()
}

fn key_files(test: &TestNode) -> Vec<String> {
    let state = test.file.parent().unwrap().join("state");
    let files = std::fs::read_dir(state).into_iter().flatten().flatten().map(|file| file.path());
    let mut all: Vec<_> = files.chain([test.file.with_file_name("wgkey")]).collect();
    all.sort();
    all.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect()
}

#[tokio::test]
async fn a_new_key_is_in_the_device_before_the_lease_and_in_the_files_after_it() {
    local(async {
        let mut test = with_key_files().await;
        let (before, files) = (device_key(&test), key_files(&test));
        let mut answer = rotate(&mut test);
        assert!(rotate(&mut test).await.unwrap().unwrap_err().to_string().contains("under way already"));
        assert!(test.asked(1).await);
        assert_eq!(device_key(&test), before, "nothing changes before the store has answered once");
        assert_eq!(key_files(&test), files, "a restart must not find a key that nobody knows");
        assert!(test.store.retakes.borrow()[0].backend_data.as_deref().unwrap().contains(&before));
        test.answer().await;
        let new = device_key(&test);
        assert_ne!(new, before);
        assert!(test.asked(2).await);
        assert!(test.store.retakes.borrow()[1].backend_data.as_deref().unwrap().contains(&new));
        assert!(answer.try_recv().is_err(), "the store has not accepted it yet");
        assert!(key_files(&test).iter().any(|file| files.contains(file)), "the old key is kept until then");
        test.answer().await;
        assert_eq!(answer.await.unwrap().unwrap(), new);
        let kept = key_files(&test);
        assert_eq!(kept.len(), 2, "{kept:?}");
        assert!(kept[0] == kept[1] && !files.contains(&kept[0]));
        assert_eq!(test.kernel.entries().keys().filter(|key| matches!(key, Key::WgPeer(..))).count(), 1);
    })
    .await;
}

#[tokio::test]
async fn the_key_stays_if_the_store_does_not_answer() {
    local(async {
        let mut test = with_key_files().await;
        let (before, files) = (device_key(&test), key_files(&test));
        let answer = rotate(&mut test);
        let due = test.node.key_change.as_ref().and_then(crate::node::key_change::KeyChange::next).unwrap();
        test.node.sysctls.next_check = due + Duration::from_secs(3600);
        assert_eq!(test.node.next_wake(), Some(due), "the node wakes up for it");
        test.node.key_change_due(due);
        assert!(answer.await.unwrap().unwrap_err().to_string().contains("The key stays as it is"));
        test.answer().await;
        assert_eq!((device_key(&test), key_files(&test)), (before.clone(), files));
        // The store answers once, and then no more.
        let answer = rotate(&mut test);
        test.answer().await;
        let due = test.node.key_change.as_ref().and_then(crate::node::key_change::KeyChange::next).unwrap();
        test.node.key_change_due(due);
        assert!(answer.await.unwrap().unwrap_err().to_string().contains("the new key is in use"));
        test.answer().await;
        assert_ne!(device_key(&test), before);
        let kept = key_files(&test);
        assert!(kept.len() == 2 && kept[0] == kept[1], "the change ends when the store answers: {kept:?}");
    })
    .await;
}

#[tokio::test]
async fn only_wireguard_has_a_key_that_can_be_changed() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        assert!(rotate(&mut test).await.unwrap().unwrap_err().to_string().contains("only wireguard has one"));
        test.node.store.error = Some("etcd is away".into());
        assert!(rotate(&mut test).await.unwrap().unwrap_err().to_string().contains("etcd is away"));
        test.node.store.error = None;
        test.node.own_lease.error = Some("permission denied".into());
        assert!(rotate(&mut test).await.unwrap().unwrap_err().to_string().contains("the own lease is being written"));
        test.node.own_lease.error = None;
        test.node.own_lease.lost = Some("another node has it".into());
        assert!(rotate(&mut test).await.unwrap().unwrap_err().to_string().contains("or is lost"));
        test.node.own_lease.lost = None;
        test.node.own_lease.missing = Some("it is gone");
        assert!(rotate(&mut test).await.unwrap().unwrap_err().to_string().contains("the own lease is being written"));
        test.node.own_lease.missing = None;
        // The node has another address, and the store has not accepted that yet.
        test.kernel.set_machine(machine("192.168.0.3"));
        test.node.full_pass(Cause::Kernel).await;
        assert!(rotate(&mut test).await.unwrap().unwrap_err().to_string().contains("the own lease is being written"));
        test.node.change.wanted = Some(WIREGUARD.into());
        assert!(rotate(&mut test).await.unwrap().unwrap_err().to_string().contains("the backend changes"));
    })
    .await;
}

#[tokio::test]
async fn the_key_stays_if_the_kernel_refuses_the_new_one() {
    local(async {
        let mut test = with_key_files().await;
        let (before, files) = (device_key(&test), key_files(&test));
        let answer = rotate(&mut test);
        assert!(test.asked(1).await);
        let device = Key::Link(Name::new("flannel-wg").unwrap());
        test.kernel.fail(device, Some(Outcome::Retry("device or resource busy".into())));
        test.answer().await;
        let said = answer.await.unwrap().unwrap_err().to_string();
        assert!(said.contains("the kernel has not accepted the new key: device or resource busy"), "{said}");
        test.kernel.fail(device, None);
        test.node.full_pass(Cause::Audit).await;
        assert_eq!((device_key(&test), key_files(&test)), (before, files), "the key that our lease names");
        assert!(test.asked(1).await, "nobody is told of another key");
    })
    .await;
}

/// The device has the new key, and goes on with its port.
#[tokio::test]
async fn the_key_changes_although_the_port_is_refused() {
    local(async {
        let mut test = with_key_files().await;
        let (before, answer) = (device_key(&test), rotate(&mut test));
        assert!(test.asked(1).await);
        let missing = "the port is taken".to_owned();
        let refused = Outcome::Partly { missing, retry: true, works: true };
        test.kernel.fail(Key::Link(Name::new("flannel-wg").unwrap()), Some(refused));
        test.answer().await;
        assert!(test.asked(2).await);
        assert!(!test.store.retakes.borrow()[1].backend_data.as_deref().unwrap().contains(&before));
        test.answer().await;
        assert!(answer.await.unwrap().is_ok());
    })
    .await;
}

/// A net-conf that was refused is tried again at the end of each pass, also of the one that gives the device the new key.
#[tokio::test]
async fn a_net_conf_that_is_applied_meanwhile_publishes_no_key_that_the_kernel_refuses() {
    local(async {
        let mut test = with_key_files().await;
        let (before, files) = (device_key(&test), key_files(&test));
        let answer = rotate(&mut test);
        assert!(test.asked(1).await);
        let wider = WIREGUARD.replace("10.5.0.0/16", "10.4.0.0/15");
        test.node.change.tried_again = Some(wider.clone());
        let device = Key::Link(Name::new("flannel-wg").unwrap());
        test.kernel.fail(device, Some(Outcome::Retry("device or resource busy".into())));
        test.answer().await;
        assert!(answer.await.unwrap().unwrap_err().to_string().contains("the kernel has not accepted the new key"));
        assert_eq!(test.node.net_conf.text, wider);
        assert!(test.asked(1).await, "nobody is told of another key");
        test.kernel.fail(device, None);
        test.node.full_pass(Cause::Audit).await;
        assert_eq!((device_key(&test), key_files(&test)), (before, files));
    })
    .await;
}

#[tokio::test]
async fn a_late_answer_with_the_old_key_does_not_end_the_change() {
    local(async {
        let mut test = with_key_files().await;
        let (old, files) = (test.node.plan.own().clone(), key_files(&test));
        let mut answer = rotate(&mut test);
        test.answer().await;
        test.node.lease_answered(LeaseAnswer::Held(old)).await;
        assert!(answer.try_recv().is_err(), "the store does not hold the new key yet");
        assert!(key_files(&test).iter().any(|file| files.contains(file)), "the old key is kept until then");
    })
    .await;
}

/// Starts the agent again on this host, with this key and this lease of it. It finds the files. `saved` is given if the store is away.
fn started_again(test: TestNode, key: &KeyPair, own: Lease, saved: Option<Saved>) -> TestNode {
    let host = Host { identities: key.clone().both(), ..test.node.plan.host().clone() };
    test.again(Started { saved, ..start_with(WIREGUARD, host, own) })
}

fn pair(byte: u8) -> KeyPair {
    KeyPair::of(Secret::new([byte; 32]))
}

fn naming(own: &Lease, pair: &KeyPair) -> Lease {
    let data = format!(r#"{{"PublicKey":"{}","Port":51820}}"#, pair.public_key());
    Lease { attrs: Attrs { backend_data: Some(data.into()), ..own.attrs.clone() }, ..own.clone() }
}

/// A node with the key 1 that an earlier run was about to replace by the key 2.
async fn changing() -> TestNode {
    let test = with_key_files().await;
    let [_, kept] = &test.node.context.secrets.wireguard_key_files()[..] else { panic!() };
    std::fs::create_dir_all(kept.parent().unwrap()).unwrap();
    std::fs::write(kept, pair(1).private().to_base64()).unwrap();
    std::fs::write(kept.with_added_extension("next"), pair(2).private().to_base64()).unwrap();
    test
}

#[tokio::test]
async fn a_change_of_the_key_that_an_earlier_run_left_ends_as_the_lease_in_the_store_says() {
    local(async {
        for byte in [1, 2] {
            let (test, key) = (changing().await, pair(byte));
            let own = naming(test.node.plan.own(), &key);
            let test = started_again(test, &key, own, None);
            assert_eq!(key_files(&test), [key.private().to_base64(), key.private().to_base64()]);
        }
    })
    .await;
}

/// What an earlier run wrote may have reached the store although its answer was lost. So leases with both keys are ours.
#[tokio::test]
async fn without_the_store_both_keys_stay_until_it_has_accepted_the_lease() {
    local(async {
        for byte in [1, 2] {
            let (test, key) = (changing().await, pair(byte));
            let (own, files) = (naming(test.node.plan.own(), &key), key_files(&test));
            let peers = test.node.plan.peers().believed().map(|lease| (**lease).clone()).collect();
            let saved = Some(Saved { head: head(&own), peers });
            let mut test = started_again(test, &key, own.clone(), saved);
            assert!(rotate(&mut test).await.unwrap().unwrap_err().to_string().contains("under way already"));
            assert_eq!((key_files(&test), files.len()), (files, 3));
            test.answer().await;
            let asked = test.store.requests.borrow().last().cloned().unwrap();
            assert_eq!((asked.attrs, asked.was), (own.attrs.clone(), Some(naming(&own, &pair(2)).attrs)));
            assert_eq!(key_files(&test), [key.private().to_base64(), key.private().to_base64()]);
            let next = rotate(&mut test);
            test.answer().await;
            test.answer().await;
            assert_eq!(next.await.unwrap().unwrap(), device_key(&test), "the next change begins as usual");
        }
    })
    .await;
}

/// What an earlier run with this lease saved.
pub(super) fn head(own: &Lease) -> Head {
    Head {
        store: "script".into(),
        saved: 1,
        expires: Expiry::Never,
        config: WIREGUARD.into(),
        earlier: Vec::new(),
        sends_earlier: false,
        own: own.clone(),
        public: (own.attrs.public_ip, None),
        chosen: [None, None],
        uplink: None,
        clear_text: None,
    }
}

/// Until then the file of the change has the only copy of the key that our lease names.
#[tokio::test]
async fn the_key_is_not_changed_again_before_all_its_files_are_written() {
    local(async {
        let mut test = with_key_files().await;
        let [flannels, kept] = &test.node.context.secrets.wireguard_key_files()[..] else { panic!() };
        let (flannels, kept) = (flannels.clone(), kept.clone());
        // A directory cannot be replaced by a file.
        std::fs::remove_file(&flannels).unwrap();
        std::fs::create_dir(&flannels).unwrap();
        let answer = rotate(&mut test);
        test.answer().await;
        test.answer().await;
        let second = answer.await.unwrap().unwrap();
        let private = test.node.plan.secrets().unwrap().private.to_base64();
        let read = |file: &std::path::Path| std::fs::read_to_string(file).ok();
        for file in [&kept, &kept.with_added_extension("next")] {
            assert_eq!(read(file).as_ref(), Some(&private), "{}", file.display());
        }
        let refused = rotate(&mut test).await.unwrap().unwrap_err().to_string();
        assert!(refused.contains("there is no new key: cannot write the private key of WireGuard to"), "{refused}");
        assert_eq!((read(&kept), device_key(&test)), (Some(private), second.clone()));
        std::fs::remove_dir(&flannels).unwrap();
        let answer = rotate(&mut test);
        test.answer().await;
        test.answer().await;
        assert_ne!(answer.await.unwrap().unwrap(), second);
        let private = test.node.plan.secrets().unwrap().private.to_base64();
        assert_eq!(key_files(&test), [private.clone(), private]);
    })
    .await;
}

/// Returns the type of the lease that the node asked for last, and the key of wireguard among its other ways.
fn asked_last(test: &TestNode) -> (String, Option<String>) {
    let attrs = test.store.retakes.borrow().last().cloned().unwrap();
    let data =
        attrs.other_ways().into_iter().find(|way| way.backend_type == "wireguard").and_then(|way| way.backend_data);
    let key = data.map(|data| data.split('"').nth(3).unwrap().to_owned());
    (attrs.backend_type, key)
}

#[tokio::test]
async fn another_backend_ends_a_change_of_the_key_that_has_changed_nothing_yet() {
    local(async {
        let mut test = with_key_files().await;
        let (before, files) = (device_key(&test), key_files(&test));
        let mut answer = rotate(&mut test);
        assert!(test.asked(1).await);
        test.node.store_changed(vec![Event::Config(CONFIG.into())]).await;
        let said = answer.try_recv().expect("an answer").unwrap_err().to_string();
        assert!(said.contains("the backend changes"), "{said}");
        test.answer().await;
        test.node.tick().await;
        assert!(test.asked(2).await);
        assert_eq!(asked_last(&test), ("host-gw".into(), Some(before.clone())));
        assert_eq!((device_key(&test), key_files(&test)), (before, files));
    })
    .await;
}

#[tokio::test]
async fn another_backend_waits_until_the_store_has_accepted_the_new_key() {
    local(async {
        for at_the_end_of_a_pass in [false, true] {
            let mut test = with_key_files().await;
            let before = device_key(&test);
            let answer = rotate(&mut test);
            if at_the_end_of_a_pass {
                // It was tried before, and is tried again when the pass that gives the device the new key has ended.
                test.node.change.tried_again = Some(CONFIG.into());
            }
            test.answer().await;
            assert!(test.asked(2).await);
            if !at_the_end_of_a_pass {
                test.node.store_changed(vec![Event::Config(CONFIG.into())]).await;
            }
            test.node.tick().await;
            assert!(!test.node.plan.is_changing());
            let problem = test.node.net_conf.not_applied.clone().unwrap();
            assert!(problem.contains("the store has not accepted our lease with it yet"), "{problem}");
            test.answer().await;
            let new = answer.await.unwrap().unwrap();
            assert!(new != before && new == device_key(&test));
            let kept = key_files(&test);
            assert!(kept.len() == 2 && kept[0] == kept[1], "{kept:?}");
            for _ in 0..2 {
                test.node.tick().await;
            }
            assert!(test.asked(3).await);
            assert_eq!(asked_last(&test), ("host-gw".into(), Some(new)));
            assert_eq!(test.node.net_conf.not_applied, None);
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_node_wakes_up_for_the_audit_of_its_peers() {
    local(async {
        let mut test = ready().await;
        test.kernel.disturb(peer(), None, false);
        tick::wake_ups(&mut test, Duration::from_secs(20)).await;
        assert!(test.kernel.entries().contains_key(&peer()));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn whoever_asks_for_a_new_key_hears_of_a_silent_store_within_a_moment() {
    local(async {
        let mut test = with_key_files().await;
        let mut answer = rotate(&mut test);
        tick::wake_ups(&mut test, Duration::from_secs(9)).await;
        assert!(answer.try_recv().is_err(), "the store has ten seconds");
        tick::wake_ups(&mut test, Duration::from_secs(2)).await;
        let reason = answer.try_recv().unwrap().unwrap_err().to_string();
        assert!(reason.contains("has not accepted the own lease within 10 s"), "{reason}");
    })
    .await;
}

/// A restart would not find it.
#[tokio::test]
async fn a_new_key_that_cannot_be_kept_is_not_used() {
    local(async {
        let mut test = with_key_files().await;
        let (before, mut answer) = (device_key(&test), rotate(&mut test));
        assert!(test.asked(1).await);
        // The directory of the file cannot be made.
        std::fs::write(test.file.with_file_name("state"), "").unwrap();
        test.answer().await;
        let said = answer.try_recv().expect("an answer").unwrap_err().to_string();
        assert!(said.contains("there is no new key: cannot write the private key of WireGuard to"), "{said}");
        assert_eq!(device_key(&test), before);
        assert!(test.asked(1).await, "nobody is told of another key");
    })
    .await;
}

#[tokio::test]
async fn another_backend_waits_no_longer_when_the_kernel_has_refused_the_new_key() {
    local(async {
        let mut test = with_key_files().await;
        let (before, mut answer) = (device_key(&test), rotate(&mut test));
        assert!(test.asked(1).await);
        // It was tried before, and is tried again when the pass that gives the device the new key has ended.
        test.node.change.tried_again = Some(CONFIG.into());
        let device = Key::Link(Name::new("flannel-wg").unwrap());
        test.kernel.fail(device, Some(Outcome::Retry("device or resource busy".into())));
        test.answer().await;
        assert!(answer.try_recv().expect("an answer").is_err());
        test.kernel.fail(device, None);
        for _ in 0..2 {
            test.node.tick().await;
        }
        assert!(test.asked(2).await, "{:?}", test.node.net_conf.not_applied);
        assert_eq!(asked_last(&test), ("host-gw".into(), Some(before)));
    })
    .await;
}

/// The agent started without the store, after an earlier run that had not ended its change of the key.
#[tokio::test]
async fn another_backend_waits_until_the_change_of_the_key_that_an_earlier_run_left_has_ended() {
    local(async {
        let (test, key) = (changing().await, pair(1));
        let own = naming(test.node.plan.own(), &key);
        let saved = Some(Saved { head: head(&own), peers: Vec::new() });
        let mut test = started_again(test, &key, own, saved);
        test.node.store_changed(vec![Event::Config(CONFIG.into())]).await;
        let problem = test.node.net_conf.not_applied.clone().unwrap_or_default();
        assert!(problem.contains("the store has not accepted our lease with it yet"), "{problem}");
        test.answer().await;
        assert_eq!(test.node.net_conf.not_applied, None);
        for _ in 0..2 {
            test.node.tick().await;
        }
        assert_eq!(test.node.plan.net_conf().backend_type, "host-gw");
    })
    .await;
}
