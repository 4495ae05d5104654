// SPDX-License-Identifier: Apache-2.0
//! Somebody with the rights of one node writes huge leases, and leases that change all the time. The memory, the log and the devices of other
//! nodes stay bounded, and changes of honest leases are applied meanwhile.

use std::fs;
use std::time::Instant;

use serde_json::json;

use crate::site::{Kind, Lease, Site, in_namespace, ip, run};

/// Number of updates of the hostile leases. After each one, an honest lease changes.
const ROUNDS: u32 = 150;
/// Size of each text in bytes.
const HUGE: usize = 200_000;

/// Returns the largest amount of memory that the agent has had, in kB.
fn peak(site: &Site) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", site.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Returns the index of a new device. An index is used once, so two calls show how many devices were made in between.
fn next_device(name: &str) -> u64 {
    ip(&format!("link add {name} type bridge"));
    let links: serde_json::Value = serde_json::from_str(&run("ip", &format!("-j link show dev {name}"))).unwrap();
    links[0]["ifindex"].as_u64().unwrap()
}

#[test]
fn huge_leases_and_leases_that_change_all_the_time_are_bounded() {
    in_namespace(|| {
        let mut site = Site::running(Kind::Vxlan);
        let (memory, log, device) = (peak(&site), site.log().len(), next_device("probe0"));
        let (shouting, restless, began) = (Lease::new(200), Lease::new(201), Instant::now());
        for round in 0..ROUNDS {
            // Each update has another type, which has no text in common with the one before.
            let kind = format!("\u{1b}[2J{round}").repeat(HUGE / 5);
            let mut value = shouting.value(site.kind);
            value["BackendType"] = json!(kind);
            site.put(&shouting.key(site.kind), &value.to_string());
            let mut value = restless.value(site.kind);
            value["BackendData"]["VNI"] = json!(1000 + round);
            site.put(&restless.key(site.kind), &value.to_string());
            let honest = Lease { mac: 0x60 + round, ..Lease::new(2 + round % 20) };
            let mac = honest.mac(false);
            site.put_peer(honest);
            site.until("the change of an honest lease", |_| run("bridge", "fdb show dev flannel.1").contains(&mac));
        }
        let (memory, device) = (peak(&site) - memory, next_device("probe1") - device);
        let log = &site.log()[log..];
        // After ten devices, a lease waits ten seconds for each further one. The slower the machine, the longer this takes.
        let most = 20 + began.elapsed().as_secs() / 10;
        let cost = format!("{memory} kB of memory, {} bytes of log, {device} devices", log.len());
        assert!(memory < 12_000 && log.len() < 200_000 && device < most, "too much ({most} devices): {cost}");
        assert!(!log.contains('\u{1b}'), "an escape sequence is in the log");
        assert!(log.contains("larger than 4096 bytes") && log.contains("changes too often"), "{log}");
        for lease in [&shouting, &restless] {
            fs::remove_file(site.lease_file(&lease.key(site.kind))).unwrap();
        }
        site.healed("the end of the hostile leases");
    });
}
