// SPDX-License-Identifier: Apache-2.0
//! `weft plan` of an agent on the real kernel.

use super::*;

fn plan(place: &Place, flags: &[&str]) -> (Option<i32>, String) {
    let socket = place.text("weft.sock");
    let out = weft(&[&["plan", "--socket", &socket], flags].concat(), &[]);
    (out.status.code(), String::from_utf8(out.stdout).unwrap())
}

fn wait_code(place: &Place, wanted: i32) -> String {
    wait_for(&format!("weft plan to end with {wanted}"), || {
        let (code, text) = plan(place, &[]);
        (code == Some(wanted)).then_some(text)
    })
}

#[test]
fn plan_without_an_agent_or_a_lease_is_exit_code_1() {
    in_namespace(|| {
        let place = Place::new();
        let socket = place.text("weft.sock");
        refused(&["plan", "--socket", &socket], &[], 1, "no agent answers on");
        let _agent = place.agent(&[], &[]);
        place.wait_status("config.json does not exist");
        refused(&["plan", "--socket", &socket], &[], 1, "there is no plan before the node has its lease: ");
        refused(&["plan", "--socket", &socket, "-o", "yaml"], &[], 2, "yaml");
    });
}

#[test]
fn plan_shows_what_the_kernel_lacks_and_the_exit_code_says_whether_there_is_anything() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        let mut agent = place.agent(&[], &[]);
        place.wait_status(", ready, weft");
        assert_eq!(plan(&place, &[]), (Some(0), "nothing to write: the kernel is as it should be\n".to_owned()));
        assert_eq!(plan(&place, &["-o", "json"]), (Some(0), "{\n  \"operations\": []\n}\n".to_owned()));
        // Without a carrier, the kernel refuses the nexthop of the peer, and the agent tries again later.
        namespace::ip("link set far0 down");
        let other = r#"{"PublicIP":"192.168.64.9","PublicIPv6":null,"BackendType":"host-gw"}"#;
        std::fs::write(place.path("store/subnets/10.244.9.0-24.json"), other).unwrap();
        let text = wait_code(&place, 2);
        let wanted = "add       route 10.244.9.0/24  via 192.168.64.9 dev eth0\n\n1 operation: 1 to add\n";
        assert_eq!(text, wanted);
        let (code, json) = plan(&place, &["-o", "json"]);
        assert!(code == Some(2) && json.contains("\"entry\": \"route 10.244.9.0/24\""), "{json}");
        assert!(!namespace::ip("route").contains("10.244.9.0/24"), "the plan writes nothing");
        namespace::ip("link set far0 up");
        wait_code(&place, 0);
        assert!(namespace::ip("route").contains("10.244.9.0/24"));
        assert_eq!(agent.term().code(), Some(0));
    });
}
