// SPDX-License-Identifier: Apache-2.0
//! Services that nothing carries.

use std::net::TcpListener;
use std::path::Path;

use super::memory::Group;
use super::{OtherNamespace, in_namespace, ip, named_process, shell, sources, until};

/// Returns the address of the service that nothing carries, as text.
fn unserved(file: &Path) -> Option<String> {
    let facts = weft_doctor::facts::read(&sources(file)).unwrap();
    facts.rules.unserved.map(|unserved| unserved.service.to_string())
}

/// It is a finding from a certain age of the pod on, which has a unit test. Other tests may run programs that carry services for a moment.
#[test]
fn a_pod_that_uses_services_without_kube_proxy_is_found() {
    in_namespace(|file| {
        ip("link set lo up");
        let variables = [("KUBERNETES_SERVICE_HOST", "192.0.2.77"), ("KUBERNETES_SERVICE_PORT", "443")];
        let pod = OtherNamespace::with_variables(&variables);
        let group = Group::new(&format!("kubepods-weft-services-{}", std::process::id()));
        let mut kubelet = named_process(file, "kubelet");
        assert_eq!(unserved(file), None, "no process of a pod was told the address");
        group.add(pod.pid());
        let is_found = || unserved(file).as_deref() == Some("192.0.2.77:443");
        until("the service that nothing carries", is_found);
        ip("addr add 192.0.2.77/32 dev lo");
        let listener = TcpListener::bind("192.0.2.77:443").unwrap();
        assert_eq!(unserved(file), None, "a program that is not known here carries it");
        drop(listener);
        until("the service that does not answer", is_found);

        shell("nft add table ip kube-proxy");
        assert_eq!(unserved(file), None, "kube-proxy has written its rules");
        shell("nft delete table ip kube-proxy");
        until("the rules that are gone", is_found);
        let mut cilium = named_process(file, "cilium-agent");
        assert_eq!(unserved(file), None, "Cilium may carry services");
        for process in [&mut cilium, &mut kubelet] {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        assert_eq!(unserved(file), None, "no kubelet runs here");
        drop(pod);
    });
}
