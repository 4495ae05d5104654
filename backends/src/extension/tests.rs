// SPDX-License-Identifier: Apache-2.0

use std::io;
use std::path::Path;

use super::*;
use crate::host::Uplink;
use crate::identity::Secrets;
use crate::register::make;
use crate::state::Name;

fn backend(options: &str) -> Result<Box<dyn Backend>, BadOption> {
    let conf = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"extension"{options}}}}}"#);
    make(&NetConf::parse(&conf).unwrap())
}

#[test]
fn the_output_of_a_command_becomes_the_json_of_flannel() {
    for (printed, expected) in [
        (&b""[..], r#""""#),
        (b" \n\t\xc2\xa0", r#""""#),
        (b"key\n", r#""key""#),
        (b"\xe3\x80\x80two\nlines \"quoted\" \\ \r\n\t", r#""two\nlines \"quoted\" \\""#),
        (b"a\x00\x01\x08\x0c\x1f\x7fb", "\"a\\u0000\\u0001\\b\\f\\u001f\u{7f}b\""),
        (b"<&>", r#""\u003c\u0026\u003e""#),
        (b"\xff\xe2\x82 \xef\xbf\xbd\xf0\x9f\x98\x80", "\"\\ufffd\\ufffd\\ufffd \u{fffd}\u{1f600}\""),
        ("\u{2028}x\u{2029}y\u{2028}z".as_bytes(), r#""x\u2029y\u2028z""#),
    ] {
        let json = to_json(printed);
        assert_eq!(json, expected);
        assert!(serde_json::from_str::<String>(&json).is_ok(), "{json}");
    }
}

#[test]
fn the_configuration_of_k3s_with_tailscale_is_one_command_after_the_lease() {
    let made = backend(r#","PostStartupCommand":"tailscale set --accept-routes --advertise-routes=$SUBNET""#).unwrap();
    let commands = made.commands().unwrap();
    let line = commands.after_lease.clone().unwrap();
    assert_eq!((line.key, line.shell, commands.concern_peers()), ("PostStartupCommand", false, false));
    let words = line.words(|_| Some(b"10.5.1.0/24".to_vec()));
    assert_eq!(words[3], b"--advertise-routes=10.5.1.0/24");
}

/// If there is neither of them, the agent keeps no list of peers. A command for peers that leave is enough.
#[test]
fn one_of_the_two_commands_for_peers_concerns_them() {
    for (key, concern) in [
        ("SubnetAddCommand", true),
        ("SubnetRemoveCommand", true),
        ("PreStartupCommand", false),
        ("PostStartupCommand", false),
    ] {
        let made = backend(&format!(r#","{key}":"run""#)).unwrap();
        assert_eq!(made.commands().unwrap().concern_peers(), concern, "{key}");
    }
}

#[test]
fn keys_that_cannot_be_used_are_refused_with_the_remedy() {
    for (options, words) in [
        (
            r#","SubnetAddCommand":" \t""#,
            "Backend.SubnetAddCommand in net-conf consists of white space: name a program",
        ),
        (r#","PostStartupCommand":7"#, "Backend.PostStartupCommand in net-conf is no text"),
        (r#","Shell":1"#, "Backend.Shell in net-conf is 1: give true or false"),
        (r#","Reconcile":"5s""#, "Backend.Reconcile in net-conf is \"5s\": give a whole number from 0 to 604800"),
    ] {
        let error = backend(options).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
    let none = backend(r#","PreStartupCommand":"","ShutdownCommand":"x","Reconcile":0"#).unwrap();
    assert_eq!(**none.commands().unwrap(), Commands::default());
}

#[test]
fn a_peer_without_data_has_empty_data_and_other_json_is_refused() {
    let made = backend(r#","SubnetAddCommand":"add","Shell":true,"Reconcile":30"#).unwrap();
    assert_eq!(made.commands().unwrap().repeat, Some(Duration::from_secs(30)));
    let lease = |data: Option<&str>| {
        let attrs = Attrs {
            public_ip: Some([192, 0, 2, 7].into()),
            backend_type: "extension".into(),
            backend_data: data.map(Into::into),
            ..Attrs::default()
        };
        let subnets = weft_subnet::cidr::Subnets::from_key("10.5.7.0-24").unwrap();
        Lease { id: "x".into(), subnets, attrs, age: weft_subnet::lease::Age::default() }
    };
    for (data, expected) in [(None, ""), (Some(r#""a\n\"b\"""#), "a\n\"b\"")] {
        let peer = made.command_peer(&lease(data)).unwrap();
        assert_eq!(&*peer.data, expected);
        let variables = peer.variables();
        let values: Vec<String> = variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(values, ["SUBNET=10.5.7.0/24", "IPV6SUBNET=", "PUBLIC_IP=192.0.2.7", "PUBLIC_IPV6="]);
    }
    assert_eq!(made.command_peer(&lease(Some("7"))), None);
}

/// The files of a node that has none.
pub(crate) struct NoFiles;

impl Secrets for NoFiles {
    fn directory(&self) -> Option<&Path> {
        None
    }

    fn read(&self, _file: &Path) -> io::Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn create(&self, _file: &Path, _content: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn replace(&self, _file: &Path, _content: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn remove(&self, _file: &Path) -> io::Result<()> {
        Ok(())
    }

    fn warn(&self, _problem: &dyn std::fmt::Display) {}
}

#[test]
fn the_output_of_the_first_command_is_in_our_lease_if_it_fits() {
    let command = r#","PreStartupCommand":"print""#;
    let lease = Attrs { backend_data: Some(r#""earlier""#.into()), ..Attrs::default() };
    let identities = |options: &str, printed: Option<&[u8]>| {
        let found = Found { links: &[], secrets: &NoFiles, random: &|_: &mut [u8]| Ok(()), printed };
        backend(options).unwrap().identities(&found, Some(&lease))
    };
    let published = |identities: Identities| {
        let v4 = Some([192, 0, 2, 1].into());
        let uplink = Uplink { name: Name::new("eth0").unwrap(), mtu: 1500, v4, v6: None };
        let host = Host { public_v4: v4, identities, ..Host::new(uplink) };
        backend(command).unwrap().advertise(&host).unwrap().backend_data
    };
    for (printed, expected) in [(Some(&b" key\n"[..]), r#""key""#), (None, r#""earlier""#)] {
        assert_eq!(published(identities(command, printed).unwrap()).as_deref(), Some(expected));
    }
    assert_eq!(published(identities("", None).unwrap()), None, "there is no such command any more");
    assert!(identities(command, Some(&[b'x'; MOST_DATA - 2])).is_ok(), "with two quotes it has the largest size");
    let error = identities(command, Some(&[b'x'; MOST_DATA - 1])).unwrap_err().to_string();
    assert!(error.contains("printed too much: its output is 3073 bytes in a lease"), "{error}");
}
