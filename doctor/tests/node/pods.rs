// SPDX-License-Identifier: Apache-2.0
//! What `weft doctor pods --fix` removes if something changes after the examination. Its other tests are in tests/doctor.rs.

use std::fs;

use weft_doctor::pods::{Certainty, Sources, examine, fix};

use super::{in_namespace, ip};

#[test]
fn a_link_or_address_that_was_given_to_another_pod_meanwhile_stays() {
    in_namespace(|file| {
        let dir = file.parent().unwrap();
        let path = |name: &str| dir.join(name);
        fs::create_dir_all(path("networks/cbr0")).unwrap();
        let link = |name: &str| {
            ip(&format!("link add {name} type veth peer name {name}p"));
            ip(&format!("link set {name} alias weft-veth"));
        };
        // No other namespace of this machine has such addresses. One that had them would be in use.
        let address = |last: u8, container: &str| {
            fs::write(path(&format!("networks/cbr0/10.213.77.{last}")), format!("{container}\r\neth0")).unwrap();
        };
        for (name, last) in [("veth0", 2), ("veth1", 3)] {
            link(name);
            address(last, "container-that-is-gone");
        }
        let sources = Sources {
            networks: path("networks"),
            records: path("records"),
            results: path("results"),
            netns: path("netns"),
            plugins: String::new(),
            min_age: std::time::Duration::ZERO,
        };
        let mut report = examine(&sources).unwrap();
        assert_eq!(report.findings.len(), 4, "{report:?}");
        // In a container, where not all processes can be seen, everything is in doubt.
        report.findings.iter_mut().for_each(|finding| finding.certainty = Certainty::Leak);
        ip("link del veth1");
        link("veth1");
        address(3, "container-that-runs");
        for done in fix(&report, &sources) {
            done.unwrap();
        }
        let left: Vec<_> = fs::read_dir(path("networks/cbr0")).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert!(left.contains(&"10.213.77.3".into()) && !left.contains(&"10.213.77.2".into()), "{left:?}");
        let exists = |name: &str| fs::exists(format!("/proc/thread-self/net/dev_snmp6/{name}")).unwrap();
        assert!(exists("veth1") && !exists("veth0"));
    });
}
