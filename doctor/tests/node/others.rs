// SPDX-License-Identifier: Apache-2.0
//! What other networks for pods left behind, and an agent that ended.

use std::fs;

use weft_doctor::sources::{AbsentAgent, AgentAnswer, NodeSources};

use super::{ENV, doctor, doctor_with, in_namespace, ip, only_text, shell, sources};

#[test]
fn rules_and_links_of_a_network_that_does_not_run_are_found() {
    in_namespace(|file| {
        assert_eq!(doctor(file, "leftovers"), []);
        shell("iptables-nft -N cali-FORWARD && iptables-nft -A cali-FORWARD -j DROP");
        assert_eq!(doctor(file, "leftovers"), [], "nothing leads to this chain");
        shell("iptables-nft -A FORWARD -m comment --comment cali:wUHhoiAYhphO9Mso -j cali-FORWARD");
        let text = only_text(&sources(file), "leftovers", &["Calico does not run", "iptables-nft", "-j cali-FORWARD`"]);
        let remedy = text.lines().nth(1).unwrap().split(';').next().unwrap();
        shell(remedy);
        assert_eq!(doctor(file, "leftovers"), [], "after {remedy}");
        ip("link add cilium_host type veth peer name cilium_net");
        only_text(&sources(file), "leftovers", &["Cilium does not run", "cilium_host", "ip link del cilium_host"]);
        let mut process = super::named_process(file, "cilium-agent");
        assert_eq!(doctor(file, "leftovers"), [], "it runs");
        process.kill().unwrap();
        process.wait().unwrap();
        ip("link del cilium_host");
        shell("iptables-nft -N KUBE-ROUTER-FORWARD && iptables-nft -A FORWARD -j KUBE-ROUTER-FORWARD");
        only_text(&sources(file), "leftovers", &["kube-router does not run", "-j KUBE-ROUTER-FORWARD`"]);
        // k3s has the network policies of kube-router inside.
        for program in ["k3s-server", "k3s-agent", "k3s"] {
            let mut process = super::named_process(file, program);
            assert_eq!(doctor(file, "leftovers"), [], "{program} runs");
            process.kill().unwrap();
            process.wait().unwrap();
        }
    });
}

#[test]
fn an_agent_that_ran_here_and_does_not_answer_is_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        ip("link add flannel.1 type vxlan id 1 dstport 8472");
        assert_eq!(doctor(file, "agent"), [], "flannel wrote the file and made the device");
        shell(&format!("ip link set flannel.1 alias 'weft {}.other'", file.display()));
        assert_eq!(doctor(file, "agent"), [], "another agent made the device");
        shell(&format!("ip link set flannel.1 alias 'weft {}'", file.display()));
        only_text(&sources(file), "agent", &["no agent answers on weft.sock", "its device flannel.1", "start weft"]);
        let running = |agent: &str| {
            let absent_agent = AbsentAgent { running: vec![agent.to_owned()], ..AbsentAgent::default() };
            NodeSources { absent_agent, ..sources(file) }
        };
        only_text(&running("weft (pid 7)"), "agent", &["weft (pid 7) runs", "its socket was removed", "--socket"]);
        assert_eq!(doctor_with(&running("flanneld (pid 7)"), "agent"), [], "flannel took over");
        let agent = AgentAnswer::Problems(Vec::new());
        assert_eq!(doctor_with(&NodeSources { agent, ..sources(file) }, "agent"), []);
    });
}
