// SPDX-License-Identifier: Apache-2.0
//! `--tx-checksum-off` on real devices. The kernel says whether the feature is on.

use nix::net::if_::if_nametoindex;
use weft::offload::ChecksumOffload;
use weft_netlink::ethtool::{has_tx_checksum, set_tx_checksum};

use super::adapter_net::{add_uplink, alone, ip, name};

const DEVICE: &str = "flannel.1";

fn create() {
    ip(&format!("link add {DEVICE} type vxlan id 1 dev up0 dstport 8472"));
}

fn index() -> u32 {
    if_nametoindex(DEVICE).unwrap()
}

fn is_on() -> bool {
    has_tx_checksum(index()).unwrap()
}

/// A run of the agent, with the flag or without it.
struct Run(ChecksumOffload);

impl Run {
    fn check(&mut self) {
        let problems = self.0.ensure([name(DEVICE), name("flannel.9")].into_iter());
        assert_eq!(problems, Vec::<String>::new());
    }
}

#[test]
fn checksum_offload_is_turned_off_and_what_weft_turned_off_is_turned_on_again() {
    alone(|| {
        add_uplink();
        create();
        let dir = tempfile::tempdir().unwrap();
        let subnet_file = dir.path().join("subnet.env");
        let run = |off| Run(ChecksumOffload::beside(&subnet_file, off));
        let file = || std::fs::read_to_string(dir.path().join("subnet.env.tx_checksum")).ok();
        assert!(is_on(), "the default of the kernel");
        run(false).check();
        assert!(is_on() && file().is_none());

        let mut with = run(true);
        with.check();
        assert!(!is_on());
        assert_eq!(file(), Some(format!("{} {DEVICE}\n", index())));
        // Another program turns it on.
        set_tx_checksum(index(), true).unwrap();
        with.check();
        assert!(!is_on());
        // The device is made again.
        ip(&format!("link del {DEVICE}"));
        with.check();
        assert_eq!(file(), None, "nothing is off");
        create();
        assert!(is_on());
        with.check();
        assert!(!is_on());

        // A restart with the flag, and one without it.
        run(true).check();
        assert!(!is_on());
        run(false).check();
        assert!(is_on() && file().is_none());
    });
}

#[test]
fn what_an_administrator_turned_off_stays_off() {
    alone(|| {
        add_uplink();
        create();
        set_tx_checksum(index(), false).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for off in [false, true, false] {
            Run(ChecksumOffload::beside(&dir.path().join("subnet.env"), off)).check();
            assert!(!is_on(), "with the flag: {off}");
        }
    });
}

/// The file of an earlier device does not concern a new one of the same name.
#[test]
fn a_device_that_was_made_again_is_left_alone() {
    alone(|| {
        add_uplink();
        create();
        let dir = tempfile::tempdir().unwrap();
        let subnet_file = dir.path().join("subnet.env");
        Run(ChecksumOffload::beside(&subnet_file, true)).check();
        ip(&format!("link del {DEVICE}"));
        create();
        set_tx_checksum(index(), false).unwrap();
        Run(ChecksumOffload::beside(&subnet_file, false)).check();
        assert!(!is_on());
    });
}
