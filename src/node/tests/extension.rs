// SPDX-License-Identifier: Apache-2.0
//! A node whose net-conf names commands: when they may run, and what waits for them.

use weft_backends::commands::CommandPeer;

use super::*;
use crate::extension::{Extension, memory};
use crate::observe::problem::ProblemKind;
use crate::observe::report::PeerList;
use crate::observe::status::PeerState;
use crate::options::NetConfCommands;

const PATIENCE: Duration = Duration::from_secs(60);

/// A node with these commands, whose lease is the only one in the store.
async fn with_commands(commands: &str, may_run: NetConfCommands) -> TestNode {
    let conf = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"extension","Shell":true{commands}}}}}"#);
    let own = lease("10.5.1.0-24", "192.168.0.1");
    let mut test = TestNode::of((&conf, own.clone()), OnLostLease::Hold, RuleOptions::default());
    test.node.context.options.net_conf_commands = may_run;
    let records = vec![Record { id: own.id.clone(), lease: Ok(own) }];
    test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
    test
}

/// Lets the node go on after an earlier run that had the peer 10.5.2.0/24. There is no lease of this peer.
fn remember_a_peer_that_left(test: &mut TestNode) {
    let left = CommandPeer {
        subnets: Subnets::from_key("10.5.2.0-24").unwrap(),
        public_ip: Some([192, 168, 0, 2].into()),
        public_ipv6: None,
        data: "".into(),
    };
    let file = test.file.with_file_name("extension");
    memory::write(&file, &[Arc::new(left)]).unwrap();
    test.node.extension = Extension::new(Some(file));
}

/// Returns true if a command ends within this time.
async fn ends(test: &mut TestNode, limit: Duration) -> bool {
    test.node.update_extension();
    let ended = test.node.command_ended();
    let has_ended = tokio::time::timeout(limit, ended.notified()).await.is_ok();
    // The task ends a moment after its notice.
    tokio::task::yield_now().await;
    test.node.update_extension();
    has_ended
}

#[tokio::test]
async fn no_command_of_net_conf_runs_without_the_flag() {
    local(async {
        let command = r#","PostStartupCommand":"true""#;
        let mut refused = with_commands(command, NetConfCommands::Refuse).await;
        assert!(!ends(&mut refused, Duration::from_millis(200)).await);
        let mut allowed = with_commands(command, NetConfCommands::Run).await;
        assert!(ends(&mut allowed, PATIENCE).await);
    })
    .await;
}

#[tokio::test]
async fn pods_wait_for_the_command_after_the_lease() {
    local(async {
        let mut test = with_commands(r#","PostStartupCommand":"true""#, NetConfCommands::Run).await;
        test.node.report();
        assert!(!test.file.exists(), "no pod may start yet");
        let faults = test.node.state().faults;
        let reasons: Vec<&str> = faults.iter().map(|fault| fault.text.as_str()).collect();
        assert_eq!(reasons, ["PostStartupCommand: it has not ended yet"]);
        assert!(ends(&mut test, PATIENCE).await);
        assert!(test.file.exists(), "the end of the command lets pods start");
        assert_eq!(test.node.state().faults, []);
    })
    .await;
}

#[tokio::test]
async fn a_first_list_without_peers_is_no_reason_to_run_commands_for_peers_that_left() {
    local(async {
        let mut test = with_commands(r#","SubnetRemoveCommand":"true""#, NetConfCommands::Run).await;
        remember_a_peer_that_left(&mut test);
        assert!(test.node.passer.keep_stale_until.is_some(), "the store may have been wiped");
        assert!(!ends(&mut test, Duration::from_millis(200)).await);
        test.node.passer.keep_stale_until = None;
        assert!(ends(&mut test, PATIENCE).await, "the grace time is over");
    })
    .await;
}

/// They are those of an earlier run, and do not tell who has left since.
#[tokio::test]
async fn saved_peers_are_no_reason_to_run_commands_for_peers_that_left() {
    local(async {
        let mut test = with_commands(r#","SubnetRemoveCommand":"true""#, NetConfCommands::Run).await;
        remember_a_peer_that_left(&mut test);
        test.node.passer.keep_stale_until = None;
        test.node.peers.list = PeerList::Saved("the store is away".to_owned());
        assert!(!ends(&mut test, Duration::from_millis(200)).await);
        test.node.peers.list = PeerList::Complete;
        assert!(ends(&mut test, PATIENCE).await, "the store has answered");
    })
    .await;
}

#[tokio::test]
async fn a_command_that_failed_for_a_peer_that_left_is_shown_and_keeps_nothing_waiting() {
    local(async {
        let mut test = with_commands(r#","SubnetRemoveCommand":"exit 3""#, NetConfCommands::Run).await;
        remember_a_peer_that_left(&mut test);
        test.node.passer.keep_stale_until = None;
        let shown = |test: &mut TestNode| -> Vec<String> {
            let problems = test.node.status().problems.into_iter();
            problems.filter(|problem| problem.kind == ProblemKind::Extension).map(|problem| problem.text).collect()
        };
        test.node.update_extension();
        assert_eq!(shown(&mut test), [""; 0], "the command has not ended yet");
        assert!(ends(&mut test, PATIENCE).await);
        let text = "the command for peers that have left failed, and is tried again: 10.5.2.0/24: SubnetRemoveCommand: exit status: 3: \
                    no output";
        assert_eq!(shown(&mut test), [text]);
        assert_eq!(test.node.state().faults, [], "pods of this node start");
    })
    .await;
}

#[tokio::test]
async fn the_state_of_a_peer_is_that_of_its_command() {
    local(async {
        let mut test = with_commands(r#","SubnetAddCommand":"exit 3""#, NetConfCommands::Run).await;
        let mut peer = lease("10.5.2.0-24", "192.168.0.2");
        peer.attrs.backend_type = "extension".into();
        let record = Record { id: peer.id.clone(), lease: Ok(peer) };
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record)])]).await;
        test.node.update_extension();
        let shown = |test: &mut TestNode| {
            let peers = test.node.status().peers;
            (peers[0].state, peers[0].reason.clone(), test.node.state().peers)
        };
        let (state, _, counts) = shown(&mut test);
        assert_eq!((state, counts.pending, counts.failed), (PeerState::Pending, 1, 0));
        assert!(ends(&mut test, PATIENCE).await);
        let (state, reason, counts) = shown(&mut test);
        assert_eq!((state, counts.pending, counts.failed), (PeerState::Failed, 0, 1));
        assert_eq!(reason.as_deref(), Some("SubnetAddCommand: exit status: 3: no output"));
    })
    .await;
}

/// The remedy of wireguard, `AllowPlaintext`, has no effect here.
#[tokio::test]
async fn a_lease_of_another_type_is_set_aside_without_a_word_about_encryption() {
    local(async {
        let mut test = with_commands("", NetConfCommands::Run).await;
        let record = stored("10.5.2.0-24", "192.168.0.2");
        let id = record.id.clone();
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record)])]).await;
        let reason = test.node.plan.unplanned(&id).unwrap_or_default();
        assert!(reason.ends_with("the commands of extension run for leases of extension only"), "{reason}");
        assert_eq!(test.node.change_warnings(), [""; 0]);
    })
    .await;
}

/// The next start runs SubnetRemoveCommand for those of them that have left by then.
#[tokio::test]
async fn the_end_of_the_agent_saves_for_which_peers_commands_have_run() {
    local(async {
        let mut test = with_commands(r#","SubnetAddCommand":"true""#, NetConfCommands::Run).await;
        let file = test.file.with_file_name("extension");
        test.node.extension = Extension::new(Some(file.clone()));
        // The first one is saved at once, and the next ones a moment later.
        for count in 1..=3 {
            let mut peer = lease(&format!("10.5.{}.0-24", count + 1), &format!("192.168.0.{}", count + 1));
            peer.attrs.backend_type = "extension".into();
            let record = Record { id: peer.id.clone(), lease: Ok(peer) };
            test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record)])]).await;
            for _ in 0..600 {
                if test.node.extension.peers().made().len() == count {
                    break;
                }
                ends(&mut test, Duration::from_millis(100)).await;
            }
        }
        test.node.stopping().await;
        assert_eq!(memory::read(&file).unwrap().len(), 3);
    })
    .await;
}

#[tokio::test]
async fn a_node_wakes_up_to_repeat_a_command_that_failed() {
    local(async {
        let mut test = with_commands(r#","PostStartupCommand":"exit 3""#, NetConfCommands::Run).await;
        assert!(ends(&mut test, PATIENCE).await);
        let due = test.node.extension.next().expect("the command is tried again");
        assert!(test.node.next_wake().is_some_and(|wake| wake <= due));
    })
    .await;
}
