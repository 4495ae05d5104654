// SPDX-License-Identifier: Apache-2.0

use std::path::Path;

use weft_backends::register::make;
use weft_subnet::cidr::Subnets;
use weft_subnet::net_conf::NetConf;

use super::peers::Counts;
use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

fn backend(options: &str) -> Box<dyn Backend> {
    let conf = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"extension","Shell":true{options}}}}}"#);
    make(&NetConf::parse(&conf).unwrap()).unwrap()
}

fn peer(number: u8) -> CommandPeer {
    CommandPeer {
        subnets: Subnets::from_key(&format!("10.5.{number}.0-24")).unwrap(),
        public_ip: Some([192, 0, 2, number].into()),
        public_ipv6: None,
        data: format!("data of {number}").into(),
    }
}

/// The subnet of this node.
const OWN: &str = "10.5.1.0/24";

/// Updates once, with this subnet of the node. `may_remove` is true if a peer that is not among these has left.
fn update(runner: &mut Extension, backend: &dyn Backend, peers: &[u8], (own, may_remove): (&str, bool), now: Instant) {
    let make = || peers.iter().map(|number| peer(*number)).collect();
    let wanted = Wanted {
        commands: backend.commands().unwrap(),
        own: vec![("SUBNET", own.to_owned())],
        version: peers.len() as u64,
        peers: Some(&make),
        may_remove,
    };
    runner.update(&wanted, now);
}

/// Updates until this holds.
async fn until(runner: &mut Extension, backend: &dyn Backend, peers: &[u8], holds: impl Fn(&Extension) -> bool) {
    let (began, ended) = (Instant::now(), runner.ended());
    loop {
        update(runner, backend, peers, (OWN, true), Instant::now());
        if holds(runner) {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{runner:?}");
        let _ = tokio::time::timeout(Duration::from_millis(50), ended.notified()).await;
    }
}

fn lines(file: &Path) -> Vec<String> {
    let mut lines: Vec<String> = std::fs::read_to_string(file).unwrap_or_default().lines().map(str::to_owned).collect();
    lines.sort_unstable();
    lines
}

/// Nothing runs and nothing waits. A list of peers waits for a while after one that took long.
fn idle(runner: &Extension) -> bool {
    runner.next_list.is_none()
        && runner.tasks.is_empty()
        && runner.peers.counts() == Counts { pending: 0, failed: 0 }
        && runner.peers.next().is_none()
}

/// Ends the commands and saves the peers. The clock stands still meanwhile: a slow disk is waited for.
async fn stop(runner: &mut Extension) {
    tokio::time::pause();
    tokio::time::timeout(LIMIT / 2, runner.stop()).await.expect("the commands are killed");
    tokio::time::resume();
}

#[tokio::test]
async fn without_the_flag_nothing_is_run() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ran");
    let backend = backend(&format!(r#","PreStartupCommand":"touch {}""#, file.display()));
    let error = FirstCommand::new(NetConfCommands::Refuse).run(&*backend).await.unwrap_err().to_string();
    assert!(error.contains("whoever may write net-conf") && error.contains("--allow-extension"), "{error}");
    assert!(!file.exists());
    FirstCommand::new(NetConfCommands::Run).run(&*backend).await.unwrap();
    assert!(file.exists());
}

#[tokio::test]
async fn the_command_before_the_lease_runs_once_when_it_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("runs");
    let text = format!("echo x >> {0}; wc -l < {0}; test $(wc -l < {0}) -gt 1", file.display());
    let backend = backend(&format!(r#","PreStartupCommand":"{text}""#));
    let mut first = FirstCommand::new(NetConfCommands::Run);
    let error = first.run(&*backend).await.unwrap_err().to_string();
    assert_eq!((error.as_str(), first.printed()), ("PreStartupCommand: exit status: 1: 1", None));
    first.run(&*backend).await.unwrap();
    first.run(&*backend).await.unwrap();
    assert_eq!(first.printed(), Some(&b"2\n"[..]));
    let other = self::backend(r#","PreStartupCommand":"echo other""#);
    first.run(&*other).await.unwrap();
    assert_eq!(first.printed(), Some(&b"other\n"[..]), "net-conf names another command now");
}

#[tokio::test]
async fn commands_for_peers_wait_for_the_one_after_the_lease() {
    let dir = tempfile::tempdir().unwrap();
    let (file, may) = (dir.path().join("ran"), dir.path().join("may"));
    let (ran, may_text) = (file.display(), may.display());
    let backend = backend(&format!(
        r#","PostStartupCommand":"test -e {may_text} && echo post $SUBNET >> {ran}","SubnetAddCommand":"echo add $SUBNET $PUBLIC_IP $(cat) >> {ran}","SubnetRemoveCommand":"echo remove $SUBNET $(cat) >> {ran}""#
    ));
    let mut runner = Extension::new(None);
    until(&mut runner, &*backend, &[2, 3], |runner| runner.own.failures > 0).await;
    assert!(runner.tasks.is_empty() && runner.next().is_some(), "the next attempt comes after a pause");
    let own = [("SUBNET", "10.5.1.0/24".to_owned())];
    assert_eq!(runner.problem(&own).unwrap(), "PostStartupCommand: exit status: 1: no output");
    assert!(!file.exists());
    std::fs::write(&may, "").unwrap();
    until(&mut runner, &*backend, &[2, 3], |runner| idle(runner) && runner.problem(&own).is_none()).await;
    let expected = ["add 10.5.2.0/24 192.0.2.2 data of 2", "add 10.5.3.0/24 192.0.2.3 data of 3", "post 10.5.1.0/24"];
    assert_eq!(lines(&file), expected);
    until(&mut runner, &*backend, &[3], idle).await;
    assert_eq!(lines(&file).last().unwrap(), "remove 10.5.2.0/24 data of 2");
    // With another subnet the command must run again, and until then no pod may start.
    assert!(runner.problem(&[("SUBNET", "10.5.9.0/24".to_owned())]).is_some());
}

/// The agent updates the commands after every event, and each event would start the command once more.
#[tokio::test]
async fn the_command_after_the_lease_is_not_started_again_while_it_runs() {
    let dir = tempfile::tempdir().unwrap();
    let (ran, gate) = (dir.path().join("ran"), dir.path().join("gate"));
    let text = format!("echo x >> {}; until test -e {}; do sleep 0.05; done", ran.display(), gate.display());
    let backend = backend(&format!(r#","PostStartupCommand":"{text}""#));
    let mut runner = Extension::new(None);
    until(&mut runner, &*backend, &[], |_| !lines(&ran).is_empty()).await;
    for _ in 0..3 {
        until(&mut runner, &*backend, &[], |_| true).await;
    }
    assert_eq!(runner.tasks.len(), 1);
    std::fs::write(&gate, "").unwrap();
    let own = [("SUBNET", "10.5.1.0/24".to_owned())];
    until(&mut runner, &*backend, &[], |runner| runner.problem(&own).is_none()).await;
    assert_eq!(lines(&ran), ["x"]);
}

/// The uplink may get another address for a moment. What the command did with that one may stand in the way of the values before.
#[tokio::test]
async fn the_command_after_the_lease_runs_again_when_it_has_failed_with_values_that_are_wanted_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let ran = dir.path().join("ran");
    let backend =
        backend(&format!(r#","PostStartupCommand":"echo $SUBNET >> {}; test $SUBNET = {OWN}""#, ran.display()));
    let mut runner = Extension::new(None);
    let is_done = |runner: &Extension| runner.problem(&[("SUBNET", OWN.to_owned())]).is_none();
    until(&mut runner, &*backend, &[], is_done).await;
    let (other, began, ended) = ("10.5.9.0/24", Instant::now(), runner.ended());
    while runner.own.failures == 0 {
        assert!(began.elapsed() < PATIENCE, "{runner:?}");
        update(&mut runner, &*backend, &[], (other, true), Instant::now());
        let _ = tokio::time::timeout(Duration::from_millis(50), ended.notified()).await;
    }
    let due = runner.next().expect("another attempt");
    update(&mut runner, &*backend, &[], (OWN, true), due);
    assert!(runner.next().is_none_or(|at| at > due), "the loop of the agent would never rest");
    assert!(!is_done(&runner), "no pod may start");
    until(&mut runner, &*backend, &[], is_done).await;
    assert_eq!(lines(&ran), [OWN, OWN, other]);
}

#[tokio::test]
async fn a_peer_that_left_while_the_agent_was_down_gets_its_command() {
    let dir = tempfile::tempdir().unwrap();
    let (ran, file) = (dir.path().join("ran"), memory::file(dir.path(), Path::new("/run/x/subnet.env")));
    let backend = backend(&format!(
        r#","SubnetAddCommand":"true","SubnetRemoveCommand":"echo $SUBNET $PUBLIC_IP $(cat) >> {}""#,
        ran.display()
    ));
    let mut runner = Extension::new(Some(file.clone()));
    until(&mut runner, &*backend, &[2, 3], idle).await;
    stop(&mut runner).await;
    drop(runner);
    let mut runner = Extension::new(Some(file.clone()));
    until(&mut runner, &*backend, &[3], |runner| idle(runner) && ran.exists()).await;
    assert_eq!(lines(&ran), ["10.5.2.0/24 192.0.2.2 data of 2"]);
    stop(&mut runner).await;
    assert_eq!(memory::read(&file).unwrap(), [peer(3)]);
    memory::remove(dir.path(), Path::new("/run/x/subnet.env")).unwrap();
    memory::remove(dir.path(), Path::new("/run/x/subnet.env")).unwrap();
    assert!(!file.exists());
}

/// Before the list is complete, a peer that is not in it may come yet. The leases themselves need not change when it is.
#[tokio::test]
async fn a_remembered_peer_is_removed_when_the_list_is_complete_and_not_before() {
    let dir = tempfile::tempdir().unwrap();
    let (ran, file) = (dir.path().join("ran"), memory::file(dir.path(), Path::new("/run/x/subnet.env")));
    memory::write(&file, &[2, 3].map(|number| Arc::new(peer(number)))).unwrap();
    let remove = format!("echo $SUBNET >> {}", ran.display());
    let backend = backend(&format!(r#","SubnetAddCommand":"true","SubnetRemoveCommand":"{remove}""#));
    let mut runner = Extension::new(Some(file.clone()));
    update(&mut runner, &*backend, &[3], (OWN, false), Instant::now());
    assert_eq!(runner.peers.made().len(), 2, "both are remembered");
    assert!(runner.peers.next().is_none() && runner.tasks.len() == 1, "one command runs, and nothing waits");
    until(&mut runner, &*backend, &[3], |runner| idle(runner) && ran.exists()).await;
    assert_eq!(lines(&ran), ["10.5.2.0/24"]);
    stop(&mut runner).await;
    assert_eq!(memory::read(&file).unwrap(), [peer(3)]);
}

#[tokio::test]
async fn a_write_that_failed_is_tried_again_although_nothing_changed() {
    let dir = tempfile::tempdir().unwrap();
    let backend = backend(r#","SubnetAddCommand":"true""#);
    let read = |file: &Path| memory::read(file).unwrap_or_default();
    for stops in [false, true] {
        let state_dir = dir.path().join(format!("state {stops}"));
        std::fs::write(&state_dir, "not a directory").unwrap();
        let file = memory::file(&state_dir, Path::new("/run/x/subnet.env"));
        let mut runner = Extension::new(Some(file.clone()));
        let has_failed =
            |runner: &Extension| idle(runner) && runner.saving.as_ref().is_some_and(|saving| saving.is_finished());
        until(&mut runner, &*backend, &[2], |runner| has_failed(runner) && !runner.peers.is_changed).await;
        assert!(runner.next().is_some(), "the loop must wake up for the next attempt");
        std::fs::remove_file(&state_dir).unwrap();
        if stops {
            stop(&mut runner).await;
        } else {
            until(&mut runner, &*backend, &[2], |runner| runner.next().is_none()).await;
        }
        assert_eq!(read(&file), [peer(2)], "{stops}");
    }
}

#[tokio::test]
async fn only_some_commands_run_at_once_and_a_failure_harms_no_other_peer() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().display();
    // Each command counts those that run with it.
    let backend = backend(&format!(
        r#","SubnetAddCommand":"test $SUBNET != 10.5.7.0/24 || exit 3; mkdir {text}/$$; ls {text} | wc -l > {text}.$$; sleep 0.1; rmdir {text}/$$""#
    ));
    let mut runner = Extension::new(None);
    let peers: Vec<u8> = (2..32).collect();
    until(&mut runner, &*backend, &peers, |runner| runner.peers.counts() == Counts { pending: 0, failed: 1 }).await;
    let failed = runner.peers.progress(&peer(7).subnets).1.unwrap();
    assert_eq!(failed, "SubnetAddCommand: exit status: 3: no output");
    // Another attempt may be running.
    until(&mut runner, &*backend, &peers, |runner| runner.peers.next().is_some()).await;
    runner.next_list = None;
    assert!(
        runner.next().is_some_and(|at| Some(at) <= runner.peers.next()),
        "the loop must wake up for the next attempt"
    );
    let mut most = 0;
    let name = dir.path().file_name().unwrap().to_str().unwrap().to_owned() + ".";
    for entry in std::fs::read_dir(dir.path().parent().unwrap()).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&name) {
            most = most.max(std::fs::read_to_string(entry.path()).unwrap().trim().parse::<usize>().unwrap());
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    assert!((1..=MAX_AT_ONCE).contains(&most), "{most}");
}

#[tokio::test]
async fn commands_for_peers_are_repeated_if_net_conf_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let ran = dir.path().join("ran");
    let backend = backend(&format!(r#","Reconcile":1,"SubnetAddCommand":"echo $SUBNET >> {}""#, ran.display()));
    let mut runner = Extension::new(None);
    until(&mut runner, &*backend, &[2], |_| lines(&ran).len() >= 3).await;
}

#[tokio::test]
async fn commands_for_peers_are_not_repeated_before_the_time_of_net_conf() {
    let dir = tempfile::tempdir().unwrap();
    let ran = dir.path().join("ran");
    let backend = backend(&format!(r#","Reconcile":3600,"SubnetAddCommand":"echo $SUBNET >> {}""#, ran.display()));
    let mut runner = Extension::new(None);
    until(&mut runner, &*backend, &[2], |runner| idle(runner) && !lines(&ran).is_empty()).await;
    let (now, next) = (Instant::now(), runner.next().expect("the loop must wake up for the repetition"));
    assert!(next > now + Duration::from_secs(3000) && next <= now + Duration::from_secs(3600), "{:?}", next - now);
    until(&mut runner, &*backend, &[2], |_| true).await;
    assert_eq!((runner.tasks.len(), lines(&ran).len()), (0, 1));
    // The time is over.
    runner.repeat_at = Some(Instant::now());
    until(&mut runner, &*backend, &[2], |runner| idle(runner) && lines(&ran).len() == 2).await;
}

#[tokio::test]
async fn while_enough_commands_run_nothing_is_due_and_the_end_does_not_wait_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("peers");
    let backend = backend(r#","SubnetAddCommand":"sleep 1000""#);
    let mut runner = Extension::new(Some(file.clone()));
    let peers: Vec<u8> = (2..32).collect();
    until(&mut runner, &*backend, &peers, |runner| runner.tasks.len() == MAX_AT_ONCE && runner.save_at.is_some()).await;
    (runner.next_list, runner.save_at) = (None, Some(Instant::now() + PATIENCE));
    assert!(runner.next().is_none_or(|at| at > Instant::now()), "the loop of the agent would never rest");
    if let Some(saving) = runner.saving.take() {
        saving.await.unwrap();
    }
    std::fs::remove_file(&file).unwrap();
    runner.peers.is_changed = true;
    until(&mut runner, &*backend, &peers, |_| true).await;
    assert!(runner.saving.is_none(), "no write is due yet");
    stop(&mut runner).await;
    assert_eq!(
        memory::read(&file).unwrap().len(),
        MAX_AT_ONCE,
        "what was begun is remembered, although no write was due"
    );
}

#[tokio::test]
async fn while_the_command_after_the_lease_fails_again_nothing_of_peers_is_due() {
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("works");
    std::fs::write(&flag, "").unwrap();
    let members =
        format!(r#","PostStartupCommand":"test -e {}","SubnetAddCommand":"true","Reconcile":1"#, flag.display());
    let backend = backend(&members);
    let mut runner = Extension::new(None);
    until(&mut runner, &*backend, &[2], |runner| runner.repeat_at.is_some()).await;
    std::fs::remove_file(&flag).unwrap();
    // The subnet of the node is another one now, and all peers are to get their command again.
    let now = Instant::now();
    runner.repeat_at = Some(now);
    let commands = backend.commands().unwrap();
    let own = vec![("SUBNET", "10.5.9.0/24".to_owned())];
    runner.update(&Wanted { commands, own, version: 1, peers: None, may_remove: false }, now);
    assert!(runner.next().is_none_or(|at| at > now), "the loop of the agent would never rest");
}

#[tokio::test]
async fn pods_never_wait_longer_than_half_a_minute_for_the_next_attempt() {
    let (mut runner, now) = (Extension::new(None), Instant::now());
    for _ in 0..20 {
        let error = CommandError::TooSlow { key: "PostStartupCommand", limit: LIMIT, output: String::new() };
        runner.own_ended(Vec::new(), Err(error), now);
    }
    assert_eq!(runner.next(), Some(now + LAST_OWN_PAUSE));
}

#[tokio::test]
async fn what_failed_for_peers_that_left_is_described_until_they_are_back() {
    let dir = tempfile::tempdir().unwrap();
    let file = memory::file(dir.path(), Path::new("/run/x/subnet.env"));
    memory::write(&file, &[2, 3, 4].map(|number| Arc::new(peer(number)))).unwrap();
    let backend = backend(r#","SubnetAddCommand":"true","SubnetRemoveCommand":"exit 3""#);
    let mut runner = Extension::new(Some(file));
    assert_eq!(runner.removal_problem(), None);
    until(&mut runner, &*backend, &[], |runner| runner.peers.counts() == Counts { pending: 0, failed: 3 }).await;
    let one = "the command for peers that have left failed, and is tried again: 10.5.2.0/24: SubnetRemoveCommand: exit status: 3: \
               no output";
    assert_eq!(runner.removal_problem().unwrap(), format!("{one}, and 2 more"));
    until(&mut runner, &*backend, &[3, 4], |runner| runner.peers.counts() == Counts { pending: 0, failed: 1 }).await;
    assert_eq!(runner.removal_problem().unwrap(), one);
    until(&mut runner, &*backend, &[2, 3, 4], idle).await;
    assert_eq!(runner.removal_problem(), None);
}
