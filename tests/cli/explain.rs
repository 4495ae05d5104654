// SPDX-License-Identifier: Apache-2.0
//! The command line of `weft explain`. What it finds is tested in tests/mesh/explain.rs.

use super::*;

#[test]
fn addresses_and_ports_that_make_no_sense_are_bad_usage() {
    refused(&["explain", "10.5.1.2", "fd00::2"], &[], 2, "of different families");
    refused(&["explain", "10.5.1.2", "224.0.0.1"], &[], 2, "not the address of one machine");
    refused(&["explain", "0.0.0.0", "10.5.1.2"], &[], 2, "not the address of one machine");
    refused(&["explain", "10.5.1.2", "10.5.2.2", "--proto", "icmp", "--port", "80"], &[], 2, "ICMP has no ports");
    refused(&["explain", "10.5.1.2", "10.5.2.2", "--proto", "sctp"], &[], 2, "sctp");
    refused(&["explain", "pod-a", "10.5.2.2"], &[], 2, "pod-a");
    refused(&["explain", "10.5.1.2"], &[], 2, "<TO>");
}

#[test]
fn without_an_agent_and_a_subnet_file_the_kernel_alone_is_asked() {
    in_namespace(|| {
        let place = Place::new();
        let (file, socket) = (place.text("subnet.env"), place.text("weft.sock"));
        let explain = |from: &str, to: &str| {
            let out = weft(&["explain", from, to, "--subnet-file", &file, "--socket", &socket], &[]);
            assert!(out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
            (out.status.code(), String::from_utf8(out.stdout).unwrap())
        };
        let (code, text) = explain("10.5.1.2", "10.5.2.2");
        assert!(code == Some(1) && text.contains("neither address belongs to this node"), "{text}");
        let own = namespace::ip("-4 -o addr show scope global");
        let own = own.split_whitespace().skip_while(|word| *word != "inet").nth(1).unwrap();
        let own = own.split('/').next().unwrap();
        let (code, text) = explain(own, "198.51.100.1");
        assert!(code == Some(0) && text.contains("default via 192.168.64.1 dev eth0"), "{text}");
        namespace::ip("route del default");
        let (code, text) = explain(own, "198.51.100.1");
        assert!(code == Some(2) && text.contains("the kernel has no route to 198.51.100.1"), "{text}");
        let (code, text) = explain(own, own);
        assert!(code == Some(0) && text.ends_with("works as far as this node can tell\n"), "{text}");
        assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 0, "the command writes nothing");
    });
}
