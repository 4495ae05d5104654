// SPDX-License-Identifier: Apache-2.0
//! `weft history` of an agent on the real kernel.

use super::*;

const OTHER: &str = r#"{"PublicIP":"192.168.64.9","PublicIPv6":null,"BackendType":"host-gw"}"#;

fn history(place: &Place, flags: &[&str]) -> String {
    let socket = place.text("weft.sock");
    let out = weft(&[&["history", "--socket", &socket], flags].concat(), &[]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn wait_history(place: &Place, wanted: &str) -> String {
    wait_for(wanted, || Some(history(place, &[])).filter(|text| text.contains(wanted)))
}

fn start(place: &Place) -> Agent {
    let agent = place.agent(&["--state-dir", &place.text("state")], &[]);
    place.wait_status(", ready, weft");
    agent
}

/// Changes the route of the peer as another program would.
fn disturb(place: &Place) {
    std::fs::write(place.path("store/subnets/10.244.9.0-24.json"), OTHER).unwrap();
    wait_history(place, "lease 10.244.9.0-24 changed; 1 written");
    namespace::ip("route del 10.244.9.0/24");
    wait_history(place, "(another program or the kernel had deleted it)");
    namespace::ip("route replace 10.244.9.0/24 via 192.168.64.77 dev eth0 proto bird");
    wait_history(place, "via 192.168.64.77 dev eth0 protocol bird -> via 192.168.64.9 dev eth0");
}

#[test]
fn history_names_causes_survives_a_restart_and_a_torn_file() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        refused(&["history", "--socket", &place.text("weft.sock")], &[], 1, "no agent answers on");
        let mut agent = start(&place);
        disturb(&place);
        let before = history(&place, &["-o", "json"]);
        assert!(before.lines().all(|line| line.starts_with("{\"seq\":")), "{before}");
        assert_eq!(agent.term().code(), Some(0));
        let files = std::fs::read_dir(place.path("state")).unwrap().map(|entry| entry.unwrap().path());
        let file = files.into_iter().find(|path| path.to_str().unwrap().contains("history-")).unwrap();
        let mut agent = start(&place);
        assert!(history(&place, &["-o", "json"]).starts_with(&before), "the records of the earlier run come first");
        assert_eq!(history(&place, &["--since", "0s"]), "");
        let socket = place.text("weft.sock");
        let said = |flags: &[&str]| {
            let all: [&[&str]; 2] = [&["history", "--socket", &socket, "--since", "0s"], flags];
            String::from_utf8(weft(&all.concat(), &[]).stderr).unwrap()
        };
        assert!(said(&[]).contains("no changes are recorded in this time"), "an empty answer looks like a failure");
        assert_eq!(said(&["-o", "json"]), "", "programs read this");
        assert!(history(&place, &["--since=1h"]).contains("protocol bird"));
        assert_eq!(agent.term().code(), Some(0));
        let text = std::fs::read(&file).unwrap();
        std::fs::write(&file, [b"\0\xff{\"seq\":", &text[..text.len() - 3]].concat()).unwrap();
        let mut agent = start(&place);
        let left = history(&place, &[]);
        assert!(
            left.contains("had deleted it") && !left.contains("protocol bird"),
            "only the ends are damaged: {left}"
        );
        assert_eq!(agent.term().code(), Some(0));
    });
}

#[test]
fn follow_shows_new_records_also_after_a_restart_of_the_agent() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        let mut agent = start(&place);
        let mut follower = Command::new(env!("CARGO_BIN_EXE_weft"))
            .args(["history", "--socket", &place.text("weft.sock"), "--follow", "-o", "json"])
            .env_clear()
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut shown = Vec::new();
        let lines = BufReader::new(follower.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut lines = lines.inspect(|line| {
            let record: serde_json::Value = serde_json::from_str(line).unwrap();
            shown.push(record["seq"].as_u64().unwrap());
        });
        std::fs::write(place.path("store/subnets/10.244.9.0-24.json"), OTHER).unwrap();
        assert!(lines.any(|line| line.contains("lease 10.244.9.0-24 changed")));
        assert_eq!(agent.term().code(), Some(0));
        let _agent = start(&place);
        namespace::ip("route del 10.244.9.0/24");
        let next = lines.find(|line| line.contains("had deleted it")).unwrap();
        assert!(next.contains("route 10.244.9.0/24"), "{next}");
        drop(lines);
        assert!(shown.is_sorted_by(|one, other| one < other), "each record is shown once: {shown:?}");
        follower.kill().unwrap();
        follower.wait().unwrap();
    });
}
