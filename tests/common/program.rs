// SPDX-License-Identifier: Apache-2.0
//! Programs that a test writes and then runs.

#![allow(clippy::unwrap_used, reason = "helpers of tests; clippy exempts only the tests themselves")]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes a program. A child does it: a process that another test is just starting has copies of all files that this one has open for
/// writing, and the kernel refuses to run such a file.
pub fn write_program(path: &Path, text: &str) {
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"cat >"$0" && chmod 755 "$0""#]).arg(path).stdin(Stdio::piped());
    let mut child = shell.spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{} is not written", path.display());
}
