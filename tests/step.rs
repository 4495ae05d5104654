// SPDX-License-Identifier: Apache-2.0
//! `tools/step`: what it starts ends with it.

#![allow(clippy::unwrap_used, reason = "a test says what it expected")]

#[path = "common/becomes_true.rs"]
mod becomes_true;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use becomes_true::becomes_true;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

#[test]
fn ctrl_c_ends_the_command_of_a_step() {
    for beside in ["", "1"] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        // A shell ignores a signal that it has inherited as ignored, as from a test that a script started in the background.
        let mut step = Command::new("env");
        step.arg("--default-signal=INT").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/step"));
        step.args(["600", "x", "sh", "-c", "echo $$ >$0; exec sleep 599"]).arg(&file).env("STEPS_BESIDE", beside);
        let mut step = step.process_group(0).spawn().unwrap();
        let read = || fs::read_to_string(&file).unwrap_or_default().trim().parse().ok().map(Pid::from_raw);
        assert!(becomes_true(|| read().is_some()), "the command does not begin");
        let sleep = read().unwrap();
        killpg(Pid::from_raw(step.id().cast_signed()), Signal::SIGINT).unwrap();
        let gone = becomes_true(|| kill(sleep, None).is_err());
        if !gone {
            let _ = kill(sleep, Signal::SIGKILL);
        }
        let code = step.wait().unwrap().code();
        assert!(gone, "the command goes on");
        assert_eq!(code, Some(130));
    }
}
