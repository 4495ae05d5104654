// SPDX-License-Identifier: Apache-2.0
//! `tools/prepare`: the policy-rc.d of the machine is there again when it has ended, also after a run that was killed. The programs of Debian
//! are replaced.

#![allow(clippy::unwrap_used, reason = "helpers of tests; clippy exempts only the tests themselves")]

#[path = "common/becomes_true.rs"]
mod becomes_true;
#[path = "common/program.rs"]
mod program;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use becomes_true::becomes_true;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use program::write_program;
use tempfile::TempDir;

/// What another program has written to policy-rc.d.
const FOREIGN: &str = "#!/bin/sh\nexit 0\n";
/// Notes who calls it and waits while there is a file `hold`.
const APT_GET: &str = "echo $PPID begin $$ >>$STUBS/calls; while [ -e $STUBS/hold ]; do sleep 0.1; done; echo $PPID end $$ >>$STUBS/calls";
/// Says that a package is installed if there is a file `complete`.
const DPKG_QUERY: &str = "if [ -e $STUBS/complete ]; then printf installed; fi";

/// A directory with the programs that `tools/prepare` calls and with the policy.
struct Machine(TempDir);

impl Machine {
    fn new(policy: Option<&str>) -> Machine {
        let machine = Machine(tempfile::tempdir().unwrap());
        for (name, script) in [("apt-get", APT_GET), ("dpkg-query", DPKG_QUERY), ("id", "echo 0")] {
            write_program(&machine.path(name), &format!("#!/bin/sh\n{script}\n"));
        }
        fs::write(machine.path("calls"), "").unwrap();
        fs::create_dir(machine.path("sbin")).unwrap();
        if let Some(policy) = policy {
            fs::write(machine.path("sbin/policy-rc.d"), policy).unwrap();
        }
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path(name)).ok()
    }

    fn policy(&self) -> Option<String> {
        self.read("sbin/policy-rc.d")
    }

    fn mark(&self, name: &str) {
        fs::write(self.path(name), "").unwrap();
    }

    /// Starts `tools/prepare make`, which writes its output to this file.
    fn start(&self, output: &str) -> Child {
        let output = fs::File::create(self.path(output)).unwrap();
        let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/prepare");
        let mut prepare = Command::new("sh");
        prepare.args(["-c", "PATH=$STUBS:$PATH; exec \"$0\" make"]).arg(tool).env("STUBS", self.0.path());
        prepare.env("POLICY_RC_D", self.path("sbin/policy-rc.d")).stderr(output.try_clone().unwrap()).stdout(output);
        prepare.spawn().unwrap()
    }

    /// Runs it while apt-get waits, and kills it there.
    fn kill_one(&self) {
        self.mark("hold");
        let mut run = self.start("killed");
        assert!(becomes_true(|| self.calls().iter().any(|[_, what, _]| what == "begin")), "apt-get is not called");
        kill(Pid::from_raw(run.id().cast_signed()), Signal::SIGKILL).unwrap();
        run.wait().unwrap();
        fs::remove_file(self.path("hold")).unwrap();
        assert!(becomes_true(|| self.calls().iter().any(|[_, what, _]| what == "end")), "apt-get does not end");
        assert!(self.policy().unwrap().ends_with("exit 101\n"), "a killed run cannot restore the policy");
    }

    /// Returns the calls of apt-get: the process that called it, what it did, and its own process.
    fn calls(&self) -> Vec<[String; 3]> {
        let lines = self.read("calls").unwrap();
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>().try_into().ok();
        lines.lines().filter_map(words).collect()
    }

    /// Asserts that there is this policy and nothing else.
    fn assert_restored(&self, policy: Option<&str>) {
        assert_eq!(self.policy().as_deref(), policy);
        assert_eq!(fs::read_dir(self.path("sbin")).unwrap().count(), usize::from(policy.is_some()));
    }
}

#[test]
fn the_policy_comes_back_after_a_run_that_was_killed() {
    for policy in [None, Some(FOREIGN)] {
        for complete in [false, true] {
            let machine = Machine::new(policy);
            machine.kill_one();
            if complete {
                machine.mark("complete");
            }
            assert!(machine.start("second").wait().unwrap().success(), "{:?}", machine.read("second"));
            machine.assert_restored(policy);
        }
    }
}

#[test]
fn two_runs_at_once_install_one_after_the_other() {
    let machine = Machine::new(Some(FOREIGN));
    machine.mark("hold");
    let mut first = machine.start("first");
    assert!(becomes_true(|| !machine.calls().is_empty()), "apt-get is not called");
    let mut second = machine.start("second");
    let waits =
        becomes_true(|| machine.read("second").unwrap().contains("waits until another tools/prepare has ended"));
    fs::remove_file(machine.path("hold")).unwrap();
    assert!(first.wait().unwrap().success() && second.wait().unwrap().success());
    assert!(waits, "the second run does not wait: {:?}", machine.read("second"));
    let callers: Vec<u32> = machine.calls().iter().map(|[caller, ..]| caller.parse().unwrap()).collect();
    let (first, second) = (first.id(), second.id());
    assert_eq!(callers, [first, first, first, first, second, second, second, second]);
    machine.assert_restored(Some(FOREIGN));
}

#[test]
fn a_policy_that_was_kept_is_not_overwritten() {
    let machine = Machine::new(Some(FOREIGN));
    machine.kill_one();
    // Somebody writes a policy of their own after that.
    fs::write(machine.path("sbin/policy-rc.d"), "#!/bin/sh\nexit 104\n").unwrap();
    assert!(!machine.start("second").wait().unwrap().success());
    assert!(machine.read("second").unwrap().contains("remove the one that is not wanted"));
    assert_eq!(machine.policy().as_deref(), Some("#!/bin/sh\nexit 104\n"));
    assert_eq!(machine.read("sbin/policy-rc.d.before-weft").as_deref(), Some(FOREIGN));
}
