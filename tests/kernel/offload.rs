// SPDX-License-Identifier: Apache-2.0
//! `--tx-checksum-off` on real devices. The kernel says whether the feature is on.

use std::path::Path;
use std::process::Command;

use nix::net::if_::if_nametoindex;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
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
        assert_eq!(problems, []);
    }
}

#[test]
fn checksum_offload_is_turned_off_and_what_weft_turned_off_is_turned_on_again() {
    alone(|| {
        add_uplink();
        create();
        let dir = tempfile::tempdir().unwrap();
        let subnet_file = dir.path().join("subnet.env");
        let run = |off| Run(ChecksumOffload::new(&subnet_file, off));
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
            Run(ChecksumOffload::new(&dir.path().join("subnet.env"), off)).check();
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
        Run(ChecksumOffload::new(&subnet_file, true)).check();
        ip(&format!("link del {DEVICE}"));
        create();
        set_tx_checksum(index(), false).unwrap();
        Run(ChecksumOffload::new(&subnet_file, false)).check();
        assert!(!is_on());
    });
}

/// The directory of the subnet file, for a process without CAP_NET_ADMIN.
const WITHOUT_RIGHTS: &str = "WEFT_TEST_WITHOUT_NET_ADMIN";

/// After a crash between the two, the file names a device whose feature is still on. That is harmless, and the other order is not. But when
/// the kernel refuses, the file must not go on naming the device: somebody may turn the feature off later.
#[test]
fn the_file_names_a_device_before_the_kernel_is_asked_and_not_after_it_has_refused() {
    if let Some(dir) = std::env::var_os(WITHOUT_RIGHTS) {
        return refused(Path::new(&dir));
    }
    alone(|| {
        add_uplink();
        create();
        let dir = tempfile::tempdir().unwrap();
        let mut without = Command::new("setpriv");
        without.args(["--bounding-set=-net_admin", "--inh-caps=-net_admin"]).arg(std::env::current_exe().unwrap());
        let this = "offload::the_file_names_a_device_before_the_kernel_is_asked_and_not_after_it_has_refused";
        let out = without.args(["--exact", this, "--nocapture"]).env(WITHOUT_RIGHTS, dir.path()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains("1 passed"), "{said}");
        assert!(is_on());
    });
}

fn refused(dir: &Path) {
    let events = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
    events.add_watch(dir, AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_DELETE).unwrap();
    let mut offload = ChecksumOffload::new(&dir.join("subnet.env"), true);
    let problems = offload.ensure([name(DEVICE)].into_iter());
    assert!(problems.len() == 1 && problems[0].text.contains("EPERM"), "{problems:?}");
    let file = "subnet.env.tx_checksum";
    let its = |name: &Option<std::ffi::OsString>| name.as_ref().is_some_and(|name| name == file);
    let events: Vec<AddWatchFlags> =
        events.read_events().unwrap().into_iter().filter(|event| its(&event.name)).map(|event| event.mask).collect();
    assert_eq!(events, [AddWatchFlags::IN_MOVED_TO, AddWatchFlags::IN_DELETE]);
    assert!(!dir.join(file).exists());
}

#[test]
fn a_file_that_cannot_be_written_is_named_once_in_each_check_until_it_can() {
    alone(|| {
        add_uplink();
        create();
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("later");
        let mut offload = ChecksumOffload::new(&missing.join("subnet.env"), true);
        assert_eq!(offload.ensure(std::iter::empty()), []);
        // A file is in the place of the directory.
        std::fs::write(&missing, "").unwrap();
        for _ in 0..2 {
            let problems = offload.ensure([name(DEVICE)].into_iter());
            assert!(problems.len() == 1 && problems[0].text.contains("subnet.env.tx_checksum"), "{problems:?}");
            assert!(!is_on());
        }
        std::fs::remove_file(&missing).unwrap();
        std::fs::create_dir(&missing).unwrap();
        assert_eq!(offload.ensure([name(DEVICE)].into_iter()), []);
        assert_eq!(
            std::fs::read_to_string(missing.join("subnet.env.tx_checksum")).unwrap(),
            format!("{} {DEVICE}\n", index())
        );
    });
}
