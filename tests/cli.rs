// SPDX-License-Identifier: Apache-2.0
//! The binary as a user calls it.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are not inside #[test] themselves

use std::process::{Command, Output};

fn weft(args: &[&str], env: &[(&str, &str)]) -> Output {
    run(Command::new(env!("CARGO_BIN_EXE_weft")).args(args), env)
}

fn run(command: &mut Command, env: &[(&str, &str)]) -> Output {
    command.env_clear().envs(env.iter().copied()).output().expect("start the binary")
}

fn refused(args: &[&str], env: &[(&str, &str)], code: i32, text: &str) {
    let out = weft(args, env);
    let err = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {err}");
    assert!(err.contains(text), "{args:?}: {err}");
    assert!(out.stdout.is_empty(), "{args:?} prints to stdout");
}

#[test]
fn help_goes_to_stdout_and_tells_our_flags_apart() {
    let out = weft(&["agent", "--help"], &[("FLANNELD_RESYNC", "never")]);
    assert_eq!(out.status.code(), Some(0));
    let text = String::from_utf8(out.stdout).unwrap();
    for wanted in ["--etcd-endpoints", "Flags that only weft has", "--hold-removals", "--log_backtrace_at"] {
        assert!(text.contains(wanted), "{wanted} is missing in\n{text}");
    }
    assert_eq!(weft(&["--help"], &[]).status.code(), Some(0));
}

#[test]
fn bad_usage_is_exit_code_2_and_a_bad_margin_1() {
    refused(&["dance"], &[], 2, "dance");
    refused(&["agent", "-nonsense"], &[], 2, "--nonsense");
    refused(&["agent", "-public-ip=fd00::1"], &[], 2, "--public-ip");
    let margin = "subnet-lease-renew-margin option, out of acceptable range";
    refused(&["agent", "-subnet-lease-renew-margin", "0"], &[], 1, margin);
    refused(&["agent", "--subnet-lease-renew-margin=1440"], &[], 1, margin);
    refused(&["agent"], &[("FLANNELD_SUBNET_LEASE_RENEW_MARGIN", "2000")], 1, margin);
}

#[test]
fn unsupported_flags_say_so() {
    refused(&["agent", "-ip-masq"], &[], 2, "--ip-masq is not supported by this version of weft yet");
    refused(&["agent", "--kube-subnet-mgr"], &[], 2, "--kube-subnet-mgr is not supported");
    refused(&["agent", "--iptables-forward-rules=true"], &[], 2, "--iptables-forward-rules is not supported");
    refused(&["agent"], &[("FLANNELD_IP_MASQ", "true")], 2, "environment variable FLANNELD_IP_MASQ");
}

#[test]
fn flanneld_is_the_agent_and_its_version_goes_to_stderr() {
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().join("flanneld");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_weft"), &name).unwrap();
    for flag in ["--version", "-version"] {
        let out = run(Command::new(&name).arg(flag), &[]);
        assert_eq!((out.status.code(), out.stdout.len()), (Some(0), 0));
        assert_eq!(String::from_utf8(out.stderr).unwrap().trim(), env!("CARGO_PKG_VERSION"));
    }
    let out = run(Command::new(&name).args(["-v", "4", "-iface", "eth0", "-kube-subnet-mgr"]), &[]);
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8(out.stderr).unwrap().contains("--kube-subnet-mgr is not supported"));
}

#[test]
fn status_without_an_agent_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("none.sock");
    refused(&["status", "--socket", socket.to_str().unwrap()], &[], 1, "no agent answers on");
}
