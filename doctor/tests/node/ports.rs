// SPDX-License-Identifier: Apache-2.0
//! Flags of ports of the bridge that keep pods of one node from each other.

use std::fs;

use weft_doctor::sources::{CniSources, NodeSources};

use super::{
    ENV, TWO_PODS, doctor, doctor_with, in_namespace, only_text, shell, shell_output, sources, two_pods, until,
};

#[test]
fn ports_that_keep_pods_of_one_node_from_each_other_are_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        let pods = two_pods();
        for (name, inside) in TWO_PODS {
            pods.run(&format!("ip link set {inside} up"));
            let is_up = || shell_output(&format!("bridge link show dev {name}")).contains("state forwarding");
            until("the port to forward packets", is_up);
        }
        assert_eq!(doctor(file, "bridge"), []);
        shell("bridge link set dev veth0a1b2c3d isolated on");
        assert_eq!(doctor(file, "bridge"), [], "a single isolated port reaches all others");
        shell("bridge link set dev veth0a1b2c3e isolated on");
        let words = ["2 ports of cni0 are isolated", "veth0a1b2c3d", "veth0a1b2c3e", "portIsolation"];
        let text = only_text(&sources(file), "bridge", &words);
        let conf_dir = file.with_file_name("net.d");
        fs::create_dir(&conf_dir).unwrap();
        let conf = r#"{"name":"cbr0","plugins":[{"type":"flannel","delegate":{"portIsolation":true}}]}"#;
        fs::write(conf_dir.join("10-flannel.conflist"), conf).unwrap();
        let cni = CniSources { conf_dir, ..CniSources::default() };
        let wanted = NodeSources { cni, ..sources(file) };
        assert_eq!(doctor_with(&wanted, "bridge"), [], "the CNI configuration wants it");
        let remedy = |text: &str| text.lines().nth(1).unwrap().split(';').next().unwrap().to_owned();
        shell(&remedy(&text));
        assert_eq!(doctor(file, "bridge"), []);
        shell("bridge link set dev veth0a1b2c3e bcast_flood off");
        let text = only_text(&sources(file), "bridge", &["1 port of cni0 gets no broadcasts", "veth0a1b2c3e"]);
        shell(&remedy(&text));
        assert_eq!(doctor(file, "bridge"), []);
    });
}
